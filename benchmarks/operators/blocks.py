"""Blocks of kernels that are worth a measurement, of each operator that tune.py tunes, and the source of its table."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.operators.case import DTYPE
from benchmarks.operators.embedding_lookups import JAGGED_MEAN, TUNED_SIZES
from benchmarks.operators.embedding_lookups import Cell as LookupCell
from benchmarks.operators.gemm_all_to_all import Product
from benchmarks.operators.gemv_all_reduce import Cell as GemvCell
from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.common.gpus import GPUS, H100, Gpu, gpu_of
from dlrm_fused.ops.embedding_all_to_all import tuning as lookup_tuning
from dlrm_fused.ops.embedding_all_to_all.tuning import ALL, LookupShape
from dlrm_fused.ops.embedding_all_to_all.tuning import Blocks as LookupBlocks
from dlrm_fused.ops.gemm_all_to_all import tuning as gemm_tuning
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles
from dlrm_fused.ops.gemv_all_reduce import tuning as gemv_tuning
from dlrm_fused.ops.gemv_all_reduce.tuning import MIN_DEPTH_OF_SPLIT, most_stages
from dlrm_fused.ops.gemv_all_reduce.tuning import Blocks as GemvBlocks


@dataclass(frozen=True)
class Tunable:
    """The blocks of an operator that are tuned.

    Attributes:
        choices: of a cell on so many ranks: what is used today, then others, in any order.
        override: makes the kernel use these blocks, None again its own.
        refined: further choices, made of the fastest ones.
        table: the fastest blocks of the records of cells, as source of the operator's table if it has one.
        cells: of the operator's sets, unless another is asked for.
        contestants: by stage of the cells, the one that is tuned; the first stage unless another is asked for.
        unlike: contestants that have no blocks, timed beside.
    """

    choices: Callable[[Any, int], Sequence[Any]]
    override: Callable[[Any], None]
    table: Callable[[Sequence[Mapping[str, Any]]], str]
    cells: str
    contestants: Mapping[str, str]
    unlike: Sequence[str]
    refined: Callable[[Sequence[Any]], Sequence[Any]] = lambda fastest: ()


def this_gpu() -> Gpu:
    """This rank's, as rules take it; without one, an H100."""
    return gpu_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else H100


