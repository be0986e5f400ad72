"""The schedule that ``auto`` takes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.matrix_workspace import ROW_BYTES
from dlrm_fused.ops.common.schedules import AUTO as AUTO
from dlrm_fused.ops.common.schedules import Shape
from dlrm_fused.ops.gemv_all_reduce.tuning import MAX_ROWS
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.estimate import Size
from dlrm_fused.ops.schedules.machines import Machine, machine_of
from dlrm_fused.ops.schedules.rule import choose, copies_are_faster

KERNEL, PRODUCT, CHUNKS, SCATTER, COPIES = "kernel", "product", "chunks", "scatter", "copies"
SCHEDULES = (AUTO, KERNEL, PRODUCT, CHUNKS, SCATTER, COPIES)
# The ranks divide the rows.
_BY_SHARDS = (SCATTER, COPIES)
# With so many rows the kernel has been faster than the library in every shape that was measured, on two and on four GPUs.
_ROWS_OF_THE_KERNEL = 16
# The schedules of many rows but copies, by their names in dlrm_fused.ops.schedules.
OF_MANY_ROWS = {"sums_beside": CHUNKS, "kernel": SCATTER}


def check_schedule(workspace: GemvWorkspace, schedule: str, x: Tensor, weight: Tensor) -> None:
    """Raises UsageError if a call cannot be made so."""
    name, rows, ranks, bytes_ = workspace.name, len(x), workspace.world_size, x.element_size()
    if schedule not in SCHEDULES:
        raise UsageError(f"{name}: schedule={schedule}; allowed: {', '.join(SCHEDULES)}")
    if (schedule in (KERNEL, PRODUCT) and rows > MAX_ROWS) or (schedule in (CHUNKS, *_BY_SHARDS) and rows <= MAX_ROWS):
        raise UsageError(
            f"{name}: schedule={schedule} for m={rows}; needed: up to {MAX_ROWS} rows for kernel and product, more for "
            "chunks, scatter and copies"
        )
    if schedule == PRODUCT and workspace.dtype == torch.float32:
        raise UsageError(f"{name}: schedule=product is for bfloat16 and float16, the workspace has {workspace.dtype}")
    if schedule in _BY_SHARDS and not _has_shards(workspace, (rows, len(weight), x.shape[1])):
        raise UsageError(
            f"{name}: schedule={schedule}: m={rows}, N={len(weight)}, K={x.shape[1]}; needed: a multiple of the {ranks} ranks "
            f"for m, and of {ROW_BYTES // bytes_} for N and K"
        )


def choose_schedule(workspace: GemvWorkspace, shape: Shape, run: Callable[[str], object]) -> str:
    """Return the schedule that ``auto`` takes for a call of kernels. Collective: all ranks choose alike.

    Args:
        run: makes the call by a schedule.

    Raises:
        CommunicationError: while it measures, as the call itself.
    """
    rows = shape[0]
    if rows <= MAX_ROWS:
        has_product = rows > _ROWS_OF_THE_KERNEL and workspace.dtype != torch.float32
        names = [KERNEL] + [PRODUCT] * has_product
    else:
        names = [CHUNKS, *_BY_SHARDS * _has_shards(workspace, shape)]
    if len(names) == 1:
        return names[0]
    return workspace.schedules.choose(shape, names, run, rule=lambda: _by_rule(workspace, shape))


def _has_shards(workspace: GemvWorkspace, shape: Shape) -> bool:
    rows, *sizes = shape
    return rows % workspace.world_size == 0 and not any(size * workspace.dtype.itemsize % ROW_BYTES for size in sizes)


def _by_rule(workspace: GemvWorkspace, shape: Shape) -> str:
    """Return the schedule whose estimate is shortest; the kernel for as many rows as it takes."""
    if shape[0] <= MAX_ROWS:
        return KERNEL
    return by_rule(
        Size(Pair.gemm_all_reduce, workspace.world_size, *shape, workspace.dtype.itemsize), machine_of(workspace.gpu)
    )


def by_rule(size: Size, machine: Machine) -> str:
    """Return the schedule of many rows, whose number the ranks divide, that takes least on paper."""
    return COPIES if copies_are_faster(size, machine) else OF_MANY_ROWS[choose(size, machine)]
