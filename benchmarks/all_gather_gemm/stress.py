"""Do AllGather + GEMM and GEMM + ReduceScatter give the same bits by every schedule, whatever the ranks' delays?

    torchrun --standalone --nproc-per-node=2 -m benchmarks.all_gather_gemm.stress --replays 10000 --output stress.json
        [--tiny] [--slices-by messages --ranks-per-host 2]
    python -m benchmarks.all_gather_gemm.stress --ranks 2 --kill-rank 1 --kill-after 3 --output killed.json

All share one workspace. First results are compared with fp64; what replays.py does with them follows. Between hosts all
schedules but the library's are one, and AllGather + GEMM has the bits of the library's product. With ``--kill-rank`` that rank
kills itself meanwhile; see killed_rank.py. Exit status 1 says that something was not as it must be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.all_gather_gemm.benchmark import SUM_TOLERANCE
from benchmarks.all_gather_gemm.cells import Layer
from benchmarks.all_gather_gemm.layers import call, new_workspace, schedules_of
from benchmarks.common import replays
from benchmarks.common.harness import World, relative_error
from benchmarks.common.replays import Work
from benchmarks.gemm_all_to_all.cells import TOLERANCE
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, reference, scatter_reference
from dlrm_fused.ops.common.schedules import LIBRARY
from dlrm_fused.ops.schedules import Pair

# M for each rank, N, K.
FULL = ((33, 1024, 1024), (256, 1536, 1024), (768, 512, 2048))
TINY = ((3, 16, 16), (7, 8, 32))


class LayerWork(Work):
    """A product by one schedule."""

    def __init__(self, world: World, workspace: ShardWorkspace, cell: Layer, schedule: str, number: int) -> None:
        super().__init__(world, workspace, f"{cell.pair} {cell.name} {schedule}")
        self.layers, self.cell, self.schedule = workspace, cell, schedule
        ((self.x, self.weight),) = cell.draw(world.rank, world.size, world.device, seed=number)
        self.tolerance = TOLERANCE if cell.pair.moves_first else SUM_TOLERANCE
        self.tolerance_to_one_host = None if cell.pair.moves_first else SUM_TOLERANCE

    @torch.no_grad()
    def compute(self) -> list[Tensor]:
        return self.multiply(self.schedule)

    @torch.no_grad()
    def compute_as_between_hosts(self) -> list[Tensor]:
        # Between hosts all rows are gathered, and then multiplied by the library.
        return self.multiply(LIBRARY if self.cell.pair.moves_first else self.schedule)

    def multiply(self, schedule: str) -> list[Tensor]:
        return [call(self.layers, self.cell.pair, self.x, self.weight, schedule)]

    @torch.no_grad()
    def check(self) -> float:
        right = reference if self.cell.pair.moves_first else scatter_reference
        expected = right(dist.group.WORLD, self.x.double(), self.weight.double())
        error = max(self.world.gather(relative_error(self.first[0], expected)))
        if error > self.tolerance:
            raise SystemExit(f"{self.name}: relative error {error}")
        return error

    def describe(self) -> Mapping[str, Any]:
        return {"layer": asdict(self.cell), "schedule": self.schedule}


def make_works(world: World, options: argparse.Namespace) -> Sequence[Work]:
    """Collective."""
    cells = [
        Layer(pair, rows * world.size, columns, depth)
        for pair in (Pair.all_gather_gemm, Pair.gemm_reduce_scatter)
        for rows, columns, depth in (TINY if options.tiny else FULL)
    ]
    workspace = new_workspace(world, "stress", cells)
    return [
        LayerWork(world, workspace, cell, schedule, number)
        for number, cell in enumerate(cells)
        for schedule in (*schedules_of(cell.pair), LIBRARY)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    return replays.main(__doc__, make_works, replays=10_000, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
