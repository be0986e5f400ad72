"""AllGather + GEMM and GEMM + ReduceScatter as operators of PyTorch, ``torch.ops.dlrm_fused.all_gather_gemm`` and
``gemm_reduce_scatter``, each of whose backward pass is the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.all_gather_gemm.gather import gather_and_multiply, gather_beside
from dlrm_fused.ops.all_gather_gemm.scatter import multiply_and_scatter
from dlrm_fused.ops.all_gather_gemm.schedule import AUTO, NAMES, check_schedule, choose_schedule
from dlrm_fused.ops.all_gather_gemm.workspace import ROW_BYTES, ShardWorkspace, Started
from dlrm_fused.ops.common.workspace import check_tensor
from dlrm_fused.ops.schedules import Pair, Schedule
from dlrm_fused.symmetric import abort_peers_on_error

GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter


def all_gather_gemm(workspace: ShardWorkspace, x: Tensor, weight: Tensor, *, schedule: str = AUTO) -> Tensor:
    """The rows of all ranks, times ``weight.T``: a column-parallel layer whose input is sharded by rows. Collective.

    Differentiable; the backward pass is collective too. It gathers x once more, rather than that it be kept.

    Args:
        x: [M / ranks, K], contiguous, in the workspace's dtype; M at most ``max_rows``, K at most ``max_columns``. Shapes must
            be equal on all ranks. Rows of x, weight and result are multiples of 16 bytes.
        weight: [N, K], contiguous, in the workspace's dtype: this rank's part of the output features.
        schedule: one of ``library``, ``kernel``, ``chunks``, ``chunks_2``, ``chunks_4``, ``tapered``, ``arriving``
            and ``arriving_4``, see docs/schedules.md; or ``auto``, which takes the fastest: from a table, or measured here by
            the first call with a shape. Without a GPU, and between hosts, all but ``library`` are one.

    Returns:
        [M, N] in the workspace's dtype.

    Raises:
        UsageError: for other shapes, dtypes or devices; the other ranks raise CommunicationError, with the name of this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On GPUs, where kernels run
            behind the host, from a later call or ``workspace.raise_fault()``.
    """
    return torch.ops.dlrm_fused.all_gather_gemm(x, weight, schedule, workspace.handle)


def gemm_reduce_scatter(workspace: ShardWorkspace, x: Tensor, weight: Tensor, *, schedule: str = AUTO) -> Tensor:
    """Return this rank's rows of the sum over ranks of ``x @ weight.T``: a row-parallel layer with its result sharded by rows.

    Collective, and differentiable, as :func:`all_gather_gemm`.

    Args:
        x: [M, K], contiguous, in the workspace's dtype: this rank's part of the input features; M a multiple of the ranks, at
            most ``max_rows``. Shapes must be equal on all ranks. Rows of all matrices are multiples of 16 bytes.
        weight: [N, K], contiguous; N at most ``max_columns``.
        schedule: one of ``library``, ``kernel``, ``chunks``, ``chunks_2``, ``chunks_4``, ``chunks_8`` and ``tapered``, or
            ``auto``.

    Returns:
        [M / ranks, N] in the workspace's dtype. But for ``library``, peers' products are rounded once and added up in fp32.

    Raises:
        UsageError, CommunicationError: as :func:`all_gather_gemm`.
    """
    return torch.ops.dlrm_fused.gemm_reduce_scatter(x, weight, schedule, workspace.handle)


_SCHEMA = "(Tensor x, Tensor weight, str schedule, int handle) -> Tensor"
_BACKWARD_SCHEMA = "(Tensor gradient, Tensor x, Tensor weight, str schedule, int handle) -> (Tensor, Tensor)"
torch.library.define("dlrm_fused::all_gather_gemm", _SCHEMA)
torch.library.define("dlrm_fused::all_gather_gemm_backward", _BACKWARD_SCHEMA)
torch.library.define("dlrm_fused::gemm_reduce_scatter", _SCHEMA)
torch.library.define("dlrm_fused::gemm_reduce_scatter_backward", _BACKWARD_SCHEMA)


@torch.library.impl("dlrm_fused::all_gather_gemm", ["cpu", "cuda"])
def _gather(x: Tensor, weight: Tensor, schedule: str, handle: int) -> Tensor:
    workspace = ShardWorkspace.of(handle)
    workspace.begin_call()
    with abort_peers_on_error(workspace.channel):
        _check(workspace, GATHER, x, weight)
        check_schedule(workspace, GATHER, schedule)
    return _gathered(workspace, x, weight, schedule, is_transposed=False).out


@torch.library.impl("dlrm_fused::gemm_reduce_scatter", ["cpu", "cuda"])
def _scatter(x: Tensor, weight: Tensor, schedule: str, handle: int) -> Tensor:
    workspace = ShardWorkspace.of(handle)
    workspace.begin_call()
    with abort_peers_on_error(workspace.channel):
        _check(workspace, SCATTER, x, weight)
        check_schedule(workspace, SCATTER, schedule)
        if len(x) % workspace.world_size:
            raise UsageError(f"{workspace.name}: x has {len(x)} rows; needed: a multiple of the {workspace.world_size} ranks")
    return _scattered(workspace, x, weight, schedule, is_transposed=False).out


def _check(workspace: ShardWorkspace, pair: Pair, x: Tensor, weight: Tensor) -> None:
    name = workspace.name
    for key, matrix in (("x", x), ("weight", weight)):
        if matrix.dim() != 2 or 0 in matrix.shape:
            raise UsageError(f"{name}: {key} has shape {list(matrix.shape)}; needed: 2-D, not empty")
        check_tensor(workspace, key, matrix, workspace.dtype, matrix.shape)
    if x.shape[1] != weight.shape[1]:
        raise UsageError(f"{name}: x is [rows, {x.shape[1]}], weight [N, {weight.shape[1]}]; their K must be equal")
    columns = {"K": x.shape[1], "N": len(weight)}
    for key, size in columns.items():
        if size * workspace.dtype.itemsize % ROW_BYTES:
            raise UsageError(f"{name}: {key}={size} elements of {workspace.dtype}; needed: a multiple of {ROW_BYTES} bytes")
    all_rows, travelling = len(x) * (workspace.world_size if pair.moves_first else 1), "K" if pair.moves_first else "N"
    if all_rows > workspace.max_rows:
        raise UsageError(f"{name}: M={all_rows} is above max_rows={workspace.max_rows} of the workspace; make it with more")
    if columns[travelling] > workspace.max_columns:
        size, limit = columns[travelling], workspace.max_columns
        raise UsageError(f"{name}: {travelling}={size} is above max_columns={limit} of the workspace; make it with more")


def _gathered(workspace: ShardWorkspace, x: Tensor, weight: Tensor, schedule: str, *, is_transposed: bool) -> Started:
    return _started(workspace, GATHER, len(x) * workspace.world_size, x, weight, schedule, is_transposed)


def _scattered(workspace: ShardWorkspace, x: Tensor, weight: Tensor, schedule: str, *, is_transposed: bool) -> Started:
    return _started(workspace, SCATTER, len(x), x, weight, schedule, is_transposed)


def _started(
    workspace: ShardWorkspace, pair: Pair, all_rows: int, x: Tensor, weight: Tensor, schedule: str, is_transposed: bool
) -> Started:
    start = gather_and_multiply if pair is GATHER else multiply_and_scatter

    def run(chosen: Schedule) -> Started:
        return start(workspace, x, weight, chosen, is_transposed=is_transposed)

    shape = (all_rows, weight.shape[1] if is_transposed else len(weight), x.shape[1])
    return run(choose_schedule(workspace, pair, shape, schedule, run))


@torch.library.impl("dlrm_fused::all_gather_gemm_backward", ["cpu", "cuda"])
def _gather_backward(gradient: Tensor, x: Tensor, weight: Tensor, schedule: str, handle: int) -> tuple[Tensor, Tensor]:
    """While the products for x's gradient are made and travel, x is gathered for that of the weight."""
    workspace = ShardWorkspace.of(handle)
    workspace.begin_call()
    gradient = gradient.contiguous()
    gathering = gather_beside(workspace, x)
    scattering = _scattered(workspace, gradient, weight, _for_pair(SCATTER, schedule), is_transposed=True)
    weight_gradient = gradient.T @ gathering.rows()
    return scattering.out, weight_gradient


