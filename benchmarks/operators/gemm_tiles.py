"""Tiles of the kernel of GEMM + All-to-All that are worth a measurement; see tune.py."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.operators.case import DTYPE
from benchmarks.operators.gemm_all_to_all import Product
from benchmarks.operators.tune import Tunable, entry_of, this_gpu
from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.gemm_all_to_all import tuning
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles

# The registers of a multiprocessor have room for so many results.
_ACCUMULATED_ELEMENTS = 32 * 1024
_MAX_ELEMENTS_OF_THREAD = 128
# Smaller tiles are loaded more often; tried only if there are few larger ones.
_LARGE_ELEMENTS = 128 * 128
# Tiles are left out that give the busiest multiprocessor more than this, times the least share with as many splits.
_LONGEST_SHARE = 1.2
# Times that differ by less do not say which is faster.
_NEARLY_AS_FAST = 1.01


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


def choices(cell: Product, ranks: int) -> list[Tiles]:
    """The tiles of today, then all that may be of use."""
    fields = ((64, 128, 256), (64, 128, 256), (64, 128), (4, 8, 16), (4, 8), (3, 4, 5), (1, 2, 3), (1, 2, 4, 8))
    useful = [tiles for field in itertools.product(*fields) if is_of_use(cell, tiles := Tiles(*field))]
    least: dict[int, float] = {}
    for tiles in useful:
        least[tiles.splits] = min(share_of(cell, tiles), least.get(tiles.splits, math.inf))
    today = tuning.tiles_of_product(cell.m, cell.n, cell.k, DTYPE.itemsize, this_gpu())
    return [today, *(tiles for tiles in useful if share_of(cell, tiles) <= _LONGEST_SHARE * least[tiles.splits])]


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """The tiles of each cell as rows of ops/common/recorded: the largest of those that are nearly as fast as the fastest.

    Their rows go to other ranks in longer pieces.
    """
    rows = []
    for cell in cells:
        times = [(time["us"], *entry_of(time)) for time in cell["times"]]
        kernels = [(us, tiles) for us, contestant, tiles in times if contestant == "kernel"]
        fast = [tiles for us, tiles in kernels if us <= _NEARLY_AS_FAST * kernels[0][0]]
        if fast:
            largest = max(fast, key=lambda tiles: int(tiles[0] * tiles[1]))
            rows.append(f"{json.dumps([*(cell[key] for key in ('m', 'n', 'k', 'element_size')), largest])},")
    return "\n".join(rows)


# In stage ``gemm`` the kernel multiplies without communication, and one rank will do.
TUNABLE = Tunable(
    choices=choices,
    override=tuning.override,
    table=table,
    cells="all",
    contestants={"op": "kernel", "gemm": "kernel"},
    unlike=("chunks", "nccl", "gemm"),
)
