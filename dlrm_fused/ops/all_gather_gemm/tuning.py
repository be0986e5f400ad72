"""Launches of kernels that multiply pieces: the tile shapes by which they take least, and how many programs push."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dlrm_fused.ops.gemm_all_to_all import tuning
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles

# Multiprocessors of an H100 or H200.
_MULTIPROCESSORS = 132
# Of 16-bit elements, with the share of the widest tile's speed that each reaches with all its programs on a multiprocessor, and
# with one alone. Measured on two H200s.
_SHAPES = (
    (Tiles(rows=128, columns=256, depth=64, band=8, warps=8, stages=4, programs=1), 1.0, 1.0),
    (Tiles(rows=128, columns=128, depth=64, band=8, warps=4, stages=3, programs=2), 0.92, 0.7),
    (Tiles(rows=128, columns=128, depth=64, band=8, warps=8, stages=5, programs=1), 0.92, 0.92),
    (Tiles(rows=64, columns=256, depth=64, band=8, warps=4, stages=4, programs=1), 0.88, 0.88),
    (Tiles(rows=64, columns=128, depth=128, band=8, warps=4, stages=4, programs=1), 0.75, 0.75),
    (Tiles(rows=64, columns=64, depth=128, band=8, warps=4, stages=5, programs=1), 0.6, 0.6),
)
# What it takes to add what has come to a tile, by programs on a multiprocessor: of two, one adds while the other multiplies.
# In units of K that could be multiplied meanwhile.
_ADDING = {1: 400, 2: 150}
# Programs that push shall end with the tiles of own rows beside, whose time is in proportion to the columns. Few cannot fill
# the links, many are not needed.
_PUSHERS_TIMES_COLUMNS = 80_000
_PUSHERS = (8, 24)


def pushers_of(columns: int, peers: int, device: torch.device) -> int:
    """Programs of a launch that store the own rows at the peers, while others multiply them."""
    if device.type == "cpu":  # where the programs of a grid run one after the other
        return 1
    fewest, most = _PUSHERS
    return max(fewest, min(most, round(_PUSHERS_TIMES_COLUMNS * peers / columns)))


def tiles_of_pieces(
    phases: Sequence[int], columns: int, depth: int, element_size: int, *, added: float = 0.0, pushers: int = 0
) -> Tiles:
    """For a persistent kernel that multiplies pieces one after the other.

    Args:
        phases: rows of x; those of a phase are multiplied when those of the one before are.
        columns, depth: N and K.
        element_size: bytes of an element.
        added: share of the tiles to which it adds what the peers have sent.
        pushers: programs that have no tiles in the first phase.
    """
    if tuning.overridden() or element_size != 2:
        return tuning.tiles_of_product(sum(phases), columns, depth, element_size)

    def time(shape: tuple[Tiles, float, float]) -> float:
        tiles, speed, speed_alone = shape
        first, *others = (-(-rows // tiles.rows) * -(-columns // tiles.columns) for rows in phases)
        rounds = _rounds(first, tiles.programs, speed / speed_alone, pushers)
        rounds += sum(_rounds(count, tiles.programs, speed / speed_alone) for count in others)
        return rounds * tiles.rows * tiles.columns * (depth + added * _ADDING[tiles.programs]) / speed

    return min(_SHAPES, key=time)[0]


def _rounds(count: int, programs: int, alone: float, taken: int = 0) -> float:
    """What so many tiles take, in tiles of a multiprocessor that is full.

    Args:
        alone: what a tile takes on a multiprocessor of its own.
        taken: programs that have none.
    """
    full, rest = divmod(count, _MULTIPROCESSORS * programs - taken)
    if rest == 0:
        return full * programs
    return full * programs + (alone if rest <= _MULTIPROCESSORS - taken else programs)
