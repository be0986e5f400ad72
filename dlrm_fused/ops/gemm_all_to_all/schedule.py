"""Which schedule ``auto`` takes: the fastest that was measured, so that it loses to none."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlrm_fused.auto_choice import device_seconds
from dlrm_fused.ops.gemm_all_to_all.measured import MEASURED_ON
from dlrm_fused.ops.gemm_all_to_all.measured import SCHEDULES as MEASURED
from dlrm_fused.ops.gemm_all_to_all.workspace import GemmWorkspace

AUTO, KERNEL, CHUNKS, LIBRARY = "auto", "kernel", "chunks", "library"
SCHEDULES = (AUTO, KERNEL, CHUNKS, LIBRARY)
# Where nothing was measured: by chunks of so many rows, and so deep, the library's product is at its best.
_CHUNK_ROWS, _CHUNK_DEPTH = 1024, 4096

# Rows, columns and K of one rank.
Shape = tuple[int, int, int]


def schedule_of(workspace: GemmWorkspace, rows: int, columns: int, depth: int) -> str:
    """What ``auto`` takes for x [rows, depth] and a weight [columns, depth] that is not float8, unless it measures first."""
    shape = (rows, columns, depth)
    return _measured(workspace, shape) or _by_rule(workspace.world_size, rows, depth)


def choose_schedule(workspace: GemmWorkspace, shape: Shape, run: Callable[[str], object]) -> str:
    """What ``auto`` takes for a call. Collective: all ranks choose alike.

    A shape that nobody has measured is measured now, on GPUs and outside of a CUDA graph's capture. The host then waits for
    the device.

    Args:
        run: makes the call by a schedule.

    Raises:
        CommunicationError: while it measures, as the call itself.
    """
    if _can_measure(workspace) and _measured(workspace, shape) is None:
        seconds = _seconds(workspace, run)
        workspace.schedules[shape] = min(seconds, key=lambda name: seconds[name])
        times = ", ".join(f"{name} {of_call * 1e3:.3f} ms" for name, of_call in seconds.items())
        workspace.log_schedule(workspace.schedules[shape], *shape, f"measured: {times}")
    schedule, is_measured = schedule_of(workspace, *shape), _measured(workspace, shape) is not None
    workspace.log_schedule(schedule, *shape, "measured before" if is_measured else "by rule, not measured")
    return schedule


def has_library(workspace: GemmWorkspace) -> bool:
    """Whether torch.distributed exchanges tensors of the workspace's device."""
    process_group = workspace.group.process_group
    return process_group is None or workspace.device.type == "cpu" or "nccl" in dist.get_backend_config(process_group)


def _measured(workspace: GemmWorkspace, shape: Shape) -> str | None:
    """By this workspace, or in the table, which holds for one kind of GPU."""
    device = workspace.device
    if shape in workspace.schedules or device.type != "cuda" or torch.cuda.get_device_name(device) != MEASURED_ON:
        return workspace.schedules.get(shape)
    return MEASURED.get(workspace.world_size, {}).get((*shape, workspace.dtype.itemsize))


def _by_rule(ranks: int, rows: int, depth: int) -> str:
    return CHUNKS if rows // ranks >= _CHUNK_ROWS and depth >= _CHUNK_DEPTH else KERNEL


def _can_measure(workspace: GemmWorkspace) -> bool:
    is_on_gpu = workspace.device.type == "cuda"
    return is_on_gpu and workspace.measures_schedules and not torch.cuda.is_current_stream_capturing()


def _seconds(workspace: GemmWorkspace, run: Callable[[str], object]) -> dict[str, float]:
    """Of a call by each schedule, on the slowest rank. Collective."""
    # The kernel first: it notices ranks that make another call, for which NCCL would wait.
    names = [KERNEL, CHUNKS] + [LIBRARY] * has_library(workspace)
    own = {}
    for name in names:

        def call(name: str = name) -> None:
            run(name)

        own[name] = device_seconds(call, workspace.device)
        workspace.raise_fault()
    of_ranks = workspace.group.gather(lambda: own)
    return {name: max(seconds[name] for seconds in of_ranks) for name in names}
