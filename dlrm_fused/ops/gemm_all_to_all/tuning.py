"""Tile shapes of the GEMM kernels, and the schedule of GEMM + All-to-All, by the shape of the product.

Shapes that are not in the table of measurements get what the rules below say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Multiprocessors of an H100 or H200.
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Tiles:
    """How one launch divides a product.

    Attributes:
        rows, columns: of a tile of the result, powers of two.
        depth: of a step along K, a power of two.
        band: rows of tiles that are computed column by column, for the L2 cache.
        warps, stages: of a program; steps whose loads are on their way.
        programs: on a multiprocessor.
    """

    rows: int
    columns: int
    depth: int
    band: int
    warps: int
    stages: int
    programs: int


@dataclass(frozen=True)
class Choice:
    """What GEMM + All-to-All does for a shape: ``kernel`` or ``chunks``, and the tiles of the kernel."""

    schedule: str
    tiles: Tiles


# By rows, columns and K of one rank, and bytes of an element, as benchmarks/gemm_all_to_all/tune.py --table prints it. Nothing
# has been measured yet.
_MEASURED: dict[tuple[int, int, int, int], Choice] = {}
_override: Tiles | None = None


def override(tiles: Tiles | None) -> None:
    """Use these for every shape; for measurements and tests. None ends it."""
    global _override
    _override = tiles


def choose_tiles(rows: int, columns: int, depth: int, element_size: int, tile_rows: int | None = None) -> Tiles:
    """The tiles for a product [rows, K] x [N, K]^T.

    Args:
        element_size: bytes of an element of x.
        tile_rows: of a tile, where the layout of the rows prescribes it.
    """
    tiles = _override
    if tiles is None:
        measured = _MEASURED.get((rows, columns, depth, element_size))
        tiles = measured.tiles if measured else _by_rule(rows, columns, element_size)
    if tile_rows is None or tile_rows == tiles.rows:
        return tiles
    if _override is not None:
        return replace(tiles, rows=tile_rows)
    return grouped_tiles(tile_rows, columns, element_size)


def grouped_tiles(tile_rows: int, columns: int, element_size: int) -> Tiles:
    """The tiles for rows in groups, whose weights are read again for every tile of rows.

    A tile of few rows is done before the loads of the next have come: two programs of a multiprocessor cover for each other.
    """
    depth, is_wide = 128 // element_size, columns > 128 and element_size < 4
    if tile_rows >= 128:
        return Tiles(tile_rows, 256 if is_wide else 128, depth, band=8, warps=8, stages=3, programs=1)
    return Tiles(tile_rows, 128, depth, band=8, warps=4, stages=4, programs=2)


def weight_gradient_tiles(element_size: int) -> Tiles:
    """Of the gradient of a group's weight. Where groups have few rows, writing it takes longest: one program stores, while
    another computes."""
    if _override is not None:
        return _override
    depth = 128 // element_size
    if element_size < 4:
        return Tiles(128, 128, depth, band=1, warps=4, stages=3, programs=2)
    return Tiles(128, 128, depth, band=1, warps=8, stages=3, programs=1)


def choose_schedule(rows: int, columns: int, depth: int, element_size: int) -> str:
    """``kernel`` or ``chunks``."""
    measured = _MEASURED.get((rows, columns, depth, element_size))
    return measured.schedule if measured else "kernel"


def _by_rule(rows: int, columns: int, element_size: int) -> Tiles:
    """The widest tiles of which there are at least as many as multiprocessors; 128 bytes of K a step."""
    depth = 128 // element_size
    if (rows // 128) * (columns // 256) >= _MULTIPROCESSORS and element_size < 4:
        return Tiles(rows=128, columns=256, depth=depth, band=8, warps=8, stages=3, programs=1)
    return Tiles(rows=128, columns=128, depth=depth, band=8, warps=4 if element_size < 4 else 8, stages=3, programs=1)
