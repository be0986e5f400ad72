"""The schedule that ``auto`` takes for AllGather + GEMM and for GEMM + ReduceScatter."""

from __future__ import annotations

from collections.abc import Callable

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.all_gather_gemm.workspace import ShardWorkspace
from dlrm_fused.ops.common.schedules import AUTO as AUTO
from dlrm_fused.ops.common.schedules import LIBRARY, Shape
from dlrm_fused.ops.schedules import SCHEDULES, Pair, Schedule
from dlrm_fused.ops.schedules.estimate import Size
from dlrm_fused.ops.schedules.machines import machine_of
from dlrm_fused.ops.schedules.rule import SPACE, choose

NAMES = {
    Pair.all_gather_gemm: (LIBRARY, "kernel", "chunks", "chunks_2", "chunks_4", "tapered", "arriving", "arriving_4"),
    Pair.gemm_reduce_scatter: (LIBRARY, "kernel", "chunks", "chunks_2", "chunks_4", "chunks_8", "tapered"),
}


def check_schedule(workspace: ShardWorkspace, pair: Pair, schedule: str) -> None:
    """Raise UsageError if a call cannot be made by this schedule."""
    name, allowed = workspace.name, (AUTO, *NAMES[pair])
    if schedule not in allowed:
        raise UsageError(f"{name}: schedule={schedule}; allowed for {pair}: {', '.join(allowed)}")
    if schedule == LIBRARY and not workspace.schedules[pair].has_library:
        raise UsageError(f"{name}: schedule=library: the process group has no NCCL; take another one, or auto")


def choose_schedule(
    workspace: ShardWorkspace, pair: Pair, shape: Shape, schedule: str, run: Callable[[Schedule], object]
) -> Schedule:
    """The schedule of a call; ``auto`` measures where nothing is known. Collective: all ranks choose alike.

    Args:
        shape: rows of all ranks, columns and K of the product.
        run: makes the call by a schedule.

    Raises:
        CommunicationError: while it measures, as the call itself.
    """
    if schedule != AUTO:
        return SCHEDULES[schedule]
    rows, columns, depth = shape
    size = Size(pair, workspace.world_size, rows, columns, depth, workspace.dtype.itemsize)
    # The first that is measured notices ranks that make another call; the library's would wait for them.
    names = [name for name in SPACE[pair] if name != LIBRARY] + [LIBRARY] * workspace.schedules[pair].has_library
    rule = choose(size, machine_of(workspace.gpu)) if workspace.is_by_kernels else names[0]
    chosen = workspace.schedules[pair].choose(shape, names, lambda name: run(SCHEDULES[name]), rule=rule)
    return SCHEDULES[chosen]
