"""Works of the stress test of AllGather + GEMM and GEMM + ReduceScatter by every schedule, which share one workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from benchmarks.common.harness import World, relative_error
from benchmarks.operators.all_gather_gemm import PAIRS, Layer, call, in_fp64, new_workspace, schedules_of, tolerance_of
from benchmarks.operators.case import draw_operands
from benchmarks.operators.stress import Work
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace
from dlrm_fused.ops.common.schedules import LIBRARY

# M for each rank, N, K.
FULL = ((33, 1024, 1024), (256, 1536, 1024), (768, 512, 2048))
TINY = ((3, 16, 16), (7, 8, 32))


def works(world: World, *, tiny: bool) -> Sequence[Work]:
    """Collective."""
    shapes = TINY if tiny else FULL
    cells = [Layer(rows * world.size, columns, depth, pair) for pair in PAIRS for rows, columns, depth in shapes]
    workspace = new_workspace(world, cells, "stress")
    return [
        product(world, workspace, cell, schedule, number)
        for number, cell in enumerate(cells)
        for schedule in (*schedules_of(cell.pair), LIBRARY)
    ]


def product(world: World, workspace: ShardWorkspace, cell: Layer, schedule: str, number: int) -> Work:
    """One product; its number says which operands it has."""
    ((x, weight),) = draw_operands(world, cell.rows(world.size)[0], cell.n, cell.k, seed=number)
    tolerance = tolerance_of(cell.pair)

    @torch.no_grad()
    def multiply(by: str) -> list[Tensor]:
        return [call(workspace, cell.pair, x, weight, by)]

    @torch.no_grad()
    def check(first: Sequence[Tensor]) -> tuple[float, bool]:
        error = relative_error(first[0], in_fp64(cell.pair, x, weight))
        return error, error <= tolerance

    return Work(
        f"{cell.pair} {cell.name} {schedule}",
        workspace,
        lambda delay: multiply(schedule),
        check,
        {"layer": asdict(cell), "schedule": schedule},
        tolerance_to_one_host=None if cell.pair.moves_first else tolerance,
        # Between hosts all rows are gathered, and then multiplied by the library.
        as_between_hosts=lambda: multiply(LIBRARY if cell.pair.moves_first else schedule),
    )