def entry_of(time: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Return the contestant and the fields of the blocks of a recorded time."""
    return time["contestant"], list((time["blocks"] or {}).values())


def fastest_blocks(cell: Mapping[str, Any]) -> list[Any]:
    """The fields of the fastest blocks of a record."""
    return next(blocks for time in cell["times"] if (blocks := entry_of(time)[1]))


# The fused lookup. One rank will do: then stores stay in the GPU. Indices are uniform over tables larger than its L2 cache.

# The table is that of this GPU.
_GPU = GPUS["NVIDIA H200"]
_GRID = _GPU.multiprocessors * 32
_LOOKUP_FIELDS = ("tables", "bags", "pooling", "dim", "dtype", "indices")
_OTHER_GRIDS = (_GPU.multiprocessors * 8, _GPU.multiprocessors * 16, _GPU.multiprocessors * 64, ALL)


def lookup_choices(cell: LookupCell, ranks: int) -> list[LookupBlocks]:
    """Today's, then all others.

    A thread loads 1 to 8 times 16 bytes of each of its rows, 16 times in all at most. The rows that a warp loads at once are of
    as many bags, or of one.
    """
    pooling = JAGGED_MEAN if isinstance(cell.pooling, str) else cell.pooling
    row_bytes = cell.dim * cell.torch_dtype.itemsize
    rows_of_warp = max(1, 32 * 16 // row_bytes)
    shape = LookupShape(cell.dim, cell.torch_dtype, float(pooling), cell.tables * cell.bags)
    found = [lookup_tuning.choose_blocks(shape, _GPU)]
    for warps, loads, rows, split in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16), sorted({1, rows_of_warp})):
        blocks = LookupBlocks(32 * warps * 16 * loads // (row_bytes * split), rows, warps, _GRID, split)
        useful = rows * split <= pooling and (rows * split > 1 or pooling < 8)
        if blocks.bags >= 1 and loads * rows <= 16 and useful and blocks.can_be_compiled:
            found.append(blocks)
    return found


def refined_lookups(fastest: Sequence[LookupBlocks]) -> list[LookupBlocks]:
    """The fastest with other numbers of programs."""
    return [replace(blocks, programs=programs) for blocks in fastest[:3] for programs in _OTHER_GRIDS]


def lookup_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """The fastest of each shape as rows of ``lookup_blocks`` in ops/common/recorded, with programs of a multiprocessor."""
    found: dict[tuple[str, int, int], list[list[int | None]]] = {}
    sizes = {shape: name for name, shape in TUNED_SIZES.items()}
    for cell in cells:
        bags, rows, warps, programs, split = fastest_blocks(cell)
        own = None if programs == ALL else programs // _GPU.multiprocessors
        element = LookupCell(*(cell[key] for key in _LOOKUP_FIELDS)).torch_dtype.itemsize
        size = sizes.get((cell["tables"], cell["bags"]), "")
        found.setdefault((size, element, cell["dim"]), []).append([bags, rows, warps, own, split])
    return "\n".join(f"{json.dumps([*kind, blocks])}," for kind, blocks in found.items())


# GEMV + AllReduce.

# Results up to which adding them up at every rank is usually best, and from half to twice as many either way may be.
_USUAL_ONE_SHOT_WORDS = 32_768


def gemv_choices(cell: GemvCell, ranks: int) -> list[GemvBlocks]:
    """Return the blocks that the operator takes today, then all others; it has no kernel of its own for many rows."""
    depth = cell.depth(ranks)
    today = gemv_tuning.choose_blocks(cell.m, cell.n, depth, ranks, DTYPE.itemsize, this_gpu(), with_norm=False)
    return [today, *([] if cell.is_large else all_gemv_blocks(cell.m, cell.n, depth))]


def all_gemv_blocks(rows: int, columns: int, depth: int) -> Iterator[GemvBlocks]:
    """Half a program to three for each multiprocessor, whose steps load 4 to 32 kB of weights."""
    multiprocessors = this_gpu().multiprocessors
    for tile, step, splits, warps in itertools.product((16, 32, 64, 128), (64, 128, 256), (1, 2, 3, 4), (4, 8)):
        programs = -(-columns // tile) * splits
        stages = most_stages(rows, tile, step, DTYPE.itemsize)
        fits = stages >= 2 and depth // splits >= max(step, MIN_DEPTH_OF_SPLIT)
        is_spread = multiprocessors // 2 < programs <= 3 * multiprocessors
        if fits and is_spread and 2048 <= tile * step <= 16384 and (warps == 4 or tile * step >= 8192):
            for two_shot, flagged in _gemv_protocols(rows * columns):
                yield GemvBlocks(tile, step, splits, warps, stages, two_shot, flagged)


def _gemv_protocols(results: int) -> Iterator[tuple[bool, bool]]:
    """Values of two_shot and flagged."""
    if results <= 4 * _USUAL_ONE_SHOT_WORDS:
        yield False, False
    if results > _USUAL_ONE_SHOT_WORDS // 2:
        yield True, False
    if results >= 2 * _USUAL_ONE_SHOT_WORDS:
        yield True, True


def gemv_table(cells: Sequence[Mapping[str, Any]]) -> str:
    """The fastest of each cell: m, N and K of a rank, then the fields of the blocks."""
    return "\n".join(
        f"{json.dumps([cell['m'], cell['n'], cell['k'] // cell['ranks'], fastest_blocks(cell)])}," for cell in cells
    )


# GEMM + All-to-All.

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


def tile_choices(cell: Product, ranks: int) -> list[Tiles]:
    """The tiles of today, then all that may be of use."""
    fields = ((64, 128, 256), (64, 128, 256), (64, 128), (4, 8, 16), (4, 8), (3, 4, 5), (1, 2, 3), (1, 2, 4, 8))
    useful = [tiles for field in itertools.product(*fields) if is_of_use(cell, tiles := Tiles(*field))]
    least: dict[int, float] = {}
    for tiles in useful:
        least[tiles.splits] = min(share_of(cell, tiles), least.get(tiles.splits, math.inf))
    today = gemm_tuning.tiles_of_product(cell.m, cell.n, cell.k, DTYPE.itemsize, this_gpu())
    return [today, *(tiles for tiles in useful if share_of(cell, tiles) <= _LONGEST_SHARE * least[tiles.splits])]


def tile_table(cells: Sequence[Mapping[str, Any]]) -> str:
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


TUNABLE = {
    "embedding_all_to_all": Tunable(
        choices=lookup_choices,
        override=lookup_tuning.override,
        table=lookup_table,
        cells="lookups",
        contestants={"forward": "fused"},
        unlike=("lookup",),
        refined=refined_lookups,
    ),
    "gemv_all_reduce": Tunable(
        choices=gemv_choices,
        override=gemv_tuning.override,
        table=gemv_table,
        cells="small",
        contestants={"small": "fused"},
        unlike=("nccl",),
    ),
    # In stage ``gemm`` the kernel multiplies without communication, and one rank will do.
    "gemm_all_to_all": Tunable(
        choices=tile_choices,
        override=gemm_tuning.override,
        table=tile_table,
        cells="all",
        contestants={"op": "kernel", "gemm": "kernel"},
        unlike=("chunks", "nccl", "gemm"),
    ),
}