@torch.library.impl("dlrm_fused::gemm_reduce_scatter_backward", ["cpu", "cuda"])
def _scatter_backward(gradient: Tensor, x: Tensor, weight: Tensor, schedule: str, handle: int) -> tuple[Tensor, Tensor]:
    workspace = ShardWorkspace.of(handle)
    workspace.begin_call()
    gathering = _gathered(workspace, gradient.contiguous(), weight, _for_pair(GATHER, schedule), is_transposed=True)
    weight_gradient = gathering.rows().T @ x
    return gathering.out, weight_gradient


def _for_pair(pair: Pair, schedule: str) -> str:
    """Return the schedule for the pair of the backward pass: this one, where that pair has it."""
    return schedule if schedule in NAMES[pair] else AUTO


@torch.library.register_fake("dlrm_fused::all_gather_gemm")
def _fake_gather(x: Tensor, weight: Tensor, schedule: str, handle: int) -> Tensor:
    return x.new_empty(len(x) * ShardWorkspace.of(handle).world_size, len(weight))


@torch.library.register_fake("dlrm_fused::gemm_reduce_scatter")
def _fake_scatter(x: Tensor, weight: Tensor, schedule: str, handle: int) -> Tensor:
    return x.new_empty(len(x) // ShardWorkspace.of(handle).world_size, len(weight))


def _fake_backward(gradient: Tensor, x: Tensor, weight: Tensor, schedule: str, handle: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.schedule, ctx.handle = inputs
    ctx.save_for_backward(*tensors)


def _register_gradient(name: str) -> None:
    backward = getattr(torch.ops.dlrm_fused, f"{name}_backward")

    def differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*backward(gradient, *ctx.saved_tensors, ctx.schedule, ctx.handle), None, None)

    torch.library.register_fake(f"dlrm_fused::{name}_backward", _fake_backward)
    torch.library.register_autograd(f"dlrm_fused::{name}", differentiate, setup_context=_save_for_backward)


_register_gradient("all_gather_gemm")
_register_gradient("gemm_reduce_scatter")
