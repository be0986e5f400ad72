"""AllGather + GEMM and GEMM + ReduceScatter as operators of PyTorch, ``torch.ops.dlrm_fused.all_gather_gemm`` and
``gemm_reduce_scatter``, each of whose backward pass is the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.all_gather_gemm.gather import gather_and_multiply, gather_beside
from dlrm_fused.ops.all_gather_gemm.scatter import multiply_and_scatter
from dlrm_fused.ops.all_gather_gemm.workspace import ShardWorkspace, Started
from dlrm_fused.ops.common.dispatch import Operator, without_autocast
from dlrm_fused.ops.common.schedules import AUTO
from dlrm_fused.ops.common.workspace import check_tensor
from dlrm_fused.ops.schedules import SCHEDULES, Pair
from dlrm_fused.ops.schedules.estimate import Size
from dlrm_fused.ops.schedules.machines import machine_of
from dlrm_fused.ops.schedules.rule import SPACE, choose
from dlrm_fused.symmetric.launches import aligned, layout_of

GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter
_OF_BOTH = ("kernel", "chunks", "chunks_2", "chunks_4", "tapered")  # a backward pass takes the schedule of its forward pass
NAMES = {GATHER: (*_OF_BOTH, "arriving"), SCATTER: _OF_BOTH}


def all_gather_gemm(workspace: ShardWorkspace, x: Tensor, weight: Tensor, *, schedule: str = AUTO) -> Tensor:
    """The rows of all ranks, times ``weight.T``: a column-parallel layer whose input is sharded by rows. Collective.

    Differentiable; the backward pass is collective too. It gathers x once more, rather than that it be kept.

    Args:
        x: [M / ranks, K], contiguous, in the workspace's dtype; M at most ``max_rows``, K at most ``max_columns``. Shapes must
            be equal on all ranks. Rows of x, weight and result are multiples of 16 bytes.
        weight: [N, K], contiguous, in the workspace's dtype: this rank's part of the output features.
        schedule: ``kernel``, ``chunks``, ``chunks_2``, ``chunks_4``, ``tapered`` or ``arriving``, see docs/schedules.md; or
            ``auto``, which takes the fastest of those that are worth it: from a table, or measured here by the first call with
            a shape. Without a GPU, and between hosts, all are one.

    Returns:
        [M, N] in the workspace's dtype.

    Raises:
        UsageError, CommunicationError: as :func:`~dlrm_fused.ops.gemm_all_to_all.gemm_all_to_all`.
    """
    return _all_gather_gemm(x, weight, schedule, workspace.handle)


def gemm_reduce_scatter(workspace: ShardWorkspace, x: Tensor, weight: Tensor, *, schedule: str = AUTO) -> Tensor:
    """Return this rank's rows of the sum over ranks of ``x @ weight.T``: a row-parallel layer with its result sharded by rows.

    Collective, and differentiable, as :func:`all_gather_gemm`.

    Args:
        x: [M, K], contiguous, in the workspace's dtype: this rank's part of the input features; M a multiple of the ranks, at
            most ``max_rows``. Shapes must be equal on all ranks. Rows of all matrices are multiples of 16 bytes.
        weight: [N, K], contiguous; N at most ``max_columns``.
        schedule: ``kernel``, ``chunks``, ``chunks_2``, ``chunks_4`` or ``tapered``, or ``auto``.

    Returns:
        [M / ranks, N] in the workspace's dtype. Peers' products are rounded once and added up in fp32; between hosts the sums
        of each host's ranks are rounded, too.

    Raises:
        UsageError, CommunicationError: as :func:`all_gather_gemm`.
    """
    return _gemm_reduce_scatter(x, weight, schedule, workspace.handle)


def _check(workspace: ShardWorkspace, pair: Pair, x: Tensor, weight: Tensor, schedule: str) -> None:
    name = workspace.name
    for key, matrix in (("x", x), ("weight", weight)):
        if matrix.dim() != 2 or 0 in matrix.shape:
            raise UsageError(f"{name}: {key} has shape {list(matrix.shape)}; needed: 2-D, not empty")
        check_tensor(workspace, key, matrix, workspace.dtype, matrix.shape)
    if x.shape[1] != weight.shape[1]:
        raise UsageError(f"{name}: x is [rows, {x.shape[1]}], weight [N, {weight.shape[1]}]; their K must be equal")
    workspace.check_row_bytes(K=x.shape[1], N=len(weight))
    if pair is GATHER:
        workspace.check_size(("M", len(x) * workspace.world_size), ("K", x.shape[1]))
    else:
        workspace.check_size(("M", len(x)), ("N", len(weight)))
    if schedule not in (AUTO, *NAMES[pair]):
        raise UsageError(f"{name}: schedule={schedule}; allowed for {pair}: {', '.join((AUTO, *NAMES[pair]))}")
    if pair is SCATTER and len(x) % workspace.world_size:
        raise UsageError(f"{name}: x has {len(x)} rows; needed: a multiple of the {workspace.world_size} ranks")


def _started(
    workspace: ShardWorkspace, pair: Pair, x: Tensor, weight: Tensor, schedule: str, *, is_transposed: bool = False
) -> Started:
    start = gather_and_multiply if pair is GATHER else multiply_and_scatter

    def run(name: str) -> Started:
        return start(workspace, x, weight, SCHEDULES[name], is_transposed=is_transposed)

    if schedule == AUTO and not workspace.is_by_kernels:  # all are one
        schedule = SPACE[pair][0]
    elif schedule == AUTO:
        all_rows = len(x) * (workspace.world_size if pair is GATHER else 1)
        shape = (all_rows, weight.shape[1] if is_transposed else len(weight), x.shape[1])
        size = Size(pair, workspace.world_size, *shape, workspace.dtype.itemsize)
        schedule = workspace.schedules[pair].choose(shape, SPACE[pair], run, lambda: choose(size, machine_of(workspace.gpu)))
    return run(schedule)


def _differentiate_gather(
    workspace: ShardWorkspace, gradient: Tensor, x: Tensor, weight: Tensor, schedule: str
) -> tuple[Tensor, Tensor]:
    """While the products for x's gradient are made and travel, x is gathered for that of the weight."""
    gathering = gather_beside(workspace, x)
    scattering = _started(workspace, SCATTER, gradient, weight, schedule, is_transposed=True)
    weight_gradient = gradient.T @ gathering.rows()
    return scattering.out, weight_gradient


