"""Tile shapes of the GEMM kernels, by the shape of the product: as recorded, or else by the rules below."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.common.gpus import GPUS, Gpu
from dlrm_fused.ops.common.recorded import MEASURED_ON, recorded_tiles

# So large a share of the multiprocessors counts as nearly all of them.
_NEARLY_ALL = 0.91
# A piece of K is worth its sum if it is at least so deep.
_LEAST_DEPTH_OF_PIECE = 2048
# Tiles are not made smaller than this where shared memory is short: bytes of a row of a step, and columns of a tile.
_LEAST_STEP_BYTES, _LEAST_COLUMNS = 64, 64
_BARRIER_BYTES = 256
# Rows of a group from which on the gradient of its weight has wide tiles: with 256 they take longer, with 2,048 they do not.
_ROWS_FOR_WIDE_GRADIENTS = 1024
# Calls repeat a few shapes, step after step.
_KEPT_SHAPES = 1024


@dataclass(frozen=True)
class Tiles:
    """The division of a product among the programs of one launch.

    Attributes:
        rows, columns: of a tile of the result, powers of two.
        depth: of a step along K, a power of two.
        band: rows of tiles that are computed column by column, for the L2 cache.
        warps, stages: of a program; steps whose loads are on their way.
        programs: on a multiprocessor.
        splits: pieces of K, each computed by a program of its own, a power of two.
    """

    rows: int
    columns: int
    depth: int
    band: int
    warps: int
    stages: int
    programs: int
    splits: int = 1

    def count(self, rows: int, columns: int) -> int:
        """Return the number of tiles of a matrix."""
        return -(-rows // self.rows) * -(-columns // self.columns)


# For products of 16 bits with few tiles, by the most pieces of K; the larger first.
_SMALL = {
    2: Tiles(rows=64, columns=128, depth=128, band=4, warps=4, stages=4, programs=1),
    8: Tiles(rows=64, columns=64, depth=128, band=4, warps=4, stages=5, programs=1),
}
_override: Tiles | None = None


def override(tiles: Tiles | None) -> None:
    """Use these for every shape; for measurements and tests. None ends it."""
    global _override
    _override = tiles


def overridden() -> bool:
    """Whether :func:`override` decides."""
    return _override is not None


def needed_memory(tiles: Tiles, element_size: int) -> int:
    """Bytes of shared memory at most of a program: loads on their way, half a tile that is stored or added, barriers."""
    loads = tiles.stages * tiles.depth * (tiles.rows + tiles.columns)
    return element_size * (loads + tiles.rows * tiles.columns // 2) + _BARRIER_BYTES


def fitted(tiles: Tiles, element_size: int, memory: int) -> Tiles:
    """The tiles, or smaller ones for which so many bytes of a multiprocessor's shared memory are enough.

    Three stages at least keep loads on their way; then a program has the multiprocessor for itself, and then come shorter
    steps, and narrower tiles. Rows are left, since layouts prescribe them.
    """
    return tiles if _override else _fitted(tiles, element_size, memory)


@functools.cache
def _fitted(tiles: Tiles, element_size: int, memory: int) -> Tiles:
    stages = tiles.stages
    while needed_memory(tiles, element_size) > room_of_program(memory, tiles.programs):
        if tiles.stages > 3:
            tiles = replace(tiles, stages=tiles.stages - 1)
        elif tiles.programs > 1:
            tiles = replace(tiles, programs=1, stages=stages)
        elif tiles.depth * element_size > _LEAST_STEP_BYTES:
            tiles = replace(tiles, depth=tiles.depth // 2, stages=stages)
        elif tiles.columns > _LEAST_COLUMNS:
            tiles = replace(tiles, columns=tiles.columns // 2, stages=stages)
        else:
            break
    return tiles


def tiles_of_groups(columns: int, element_size: int, tile_rows: int) -> Tiles:
    """The tiles for rows in groups, whose weights are read again for every tile of rows.

    A tile of few rows is done before the loads of the next have come: two programs of a multiprocessor cover for each other.

    Args:
        columns: of the result.
        element_size: bytes of an element of x.
        tile_rows: of a tile, which the layout of the rows prescribes.
    """
    if _override:
        return replace(_override, rows=tile_rows, splits=1)
    depth, is_wide = 128 // element_size, columns > 128 and element_size < 4
    if tile_rows >= 128:
        return Tiles(tile_rows, 256 if is_wide else 128, depth, band=8, warps=8, stages=3, programs=1)
    return Tiles(tile_rows, 128, depth, band=8, warps=4, stages=4, programs=2)


def weight_gradient_tiles(element_size: int, expected_rows: float) -> Tiles:
    """Return the tiles of the gradient of the weight of a group with so many rows.

    If groups have few rows, writing it takes longest: one program stores, while another computes. If they have many, wide
    tiles need fewer loads.
    """
    if _override:
        return _override
    depth = 128 // element_size
    if element_size == 4:
        return Tiles(128, 128, depth, band=16, warps=8, stages=3, programs=1)
    if expected_rows < _ROWS_FOR_WIDE_GRADIENTS:
        return Tiles(128, 128, depth, band=16, warps=4, stages=3, programs=2)
    return Tiles(128, 256, depth, band=16, warps=8, stages=3, programs=1)


def tiles_of_product(rows: int, columns: int, depth: int, element_size: int, gpu: Gpu) -> Tiles:
    """The tiles for one product [rows, K] x [N, K]^T; ``element_size``: bytes of an element of x."""
    return _override or _recorded_or_by_rule(rows, columns, depth, element_size, gpu)


@functools.lru_cache(maxsize=_KEPT_SHAPES)
def _recorded_or_by_rule(rows: int, columns: int, depth: int, element_size: int, gpu: Gpu) -> Tiles:
    # Measurements tell how tiles fill multiprocessors: they hold for other GPUs with as many.
    measured = recorded_tiles().get((rows, columns, depth, element_size)) if _is_alike(gpu) else None
    return Tiles(*measured) if measured else _by_rule(rows, columns, depth, element_size, gpu)


def _is_alike(gpu: Gpu) -> bool:
    of_measurements = GPUS[MEASURED_ON]
    return (gpu.capability, gpu.multiprocessors) == (of_measurements.capability, of_measurements.multiprocessors)


def _widest(rows: int, columns: int, element_size: int, least: int) -> Tiles:
    """The widest tiles of which there are so many at least; 128 bytes of K a step."""
    depth = 128 // element_size
    if (rows // 128) * (columns // 256) >= least and element_size < 4:
        return Tiles(rows=128, columns=256, depth=depth, band=8, warps=8, stages=3, programs=1)
    return Tiles(rows=128, columns=128, depth=depth, band=8, warps=4 if element_size < 4 else 8, stages=3, programs=1)


def _by_rule(rows: int, columns: int, depth: int, element_size: int, gpu: Gpu) -> Tiles:
    """Wide tiles, if they occupy nearly all multiprocessors; small ones, or pieces of K, if others leave half of those idle."""
    available = gpu.multiprocessors
    nearly_all = int(_NEARLY_ALL * available)
    tiles = _widest(rows, columns, element_size, nearly_all)
    if element_size == 4 or 2 * tiles.count(rows, columns) > available:
        return tiles
    for most, tiles in _SMALL.items():
        count, splits = tiles.count(rows, columns), 1
        while splits < most and 2 * splits * count <= available and depth >= 2 * splits * _LEAST_DEPTH_OF_PIECE:
            splits *= 2
        tiles = replace(tiles, splits=splits)
        if splits * count >= nearly_all:
            break
    return tiles
