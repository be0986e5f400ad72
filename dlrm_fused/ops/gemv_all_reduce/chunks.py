"""Product + AllReduce for many rows, in two ways. What crosses the links is that of a reduce-scatter and an all-gather.

* By chunks: while a chunk of rows is summed over the ranks, the next one is multiplied. The product of a chunk is cuBLAS's, in
  symmetric memory. Its sum is one kernel on a stream beside: each rank reads its share of the chunk from all ranks, adds it up
  in their order, and stores the result at all of them.
* By scatter: the GEMM of :mod:`~dlrm_fused.ops.gemm_all_to_all.kernel` stores every finished tile at the rank that adds up its
  rows, while others are computed; then the same kernel adds what has come, and stores the result at all ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.gemm_all_to_all.kernel import gemm
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace
from dlrm_fused.ops.schedules import Kind, Pair, Task, make_plan, sums_beside
from dlrm_fused.symmetric.device import announced_offset, begin, finish, peer_pointer, wait_until_all_ready

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


def sum_by_chunks(
    workspace: GemvWorkspace, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, fingerprint: int
) -> Tensor:
    """[m, N], as :func:`~dlrm_fused.ops.gemv_all_reduce.op.gemv_all_reduce` returns it; it lies in symmetric memory."""
    rows, columns = x.shape[0], weight.shape[0]
    parts = workspace.parts.local.view(workspace.dtype)[: rows * columns].view(rows, columns)
    result = workspace.results.receive((rows, columns), workspace.dtype)

    def multiply(task: Task) -> None:
        (piece,) = task.pieces
        torch.mm(x[piece.first : piece.last], weight.T, out=parts[piece.first : piece.last])

    def add_up(task: Task) -> None:
        (piece,) = task.pieces
        _sum(workspace, result, piece.first, piece.last, bias, residual, fingerprint, scattered=False)

    plan = make_plan(Pair.gemm_all_reduce, sums_beside(rows, columns), workspace.world_size, rows)
    workspace.streams.run(plan, {Kind.compute: multiply, Kind.combine: add_up})
    return workspace.results.to_hold(result)


def sum_by_scatter(
    workspace: GemvWorkspace, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, fingerprint: int
) -> Tensor:
    """Return the result of :func:`sum_by_chunks`; the kernel of the product stores at the peers.

    The ranks must divide m, and rows of all matrices have a multiple of 16 bytes.
    """
    # A rank makes ready for these stores when the sum of its last call, which read what is there, is done.
    gemm(x.contiguous(), weight.contiguous(), ReceiveWindow(workspace.parts, workspace.channel, 0, fingerprint))
    result = workspace.results.receive((x.shape[0], weight.shape[0]), workspace.dtype)
    _sum(workspace, result, 0, x.shape[0], bias, residual, fingerprint, scattered=True)
    return workspace.results.to_hold(result)


def _sum(
    workspace: GemvWorkspace,
    result: Tensor,
    first: int,
    last: int,
    bias: Tensor | None,
    residual: Tensor | None,
    fingerprint: int,
    *,
    scattered: bool,
) -> None:
    """Rows ``first`` to ``last`` of the result, on all ranks. One epoch."""
    columns = result.shape[1]
    elements = (last - first) * columns
    most = int(_PROGRAMS_OF_MULTIPROCESSOR * gpu_of(workspace.device).multiprocessors)
    sum_chunk_kernel[(min(triton.cdiv(elements, _BLOCK * workspace.world_size), most),)](
        workspace.parts.addresses, workspace.results.memory.addresses, result if bias is None else bias,
        result if residual is None else residual, first * columns, elements, columns, workspace.results.offset_of(result),
        workspace.channel.args, fingerprint,
        SCATTERED=scattered, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        DTYPE=TRITON_DTYPES[workspace.dtype], VECTOR=8 if columns % 8 == 0 else 1, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
