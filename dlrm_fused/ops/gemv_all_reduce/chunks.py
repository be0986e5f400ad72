"""Product + AllReduce for many rows, in two ways. What crosses the links is that of a reduce-scatter and an all-gather.

* By chunks: while a chunk of rows is summed over the ranks, the next one is multiplied. The product of a chunk is cuBLAS's, in
  symmetric memory. Its sum is one kernel on a stream beside: each rank reads its share of the chunk from all ranks, adds it up
  in their order, and stores the result at all of them.
* By scatter: the GEMM of :mod:`~dlrm_fused.ops.gemm_all_to_all.kernel` stores every finished tile at the rank that adds up its
  rows, while others are computed; then the same kernel adds what has come, and stores the result at all ranks.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.gemm_all_to_all.kernel import gemm
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace, Inputs
from dlrm_fused.ops.schedules import Kind, Pair, Task, make_plan, sums_beside
from dlrm_fused.symmetric.device import announced_offset, begin, finish, peer_pointer, wait_until_all_ready
from dlrm_fused.symmetric.launches import ceil_div, layout_of

# Elements of a program's block, and programs of a multiprocessor: nearly one.
_BLOCK = 4096
_PROGRAMS_OF_MULTIPROCESSOR = 0.97


@triton.jit(do_not_specialize=["chunk_offset", "elements", "receive_offset", "fingerprint"])
def sum_chunk_kernel(
    part_addresses, result_addresses, bias, residual, chunk_offset, elements, n, receive_offset, channel, fingerprint,
    SCATTERED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr, VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum elements ``chunk_offset`` to ``chunk_offset + elements`` over the ranks; blocks are dealt out to the ranks in turn.

    Args:
        part_addresses: int64 [ranks], of the partial products, at the same place on every rank.
        SCATTERED: instead, each rank has received what it is to add up: the same elements of all ranks' products, one after the
            other, the p-th of as many equal parts as there are ranks on rank p.
        result_addresses: int64 [ranks], of the pool in which each rank receives at an offset of its own.
        VECTOR: divides n, ``chunk_offset`` and ``elements``.
    """
    epoch = begin(channel, receive_offset, fingerprint)
    all_ready = wait_until_all_ready(channel, epoch, fingerprint)
    # The compiler makes wide loads of what it knows to be a multiple.
    chunk_offset = chunk_offset // VECTOR * VECTOR
    elements = elements // VECTOR * VECTOR
    first_block, stride = tl.program_id(0) * channel.world + channel.rank, tl.num_programs(0) * channel.world
    received = peer_pointer(part_addresses, channel.rank, 0, DTYPE)
    if SCATTERED:
        first_block, stride = tl.program_id(0), tl.num_programs(0)
        elements = elements // (channel.world * VECTOR) * VECTOR
        chunk_offset += channel.rank * elements
    for block in range(first_block, tl.cdiv(elements, BLOCK), stride):
        element = block * BLOCK + tl.arange(0, BLOCK)
        inside = (element < elements) & all_ready
        at = chunk_offset + element.to(tl.int64)
        total = tl.zeros((BLOCK,), tl.float32)
        for rank in tl.static_range(0, channel.world):
            if SCATTERED:
                part = received + (elements.to(tl.int64) * rank + element)
            else:
                part = peer_pointer(part_addresses, rank, 0, DTYPE) + at
            total += tl.load(part, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + at % n, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        result = total.to(DTYPE)
        for i in tl.static_range(1, channel.world + 1):
            peer = (channel.rank + i) % channel.world
            result_of_peer = peer_pointer(result_addresses, peer, announced_offset(channel, peer), DTYPE)
            tl.store(result_of_peer + at, result, mask=inside)
    finish(channel, epoch)


class _Sums(abc.ABC):
    """Calls of one layout for many rows.

    Attributes:
        parts: [m, N], the products of this rank, in symmetric memory.
    """

    _is_scattered: ClassVar[bool]

    def __init__(self, workspace: GemvWorkspace, inputs: Inputs, fingerprint: int) -> None:
        rows, self._columns, _ = inputs.shape
        self._fingerprint, self._shape = fingerprint, (rows, self._columns)
        self.parts = workspace.parts.local.view(workspace.dtype)[: rows * self._columns].view(self._shape)
        self._most = int(_PROGRAMS_OF_MULTIPROCESSOR * gpu_of(workspace.device).multiprocessors)
        self._layout = "sum", self._is_scattered, layout_of(*inputs[:4])
        self._constants = {
            "SCATTERED": self._is_scattered,
            "HAS_BIAS": inputs.bias is not None,
            "HAS_RESIDUAL": inputs.residual is not None,
            "DTYPE": TRITON_DTYPES[workspace.dtype],
            "VECTOR": 8 if self._columns % 8 == 0 else 1,
            "BLOCK": _BLOCK,
            "num_warps": 8,
        }

    def __call__(self, workspace: GemvWorkspace, inputs: Inputs) -> Tensor:
        """Return the sum over ranks [m, N], plus bias and residual. It lies in symmetric memory."""
        result = workspace.results.receive(self._shape, workspace.dtype)
        self._run(workspace, inputs, result)
        return workspace.results.to_hold(result)

    @abc.abstractmethod
    def _run(self, workspace: GemvWorkspace, inputs: Inputs, result: Tensor) -> None: ...

    def _add_up(self, workspace: GemvWorkspace, inputs: Inputs, result: Tensor, first: int, last: int) -> None:
        """Rows ``first`` to ``last`` of the result, on all ranks. One epoch."""
        elements = (last - first) * self._columns
        workspace.channel.launches(
            self._layout, sum_chunk_kernel, (min(ceil_div(elements, _BLOCK * workspace.world_size), self._most),),
            workspace.parts.addresses, workspace.results.memory.addresses, result if inputs.bias is None else inputs.bias,
            result if inputs.residual is None else inputs.residual, first * self._columns, elements, self._columns,
            workspace.results.offset_of(result), workspace.channel.args, self._fingerprint, **self._constants,
        )  # fmt: skip


class ChunkedSums(_Sums):
    """While a chunk of rows is summed, the next one is multiplied."""

    _is_scattered = False

    def __init__(self, workspace: GemvWorkspace, inputs: Inputs, fingerprint: int) -> None:
        super().__init__(workspace, inputs, fingerprint)
        schedule = sums_beside(*self._shape)
        self._plan = make_plan(Pair.gemm_all_reduce, schedule, workspace.world_size, len(inputs.x))

    def _run(self, workspace: GemvWorkspace, inputs: Inputs, result: Tensor) -> None:
        def multiply(task: Task) -> None:
            (piece,) = task.pieces
            torch.mm(inputs.x[piece.first : piece.last], inputs.weight.T, out=self.parts[piece.first : piece.last])

        def add_up(task: Task) -> None:
            (piece,) = task.pieces
            self._add_up(workspace, inputs, result, piece.first, piece.last)

        workspace.streams.run(self._plan, {Kind.compute: multiply, Kind.combine: add_up})


class ScatteredSums(_Sums):
    """The kernel of the product stores at the peers. The ranks must divide m, and rows of all matrices have a multiple of 16
    bytes."""

    _is_scattered = True

    def _run(self, workspace: GemvWorkspace, inputs: Inputs, result: Tensor) -> None:
        # A rank makes ready for these stores when the sum of its last call, which read what is there, is done.
        window = ReceiveWindow(workspace.parts, workspace.channel, 0, self._fingerprint)
        gemm(inputs.x.contiguous(), inputs.weight.contiguous(), window)
        self._add_up(workspace, inputs, result, 0, len(inputs.x))
