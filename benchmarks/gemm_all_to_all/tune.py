"""Which tiles and which schedule make GEMM + All-to-All fastest.

    torchrun --standalone --nproc-per-node=4 -m benchmarks.gemm_all_to_all.tune --output tuning.json
        [--alone] [--cells tiny|full|few] [--match REGEX] [--most 24] [--seconds-budget 150]
    python -m benchmarks.gemm_all_to_all.tune --table tuning.json

The figures behind dlrm_fused/ops/common/recorded, for the products of cells.py. All ranks take part in every call,
with the same tiles; the schedules that have no tiles, chunks and the library's, are candidates too. With ``--alone`` the kernel
multiplies without communication, against the library's product, and one rank will do. The fastest are timed again, longer.
With ``--table`` it prints the tiles of each cell as recorded there. Without GPUs tiles mean nothing: that tests
this script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.environment import this_gpu
from benchmarks.common.harness import Report, World, compile_ahead, describe_run, geometric_mean, time_finalists
from benchmarks.common.tune_command import run_tuner, tuner_parser
from benchmarks.gemm_all_to_all.cells import DTYPE, PRODUCT_CELLS, Product
from benchmarks.gemm_all_to_all.products import new_workspace
from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all import tuning as gemm_tuning
from dlrm_fused.ops.gemm_all_to_all.kernel import gemm
from dlrm_fused.ops.gemm_all_to_all.split import Arrivals
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles

# Choices that are timed again.
FINALISTS = 6
SEED = 4
# The registers of a multiprocessor have room for so many results.
_ACCUMULATED_ELEMENTS = 32 * 1024
_MAX_ELEMENTS_OF_THREAD = 128
# Smaller tiles are loaded more often; tried only if there are few larger ones.
_LARGE_ELEMENTS = 128 * 128
# Of the least share of the busiest multiprocessor, with as many splits; tiles that give it more are left out.
_LONGEST_SHARE = 1.2
# Times that differ by less do not say which is faster.
_NEARLY_AS_FAST = 1.01


@dataclass(frozen=True)
class Choice:
    """What is timed: a schedule, and the tiles of the kernel."""

    schedule: str
    tiles: Tiles


def chosen_tiles(cell: Product) -> Tiles:
    """What the kernel takes today."""
    return gemm_tuning.tiles_of_product(cell.m, cell.n, cell.k, DTYPE.itemsize, this_gpu())


def fits(tiles: Tiles) -> bool:
    """Whether a multiprocessor has memory and registers for so many programs."""
    steps = tiles.stages * (tiles.rows + tiles.columns) * tiles.depth * DTYPE.itemsize
    half_of_result = tiles.rows * tiles.columns // 2 * DTYPE.itemsize
    elements = tiles.rows * tiles.columns
    return (
        tiles.programs * (steps + half_of_result) <= room_of_program(this_gpu().shared_memory)
        and tiles.programs * elements <= _ACCUMULATED_ELEMENTS
        and elements <= 32 * tiles.warps * _MAX_ELEMENTS_OF_THREAD
    )


def pieces_of(cell: Product, tiles: Tiles) -> int:
    return -(-cell.m // tiles.rows) * -(-cell.n // tiles.columns) * tiles.splits


def share_of(cell: Product, tiles: Tiles) -> float:
    """Elements of the result, times parts of K, that the busiest multiprocessor computes."""
    rounds = -(-pieces_of(cell, tiles) // this_gpu().multiprocessors)
    return rounds * tiles.rows * tiles.columns / tiles.splits


def is_of_use(cell: Product, tiles: Tiles) -> bool:
    """Whether the tiles may be worth a try: not smaller than need be, no bands beyond the matrix, K not split in vain."""
    row_tiles, many = -(-cell.m // tiles.rows), 2 * this_gpu().multiprocessors
    return (
        fits(tiles)
        and (tiles.rows * tiles.columns >= _LARGE_ELEMENTS or cell.m * cell.n < many * _LARGE_ELEMENTS)
        and (tiles.band <= max(8, row_tiles // 2))
        and (tiles.splits == 1 or pieces_of(cell, tiles) <= many)
        and cell.k // tiles.depth >= 8 * tiles.splits
    )


def candidates(cell: Product, most: int | None) -> list[Tiles]:
    """To be timed: the tiles of today, then others, in an order of chance but always the same."""
    today = chosen_tiles(cell)
    fields = ((64, 128, 256), (64, 128, 256), (64, 128), (4, 8, 16), (4, 8), (3, 4, 5), (1, 2, 3), (1, 2, 4, 8))
    useful = [tiles for field in itertools.product(*fields) if is_of_use(cell, tiles := Tiles(*field))]
    least: dict[int, float] = {}
    for tiles in useful:
        least[tiles.splits] = min(share_of(cell, tiles), least.get(tiles.splits, math.inf))
    others = [tiles for tiles in useful if share_of(cell, tiles) <= _LONGEST_SHARE * least[tiles.splits] and tiles != today]
    random.Random(SEED).shuffle(others)
    return [today, *others][:most]


class Tuning:
    """All cells. Everything is collective."""

    def __init__(self, world: World, options: argparse.Namespace) -> None:
        self.world, self.options = world, options
        self.cells = [cell for cell in PRODUCT_CELLS[options.cells]() if re.search(options.match, cell.name)]
        self.workspace: GemmWorkspace | None = None
        if not options.alone:
            most_rows, most_columns = (max(size) for size in zip(*((cell.m, cell.n) for cell in self.cells), strict=True))
            self.workspace = new_workspace(world, "tuning", most_rows, most_columns)
        self.arrivals = Arrivals(world.device)
        head = {**describe_run(world, options.commit), "alone": options.alone}
        self.report = Report(world, options.output, head, summarize=summarize, line=line, seconds_budget=options.seconds_budget)

    def choices(self, cell: Product) -> list[Choice]:
        today = chosen_tiles(cell)
        others = ["library"] if self.options.alone else ["library", "chunks"]
        return [
            *(Choice(schedule, today) for schedule in others),
            *(Choice("kernel", tiles) for tiles in candidates(cell, self.options.most)),
        ]

    @torch.no_grad()
    def work(self) -> None:
        choices = {cell: self.choices(cell) for cell in self.cells}
        if self.world.device.type == "cuda":
            compile_ahead(self.world, [partial(self.compile, cell, choice) for cell in choices for choice in choices[cell]])
        for cell, own in choices.items():
            if self.report.has_time(cell.name):
                times = self.times(cell, own)
                self.report.add(
                    {
                        "name": cell.name,
                        **asdict(cell),
                        "element_size": DTYPE.itemsize,
                        "times": [{"us": us, **asdict(choice)} for choice, us in list(times.items())[:10]],
                        "chosen_us": times.get(Choice("kernel", chosen_tiles(cell))),
                        "library_us": times.get(Choice("library", chosen_tiles(cell))),
                        "timed": len(times),
                    }
                )
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
        self.report.write()

    def compile(self, cell: Product, choice: Choice) -> None:
        if choice.schedule == "library":  # has nothing to compile, and would run
            return
        x, weight = (torch.empty(rows, cell.k, dtype=DTYPE, device=self.world.device) for rows in (cell.m, cell.n))
        self.multiply(choice, x, weight, x.new_empty(cell.m, cell.n))

    def multiply(self, choice: Choice, x: Tensor, weight: Tensor, out: Tensor) -> None:
        gemm_tuning.override(choice.tiles)
        try:
            if self.workspace is not None:
                gemm_all_to_all(self.workspace, x, weight, schedule=choice.schedule)
            elif choice.schedule == "library" or self.world.device.type != "cuda":
                torch.mm(x, weight.t(), out=out)
            else:
                gemm(x, weight, out, arrivals=self.arrivals)
        finally:
            gemm_tuning.override(None)

    def times(self, cell: Product, choices: Sequence[Choice]) -> dict[Choice, float]:
        """Microseconds of a call, the fastest first. What cannot be launched on some rank is left out."""
        operands = cell.draw(self.world.rank, self.world.size, self.world.device, count=cell.operands)
        out = torch.empty(cell.m, cell.n, dtype=DTYPE, device=self.world.device)

        def run(choice: Choice) -> None:
            for x, weight in operands:
                self.multiply(choice, x, weight, out)

        calls: dict[str, Callable[[], object]] = {}
        for choice in choices:
            problem = self.problem_of(partial(run, choice))
            if problem:
                self.world.log(f"{cell.name}: {choice}: {problem}")
            else:
                calls[str(choice)] = partial(run, choice)
        times = time_finalists(self.world, calls, FINALISTS)
        if self.workspace is not None:
            self.workspace.raise_fault()
        by_name = {str(choice): choice for choice in choices}
        return {by_name[name]: us / len(operands) for name, us in times.items()}

    def problem_of(self, call: Callable[[], object]) -> str:
        """Why the call cannot be made on some rank, or nothing: too little shared memory is seen before the launch."""
        error = ""
        try:
            call()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return next((other for other in self.world.gather(error) if other), "")


def line(cell: Mapping[str, Any]) -> str:
    best = "  ".join(
        f"{own['us']:.1f} {own['schedule']} " + "/".join(map(str, own["tiles"].values())) for own in cell["times"][:4]
    )
    chosen = "-" if cell["chosen_us"] is None else f"{cell['chosen_us']:.1f}"
    return f"{cell['name']:<18} chosen {chosen:>7} | best of {cell['timed']:>3}: {best}"


def summarize(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gains = [cell["times"][0]["us"] / cell["chosen_us"] for cell in cells if cell["chosen_us"]]
    return {"best_over_chosen": geometric_mean(gains) if gains else None}


def print_table(files: Sequence[Path]) -> None:
    """Print the tiles of each cell as rows of a record: the largest of those that are nearly as fast as the fastest.

    Their rows go to other ranks in longer pieces.
    """
    for cell in [cell for file in files for cell in json.loads(file.read_text())["cells"]]:
        kernels = [own for own in cell["times"] if own["schedule"] == "kernel"]
        fast = [own for own in kernels if own["us"] <= _NEARLY_AS_FAST * kernels[0]["us"]]
        kernel = max(fast, key=lambda own: own["tiles"]["rows"] * own["tiles"]["columns"])
        row = [*(cell[key] for key in ("m", "n", "k", "element_size")), list(kernel["tiles"].values())]
        print(f"{json.dumps(row)},")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = tuner_parser(__doc__, list(PRODUCT_CELLS), "full")
    parser.add_argument("--alone", action="store_true", help="the product without communication; needs one rank only")
    run_tuner(parser, arguments, lambda world, options: Tuning(world, options).work(), print_table)


if __name__ == "__main__":
    main()
