"""The work of one program of the fused lookup, by shape: measured, not derived.

The record and its source are in :mod:`~dlrm_fused.ops.common.recorded`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from dlrm_fused.ops.common.gpus import GPUS, INTERPRETER, Gpu
from dlrm_fused.ops.common.recorded import MEASURED_ON, recorded_lookup_blocks


@dataclass(frozen=True)
class LookupShape:
    """The facts about a lookup that the best block shape depends on.

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
    """The division of a lookup among programs.

    Attributes:
        bags: of a program's item of work.
        rows: of each share of a bag that are on their way at once.
        warps: of a program.
        programs: of the grid at most.
        split: shares of a bag, which different threads pool.
    """

    bags: int
    rows: int
    warps: int
    programs: int
    split: int = 1

    @property
    def can_be_compiled(self) -> bool:
        """Triton 3.6 fails on a program that has a warp of bags, but not one for each of its threads."""
        shares = self.bags * self.split
        return shares < 32 or shares >= 32 * self.warps


ALL = 1 << 30  # a program for each item
_ENOUGH_PROGRAMS = 16  # of a multiprocessor
_LOAD_BYTES = 16  # of a thread's load
_MAX_LOADS = 8  # of a thread at once, when rows are added
_ENOUGH_BYTES = 96 * 1024  # on their way to a multiprocessor
# Rows per bag from which on the next column of the table holds; measured at 1, 8, 32 and 100.
_LENGTH_LIMITS = (3, 16, 64)
# Up to so many bags of all features, with so many multiprocessors, the small shape (8 tables x 2048 bags) is the better guide,
# else the large (16 x 8192).
_SMALL_BAGS, _MULTIPROCESSORS = 48_000, GPUS[MEASURED_ON].multiprocessors
_INTERPRETED = Blocks(bags=2, rows=2, warps=1, programs=3)
_override: Blocks | None = None


def override(blocks: Blocks | None) -> None:
    """Use these blocks for every lookup from now on, or again the chosen ones: for measuring."""
    global _override
    _override = blocks


def choose_blocks(shape: LookupShape, gpu: Gpu) -> Blocks:
    """The blocks for a lookup of this shape."""
    if _override is not None:
        return _override
    if gpu == INTERPRETER:
        return _INTERPRETED
    size = "small" if shape.bags * _MULTIPROCESSORS <= _SMALL_BAGS * gpu.multiprocessors else "large"
    measured_dim = max(32, min(256, shape.block_dim))
    blocks = measured_blocks()[size, shape.dtype.itemsize, measured_dim][_length_class(shape.mean_length)]
    # Other dims: as many bytes of a row for each thread.
    narrower, wider = max(1, measured_dim // shape.block_dim), max(1, shape.block_dim // measured_dim)
    blocks = replace(
        blocks,
        bags=max(1, blocks.bags * narrower // wider),
        rows=max(1, blocks.rows // wider),
        programs=min(ALL, blocks.programs * gpu.multiprocessors),
        split=max(1, blocks.split // wider),
    )
    chosen = _spread(shape, blocks, gpu.multiprocessors)
    return chosen if chosen.can_be_compiled else replace(chosen, bags=max(1, 16 // chosen.split))


@functools.cache
def measured_blocks() -> dict[tuple[str, int, int], tuple[Blocks, ...]]:
    """Return the fastest blocks by size, bytes of an element and block dim, for each class of lengths.

    Their programs are of a multiprocessor.
    """
    return {
        (size, element, dim): tuple(
            Blocks(bags, rows, warps, ALL if programs is None else programs, split)
            for bags, rows, warps, programs, split in of_lengths
        )
        for size, element, dim, of_lengths in recorded_lookup_blocks()
    }


def _spread(shape: LookupShape, blocks: Blocks, multiprocessors: int) -> Blocks:
    """Blocks with which a short lookup keeps all multiprocessors busy."""
    row_bytes = shape.block_dim * shape.dtype.itemsize * blocks.split  # of a row for each share of a bag
    bytes_at_once = 32 * blocks.warps * _LOAD_BYTES
    bags, rows = blocks.bags, blocks.rows
    # More programs, as long as a row of each share fills their threads.
    while bags > 1 and shape.bags // bags < _ENOUGH_PROGRAMS * multiprocessors and bags * row_bytes > bytes_at_once:
        bags //= 2
    # More rows on their way, as long as there are so many, and registers for them.
    while (
        shape.bags * rows * row_bytes < _ENOUGH_BYTES * multiprocessors
        and 2 * rows * blocks.split <= shape.mean_length
        and 2 * rows * bags * row_bytes <= bytes_at_once * _MAX_LOADS
    ):
        rows *= 2
    return replace(blocks, bags=bags, rows=rows)


def _length_class(mean_length: float) -> int:
    return sum(mean_length >= limit for limit in _LENGTH_LIMITS)
