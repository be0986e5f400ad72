"""How much work a program of the fused lookup does, by shape: measured, not derived (benchmarks/tune_lookup.py)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

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
    return _by_shape(shape.block_dim, shape.dtype.itemsize, _length_class(shape.mean_length))


def _length_class(mean_length: float) -> int:
    """1, 2, 4, ... 32: the power of two at or below the rows per bag."""
    length = 1
    while length < 32 and length * 2 <= mean_length:
        length *= 2
    return length


@functools.cache
def _by_shape(block_dim: int, item_size: int, length: int) -> Blocks:
    # 16 rows of 128 fp32 keep 64 registers of each thread of a warp busy.
    rows_in_flight = max(4, min(32, 2048 // block_dim))
    rows = min(length, rows_in_flight, 8)
    bags = max(1, rows_in_flight // 2 // rows)
    return Blocks(bags=bags, rows=rows, warps=1, programs=_ALL)
