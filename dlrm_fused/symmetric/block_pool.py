"""Blocks of symmetric memory that live as long as the tensors in them.

Peers store results straight into such a block, and the tensor over it is what a caller gets, without a copy. Autograd may keep
that tensor until the backward, a user for ever; the block is free again when the tensor's storage is, not before.
"""

from __future__ import annotations

import math
import sys
import threading
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dlrm_fused.compat.torch import current_stream
from dlrm_fused.errors import UsageError
from dlrm_fused.symmetric.device import round_up
from dlrm_fused.symmetric.memory import SymmetricGroup, SymmetricMemory

Streams = frozenset[torch.cuda.Stream]


@dataclass(frozen=True, order=True)
class _Block:
    """Bytes of the pool, and the streams whose work of today may still use them."""

    offset: int
    size: int
    streams: Streams = field(default=frozenset(), compare=False)


class BlockPool:
    """Symmetric memory that is lent out in blocks. Every rank takes and frees on its own; only making it is collective.

    Safe to use from several threads: the last reference to a tensor may be dropped in any of them.

    A pool may keep a *spare* block, at offset 0 on all ranks, that is never lent out: a rank whose callers hold everything
    else receives there, and gives its caller a copy.
    """

    def __init__(self, group: SymmetricGroup, name: str, size: int) -> None:
        """Collective. Without a spare block.

        Args:
            size: bytes on each rank, rounded up to a whole number of 4096.

        Raises:
            UsageError, CommunicationError: as :meth:`SymmetricGroup.allocate`.
        """
        self._group = group
        self.memory: SymmetricMemory = group.allocate(name, round_up(size))
        self._spare: Tensor | None = None
        self._device = group.device
        self._free = [_Block(0, self.memory.size)]  # by offset, no two of them adjacent
        self._lock = threading.Lock()
        # Leases end in any thread and at any moment, even within take(): what they do is one append, which needs no lock.
        self._returned: deque[_Block] = deque()

    def take(self, shape: Sequence[int], dtype: torch.dtype, size: int = 0) -> Tensor | None:
        """Return a contiguous tensor, not initialized, in a block of its own; None if no free block is large enough.

        The block is free again when the tensor's storage is freed, that is when no view of it and no autograd graph holds it
        any more. On a GPU, work of the current stream may use it at once: the stream is made to wait for other streams
        that used the block before. As with any tensor, work of *another* stream than that of the take or the release has to
        be waited for by the caller before the release. A block taken while a CUDA graph is captured is the graph's for ever.

        Args:
            size: bytes of the block at least. Blocks of one size leave no gaps in which another would not fit.
        """
        # The storage has the bytes of the tensor alone: torch.save writes all of them.
        used = max(1, math.prod(shape) * dtype.itemsize)
        size = round_up(max(size, used))
        with self._lock:
            block = self._returned_with(size) or self._found_with(size)
        if block is None:
            return None
        lease = _Lease(self, block, used)
        if self._device.type == "cuda":
            bytes_ = torch.as_tensor(lease, device=self._device)
        else:
            bytes_ = torch.from_numpy(np.asarray(lease))
        del lease  # now owned by the storage alone
        assert bytes_.data_ptr() == self.memory.local.data_ptr() + block.offset, "torch has copied the block"
        # This is no view of the bytes but a tensor in its own right, as from an allocator.
        return torch.empty(0, dtype=dtype, device=self._device).set_(bytes_.untyped_storage(), 0, tuple(shape), ())

    @classmethod
    def with_spare(cls, group: SymmetricGroup, name: str, block_size: int, held: int) -> BlockPool:
        """Collective: room for ``held`` blocks of ``block_size`` bytes that callers may hold without a copy, and the spare."""
        size = round_up(max(1, block_size))
        pool = cls(group, name, (held + 1) * size)
        # The spare block is not lent out: a lease would keep the pool alive, and the pool the lease.
        pool._spare = pool.memory.local[:size]
        pool._free = [_Block(size, pool.memory.size - size)]
        return pool

    @property
    def spare(self) -> Tensor:
        """uint8 [block_size]: the block that is never lent out."""
        assert self._spare is not None, f"pool {self.memory.name} was made without a spare block"
        return self._spare

    def receive(self, shape: Sequence[int], dtype: torch.dtype, size: int = 0) -> Tensor:
        """Return a tensor as :meth:`take` does, but in the spare block if no other is free."""
        block = self.take(shape, dtype, size)
        if block is None:
            block = self.spare[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        return block

    def to_hold(self, received: Tensor) -> Tensor:
        """Return a tensor that a caller may hold for good: that of :meth:`receive`, or a copy if it is in the spare block."""
        is_spare = received.untyped_storage().data_ptr() == self.memory.local.untyped_storage().data_ptr()
        return received.clone() if is_spare else received

    def release(self) -> None:
        """Let go of the memory, as :meth:`SymmetricGroup.release`; blocks that callers hold stay."""
        self._group.release(self.memory)

    def offset_of(self, tensor: Tensor) -> int:
        """Return bytes from the beginning of the pool to the tensor's first element.

        Raises:
            UsageError: the tensor is not in this pool.
        """
        address = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.element_size()
        offset = int(address) - self.memory.local.data_ptr()
        if tensor.device != self._device or not 0 <= offset < self.memory.size:
            raise UsageError(f"pool {self.memory.name}: a tensor of shape {tuple(tensor.shape)} is not in it")
        return offset

    def free_bytes(self) -> int:
        """Return bytes that are not lent out, in all free blocks together."""
        with self._lock:
            self._collect()
            return sum(block.size for block in self._free)

    def _returned_with(self, size: int) -> _Block | None:
        """Return the block that was returned first, if it has this size: calls that come again need no search."""
        return self._returned.popleft() if self._returned and self._returned[0].size == size else None

    def _found_with(self, size: int) -> _Block | None:
        self._collect()
        return self._cut(size)

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            insort(self._free, block)
            index = self._free.index(block)
            while index + 1 < len(self._free) and _touch(self._free[index], self._free[index + 1]):
                self._free[index : index + 2] = [_merged(*self._free[index : index + 2])]
            while index > 0 and _touch(self._free[index - 1], self._free[index]):
                index -= 1
                self._free[index : index + 2] = [_merged(*self._free[index : index + 2])]

    def _cut(self, size: int) -> _Block | None:
        """Take ``size`` bytes out of the smallest free block that has them."""
        best = min((block for block in self._free if block.size >= size), key=lambda block: block.size, default=None)
        if best is None:
            return None
        index = self._free.index(best)
        rest = _Block(best.offset + size, best.size - size, best.streams)
        self._free[index : index + 1] = [rest] if rest.size else []
        return _Block(best.offset, size, best.streams)


class _Lease:
    """The first bytes of one block as NumPy and torch take them over; when they drop them, the block goes back to the pool."""

    def __init__(self, pool: BlockPool, block: _Block, used: int) -> None:
        self._pool = pool
        self._block = block
        self._stream: torch.cuda.Stream | None = None
        self._of_a_graph = False
        interface = {
            "version": 3,
            "shape": (used,),
            "typestr": "|u1",
            "data": (pool.memory.local.data_ptr() + block.offset, False),
        }
        if pool._device.type == "cpu":
            self.__array_interface__ = interface
            return
        self.__cuda_array_interface__ = interface
        self._stream = current_stream(pool._device)
        self._of_a_graph = torch.cuda.is_current_stream_capturing()
        # A capture begins with a synchronization, so nothing that was returned before is in use any more; to wait for a
        # stream that is not captured would be an error.
        if not self._of_a_graph:
            for stream in block.streams - {self._stream}:
                self._stream.wait_stream(stream)

    def __del__(self) -> None:
        if self._of_a_graph or sys.is_finalizing():
            return
        streams: Streams = frozenset()
        if self._stream is not None:
            # Used by the stream that took it, and freed after its last use in the one that is current now.
            streams = frozenset({self._stream, current_stream(self._pool._device)})
        self._pool._returned.append(_Block(self._block.offset, self._block.size, streams))


def _touch(left: _Block, right: _Block) -> bool:
    return left.offset + left.size == right.offset


def _merged(left: _Block, right: _Block) -> _Block:
    return _Block(left.offset, left.size + right.size, left.streams | right.streams)
