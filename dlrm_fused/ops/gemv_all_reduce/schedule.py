"""Which schedule ``auto`` takes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.schedules import AUTO as AUTO
from dlrm_fused.ops.common.schedules import LIBRARY as LIBRARY
from dlrm_fused.ops.common.schedules import Shape
from dlrm_fused.ops.gemv_all_reduce.tuning import MAX_ROWS
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace

# Scatter has not run on several GPUs yet, and so auto leaves it out.
KERNEL, CHUNKS, SCATTER = "kernel", "chunks", "scatter"
SCHEDULES = (AUTO, KERNEL, CHUNKS, SCATTER, LIBRARY)
_ROW_BYTES = 16  # of which rows have a multiple where they are scattered
# With so many rows the kernel has been faster than the library in every shape that was measured, on two and on four GPUs.
_ROWS_OF_THE_KERNEL = 16
# Where nothing was measured: results with more elements, and deeper products, leave a sum beside them no room.
_MOST_ELEMENTS, _MOST_DEPTH = 64 << 20, 8192


def check_schedule(workspace: GemvWorkspace, schedule: str, x: Tensor, weight: Tensor) -> None:
    """Raises UsageError if a call cannot be made so."""
    name, rows, ranks, bytes_ = workspace.name, len(x), workspace.world_size, x.element_size()
    if schedule not in SCHEDULES:
        raise UsageError(f"{name}: schedule={schedule}; allowed: {', '.join(SCHEDULES)}")
    if schedule == LIBRARY and not workspace.schedules.has_library:
        raise UsageError(f"{name}: schedule=library: the process group has no NCCL; allowed: auto, kernel, chunks, scatter")
    if (schedule == KERNEL and rows > MAX_ROWS) or (schedule in (CHUNKS, SCATTER) and rows <= MAX_ROWS):
        raise UsageError(
            f"{name}: schedule={schedule} for m={rows}; needed: up to {MAX_ROWS} rows for kernel, more for chunks and scatter"
        )
    if schedule == SCATTER and (rows % ranks or any(size * bytes_ % _ROW_BYTES for size in (x.shape[1], len(weight)))):
        raise UsageError(
            f"{name}: schedule=scatter: m={rows}, N={len(weight)}, K={x.shape[1]}; needed: a multiple of the {ranks} ranks "
            f"for m, and of {_ROW_BYTES // bytes_} for N and K"
        )


def choose_schedule(workspace: GemvWorkspace, shape: Shape, run: Callable[[str], object]) -> str:
    """What ``auto`` takes for a call. Collective: all ranks choose alike.

    Args:
        run: makes the call by a schedule.

    Raises:
        CommunicationError: while it measures, as the call itself.
    """
    rows, columns, depth = shape
    fused = KERNEL if rows <= MAX_ROWS else CHUNKS
    if not workspace.sums_by_kernel or rows <= _ROWS_OF_THE_KERNEL or not workspace.schedules.has_library:
        return fused
    is_beyond = fused == CHUNKS and (rows * columns >= _MOST_ELEMENTS or depth > _MOST_DEPTH)
    return workspace.schedules.choose(shape, (fused, LIBRARY), run, rule=LIBRARY if is_beyond else fused)
