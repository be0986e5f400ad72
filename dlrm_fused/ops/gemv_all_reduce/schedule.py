"""Which schedule ``auto`` takes."""

from __future__ import annotations

from collections.abc import Callable

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.schedules import AUTO as AUTO
from dlrm_fused.ops.common.schedules import LIBRARY as LIBRARY
from dlrm_fused.ops.common.schedules import Shape, has_library
from dlrm_fused.ops.gemv_all_reduce.tuning import MAX_ROWS
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace

KERNEL, CHUNKS = "kernel", "chunks"
SCHEDULES = (AUTO, KERNEL, CHUNKS, LIBRARY)
# With so many rows the kernel has been faster than the library in every shape that was measured, on two and on four GPUs.
_ROWS_OF_THE_KERNEL = 16
# Where nothing was measured: results with more elements, and deeper products, leave a sum beside them no room.
_MOST_ELEMENTS, _MOST_DEPTH = 64 << 20, 8192


def check_schedule(workspace: GemvWorkspace, schedule: str, rows: int) -> None:
    """Raises UsageError if a call with so many rows of x cannot be made so."""
    name = workspace.name
    if schedule not in SCHEDULES:
        raise UsageError(f"{name}: schedule={schedule}; allowed: {', '.join(SCHEDULES)}")
    if schedule == LIBRARY and not has_library(workspace.channel):
        raise UsageError(f"{name}: schedule=library: the process group has no NCCL; allowed: auto, kernel, chunks")
    if (schedule == KERNEL and rows > MAX_ROWS) or (schedule == CHUNKS and rows <= MAX_ROWS):
        raise UsageError(f"{name}: schedule={schedule} for m={rows}; needed: up to {MAX_ROWS} rows for kernel, more for chunks")


def choose_schedule(workspace: GemvWorkspace, shape: Shape, run: Callable[[str], object]) -> str:
    """What ``auto`` takes for a call. Collective: all ranks choose alike.

    Args:
        run: makes the call by a schedule.

    Raises:
        CommunicationError: while it measures, as the call itself.
    """
    rows, columns, depth = shape
    fused = KERNEL if rows <= MAX_ROWS else CHUNKS
    if not workspace.sums_by_kernel or rows <= _ROWS_OF_THE_KERNEL or not has_library(workspace.channel):
        return fused
    is_beyond = fused == CHUNKS and (rows * columns >= _MOST_ELEMENTS or depth > _MOST_DEPTH)
    return workspace.schedules.choose(shape, (fused, LIBRARY), run, rule=LIBRARY if is_beyond else fused)
