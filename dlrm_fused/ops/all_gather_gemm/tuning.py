"""Launches of kernels that multiply pieces: the tile shapes by which they take least, and how many programs push."""

from __future__ import annotations

import functools

from dlrm_fused.ops.common.gpus import H100, INTERPRETER, Gpu
from dlrm_fused.ops.gemm_all_to_all import tuning
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles

# Tiles for 16-bit elements, with the share of the widest tile's speed that each reaches with all its programs on a
# multiprocessor, and with one alone. Measured on two H200s.
_SHAPES = (
    (Tiles(rows=128, columns=256, depth=64, band=8, warps=8, stages=4, programs=1), 1.0, 1.0),
    (Tiles(rows=128, columns=128, depth=64, band=8, warps=4, stages=3, programs=2), 0.92, 0.7),
    (Tiles(rows=128, columns=128, depth=64, band=8, warps=8, stages=5, programs=1), 0.85, 0.95),
    (Tiles(rows=64, columns=256, depth=64, band=8, warps=4, stages=4, programs=1), 0.88, 0.88),
    (Tiles(rows=64, columns=128, depth=128, band=8, warps=4, stages=4, programs=1), 0.62, 0.75),
    (Tiles(rows=64, columns=64, depth=128, band=8, warps=4, stages=5, programs=1), 0.46, 0.6),
)
# The time to add what has come to a tile, by programs on a multiprocessor: of two, one adds while the other multiplies.
# In units of K that could be multiplied meanwhile.
_ADDING = {1: 400, 2: 150}
# Programs that push shall end with the tiles of own rows beside, whose time is in proportion to the columns, and shorter where
# the GPU multiplies faster. Few cannot fill the links, many are not needed: fewer where links are slower. For an H100.
_PUSHERS_TIMES_COLUMNS = 80_000
_FEWEST_PUSHERS, _MOST_PUSHERS = 8, 24


def tiles_of_pieces(
    rows: int, columns: int, depth: int, element_size: int, gpu: Gpu, *, peers: int = 0, added: float = 0.0
) -> Tiles:
    """Return the tiles of a persistent kernel that multiplies pieces one after the other.

    Args:
        rows: of x that it multiplies first.
        peers: ranks of which it multiplies as many rows each, when they have come.
        added: share of the tiles to which it adds what the peers have sent.
    """

    if tuning.overridden() or element_size != 2:
        chosen = tuning.tiles_of_product(rows * (1 + peers), columns, depth, element_size, gpu)
    else:
        chosen = _fastest(rows, columns, depth, gpu, peers, added)
    return tuning.fitted(chosen, element_size, gpu.shared_memory)


@functools.lru_cache(maxsize=1024)
def _fastest(rows: int, columns: int, depth: int, gpu: Gpu, peers: int, added: float) -> Tiles:
    def time(shape: tuple[Tiles, float, float]) -> float:
        tiles, speed, speed_alone = shape
        rounds = _rounds((1 + peers) * tiles.count(rows, columns), gpu.multiprocessors, tiles.programs, speed / speed_alone)
        if peers:  # whose rows come while a tile of own ones is multiplied
            rounds = max(rounds, 2 * speed / speed_alone)
        return rounds * tiles.rows * tiles.columns * (depth + added * _ADDING[tiles.programs]) / speed

    return min(_SHAPES, key=time)[0]


def tiles_and_pushers(rows: int, columns: int, depth: int, element_size: int, peers: int, gpu: Gpu) -> tuple[Tiles, int]:
    """Return :func:`tiles_of_pieces` for a kernel some programs of which store its rows at the peers first; and how many do."""
    tiles = tiles_of_pieces(rows, columns, depth, element_size, gpu, peers=peers)
    if gpu == INTERPRETER:  # where the programs of a grid run one after the other
        return tiles, 1
    fewest, most = pushers_at_least_and_at_most(gpu)
    pushers = max(fewest, min(most, round(_PUSHERS_TIMES_COLUMNS * gpu.bf16 / H100.bf16 * peers / columns)))
    return tiles, _left_by(tiles.count(rows, columns), tiles.programs * gpu.multiprocessors, pushers, fewest)


def pushers_at_least_and_at_most(gpu: Gpu) -> tuple[int, int]:
    """Programs that fill its links, in a call that gives them much time and in one that gives them little."""
    most = max(2, round(_MOST_PUSHERS * gpu.fastest_link / H100.fastest_link))
    return min(_FEWEST_PUSHERS, most), most


def _left_by(count: int, programs: int, pushers: int, fewest: int) -> int:
    """Return ``pushers``, or fewer, such that the tiles need the fewest rounds of programs beside them."""
    rounds = -(-count // (programs - fewest))
    return min(pushers, programs - -(-count // rounds))


def _rounds(count: int, multiprocessors: int, programs: int, alone: float) -> float:
    """Return the time of so many tiles, in tiles of a multiprocessor that is full.

    Args:
        programs: on a multiprocessor.
        alone: what a tile takes on a multiprocessor of its own.
    """
    full, rest = divmod(count, multiprocessors * programs)
    last = 0.0 if rest == 0 else alone if rest <= multiprocessors else programs
    return full * programs + last
