"""Finish embeddings that a rank has received: add up row-wise parts, and convert from another dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import to_wire, within_range
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.launches import ceil_div

# Rows and columns of a program's tile.
_ROWS, _COLUMNS = 4, 256
_ELEMENTS = 1024


def open_output(workspace: EmbeddingWorkspace, plan: BatchPlan) -> tuple[Tensor, int]:
    """Return a new output, and the byte of ``workspace.outputs`` at which the ranks that send store it. Collective where the
    batch needs more memory.

    The output is [local batch, columns] of the workspace's output dtype: a block of symmetric memory, or, where everything is
    received in another dtype, an ordinary tensor, and the byte is 0.
    """
    workspace.reserve(plan.batch_sizes)
    shape, pool = (plan.local_batch, workspace.layout.columns), workspace.outputs
    if plan.places.is_staged:
        return torch.empty(shape, dtype=workspace.output_dtype, device=workspace.device), 0
    output = pool.receive(shape, workspace.output_dtype)
    return output, pool.offset_of(output)


def finish_output(workspace: EmbeddingWorkspace, plan: BatchPlan, output: Tensor, *, are_empty_bags_sent: bool) -> Tensor:
    """Return the output of :func:`open_output`, once all ranks have stored their parts: the caller's as long as it likes.

    Args:
        are_empty_bags_sent: whether all partial sums arrive, also those of empty bags.
    """
    _finish_staged(workspace, plan, output, are_empty_bags_sent)
    return workspace.outputs.to_hold(output)


def _finish_staged(workspace: EmbeddingWorkspace, plan: BatchPlan, output: Tensor, are_empty_bags_sent: bool) -> None:
    """Turn what was received in staging memory into columns of the output; nothing to do where all came straight there."""
    if workspace.layout.row_wise_columns and not are_empty_bags_sent:
        _add_up_present(workspace, plan, output)
    elif workspace.layout.row_wise_columns:
        partial_sums = plan.partial_sums_view(workspace.staging())
        for source, column, width in plan.places.row_wise_runs:
            add_up(partial_sums[:, :, source : source + width], output[:, column : column + width])
    if plan.places.is_staged:
        staged = plan.staged_view(workspace.staging())
        for column, width in plan.places.direct_runs:
            add_up(staged[None, :, column : column + width], output[:, column : column + width])


def add_up(sources: Tensor, output: Tensor) -> None:
    """output [rows, width] = sum in fp32 over the first dimension of sources [n, rows, width], in its order."""
    if not uses_kernels(output.device):
        total = output if output.dtype == torch.float32 else torch.empty_like(output, dtype=torch.float32)
        total.copy_(sources[0])
        for source in sources[1:]:
            total += source
        if total is not output:
            output.copy_(within_range(total, output.dtype))
        return
    rows, width = output.shape
    if rows:
        add_up_kernel[(ceil_div(rows, _ROWS), ceil_div(width, _COLUMNS))](
            sources, output, rows, width, sources.stride(0), sources.stride(1), output.stride(0),
            SOURCES=sources.shape[0], ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=4,
        )  # fmt: skip


def _add_up_present(workspace: EmbeddingWorkspace, plan: BatchPlan, output: Tensor) -> None:
    """The row-wise columns of ``output`` from the partial sums that were sent."""
    partial_sums, presence = plan.partial_sums_view(workspace.staging()), plan.presence_view(workspace.staging())
    for features in workspace.partial_sum_tables if plan.local_batch else ():
        rows = max(1, _ELEMENTS // features.block_dim)
        add_up_present_kernel[(ceil_div(plan.local_batch, rows), features.count)](
            partial_sums, presence, output, features.table, plan.local_batch, partial_sums.stride(0),
            partial_sums.stride(1), presence.stride(0), presence.stride(1), output.stride(0),
            SOURCES=partial_sums.shape[0], ROWS=rows, DIM=features.block_dim,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def add_up_present_kernel(
    sources, presence, output, features, rows, source_stride, row_stride, presence_source_stride,
    presence_feature_stride, output_stride,
    SOURCES: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Sum of the partial results that are not empty, always in the order of ranks, which are on one host.

    Args:
        presence: uint8 [SOURCES, features, rows]: 1 where there is a partial result.
        features: int64 [n, 4], :class:`~dlrm_fused.ops.embedding_all_to_all.layout.FeatureTable`, one for each program of
        the second axis.
    """
    fields = features + tl.program_id(1) * 4
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, DIM)
    of_dim = (lane < tl.multiple_of(tl.load(fields + 2), 4))[None, :]
    exists = row < rows
    of_rows = presence + tl.load(fields) * presence_feature_stride + row
    # Pointers go from source to source: a product of 32 bits with their distance could overflow.
    places = sources + row[:, None] * row_stride + (tl.multiple_of(tl.load(fields + 1), 4) + lane)[None, :]
    total = tl.zeros((ROWS, DIM), tl.float32)
    for _ in tl.static_range(SOURCES):
        is_there = tl.load(of_rows, mask=exists, other=0) != 0
        partial = tl.load(places, mask=is_there[:, None] & of_dim, other=0.0)
        total += partial.to(tl.float32)
        of_rows += presence_source_stride
        places += source_stride
    at_output = row[:, None] * output_stride + (tl.multiple_of(tl.load(fields + 3), 4) + lane)[None, :]
    tl.store(output + at_output, to_wire(total, output.dtype.element_ty), mask=exists[:, None] & of_dim)


@triton.jit(do_not_specialize=["rows", "width"])
def add_up_kernel(
    sources, output, rows, width, source_stride, row_stride, output_stride,
    SOURCES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum of partial results, always in the order of ``ByteLayout.sources``, so that it is the same in every run."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at_source = sources + row[:, None] * row_stride + column[None, :]
    total = tl.load(at_source, mask=inside, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, SOURCES):
        at_source += source_stride  # not a product, which 32 bits might not hold
        total += tl.load(at_source, mask=inside, other=0.0).to(tl.float32)
    places = output + row[:, None] * output_stride + column[None, :]
    tl.store(places, to_wire(total, output.dtype.element_ty), mask=inside)
