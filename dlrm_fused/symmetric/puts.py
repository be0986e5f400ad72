"""Slices to ranks on other hosts by put-with-signal: the inboxes, signal words and counts that kernels put them through.

An operator whose kernels finish slices has a :class:`Puts` of its own, sized for them, and calls the functions of
:mod:`~dlrm_fused.symmetric.device_puts`. For all others :meth:`Puts.exchange` sends slices of any size in pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.symmetric.device import ChannelArgs, round_up
from dlrm_fused.symmetric.device_puts import put_args, put_bytes_kernel, read_bytes_kernel
from dlrm_fused.symmetric.launches import ceil_div
from dlrm_fused.symmetric.memory import SymmetricGroup
from dlrm_fused.symmetric.messages import Exchange

# A slice can be written and sent while the receiver still reads the one before.
_SLOTS = 2
_ALIGNMENT = 256
# In kernels that copy: bytes that a program copies at a time, and programs.
_BLOCK_BYTES, _PROGRAMS = 4096, 64


class Puts:
    """Inboxes and outboxes for slices between the ranks of different hosts. Making one is collective.

    Every rank has a block of symmetric memory: signal words, an inbox with slots for each rank of another host, and an outbox
    of the same shape, as only symmetric memory can be put.

    Attributes:
        slice_size: bytes that a slice may have.
    """

    def __init__(self, group: SymmetricGroup, name: str, channel: ChannelArgs, slice_size: int) -> None:
        """Args:
        name: for messages and the log; the same on all ranks.
        channel: whose limit, faults and rank kernels use.
        slice_size: bytes; the same on all ranks.
        """
        self._group, self._channel, self.slice_size = group, channel, round_up(max(slice_size, 1), _ALIGNMENT)
        world, host_of = group.world_size, group.hosts.of_rank

        def box(rank: int, of: int) -> int:
            """Return number of a rank's box in the memory of another one."""
            return sum(host_of[other] != host_of[of] for other in range(rank))

        boxes = world - min(map(len, group.hosts.ranks))
        scratch = 2 * _SLOTS * world * 8
        inbox = round_up(scratch + 8, _ALIGNMENT)
        outbox = inbox + boxes * _SLOTS * self.slice_size
        self.memory = group.allocate(name, outbox + boxes * _SLOTS * self.slice_size)
        ranks = [group.put_numbers(), [box(peer, group.rank) for peer in range(world)]]
        ranks.append([box(group.rank, peer) for peer in range(world)])
        self.args = put_args(
            self.memory.local.data_ptr(),
            torch.zeros(4 * world, dtype=torch.int64, device=group.device),
            torch.tensor(ranks, dtype=torch.int64, device=group.device).flatten(),
            self.slice_size,
            _SLOTS,
            scratch,
            inbox,
            outbox,
        )
        # For exchange(), by rank: pieces not yet put, and how many are put but, as far as this rank's calls go, not yet read.
        self._queues: dict[int, deque[tuple[Tensor, int]]] = {rank: deque() for rank in group.hosts.remote}
        self._unread = dict.fromkeys(group.hosts.remote, 0)

    def kernel(self, kernel: Any) -> Any:
        """Return a Triton kernel that uses ``args``, as it is to be launched."""
        return self._group.with_puts(kernel)

    def release(self) -> None:
        """Let go of the memory; as :meth:`~dlrm_fused.symmetric.memory.SymmetricGroup.release`."""
        self._group.release(self.memory)

    def exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], fingerprint: int, raise_fault: Callable[[], None]
    ) -> Exchange:
        """Begin to send and to receive slices of any size; exchanges end in the order in which they begin.

        Args:
            sent, received: by rank; contiguous. Empty slices are not sent.
            fingerprint: 31 bits, equal on both sides.
            raise_fault: raises what has gone wrong in a kernel.
        """
        return _PutExchange(self, self._pieces(sent), self._pieces(received), received, fingerprint, raise_fault)

    def _pieces(self, slices: Mapping[int, Tensor]) -> dict[int, list[Tensor]]:
        """uint8 views, each of at most a slot."""
        return {
            rank: list(slice_.view(-1).view(torch.uint8).split(self.slice_size))
            for rank, slice_ in slices.items()
            if slice_.numel()
        }

    def enqueue(self, rank: int, piece: Tensor, fingerprint: int) -> None:
        """Put a piece, once those before it are put and a slot is free."""
        self._queues[rank].append((piece, fingerprint))
        self._put_queued(rank)

    def mark_read(self, rank: int) -> None:
        """Count the oldest piece that was put to a rank as read: this rank has come to where that one reads it.

        All ranks make the same calls in the same order, so who waits for a credit from here on waits for something that comes
        before in this order: nobody waits in a circle.
        """
        self._unread[rank] -= 1
        self._put_queued(rank)

    def _put_queued(self, rank: int) -> None:
        queue = self._queues[rank]
        while queue and self._unread[rank] < _SLOTS:
            self._unread[rank] += 1
            piece, fingerprint = queue.popleft()
            self._launch(put_bytes_kernel, piece, rank, fingerprint)

    def read(self, rank: int, piece: Tensor, fingerprint: int) -> None:
        """Read the next piece from a rank; on GPUs the current stream waits for it, not the host."""
        self._launch(read_bytes_kernel, piece, rank, fingerprint)

    def _launch(self, kernel: Any, piece: Tensor, rank: int, fingerprint: int) -> None:
        programs = min(ceil_div(piece.numel(), _BLOCK_BYTES), _PROGRAMS)
        self.kernel(kernel)[(programs,)](
            piece, piece.numel(), rank, self._channel, self.args, fingerprint, BLOCK=_BLOCK_BYTES, num_warps=8
        )


class _PutExchange(Exchange):
    def __init__(
        self,
        puts: Puts,
        sent: dict[int, list[Tensor]],
        pieces: dict[int, list[Tensor]],
        received: Mapping[int, Tensor],
        fingerprint: int,
        raise_fault: Callable[[], None],
    ) -> None:
        self._puts, self._sent, self._pieces, self._received = puts, sent, pieces, received
        self._fingerprint, self._raise_fault = fingerprint, raise_fault
        self._rounds = iter(range(max((len(own) for own in (*sent.values(), *pieces.values())), default=0)))
        for rank, own in sent.items():
            for piece in own:
                puts.enqueue(rank, piece, fingerprint)
        raise_fault()

    def arrivals(self, deadline: float) -> Iterator[tuple[int, Tensor]]:
        """Yield arrivals as the base class does, but with the kernels' time limit; they record what goes wrong."""
        for number in self._rounds:
            here = {rank: pieces for rank, pieces in self._pieces.items() if number < len(pieces)}
            for rank, pieces in here.items():
                self._puts.read(rank, pieces[number], self._fingerprint)
            self._raise_fault()
            for rank, own in self._sent.items():
                if number < len(own):
                    self._puts.mark_read(rank)
            self._raise_fault()
            yield from ((rank, self._received[rank]) for rank, pieces in here.items() if number + 1 == len(pieces))

    def finish(self, deadline: float) -> None:
        for _ in self.arrivals(deadline):
            pass  # read by now, if the caller has asked for all
