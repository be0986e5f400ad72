"""Which block shapes make the fused GEMV + AllReduce fastest.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.gemv_all_reduce.tune --output tuning.json
        [--rows 1 16 64] [--match REGEX] [--most 24] [--seconds-budget 150]
    python -m benchmarks.gemv_all_reduce.tune --table tuning.json

The figures behind dlrm_fused/ops/gemv_all_reduce/tuning.py, for the cells of gemv_all_reduce.py. All ranks take part in every
call, with the same block shape. Calls are timed in CUDA graphs, as there, over weights that the L2 cache does not hold; the
fastest are timed again, longer. With ``--table`` it prints the fastest of each cell as source of the tuning table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.environment import this_gpu
from benchmarks.common.harness import Report, World, captured, compile_ahead, describe_run, geometric_mean, time_finalists
from benchmarks.common.tune_command import run_tuner, tuner_parser
from benchmarks.gemv_all_reduce.cells import CELLS, DTYPE, Cell, by_shape, draw_inputs, draw_weights, weight_copies
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.gemv_all_reduce import tuning as gemv_tuning
from dlrm_fused.ops.gemv_all_reduce.tuning import (
    MIN_DEPTH_OF_SPLIT,
    ONE_SHOT_WORDS,
    Blocks,
    most_stages,
)

CALLS_OF_A_GRAPH = 24
# Block shapes that are timed again.
FINALISTS = 4
SEED = 4


def chosen_blocks(cell: Cell, ranks: int) -> Blocks:
    """What the operator takes today."""
    return gemv_tuning.choose_blocks(cell.m, cell.n, cell.depth(ranks), ranks, DTYPE.itemsize, this_gpu(), with_norm=False)


def candidates(cell: Cell, ranks: int, most: int | None) -> list[Blocks]:
    """Block shapes to be timed: what the operator takes today first, then others, in an order of chance but always the same."""
    others = list(dict.fromkeys(all_blocks(cell.m, cell.n, cell.depth(ranks))))
    random.Random(SEED).shuffle(others)
    return list(dict.fromkeys([chosen_blocks(cell, ranks), *others]))[:most]


def all_blocks(rows: int, columns: int, depth: int) -> Iterator[Blocks]:
    """Blocks worth a measurement: half a program to three for each multiprocessor, whose steps load 4 to 32 kB of weights."""
    for tile, step, splits, warps in itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 3, 4), (4, 8)):
        programs = -(-columns // tile) * splits
        stages = most_stages(rows, tile, step, DTYPE.itemsize)
        fits = stages >= 2 and depth // splits >= max(step, MIN_DEPTH_OF_SPLIT)
        is_spread = this_gpu().multiprocessors // 2 < programs <= 3 * this_gpu().multiprocessors
        if fits and is_spread and 2048 <= tile * step <= 16384 and (warps == 4 or tile * step >= 8192):
            for two_shot, flagged in _protocols(rows * columns):
                yield Blocks(tile, step, splits, warps, stages, two_shot, flagged)


def _protocols(results: int) -> Iterator[tuple[bool, bool]]:
    """Values of two_shot and flagged."""
    if results <= 4 * ONE_SHOT_WORDS:
        yield False, False
    if results > ONE_SHOT_WORDS // 2:
        yield True, False
    if results >= 2 * ONE_SHOT_WORDS:
        yield True, True


class Tuning:
    """All cells. Everything is collective."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self.cells = [
            cell
            for cell in CELLS[options.cells]()
            if not cell.is_large and re.search(options.match, cell.name) and (not options.rows or cell.m in options.rows)
        ]
        self.workspace = GemvWorkspace(
            world.symmetric,
            name="tuning",
            max_columns=max(cell.n for cell in self.cells),
            max_rows=max(cell.m for cell in self.cells),
            dtype=DTYPE,
            timeout_seconds=60.0,
        )
        head = describe_run(world, options.commit)
        self.report = Report(world, options.output, head, summarize=summarize, line=line, seconds_budget=options.seconds_budget)

    @torch.no_grad()
    def work(self) -> None:
        candidates_of = {cell: candidates(cell, self.world.size, self.options.most) for cell in self.cells}
        calls = [partial(self.compile, cell, blocks) for cell, own in candidates_of.items() for blocks in own]
        compile_ahead(self.world, calls)
        device, place = self.world.device, (self.world.rank, self.world.size, self.world.device)
        for (n, k), cells in by_shape(self.cells):
            copies = weight_copies(n, k // self.world.size) if device.type == "cuda" else 2
            weights = draw_weights(copies, n, k, *place)
            for cell in cells:
                if self.report.has_time(cell.name):
                    inputs = draw_inputs(copies, cell, *place)
                    times = self.times(cell, candidates_of[cell], inputs, weights)
                    best = [{"us": us, **asdict(blocks)} for blocks, us in times[:10]]
                    chosen = chosen_blocks(cell, self.world.size)
                    entry = {"name": cell.name, **asdict(cell), "depth": cell.depth(self.world.size), "ranks": self.world.size}
                    self.report.add({**entry, "times": best, "chosen_us": dict(times).get(chosen), "timed": len(times)})
            del weights
            if device.type == "cuda":
                torch.cuda.empty_cache()
        self.report.write()

    def compile(self, cell: Cell, blocks: Blocks) -> None:
        depth = cell.depth(self.world.size)
        x, weight = (torch.empty(rows, depth, dtype=DTYPE, device=self.world.device) for rows in (cell.m, cell.n))
        gemv_tuning.override(blocks)
        gemv_all_reduce(self.workspace, x, weight)
        gemv_tuning.override(None)

    def times(self, cell: Cell, shapes: list[Blocks], inputs: Tensor, weights: Tensor) -> list[tuple[Blocks, float]]:
        """Microseconds of a call by block shape, the fastest first."""
        turns = max(1, CALLS_OF_A_GRAPH // len(weights)) if self.world.device.type == "cuda" else 1

        def run(blocks: Blocks) -> None:
            gemv_tuning.override(blocks)
            for _, (x, weight) in itertools.product(range(turns), zip(inputs, weights, strict=True)):
                gemv_all_reduce(self.workspace, x, weight)
            gemv_tuning.override(None)

        calls: dict[str, Callable[[], object]] = {}
        for blocks in shapes:
            call, problem = partial(run, blocks), ""
            replay: Callable[[], object] | None = call
            if self.world.device.type == "cuda":
                replay, problem = captured(self.world, call)
            if replay is None:
                self.world.log(f"{cell.name}: {blocks}: {problem}")
            else:
                calls[str(blocks)] = replay
        self.workspace.raise_fault()
        times = time_finalists(self.world, calls, FINALISTS)
        self.workspace.raise_fault()
        count = turns * len(weights)
        by_name = {str(blocks): blocks for blocks in shapes}
        return [(by_name[name], us / count) for name, us in times.items()]


def line(cell: Mapping[str, Any]) -> str:
    best = "  ".join(f"{own['us']:.1f} " + "/".join(str(v) for v in list(own.values())[1:]) for own in cell["times"][:4])
    chosen = "-" if cell["chosen_us"] is None else f"{cell['chosen_us']:.1f}"
    return f"{cell['name']:<18} chosen {chosen:>6} | best of {cell['timed']:>3}: {best}"


def summarize(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gains = [cell["times"][0]["us"] / cell["chosen_us"] for cell in cells if cell["chosen_us"]]
    return {"best_over_chosen": geometric_mean(gains) if gains else None}


def print_table(files: Sequence[Path]) -> None:
    """The fastest of each cell as source of gemv_tuning.py: by m, N and K of a rank."""
    print("_MEASURED = {")
    for cell in [cell for file in files for cell in json.loads(file.read_text())["cells"]]:
        shape = {key: value for key, value in cell["times"][0].items() if key != "us"}
        values = ", ".join(map(str, astuple(Blocks(**shape))))
        print(f"    ({cell['m']}, {cell['n']}, {cell['depth']}): Blocks({values}),")
    print("}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = tuner_parser(__doc__, ["tiny", "small"], "small")
    # Not --m: torchrun takes that for the beginning of several options of its own.
    parser.add_argument("--rows", type=int, nargs="+", help="only cells of these numbers of rows, m")
    run_tuner(parser, arguments, lambda world, options: Tuning(world, options).work(), print_table)


if __name__ == "__main__":
    main()
