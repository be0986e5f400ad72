"""Tile shapes of products of pieces: as measured for the product alone, or those that leave the fewest multiprocessors idle."""

from __future__ import annotations

from dlrm_fused.ops.gemm_all_to_all import tuning
from dlrm_fused.ops.gemm_all_to_all.measured import TILES
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles

# Multiprocessors of an H100 or H200.
_MULTIPROCESSORS = 132
# Of 16-bit elements, with the share of the widest tile's speed that each reaches. Measured on two H100s.
_SHAPES = (
    (Tiles(rows=128, columns=256, depth=64, band=8, warps=8, stages=3, programs=1), 1.0),
    (Tiles(rows=128, columns=128, depth=64, band=8, warps=4, stages=3, programs=2), 0.92),
    (Tiles(rows=64, columns=128, depth=128, band=8, warps=4, stages=4, programs=1), 0.75),
    (Tiles(rows=64, columns=64, depth=128, band=8, warps=4, stages=5, programs=1), 0.6),
)
# What it takes to add what has come to a tile, by programs on a multiprocessor: of two, one adds while the other multiplies.
# In units of K that could be multiplied meanwhile.
_ADDING = {1: 300, 2: 150}


def tiles_of_pieces(rows: int, columns: int, depth: int, element_size: int, *, added: float = 0.0) -> Tiles:
    """For a persistent kernel that multiplies pieces one after the other, [rows, K] x [N, K]^T together.

    Args:
        element_size: bytes of an element.
        added: share of the tiles to which it adds what the peers have sent.
    """
    measured = TILES.get((rows, columns, depth, element_size))
    if tuning.overridden() or element_size != 2 or (measured and Tiles(*measured).splits == 1):
        return tuning.tiles_of_product(rows, columns, depth, element_size)

    def time(shape: tuple[Tiles, float]) -> float:
        tiles, speed = shape
        count = -(-rows // tiles.rows) * -(-columns // tiles.columns)
        rounds = -(-count // (_MULTIPROCESSORS * tiles.programs)) * tiles.programs
        return rounds * tiles.rows * tiles.columns * (depth / speed + added * _ADDING[tiles.programs])

    return min(_SHAPES, key=time)[0]