def _differentiate_scatter(
    workspace: ShardWorkspace, gradient: Tensor, x: Tensor, weight: Tensor, schedule: str
) -> tuple[Tensor, Tensor]:
    gathering = _started(workspace, GATHER, gradient, weight, schedule, is_transposed=True)
    weight_gradient = gathering.rows().T @ x
    return gathering.out, weight_gradient


def _registered(pair: Pair, other: Pair, gradients: Callable[..., tuple[Tensor, Tensor]]) -> Operator:
    """Register the operator of a pair, whose backward pass is that of the ``other``."""
    name = f"dlrm_fused::{pair}"
    torch.library.define(name, "(Tensor x, Tensor weight, str schedule, int handle) -> Tensor")
    torch.library.define(
        f"{name}_backward", "(Tensor gradient, Tensor x, Tensor weight, str schedule, int handle) -> (Tensor, Tensor)"
    )

    def forward(x: Tensor, weight: Tensor, schedule: str, handle: int) -> Tensor:
        workspace = ShardWorkspace.of(handle)
        workspace.begin_call()
        layout = pair, layout_of(x, weight), schedule
        workspace.check_once(layout, lambda: _check(workspace, pair, x, weight, schedule))
        return _started(workspace, pair, aligned(x), aligned(weight), schedule).out

    def backward(gradient: Tensor, x: Tensor, weight: Tensor, schedule: str, handle: int) -> tuple[Tensor, Tensor]:
        workspace = ShardWorkspace.of(handle)
        workspace.begin_call()
        # This schedule, where the other pair has it.
        tensors = (aligned(tensor) for tensor in (gradient.contiguous(), x, weight))
        return gradients(workspace, *tensors, schedule if schedule in NAMES[other] else AUTO)

    def fake_forward(x: Tensor, weight: Tensor, schedule: str, handle: int) -> Tensor:
        ranks = ShardWorkspace.of(handle).world_size
        return x.new_empty(len(x) * ranks if pair is GATHER else len(x) // ranks, len(weight))

    def fake_backward(gradient: Tensor, x: Tensor, weight: Tensor, schedule: str, handle: int) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), torch.empty_like(weight)

    def differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        operator = getattr(torch.ops.dlrm_fused, f"{pair}_backward")
        return (*operator(gradient, *ctx.saved_tensors, ctx.schedule, ctx.handle), None, None)

    torch.library.impl(f"{name}_backward", ["cpu", "cuda"], without_autocast(backward))
    torch.library.register_fake(name, fake_forward)
    torch.library.register_fake(f"{name}_backward", fake_backward)
    return Operator(name, forward, differentiate, _save_for_backward)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.schedule, ctx.handle = inputs
    ctx.save_for_backward(*tensors)


_all_gather_gemm = _registered(GATHER, SCATTER, _differentiate_gather)
_gemm_reduce_scatter = _registered(SCATTER, GATHER, _differentiate_scatter)
