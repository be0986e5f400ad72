"""Launches of kernels that multiply pieces: the tile shapes by which they take least, and how many programs push."""

from __future__ import annotations

import torch

from dlrm_fused.ops.common.devices import shared_memory
from dlrm_fused.ops.gemm_all_to_all import tuning
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles

# Multiprocessors of an H100 or H200.
_MULTIPROCESSORS = 132
# Of 16-bit elements, with the share of the widest tile's speed that each reaches with all its programs on a multiprocessor, and
# with one alone. Measured on two H200s.
_SHAPES = (
    (Tiles(rows=128, columns=256, depth=64, band=8, warps=8, stages=4, programs=1), 1.0, 1.0),
    (Tiles(rows=128, columns=128, depth=64, band=8, warps=4, stages=3, programs=2), 0.92, 0.7),
    (Tiles(rows=128, columns=128, depth=64, band=8, warps=8, stages=5, programs=1), 0.85, 0.95),
    (Tiles(rows=64, columns=256, depth=64, band=8, warps=4, stages=4, programs=1), 0.88, 0.88),
    (Tiles(rows=64, columns=128, depth=128, band=8, warps=4, stages=4, programs=1), 0.62, 0.75),
    (Tiles(rows=64, columns=64, depth=128, band=8, warps=4, stages=5, programs=1), 0.46, 0.6),
)
# What it takes to add what has come to a tile, by programs on a multiprocessor: of two, one adds while the other multiplies.
# In units of K that could be multiplied meanwhile.
_ADDING = {1: 400, 2: 150}
# Programs that push shall end with the tiles of own rows beside, whose time is in proportion to the columns. Few cannot fill
# the links, many are not needed.
_PUSHERS_TIMES_COLUMNS = 80_000
_FEWEST_PUSHERS, _MOST_PUSHERS = 8, 24


def tiles_of_pieces(rows: int, columns: int, depth: int, element_size: int, *, peers: int = 0, added: float = 0.0) -> Tiles:
    """For a persistent kernel that multiplies pieces one after the other.

    Args:
        rows: of x that it multiplies first.
        columns, depth: N and K.
        element_size: bytes of an element.
        peers: ranks of which it multiplies as many rows each, when they have come.
        added: share of the tiles to which it adds what the peers have sent.
    """
    return _fastest(rows, columns, depth, element_size, peers, added)


def tiles_and_pushers(
    rows: int, columns: int, depth: int, element_size: int, peers: int, device: torch.device
) -> tuple[Tiles, int]:
    """As :func:`tiles_of_pieces`, for a kernel some programs of which store its rows at the peers first; and how many do."""
    tiles = tuning.fitted(_fastest(rows, columns, depth, element_size, peers, 0.0), element_size, shared_memory(device))
    if device.type == "cpu":  # where the programs of a grid run one after the other
        return tiles, 1
    pushers = max(_FEWEST_PUSHERS, min(_MOST_PUSHERS, round(_PUSHERS_TIMES_COLUMNS * peers / columns)))
    return tiles, _left_by(_count(rows, columns, tiles), tiles, pushers)


def _fastest(rows: int, columns: int, depth: int, element_size: int, peers: int, added: float) -> Tiles:
    if tuning.overridden() or element_size != 2:
        return tuning.tiles_of_product(rows * (1 + peers), columns, depth, element_size)

    def time(shape: tuple[Tiles, float, float]) -> float:
        tiles, speed, speed_alone = shape
        rounds = _rounds((1 + peers) * _count(rows, columns, tiles), tiles.programs, speed / speed_alone)
        if peers:  # whose rows come while a tile of own ones is multiplied
            rounds = max(rounds, 2 * speed / speed_alone)
        return rounds * tiles.rows * tiles.columns * (depth + added * _ADDING[tiles.programs]) / speed

    return min(_SHAPES, key=time)[0]


def _count(rows: int, columns: int, tiles: Tiles) -> int:
    return -(-rows // tiles.rows) * -(-columns // tiles.columns)


def _left_by(count: int, tiles: Tiles, pushers: int) -> int:
    """So many pushers, or as many fewer as it takes for the tiles to need the fewest rounds beside them."""
    programs = _MULTIPROCESSORS * tiles.programs
    rounds = -(-count // (programs - _FEWEST_PUSHERS))
    return min(pushers, programs - -(-count // rounds))


def _rounds(count: int, programs: int, alone: float) -> float:
    """What so many tiles take, in tiles of a multiprocessor that is full.

    Args:
        programs: on a multiprocessor.
        alone: what a tile takes on a multiprocessor of its own.
    """
    full, rest = divmod(count, _MULTIPROCESSORS * programs)
    last = 0.0 if rest == 0 else alone if rest <= _MULTIPROCESSORS else programs
    return full * programs + last
