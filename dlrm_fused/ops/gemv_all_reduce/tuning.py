"""Block shapes of the fused GEMV + AllReduce, by the shape of the product.

Shapes that are not in the table of measurements get what the rules below say; docs/performance/gemv_all_reduce.md says what
led to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# Rows of x that the kernel for few rows takes.
MAX_ROWS = 64
# Columns of a tile at least.
MIN_COLUMNS = 16
# Parts of splits that the receive buffer has room for, in results of the largest product.
SPLIT_SLOTS = 3
# Programs of a launch at most where all of them wait for each other: one for each multiprocessor of an H100 or H200.
RESIDENT_PROGRAMS = 132
# Partial results, rows * columns, above which they are added up at one rank instead of at every rank.
ONE_SHOT_WORDS = 32_768
STAGE_BYTES = 96 * 1024
MIN_DEPTH_OF_SPLIT = 256


@dataclass(frozen=True)
class Blocks:
    """How one launch divides the work.

    Attributes:
        columns: of a program's tile of the result, a power of two from 16.
        depth: of a step along K, a power of two from 16.
        splits: programs that share a tile, each with its part of K.
        warps, stages: of a program; steps whose loads are on their way.
        two_shot: add partial results up at one rank a tile, which sends the sum to all, instead of at every rank.
        flagged: send tiles as they are, with a flag each, instead of words with a tag: half the bytes, for a fence. With
            two_shot only.
    """

    columns: int
    depth: int
    splits: int
    warps: int
    stages: int
    two_shot: bool
    flagged: bool


# By rows, columns, and K of one rank, as benchmarks/gemv_all_reduce/tune.py --table prints it. Nothing has been measured
# yet.
_MEASURED: dict[tuple[int, int, int], Blocks] = {}
_override: Blocks | None = None


def override(blocks: Blocks | None) -> None:
    """Use these for every shape; for measurements and tests. None ends it."""
    global _override
    _override = blocks


def choose_blocks(rows: int, columns: int, depth: int, world_size: int, element_size: int, *, with_norm: bool) -> Blocks:
    """The blocks for x [rows, depth] times weight [columns, depth] transposed; the same on every rank.

    Args:
        depth: K of one rank.
        with_norm: whether programs wait for each other, so that all of them must be resident at once.
    """
    blocks = _override or _measured(rows, columns, depth) or _by_rule(rows, columns, depth, element_size)
    if with_norm:
        blocks = _resident(blocks, columns)
    if blocks.two_shot and not can_be_two_shot(blocks, columns, world_size):
        blocks = replace(blocks, two_shot=False, flagged=False)
    return blocks


def can_be_two_shot(blocks: Blocks, columns: int, world_size: int) -> bool:
    """Every rank must add up some tile, and words must hold whole pairs of results."""
    return columns % 2 == 0 and -(-columns // blocks.columns) >= world_size


def _measured(rows: int, columns: int, depth: int) -> Blocks | None:
    """What was fastest for this weight and as many rows or the next more that were measured."""
    shapes = {m: blocks for (m, n, k), blocks in _MEASURED.items() if (n, k) == (columns, depth) and m >= rows}
    return shapes[min(shapes)] if shapes else None


def _by_rule(rows: int, columns: int, depth: int, element_size: int) -> Blocks:
    # Every tile reads all of x: with many rows, wide tiles and more splits read less.
    if rows > 16:
        tile = min(128, max(MIN_COLUMNS, 1 << max(1, columns // 32).bit_length() - 1))
    else:
        tile = next((width for width in (128, 64, 32) if columns // width >= 96), MIN_COLUMNS)
    tiles = -(-columns // tile)
    splits = max(1, min(8, round(RESIDENT_PROGRAMS / tiles), depth // MIN_DEPTH_OF_SPLIT))
    step = 128 if tile <= 64 else 64
    stages = max(2, min(5, STAGE_BYTES // (element_size * step * (tile + padded(rows)))))
    two_shot = rows * columns > ONE_SHOT_WORDS
    warps = 8 if tile * padded(rows) >= 8192 else 4
    return Blocks(tile, step, splits, warps, stages, two_shot, flagged=two_shot and rows > 16)


def _resident(blocks: Blocks, columns: int) -> Blocks:
    """As many programs as fit at once: fewer splits, then wider tiles."""
    splits, tile = blocks.splits, blocks.columns
    while -(-columns // tile) * splits > RESIDENT_PROGRAMS:
        splits, tile = (splits - 1, tile) if splits > 1 else (1, 2 * tile)
    # A wider tile takes more memory for each step.
    step = max(16, blocks.depth * blocks.columns // tile)
    return replace(blocks, splits=splits, columns=tile, depth=step)


def padded(rows: int) -> int:
    return max(16, 1 << (rows - 1).bit_length())
