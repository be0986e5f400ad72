"""Blocks of the kernel of GEMV + AllReduce that are worth a measurement; see tune.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.operators.case import DTYPE
from benchmarks.operators.gemv_all_reduce import Cell
from benchmarks.operators.tune import Tunable, fastest_blocks, this_gpu
from dlrm_fused.ops.gemv_all_reduce import tuning
from dlrm_fused.ops.gemv_all_reduce.tuning import MIN_DEPTH_OF_SPLIT, ONE_SHOT_WORDS, Blocks, most_stages


def choices(cell: Cell, ranks: int) -> list[Blocks]:
    """Return the blocks that the operator takes today, then all others; it has no kernel of its own for many rows."""
    depth = cell.depth(ranks)
    today = tuning.choose_blocks(cell.m, cell.n, depth, ranks, DTYPE.itemsize, this_gpu(), with_norm=False)
    return [today, *([] if cell.is_large else all_blocks(cell.m, cell.n, depth))]


def all_blocks(rows: int, columns: int, depth: int) -> Iterator[Blocks]:
    """Half a program to three for each multiprocessor, whose steps load 4 to 32 kB of weights."""
    multiprocessors = this_gpu().multiprocessors
    for tile, step, splits, warps in itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 3, 4), (4, 8)):
        programs = -(-columns // tile) * splits
        stages = most_stages(rows, tile, step, DTYPE.itemsize)
        fits = stages >= 2 and depth // splits >= max(step, MIN_DEPTH_OF_SPLIT)
        is_spread = multiprocessors // 2 < programs <= 3 * multiprocessors
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


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """The fastest of each cell as source of ops/gemv_all_reduce/tuning.py: by m, N and K of a rank."""
    rows = []
    for cell in cells:
        blocks = fastest_blocks(cell)
        rows.append(f"    ({cell['m']}, {cell['n']}, {cell['k'] // cell['ranks']}): Blocks({', '.join(map(str, blocks))}),")
    return "\n".join(["_MEASURED = {", *rows, "}"])


TUNABLE = Tunable(
    choices=choices, override=tuning.override, table=table, cells="small", contestants={"small": "fused"}, unlike=("nccl",)
)
