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
    """How a lookup is divided.

    Attributes:
        bags: of a program's item of work.
        rows: of each of them that are on their way at once.
        warps: of a program.
        programs: of the grid at most.
        ahead: the next rows are on their way while these are added.
    """

    bags: int
    rows: int
    warps: int
    programs: int
    ahead: bool = False


ALL = 1 << 30  # a program for each item
_ENOUGH_PROGRAMS = 132 * 16
# Rows per bag from which on the next column of the table holds; measured at 1, 8, 32 and 100.
_LENGTH_LIMITS = (3, 16, 64)
# Up to so many bags of all features the small shape (8 tables x 2048 bags) is the better guide, else the large (16 x 8192).
_SMALL_BAGS = 48_000
# By size and bytes of an element, then by block dim, for each class of lengths. H200, benchmarks/results/tune_lookup_*.json.
_MEASURED: dict[tuple[str, int], dict[int, tuple[Blocks, ...]]] = {
    ("large", 4): {
        32: (Blocks(32, 1, 1, 2112), Blocks(32, 1, 1, 2112), Blocks(16, 2, 2, 1056), Blocks(8, 4, 2, ALL)),
        64: (Blocks(32, 1, 1, 1056), Blocks(16, 1, 1, 4224), Blocks(8, 2, 2, 8448), Blocks(8, 2, 2, ALL)),
        128: (Blocks(16, 1, 2, 2112), Blocks(16, 1, 2, 2112), Blocks(8, 2, 1, 1056), Blocks(2, 4, 1, ALL)),
        256: (Blocks(8, 1, 1, 4224), Blocks(4, 2, 1, 4224), Blocks(4, 2, 2, 1056), Blocks(4, 2, 1, ALL)),
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
    size = "small" if shape.bags <= _SMALL_BAGS else "large"
    measured = _MEASURED[size, shape.dtype.itemsize][max(32, min(256, shape.block_dim))]
    blocks = measured[_length_class(shape.mean_length)]
    slots = max(1, blocks.bags * blocks.rows * 256 // max(256, shape.block_dim))
    bags, rows = min(blocks.bags, slots), min(blocks.rows, slots)
    # A short lookup is spread over all multiprocessors rather than left to a few programs, as long as each fills its warps.
    least = max(1, 32 * blocks.warps * 4 // shape.block_dim)
    while bags > 1 and shape.bags // bags < _ENOUGH_PROGRAMS:
        bags //= 2
        if 2 * rows <= shape.mean_length:
            rows *= 2
        elif bags * rows < least:
            bags *= 2
            break
    return replace(blocks, bags=bags, rows=rows)


def _length_class(mean_length: float) -> int:
    return sum(mean_length >= limit for limit in _LENGTH_LIMITS)
