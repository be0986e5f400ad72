"""The receiving side of a workspace: the output tensor, and what turns partial sums and other dtypes into it."""

# Kernels follow Triton's ways: constants in capitals, no types but theirs.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all.workspace import BatchPlan, EmbeddingWorkspace
from dlrm_fused.symmetric.device import uses_kernels

# Of a program's tile.
_ROWS, _COLUMNS = 4, 256
_ELEMENTS = 1024


class Output:
    """Where this rank receives in one epoch.

    Attributes:
        received: fp32 [local batch, columns]: a block of symmetric memory that peers store into, or, where everything is
            received in another dtype, an ordinary tensor.
        offset: byte of the block in the symmetric memory.
    """

    def __init__(self, workspace: EmbeddingWorkspace, plan: BatchPlan) -> None:
        self.buffers = workspace.buffers(plan)
        shape = (plan.local_batch, workspace.layout.columns)
        if plan.is_staged:
            self.received = torch.empty(shape, device=workspace.device)
            self.offset = 0
            return
        self.received = self.buffers.outputs.receive(shape, torch.float32)
        self.offset = self.buffers.outputs.offset_of(self.received)

    def tensor(self) -> Tensor:
        """The tensor for the caller: its own as long as it likes."""
        return self.buffers.outputs.to_hold(self.received)


def finish_staged(workspace: EmbeddingWorkspace, plan: BatchPlan, output: Tensor, *, are_empty_bags_sent: bool) -> None:
    """Turn what was received in staging memory into columns of the output; nothing to do where all came straight there."""
    if workspace.layout.row_wise_columns and not are_empty_bags_sent:
        _add_up_present(workspace, plan, output)
    elif workspace.layout.row_wise_columns:
        partial_sums = plan.partial_sums_view(workspace.buffers(plan).staging_memory())
        for source, column, width in plan.row_wise_runs():
            _add_up(partial_sums[:, :, source : source + width], output[:, column : column + width], workspace)
    if plan.is_staged:
        staged = plan.staged_view(workspace.buffers(plan).staging_memory())
        for column, width in plan.direct_runs():
            _add_up(staged[None, :, column : column + width], output[:, column : column + width], workspace)


def _add_up(sources: Tensor, output: Tensor, workspace: EmbeddingWorkspace) -> None:
    """output [rows, width] fp32 = sum over the first dimension of sources [n, rows, width], in its order."""
    if not uses_kernels(workspace.device):
        output.copy_(sources[0])
        for source in sources[1:]:
            output += source
        return
    rows, width = output.shape
    if rows:
        add_up_kernel[(triton.cdiv(rows, _ROWS), triton.cdiv(width, _COLUMNS))](
            sources,
            output,
            rows,
            width,
            sources.stride(0),
            sources.stride(1),
            output.stride(0),
            SOURCES=sources.shape[0],
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )


def _add_up_present(workspace: EmbeddingWorkspace, plan: BatchPlan, output: Tensor) -> None:
    """The row-wise columns of ``output`` from the partial sums that were sent."""
    staging = workspace.buffers(plan).staging_memory()
    partial_sums, presence = plan.partial_sums_view(staging), plan.presence_view(staging)
    for features in workspace.partial_sum_tables if plan.local_batch else ():
        rows = max(1, _ELEMENTS // features.block_dim)
        add_up_present_kernel[(triton.cdiv(plan.local_batch, rows), features.count)](
            partial_sums,
            presence,
            output,
            features.table,
            plan.local_batch,
            partial_sums.stride(0),
            partial_sums.stride(1),
            presence.stride(0),
            presence.stride(1),
            output.stride(0),
            SOURCES=workspace.world_size,
            ROWS=rows,
            DIM=features.block_dim,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["rows"])
def add_up_present_kernel(
    sources,
    presence,
    output,
    features,
    rows,
    source_stride,
    row_stride,
    presence_source_stride,
    presence_feature_stride,
    output_stride,
    SOURCES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Sum of the partial results that are not empty, always in the order of ranks.

    Args:
        presence: uint8 [SOURCES, features, rows]: 1 where there is a partial result.
        features: int64 [n, 4], :class:`~dlrm_fused.ops.embedding_all_to_all.workspace.FeatureTable`, one for each program of
        the second axis.
    """
    fields = features + tl.program_id(1) * 4
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    lane = tl.arange(0, DIM)
    of_dim = (lane < tl.multiple_of(tl.load(fields + 2), 4))[None, :]
    exists = row < rows
    of_rows = presence + tl.load(fields) * presence_feature_stride + row
    places = row[:, None] * row_stride + (tl.multiple_of(tl.load(fields + 1), 4) + lane)[None, :]
    total = tl.zeros((ROWS, DIM), tl.float32)
    for source in tl.static_range(SOURCES):
        is_there = tl.load(of_rows + source * presence_source_stride, mask=exists, other=0) != 0
        partial = tl.load(sources + source * source_stride + places, mask=is_there[:, None] & of_dim, other=0.0)
        total += partial.to(tl.float32)
    at_output = row[:, None] * output_stride + (tl.multiple_of(tl.load(fields + 3), 4) + lane)[None, :]
    tl.store(output + at_output, total, mask=exists[:, None] & of_dim)


@triton.jit(do_not_specialize=["rows", "width"])
def add_up_kernel(
    sources,
    output,
    rows,
    width,
    source_stride,
    row_stride,
    output_stride,
    SOURCES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum of partial results, always in the order of ranks, so that it is the same in every run."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * row_stride + column[None, :]
    total = tl.load(sources + places, mask=inside, other=0.0).to(tl.float32)
    for source in tl.static_range(1, SOURCES):
        total += tl.load(sources + source * source_stride + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row[:, None] * output_stride + column[None, :], total, mask=inside)
