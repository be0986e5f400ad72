"""Block shapes of the fused GEMV + AllReduce, by the shape of the product.

docs/performance/gemv_all_reduce.md says what led to the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.common.gpus import Gpu
from dlrm_fused.symmetric.launches import next_power_of_2

# Rows of x that the kernel for few rows takes.
MAX_ROWS = 64
# Columns of a tile at least and at most.
MIN_COLUMNS, MAX_COLUMNS = 16, 256
# Programs that share a tile at most; with more, their sum takes longer than they save.
MAX_SPLITS = 4
# Rows up to which they hand their parts on as words with tags; with more, a fence takes less time than twice the bytes.
TAGGED_SPLIT_ROWS = 4
# A program on so large a share of the multiprocessors is as good as one on all of them.
_ENOUGH = 0.895
# Partial results that a rank sends, rows * columns to each peer, above which they are added up at one rank instead of at every
# rank.
_MOST_ONE_SHOT_WORDS = 98_304
# Bytes of loads on their way, for up to 16 rows and for more. With the first, two programs have room on a multiprocessor:
# one of a launch, and one of the next, which starts early.
_STAGE_BYTES, _STAGE_BYTES_OF_MANY_ROWS = 104 * 1024, 160 * 1024
_MOST_STAGES = 10
MIN_DEPTH_OF_SPLIT = 512
# A step is not made shallower than this where shared memory is short.
_LEAST_DEPTH = 16
# Sums over a program's warps take these bytes where rows are normalized.
_SCRATCH_BYTES = 1024


@dataclass(frozen=True)
class Blocks:
    """The division of the work among the programs of one launch.

    Attributes:
        columns: of a program's tile of the result, a power of two from 16.
        depth: of a step along K, a power of two from 16.
        splits: programs that share a tile, each with its part of K.
        warps, stages: of a program; steps whose loads are on their way.
        two_shot: add partial results up at one rank a tile, which sends the sum to all, instead of at every rank.
        flagged: send tiles as they are, with a flag each, instead of words with a tag: half the bytes, for a fence. With
            two_shot only.
        is_given: the product is made before, by the library; programs only add it up.
    """

    columns: int
    depth: int
    splits: int
    warps: int
    stages: int
    two_shot: bool
    flagged: bool
    is_given: bool = False


_override: Blocks | None = None


def override(blocks: Blocks | None) -> None:
    """Use these for every shape; for measurements and tests. None ends it."""
    global _override
    _override = blocks


def overriding_blocks() -> Blocks | None:
    """Return the blocks that :func:`override` has set."""
    return _override


def choose_blocks(
    rows: int, columns: int, depth: int, world_size: int, element_size: int, gpu: Gpu, *, with_norm: bool
) -> Blocks:
    """The blocks for x [rows, depth] times weight [columns, depth] transposed; the same on every rank.

    Args:
        depth: K of one rank.
        gpu: of every rank; of those with the fewest multiprocessors, where they differ.
        with_norm: whether programs wait for each other, so that all of them must be resident at once.
    """
    blocks = _override or _by_rule(rows, columns, depth, world_size, element_size, gpu)
    return _possible(blocks, columns, world_size, gpu, with_norm=with_norm)


def choose_blocks_of_sum(rows: int, columns: int, world_size: int, gpu: Gpu, *, with_norm: bool) -> Blocks:
    """The blocks for a product [rows, columns] that is given: as many tiles as there are multiprocessors, or fewer."""
    if _override:
        return _possible(replace(_override, splits=1, is_given=True), columns, world_size, gpu, with_norm=with_norm)
    tile = next((tile for tile in (16, 32, 64) if -(-columns // tile) <= gpu.multiprocessors), 128)
    two_shot = _is_two_shot(rows, columns, world_size)
    blocks = Blocks(tile, _LEAST_DEPTH, 1, 4, 1, two_shot, flagged=two_shot and rows > 16, is_given=True)
    return _possible(blocks, columns, world_size, gpu, with_norm=with_norm)


def _possible(blocks: Blocks, columns: int, world_size: int, gpu: Gpu, *, with_norm: bool) -> Blocks:
    if with_norm:
        blocks = _resident(blocks, columns, gpu)
    if blocks.two_shot and not can_be_two_shot(blocks, columns, world_size):
        blocks = replace(blocks, two_shot=False, flagged=False)
    return blocks


def _is_two_shot(rows: int, columns: int, world_size: int) -> bool:
    return rows * columns * (world_size - 1) > _MOST_ONE_SHOT_WORDS


def can_be_two_shot(blocks: Blocks, columns: int, world_size: int) -> bool:
    """Every rank must add up some tile, and words must hold whole pairs of results."""
    return columns % 2 == 0 and -(-columns // blocks.columns) >= world_size


def _by_rule(rows: int, columns: int, depth: int, world_size: int, element_size: int, gpu: Gpu) -> Blocks:
    tile, splits = _tile_and_splits(columns, depth, gpu.multiprocessors)
    step = 128 if tile <= 64 and rows <= 16 else 64
    two_shot = _is_two_shot(rows, columns, world_size)
    warps = 8 if tile >= 128 else 4
    stages = max(2, most_stages(rows, tile, step, element_size))
    return Blocks(tile, step, splits, warps, stages, two_shot, flagged=two_shot and rows > 16)


def most_stages(rows: int, tile: int, step: int, element_size: int) -> int:
    """Steps whose loads have room."""
    room = _STAGE_BYTES if rows <= 16 else _STAGE_BYTES_OF_MANY_ROWS
    return min(_MOST_STAGES, room // (element_size * step * (tile + padded(rows))))


def _tile_and_splits(columns: int, depth: int, most: int) -> tuple[int, int]:
    """Return the columns of a tile, and the splits, for as many programs as multiprocessors or a few less.

    Then all programs have the same to do, and all begin at once.

    Tiles of 64 columns were the fastest of those that come near; wider ones make for more splits, narrower ones for more reads
    of x.
    """
    widest = max(MIN_COLUMNS, next_power_of_2(columns))
    most_splits = max(1, min(MAX_SPLITS, depth // MIN_DEPTH_OF_SPLIT))
    choices = []
    for tile in (64, 128, 32, 16):
        tiles = -(-columns // tile)
        if tile <= widest and tiles <= most:
            choices.append((tile, min(most_splits, most // tiles)))
    if not choices:
        return 128, 1
    programs = {choice: -(-columns // choice[0]) * choice[1] for choice in choices}
    enough = min(max(programs.values()), int(_ENOUGH * most))
    return next(choice for choice in choices if programs[choice] >= enough)


def _resident(blocks: Blocks, columns: int, gpu: Gpu) -> Blocks:
    """Return blocks with as many programs as fit at once, one on each multiprocessor: fewer splits, then wider tiles."""
    splits, tile = blocks.splits, blocks.columns
    while -(-columns // tile) * splits > gpu.multiprocessors:
        splits, tile = (splits - 1, tile) if splits > 1 else (1, 2 * tile)
    # A wider tile takes more memory for each step.
    step = max(16, blocks.depth * blocks.columns // tile)
    return replace(blocks, splits=splits, columns=tile, depth=step)


def needed_memory(blocks: Blocks, rows: int, element_size: int) -> int:
    """Bytes of shared memory at most of a program: loads on their way, or after them the tile in fp32, to transpose it."""
    width = blocks.columns + padded(rows)
    return max(blocks.stages * blocks.depth * width * element_size, blocks.columns * padded(rows) * 4) + _SCRATCH_BYTES


def fitted(blocks: Blocks, rows: int, element_size: int, memory: int) -> Blocks:
    """The blocks, or with fewer stages, then shorter steps, those for which so many bytes of shared memory are enough."""
    if _override:
        return blocks
    while needed_memory(blocks, rows, element_size) > room_of_program(memory):
        if blocks.stages > 2:
            blocks = replace(blocks, stages=blocks.stages - 1)
        elif blocks.depth > _LEAST_DEPTH:
            blocks = replace(blocks, depth=blocks.depth // 2)
        else:
            break
    return blocks


def padded(rows: int) -> int:
    return max(16, next_power_of_2(rows))
