"""Fused GEMV + AllReduce against cuBLAS with NCCL, and with the all-reduces of torch's symmetric memory.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.gemv_all_reduce.benchmark --output results.json
        [--cells tiny|small|large|all] [--rows 1 2 4] [--match REGEX] [--seconds-budget 120]

[m, K] x [N, K]^T in bf16, K split over the ranks. The contestants of a cell multiply the same operands:

* fused: ``dlrm_fused.gemv_all_reduce``; for m above 64 on GPUs, also by the schedules that ``auto`` does not take;
* nccl: cuBLAS (``torch.nn.functional.linear``), then NCCL's all-reduce;
* one_shot, two_shot: cuBLAS, which stores into symmetric memory, then ``torch.ops.symm_mem.one_shot_all_reduce_out`` or
  ``two_shot_all_reduce_``; for m up to 64;
* gemm: cuBLAS alone: what is left if communication costs nothing.

Up to m = 64, all are timed in CUDA graphs, each of which multiplies by so many different weights that the L2 cache holds none
of them when its turn comes again. Above, calls are timed one by one. The results that were timed are then compared with a
product in fp64, and between the ranks bit by bit: a cell that differs is reported as failed. The floor of a cell is the time in
which its bytes can be moved at the speed of plain copies, measured in the same run. Without GPUs the fused operator runs as it
does there, against gloo: that tests this script, not the speed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.common.benchmark_command import benchmark_parser
from benchmarks.common.harness import (
    Ceilings,
    Report,
    Timing,
    World,
    captured,
    compile_ahead,
    describe_run,
    measure_ceilings,
    open_world,
    relative_error,
    time_interleaved,
)
from benchmarks.gemv_all_reduce.cells import (
    CELLS,
    DTYPE,
    ROWS,
    TOLERANCE,
    Cell,
    by_shape,
    draw_inputs,
    draw_weights,
    weight_copies,
)
from benchmarks.gemv_all_reduce.report import REPORT, RIVALS
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.gemv_all_reduce.schedule import CHUNKS, SCATTER

TIMEOUT_SECONDS = 60.0
# A graph makes at least so many calls, so that its launch does not count.
CALLS_OF_A_GRAPH = 48

Multiply = Callable[[Tensor, Tensor], Tensor]


def contestants(
    world: World, workspace: GemvWorkspace, cell: Cell, buffer: Tensor | None, schedules: Sequence[str]
) -> dict[str, Multiply]:
    """By name: from x [m, K / ranks] and weight [N, K / ranks] to [m, N].

    Args:
        schedules: of the operator, beside ``auto``.
        buffer: in symmetric memory, for the all-reduces that need it; None leaves them out.
    """

    def fused(x: Tensor, weight: Tensor, schedule: str = "auto") -> Tensor:
        return gemv_all_reduce(workspace, x, weight, schedule=schedule)[0]

    def nccl(x: Tensor, weight: Tensor) -> Tensor:
        out = linear(x, weight)
        dist.all_reduce(out)
        return out

    others = {schedule: partial(fused, schedule=schedule) for schedule in schedules}
    chosen: dict[str, Multiply] = {"fused": fused, **others, "nccl": nccl}
    if buffer is not None:
        partial_result, group = buffer[: cell.m * cell.n].view(cell.m, cell.n), world.group.group_name

        def one_shot(x: Tensor, weight: Tensor) -> Tensor:
            torch.mm(x, weight.t(), out=partial_result)
            return torch.ops.symm_mem.one_shot_all_reduce_out(partial_result, "sum", group, torch.empty_like(partial_result))

        def two_shot(x: Tensor, weight: Tensor) -> Tensor:
            torch.mm(x, weight.t(), out=partial_result)
            return torch.ops.symm_mem.two_shot_all_reduce_(partial_result, "sum", group)

        chosen |= {"one_shot": one_shot, "two_shot": two_shot}
    return {**chosen, "gemm": linear}


class CellRun:
    """One cell on this rank. Everything is collective."""

    def __init__(
        self, world: World, cell: Cell, workspace: GemvWorkspace, weights: Tensor, buffer: Tensor | None, seconds: float
    ) -> None:
        """Args:
        weights: [copies, N, K / ranks]; they take turns.
        seconds: of timing.
        """
        self.world, self.cell, self.workspace, self.seconds = world, cell, workspace, seconds
        self.weights = weights
        self.inputs = draw_inputs(len(weights), cell, world.rank, world.size, world.device)
        schedules = self.other_schedules() if cell.is_large and world.device.type == "cuda" else []
        self.contestants = contestants(world, workspace, cell, None if cell.is_large else buffer, schedules)
        self.in_graphs = world.device.type == "cuda" and not cell.is_large
        turns = max(1, CALLS_OF_A_GRAPH // len(weights)) if self.in_graphs else 1
        self.calls = turns * len(weights)
        self.last_results: dict[str, Tensor] = {}

    @torch.no_grad()
    def other_schedules(self) -> list[str]:
        """Of many rows, those that auto does not take here; it has measured, unless a table knows."""
        gemv_all_reduce(self.workspace, self.inputs[0], self.weights[0])
        taken = self.workspace.schedules.known((self.cell.m, self.cell.n, self.cell.depth(self.world.size)))
        return [schedule for schedule in (CHUNKS, SCATTER) if schedule != taken]

    def run_of(self, name: str) -> Callable[[], None]:
        """All calls of one contestant."""
        multiply = self.contestants[name]

        def run() -> None:
            for _ in range(self.calls // len(self.weights)):
                for x, weight in zip(self.inputs, self.weights, strict=True):
                    self.last_results[name] = multiply(x, weight)

        return run

    def times(self) -> tuple[dict[str, Timing], dict[str, str]]:
        """Timings of all calls together, and why contestants could not be captured in a graph."""
        runs, problems = {name: self.run_of(name) for name in self.contestants}, {}
        if self.in_graphs:
            for name, run in list(runs.items()):
                replay, problem = captured(self.world, run)
                if replay is not None:
                    runs[name] = replay
                elif name in ("one_shot", "two_shot"):
                    del runs[name]
                    problems[name] = problem
                else:
                    raise RuntimeError(f"{name} cannot be captured in a CUDA graph: {problem}")
        with torch.no_grad():
            return time_interleaved(self.world, runs, self.seconds, rounds=(8, 20)), problems

    def check(self, name: str, expected: Tensor) -> tuple[float, bool]:
        """Largest relative error of the last result on any rank, and whether all ranks have the same bits."""
        replay_overwrites = name == "two_shot"  # its result is the symmetric buffer, which others have used since
        result = self.contestants[name](self.inputs[-1], self.weights[-1]) if replay_overwrites else self.last_results[name]
        of_first_rank = result.clone()
        dist.broadcast(of_first_rank, src=0)
        same = torch.equal(result.view(torch.int16), of_first_rank.view(torch.int16))
        every_rank = self.world.gather((relative_error(result, expected), same))
        return max(error for error, _ in every_rank), all(same for _, same in every_rank)

    def expected(self) -> Tensor:
        """fp64 [m, N], of the last operands."""
        product = self.inputs[-1].double() @ self.weights[-1].double().t()
        dist.all_reduce(product)
        return product

    @torch.no_grad()
    def result(self, ceilings: Ceilings) -> dict[str, Any]:
        """What the report says of the cell."""
        timings, problems = self.times()
        self.workspace.raise_fault()
        us = {name: timing.microseconds / self.calls for name, timing in timings.items()}
        expected = self.expected()
        checks = {name: self.check(name, expected) for name in timings if name != "gemm"}
        errors = {name: error for name, (error, _) in checks.items()}
        memory_bytes, link_bytes = self.cell.memory_bytes(self.world.size), self.cell.link_bytes(self.world.size)
        floor_us = ceilings.transfer_microseconds(memory_bytes, link_bytes)
        rivals = {name: us[name] for name in RIVALS if name in us}
        best = min(rivals, key=lambda name: rivals[name], default=None)
        return {
            "passed": errors["fused"] <= self.cell.tolerance(self.world.symmetric.hosts) and checks["fused"][1],
            "errors": errors,
            "same_bits_on_all_ranks": {name: same for name, (_, same) in checks.items()},
            "us": us,
            "ratio": us["fused"] / us["nccl"],
            "best_symmetric": best,
            "ratio_to_symmetric": us["fused"] / rivals[best] if best else None,
            "memory_bytes": memory_bytes,
            "link_bytes": link_bytes,
            "floor_us": floor_us,
            "fused_over_floor": us["fused"] / floor_us,
            "different_weights": len(self.weights),
            "calls": self.calls,
            "timed": "graphs" if self.in_graphs else "bursts",
            "spread": {name: timing.spread for name, timing in timings.items()},
            "by_rank_us": {name: [own / self.calls for own in timing.by_rank] for name, timing in timings.items()},
            "without_graph": problems,
        }


def entry(cell: Cell) -> dict[str, Any]:
    """What the report of a cell begins with."""
    return {"name": cell.name, "size": cell.size, **asdict(cell)}


class Run:
    """All cells, and the report that is written after each."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        ceilings = measure_ceilings(world)
        head = {
            **describe_run(world, options.commit),
            "ceilings": {"unit": "GB/s of a rank", **asdict(ceilings)},
            "dtype": str(DTYPE).removeprefix("torch."),
            "tolerances": TOLERANCE,
        }
        world.log(json.dumps(head, indent=2))
        self.ceilings = ceilings
        self.report = Report(
            world, options.output, head, summarize=REPORT.summarize, line=REPORT.line, seconds_budget=options.seconds_budget
        )
        self.cells = [
            cell
            for cell in CELLS[options.cells]()
            if re.search(options.match, cell.name) and (not options.rows or cell.m in options.rows)
        ]
        self.workspaces = {size: self.workspace(size) for size in dict.fromkeys(cell.size for cell in self.cells)}
        self.buffer = self.symmetric_buffer() if world.device.type == "cuda" else None

    def workspace(self, size: str) -> GemvWorkspace:
        """For all cells of this size. Collective."""
        cells = [cell for cell in self.cells if cell.size == size]
        return GemvWorkspace(
            self.world.symmetric,
            name=f"benchmark {size}",
            max_columns=max(cell.n for cell in cells),
            max_rows=max(cell.m for cell in cells),
            dtype=DTYPE,
            timeout_seconds=TIMEOUT_SECONDS,
        )

    def symmetric_buffer(self) -> Tensor:
        """For the partial results of the contestants that need one. Collective."""
        largest = ROWS[-1] * max((cell.n for cell in self.cells), default=1)
        buffer = symm_mem.empty(largest, dtype=DTYPE, device=self.world.device)
        symm_mem.rendezvous(buffer, self.world.group)
        dist.barrier()  # torch clears the signal pads, and does not wait for the peers to have done so
        return buffer

    def work(self) -> None:
        self.compile()
        for (n, k), cells in by_shape(self.cells):
            weights: dict[int, Tensor] = {}
            for cell in cells:
                if self.report.has_time(cell.name):
                    copies = 1 if cell.is_large else self.copies(cell)
                    if copies not in weights:
                        weights = {copies: draw_weights(copies, n, k, self.world.rank, self.world.size, self.world.device)}
                    self.measure(cell, weights[copies])
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
        self.report.write()
        self.world.log(REPORT.table(self.report.content))

    def copies(self, cell: Cell) -> int:
        return weight_copies(cell.n, cell.depth(self.world.size)) if self.world.device.type == "cuda" else 2

    def compile(self) -> None:
        """The kernels of all cells, before the first is timed."""

        def call(cell: Cell) -> None:
            depth = cell.depth(self.world.size)
            x, weight = (torch.empty(rows, depth, dtype=DTYPE, device=self.world.device) for rows in (cell.m, cell.n))
            gemv_all_reduce(self.workspaces[cell.size], x, weight)

        with torch.no_grad():
            compile_ahead(self.world, [partial(call, cell) for cell in self.cells])

    def measure(self, cell: Cell, weights: Tensor) -> None:
        def work() -> Mapping[str, Any]:
            workspace = self.workspaces[cell.size]
            run = CellRun(self.world, cell, workspace, weights, self.buffer, self.options.seconds_per_cell)
            return run.result(self.ceilings)

        result = self.report.attempt(entry(cell), work)
        if result is not None:
            self.report.add({**entry(cell), **result})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser(__doc__, CELLS, "all", 0.3)
    # Not --m: torchrun takes that for the beginning of several options of its own.
    parser.add_argument("--rows", type=int, nargs="+", help="only cells of these numbers of rows, m")
    options = parser.parse_args(arguments)
    with open_world(options.slices_by, options.ranks_per_host) as world:
        Run(world, options).work()


if __name__ == "__main__":
    main()
