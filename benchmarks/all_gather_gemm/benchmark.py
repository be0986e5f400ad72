"""AllGather + GEMM and GEMM + ReduceScatter by every schedule, against NCCL and cuBLAS.

    torchrun --standalone --nproc-per-node=2 -m benchmarks.all_gather_gemm.benchmark --output results.json
        [--cells tiny|full] [--match REGEX] [--schedules chunks arriving_4] [--seconds-budget 300]

The baseline is NCCL's ``all_gather_into_tensor`` or ``reduce_scatter_tensor`` beside cuBLAS, into memory allocated before. All
contestants take turns, results are compared with fp64, and a cell whose results are wrong is reported as failed. The floor of
a cell is as in benchmarks/gemm_all_to_all. Without GPUs everything runs through shared memory and gloo: that tests this
script, not the speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.all_gather_gemm.cells import CELLS, Layer
from benchmarks.all_gather_gemm.layers import LayerRun, call, new_workspace, schedules_of
from benchmarks.all_gather_gemm.report import REPORT
from benchmarks.common.benchmark_command import benchmark_parser
from benchmarks.common.harness import (
    Report,
    World,
    compile_ahead,
    describe_run,
    measure_ceilings,
    measure_contention,
    measure_teraflops,
    open_world,
)
from benchmarks.gemm_all_to_all.cells import DTYPE, TOLERANCE
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace

# Of a sum whose terms are rounded to bf16; terms may be larger than the sum.
SUM_TOLERANCE = 8 * 2**-8


class Run:
    """All cells, and the report that is written after each."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.seconds, self.schedules = world, options.seconds_per_cell, options.schedules
        self.ceilings = measure_ceilings(world)
        self.teraflops = measure_teraflops(world, DTYPE)
        head = {
            **describe_run(world, options.commit),
            "ceilings": {"unit": "GB/s of a rank", **asdict(self.ceilings), "teraflops": self.teraflops},
            "contention": measure_contention(world, DTYPE),
            "dtype": str(DTYPE).removeprefix("torch."),
            "tolerances": {"all_gather_gemm": TOLERANCE, "gemm_reduce_scatter": SUM_TOLERANCE},
        }
        world.log(json.dumps(head, indent=2))
        self.report = Report(
            world,
            options.output,
            head,
            summarize=REPORT.summarize,
            line=lambda cell: f"{cell['pair']:<20} {REPORT.line(cell)}",
            seconds_budget=options.seconds_budget,
        )
        is_asked_for = re.compile(options.match).search
        self.cells = [cell for cell in CELLS[options.cells]() if is_asked_for(f"{cell.pair} {cell.name}")]

    def work(self) -> None:
        if self.world.device.type == "cuda":
            self.compile()
            self.world.free_symmetric_memory()
        workspace = new_workspace(self.world, "benchmark", self.cells)
        for cell in self.cells:
            if self.report.has_time(f"{cell.pair} {cell.name}"):
                self.measure(cell, workspace)
        self.report.write()
        self.world.log(REPORT.table(self.report.content))

    def compile(self) -> None:
        """The kernels of all cells, before the first is timed."""
        workspace = new_workspace(self.world, "compilation", self.cells)

        def compiled(cell: Layer, schedule: str) -> None:
            x = torch.empty(cell.rows(self.world.size)[0], cell.k, dtype=DTYPE, device=self.world.device)
            weight = torch.empty(cell.n, cell.k, dtype=DTYPE, device=self.world.device)
            call(workspace, cell.pair, x, weight, schedule)

        calls = [partial(compiled, cell, name) for cell in self.cells for name in schedules_of(cell.pair) if name != "library"]
        compile_ahead(self.world, calls)

    def measure(self, cell: Layer, workspace: ShardWorkspace) -> None:
        """One entry of the report."""
        tolerance = TOLERANCE if cell.pair.moves_first else SUM_TOLERANCE

        def work() -> dict[str, Any]:
            return LayerRun(
                self.world, cell, workspace, self.seconds, tolerance, schedules_of(cell.pair, self.schedules)
            ).result(self.ceilings, self.teraflops)

        entry = {"name": cell.name, **asdict(cell)}
        result = self.report.attempt(entry, work)
        if result is not None:
            self.report.add({**entry, **result})
        gc.collect()  # contestants refer to their run, and it to them
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, CELLS, "full", 0.3)
    parser.add_argument("--schedules", nargs="+", help="only these, of all that a pair has")
    options = parser.parse_args(arguments)
    with open_world(options.slices_by, options.ranks_per_host) as world:
        Run(world, options).work()


if __name__ == "__main__":
    main()
