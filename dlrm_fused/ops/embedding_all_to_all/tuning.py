"""The work of one program of the fused lookup, by shape: measured, not derived.

The source is ``python -m benchmarks tune embedding_all_to_all``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dlrm_fused.ops.common.gpus import GPUS, INTERPRETER, Gpu


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
_SMALL_BAGS, _MULTIPROCESSORS = 48_000, GPUS["NVIDIA H200"].multiprocessors
# By size and bytes of an element, then by block dim, for each class of lengths; programs of a multiprocessor instead of all.
# H200, benchmarks/results/tune_lookup_*.json.
# For 100 rows of dim 256, two of the shapes that are as fast there are those that are faster with Zipf indices.
_MEASURED: dict[tuple[str, int], dict[int, tuple[Blocks, ...]]] = {
    ("large", 2): {
        32: (Blocks(64, 1, 2, 8, 1), Blocks(8, 2, 1, 32, 1), Blocks(1, 4, 1, 32, 8), Blocks(1, 8, 1, 32, 8)),
        64: (Blocks(8, 1, 1, 32, 1), Blocks(8, 2, 1, 32, 1), Blocks(4, 8, 1, 32, 1), Blocks(4, 8, 1, 32, 1)),
        128: (Blocks(4, 1, 1, 32, 1), Blocks(4, 2, 1, 32, 1), Blocks(1, 8, 1, 32, 2), Blocks(2, 8, 1, ALL, 1)),
        256: (Blocks(2, 1, 1, 32, 1), Blocks(1, 4, 1, 32, 1), Blocks(1, 8, 1, 32, 1), Blocks(4, 8, 4, 16, 1)),
    },
    ("large", 4): {
        32: (Blocks(32, 1, 1, 16, 1), Blocks(4, 8, 1, 32, 1), Blocks(1, 4, 1, 32, 4), Blocks(4, 8, 1, 32, 1)),
        64: (Blocks(8, 1, 1, 32, 1), Blocks(2, 8, 1, 32, 1), Blocks(1, 8, 1, 32, 2), Blocks(1, 8, 1, 32, 2)),
        128: (Blocks(4, 1, 1, 32, 1), Blocks(2, 4, 1, 32, 1), Blocks(1, 8, 1, 32, 1), Blocks(4, 8, 4, ALL, 1)),
        256: (Blocks(4, 1, 2, 16, 1), Blocks(1, 8, 1, 64, 1), Blocks(1, 8, 1, ALL, 1), Blocks(1, 8, 1, ALL, 1)),
    },
    ("small", 2): {
        32: (Blocks(32, 1, 1, 8, 1), Blocks(8, 8, 1, 32, 1), Blocks(8, 8, 1, 32, 1), Blocks(1, 8, 1, 32, 8)),
        64: (Blocks(32, 1, 1, 8, 1), Blocks(16, 8, 4, 16, 1), Blocks(16, 8, 4, 8, 1), Blocks(16, 8, 4, ALL, 1)),
        128: (Blocks(16, 1, 1, ALL, 1), Blocks(8, 4, 2, 16, 1), Blocks(1, 8, 1, 32, 2), Blocks(2, 8, 1, 32, 1)),
        256: (Blocks(8, 1, 2, 8, 1), Blocks(1, 4, 1, 32, 1), Blocks(1, 4, 1, 32, 1), Blocks(2, 2, 1, 32, 1)),
    },
    ("small", 4): {
        32: (Blocks(128, 1, 4, 32, 1), Blocks(16, 8, 4, 64, 1), Blocks(4, 8, 1, ALL, 1), Blocks(4, 8, 1, 64, 1)),
        64: (Blocks(16, 1, 1, 8, 1), Blocks(8, 4, 2, 32, 1), Blocks(4, 4, 1, ALL, 1), Blocks(2, 8, 1, 32, 1)),
        128: (Blocks(16, 1, 2, 8, 1), Blocks(2, 4, 1, 32, 1), Blocks(1, 8, 1, 32, 1), Blocks(2, 2, 1, 32, 1)),
        256: (Blocks(2, 1, 1, 16, 1), Blocks(1, 8, 1, 32, 1), Blocks(1, 8, 1, 64, 1), Blocks(1, 8, 1, ALL, 1)),
    },
}
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
    blocks = _MEASURED[size, shape.dtype.itemsize][measured_dim][_length_class(shape.mean_length)]
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
