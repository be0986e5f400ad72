"""How much work a program of the fused lookup does, by shape: measured, not derived (benchmarks/tune_lookup.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class LookupShape:
    """What the best block shape depends on.

    Attributes:
        block_dim: next power of two of the embedding dim.
        mean_length: rows per bag.
        bags: of all features and ranks.
    """

    block_dim: int
    dtype: torch.dtype
    mean_length: float
    bags: int


@dataclass(frozen=True)
class Blocks:
    """Bags of a program's item of work, rows of each bag on their way at once, warps, and programs of the grid at most."""

    bags: int
    rows: int
    warps: int
    programs: int


_ALL = 1 << 30  # a program for each item
_ENOUGH_PROGRAMS = 132 * 16
# Rows per bag from which on the next column of the table holds; measured at 1, 8, 32 and 100.
_LENGTH_LIMITS = (3, 16, 64)
# By bytes of an element and block dim, for each class of lengths. H200, benchmarks/results/tune_lookup.json.
_MEASURED: dict[int, dict[int, tuple[Blocks, ...]]] = {
    4: {
        32: (Blocks(32, 1, 1, 2112), Blocks(32, 1, 1, 2112), Blocks(16, 2, 2, 1056), Blocks(8, 4, 2, _ALL)),
        64: (Blocks(32, 1, 1, 1056), Blocks(16, 1, 1, 4224), Blocks(8, 2, 2, 8448), Blocks(8, 2, 2, _ALL)),
        128: (Blocks(16, 1, 2, 2112), Blocks(16, 1, 2, 2112), Blocks(8, 2, 1, 1056), Blocks(2, 4, 1, _ALL)),
        256: (Blocks(8, 1, 1, 4224), Blocks(4, 2, 1, 4224), Blocks(4, 2, 2, 1056), Blocks(4, 2, 1, _ALL)),
    },
}
_INTERPRETED = Blocks(bags=2, rows=2, warps=1, programs=3)
_override: Blocks | None = None


def override(blocks: Blocks | None) -> None:
    """Use these blocks for every lookup from now on, or again the chosen ones: for measuring."""
    global _override
    _override = blocks


def choose_blocks(shape: LookupShape, device: torch.device) -> Blocks:
    """The blocks for a lookup of this shape."""
    if _override is not None:
        return _override
    if device.type == "cpu":
        return _INTERPRETED
    measured = _MEASURED.get(shape.dtype.itemsize, _MEASURED[4])
    blocks = measured[max(32, min(256, shape.block_dim))][_length_class(shape.mean_length)]
    bags = max(1, blocks.bags * 256 // max(256, shape.block_dim))
    # A short lookup is spread over all multiprocessors rather than left to a few programs.
    while bags > 1 and shape.bags // bags < _ENOUGH_PROGRAMS:
        bags //= 2
    return replace(blocks, bags=bags)


def _length_class(mean_length: float) -> int:
    return sum(mean_length >= limit for limit in _LENGTH_LIMITS)
