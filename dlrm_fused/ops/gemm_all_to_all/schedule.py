"""The schedule that ``auto`` takes: the fastest that was measured, so that it loses to none."""

from __future__ import annotations

from dlrm_fused.ops.common.gpus import H100, Gpu
from dlrm_fused.ops.common.schedules import AUTO as AUTO
from dlrm_fused.ops.common.schedules import Shape
from dlrm_fused.ops.gemm_all_to_all.workspace import GemmWorkspace
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.estimate import Size
from dlrm_fused.ops.schedules.machines import machine_of
from dlrm_fused.ops.schedules.rule import SPACE, choose

KERNEL, CHUNKS = "kernel", "chunks"
# By a copy engine: names of dlrm_fused.ops.schedules.
BY_PIECES = SPACE[Pair.gemm_all_to_all][1:]
SCHEDULES = (AUTO, KERNEL, *BY_PIECES)
# On GPUs like an H100 with NVLink the library's product is at its best by chunks of so many rows, and so deep; this decides
# where nothing was measured. The rule of dlrm_fused.ops.schedules is better with two ranks, but loses up to 27 % with four
# (docs/schedules.md); other GPUs have it all the same.
_CHUNK_ROWS, _CHUNK_DEPTH = 1024, 4096


def schedule_of(workspace: GemmWorkspace, rows: int, columns: int, depth: int) -> str:
    """Return the schedule that ``auto`` takes, unless it measures first.

    The call has x [rows, depth] and a weight [columns, depth] that is not float8.
    """
    if workspace.group.hosts.are_many:
        return CHUNKS
    shape = rows, columns, depth
    rule = by_rule(workspace.world_size, shape, workspace.dtype.itemsize, workspace.gpu)
    return workspace.schedules.known(shape) or rule


def by_rule(ranks: int, shape: Shape, element_bytes: int, gpu: Gpu) -> str:
    """Return the schedule for a shape that nobody has measured."""
    rows, _, depth = shape
    if (gpu.multiprocessors, gpu.bf16, gpu.link) != (H100.multiprocessors, H100.bf16, H100.link):
        return choose(Size(Pair.gemm_all_to_all, ranks, *shape, element_bytes), machine_of(gpu))
    return CHUNKS if rows // ranks >= _CHUNK_ROWS and depth >= _CHUNK_DEPTH else KERNEL
