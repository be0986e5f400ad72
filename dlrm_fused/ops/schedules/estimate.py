"""The time that a call takes by a schedule, on paper: the tasks of its plan, each with a time from sizes and rates alone.

A product takes as many rounds of tiles as the multiprocessors need for them, or as long as its operands take to be read; a
piece as long as the links take for it, behind the pieces before. Lanes are as the executor runs them, and the peers are taken
to do the same at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dlrm_fused.ops.schedules.machines import Machine
from dlrm_fused.ops.schedules.plan import Kind, Lane, Piece, Plan, Task, make_plan
from dlrm_fused.ops.schedules.schedule import Mover, Pair, Schedule

# A product of at most so many rows takes as long as its weight takes to be read.
FEW_ROWS = 64
# Rows and columns of tiles, with the share of the largest ones' speed that each reaches: the library's, and our kernels'.
_SHAPES = ((256, 128, 1.0), (192, 128, 0.98), (128, 128, 0.95), (96, 128, 0.93), (64, 128, 0.85), (64, 64, 0.7))
_TILES = (*_SHAPES, *((columns, rows, share) for rows, columns, share in _SHAPES))
_KERNEL_TILES = ((128, 256, 1.0), (128, 128, 0.92), (64, 256, 0.88), (64, 128, 0.75), (64, 64, 0.6))
# The power of a smooth maximum: multiplication and stores at the peers that take equally long take 1.26 times that together.
_SHARPNESS = 3
# Products of many rows whose sums travel, too, overlap less with their stores. Fitted to 24 calls on two H100s.
_SHARPNESS_OF_SUMS = 2


@dataclass(frozen=True)
class Size:
    """The size of a call on one rank.

    Attributes:
        rows: M, of all ranks together where rows are sharded.
        columns: N of the product on this rank.
        depth: K of the product on this rank.
        element_bytes: of an element of what travels.
    """

    pair: Pair
    ranks: int
    rows: int
    columns: int
    depth: int
    element_bytes: int = 2

    @property
    def travelling(self) -> int:
        """Columns of what travels."""
        return self.depth if self.pair.moves_first else self.columns

    @property
    def shard_rows(self) -> int:
        """Rows that go from one rank to another; of an all-reduce by chunks, those of the whole matrix."""
        return max(1, self.rows // self.ranks)

    @property
    def link_bytes(self) -> int:
        """The bytes that a rank sends at least."""
        passes = 2 if self.pair is Pair.gemm_all_reduce else 1
        return passes * self.shard_rows * (self.ranks - 1) * self.travelling * self.element_bytes

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.columns * self.depth

    @property
    def memory_bytes(self) -> int:
        """Bytes of the three matrices: MK + NK + MN elements."""
        return self.bytes_of_rows(self.rows)

    def bytes_of_rows(self, rows: int) -> int:
        """Return the bytes that so many rows of the computation read and write."""
        return (rows * self.depth + self.columns * self.depth + rows * self.columns) * self.element_bytes


@dataclass(frozen=True)
class Span:
    """The time in which a task deals with a piece: microseconds from the beginning of the call."""

    kind: Kind
    lane: Lane
    piece: Piece | None
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of a call by a schedule, and when it ends."""

    schedule: Schedule
    size: Size
    spans: Sequence[Span]
    microseconds: float


def estimate(size: Size, schedule: Schedule, machine: Machine) -> Timeline:
    """A call on paper.

    Raises:
        ValueError: the pair cannot be run so.
    """
    rows = size.rows if size.pair is Pair.gemm_all_reduce and schedule.mover is Mover.other_kernel else size.shard_rows
    clock = _Clock(make_plan(size.pair, schedule, size.ranks, rows), _Times(size, schedule, machine))
    return Timeline(schedule, size, tuple(clock.spans), max(clock.free.values()))


class _Clock:
    """Runs a plan on paper: each lane does one task after the other."""

    def __init__(self, plan: Plan, times: _Times) -> None:
        self.times, self.spans = times, list[Span]()
        self.free = dict.fromkeys(Lane, 0.0)
        self.ended: list[dict[Piece, float]] = []  # by task
        for task in plan:
            self.ended.append(self._run(task))

    def _run(self, task: Task) -> dict[Piece, float]:
        """Return when each piece of the task is done, in microseconds."""
        if task.is_inside and task.kind is Kind.move and not self.times.size.pair.moves_first:  # stores of computed tiles
            return {piece: self._end_of(task.after[0], piece) + self.times.machine.wait_us for piece in task.pieces}
        is_launch = not task.is_inside and task.kind is not Kind.end and not self.times.is_part_of_launch(task)
        started = self.times.machine.started_us if is_launch else 0.0
        awaited = [self._end_of(other, task.pieces[0]) + self.times.start_us(task) for other in task.after if task.pieces]
        now = max([self.free[task.lane], *awaited]) + started
        if task.kind is Kind.end:
            now = max([now, *(max(self.ended[other].values()) for other in task.after)])
        first, ended = now, dict[Piece, float]()
        for piece, arrival, duration in self._steps(task):
            begin = max(now, arrival)
            now = begin + duration
            # Tiles of another piece run beside those of a small one, none of which takes less than a round.
            ended[piece] = max(now, (arrival if task.is_inside else max(first, arrival)) + self.times.least_us(task))
            self.spans.append(Span(task.kind, task.lane, piece, begin, ended[piece]))
        if not task.pieces and task.kind is Kind.begin:
            now += self.times.of(task, None)
            self.spans.append(Span(task.kind, task.lane, None, self.free[task.lane], now))
        self.free[task.lane] = now if self.times.goes_on(task) else max([now, *ended.values()])
        return ended or dict.fromkeys(task.pieces, now)

    def _end_of(self, number: int, piece: Piece) -> float:
        """Return when a task has done a piece, in microseconds; when it has done all, if it does not have that piece."""
        ended = self.ended[number]
        return ended.get(piece, max(ended.values(), default=0.0))

    def _steps(self, task: Task) -> Iterator[tuple[Piece, float, float]]:
        """Yield the steps of a task in order: a piece, when it may begin, and how long it takes."""
        arrivals = [max(self.ended[other].values()) + self.times.machine.wait_us for other in task.arrivals]
        if len(task.pieces) > 1 and not self.times.schedule.is_one_product:  # one launch for all
            all_rows = Piece(0, 0, sum(piece.rows for piece in task.pieces))
            yield all_rows, 0.0, self.times.of(replace(task, pieces=(all_rows,)), all_rows)
        elif task.kind is Kind.combine and len(task.pieces) == 1 and arrivals:  # own rows, piece by piece
            (own,) = task.pieces
            # A kernel that has moved, too, multiplies a tile before it waits.
            lead = self.times.least_us(task) if task.is_inside else 0.0
            for arrival in arrivals:
                yield own, arrival - lead, self.times.of(task, own) / len(arrivals)
        else:
            own_first = [0.0] * (len(task.pieces) - len(arrivals))
            for piece, arrival in zip(task.pieces, own_first + arrivals, strict=True):
                yield piece, arrival, self.times.of(task, piece)


class _Times:
    """Microseconds of tasks."""

    def __init__(self, size: Size, schedule: Schedule, machine: Machine) -> None:
        self.size, self.schedule, self.machine = size, schedule, machine
        self._is_by_copies = schedule.mover is Mover.copy_engine
        self._slowed = self._contention()
        # Rows whose tiles this project's kernel computes together, its time for them, and for a round of tiles.
        added = size.pair is Pair.gemm_reduce_scatter and not schedule.is_one_product
        self._kernel_rows = size.shard_rows * (1 if added or size.pair.moves_first else size.ranks)
        self._kernel_us, self._round_us = product_us(
            self._kernel_rows, size.columns, size.depth + machine.store_depth, machine, _KERNEL_TILES
        )

    def of(self, task: Task, piece: Piece | None) -> float:
        """Return the microseconds that a task needs for one of its pieces."""
        machine = self.machine
        if piece is None or task.kind in (Kind.begin, Kind.gate):
            return machine.wait_us
        if task.kind is Kind.mark:
            return machine.mark_us
        if task.kind is Kind.move:
            if self._is_by_copies:
                return machine.move_us + self._bytes(piece) / machine.peer_copies / 1e3
            return machine.wait_us + self._bytes(piece) / machine.peer_stores / 1e3
        if task.kind is Kind.combine:
            return self._combination(piece)
        return self._computation(task, piece)

    def start_us(self, task: Task) -> float:
        """Return the microseconds from the end of the other lane's task that this one waits for to this one's beginning."""
        return self.machine.copy_start_us if task.kind is Kind.move and self._is_by_copies else 0.0

    def least_us(self, task: Task) -> float:
        """Return the microseconds that a task needs for any piece: a round of tiles, or none."""
        return self._round_us / self.machine.kernel_share if self._is_persistent(task) and self._has_tiles else 0.0

    def goes_on(self, task: Task) -> bool:
        """Whether the kernel of a task has tiles of a later task as well."""
        return task.kind is Kind.compute and self.schedule.is_one_product and self.size.pair is Pair.gemm_reduce_scatter

    @property
    def _has_tiles(self) -> bool:
        return self.size.rows > FEW_ROWS

    def is_part_of_launch(self, task: Task) -> bool:
        """Whether the task is the end of another kernel: with few rows, that of the product adds up, too."""
        adds_up = self.size.pair is Pair.gemm_all_reduce and self.schedule.is_one_product and self.size.rows <= FEW_ROWS
        return task.kind is Kind.combine and adds_up

    def _is_persistent(self, task: Task) -> bool:
        own_rows_are_added = task.kind is Kind.combine and self.size.pair is Pair.gemm_reduce_scatter
        return own_rows_are_added or (task.kind is Kind.compute and self.schedule.is_one_product)

    def _bytes(self, piece: Piece) -> float:
        return piece.rows * self.size.travelling * self.size.element_bytes

    def _computation(self, task: Task, piece: Piece) -> float:
        size, machine = self.size, self.machine
        is_first = piece == task.pieces[0]
        time = machine.tile_us * is_first + self._rows_us(piece.rows, self._is_persistent(task))
        stores = self.schedule.mover is Mover.same_kernel and not size.pair.moves_first and piece.shift > 0
        if not stores:
            return time
        # The links have nothing to do until the first tiles are computed.
        stores_us = min(time, self._round_us) + self._bytes(piece) / machine.peer_stores / 1e3
        sharpness = _SHARPNESS_OF_SUMS if size.pair is Pair.gemm_all_reduce and self._has_tiles else _SHARPNESS
        return (time**sharpness + stores_us**sharpness) ** (1 / sharpness)

    def _rows_us(self, rows: int, is_persistent: bool) -> float:
        """Return the microseconds of so many rows of the computation."""
        size, machine = self.size, self.machine
        floor = size.bytes_of_rows(rows) / machine.memory / 1e3
        if is_persistent:  # the weight is read once, and rounds of tiles are filled, for the pieces of a shard together
            read_us = size.bytes_of_rows(self._kernel_rows) / machine.memory / 1e3
            tiles_us = self._kernel_us / machine.kernel_share if self._has_tiles else 0.0
            return max(read_us, tiles_us) * rows / self._kernel_rows * self._slowed
        return max(floor, product_us(rows, size.columns, size.depth, machine)[0]) * self._slowed

    def _combination(self, piece: Piece) -> float:
        size, machine = self.size, self.machine
        bytes_ = piece.rows * size.columns * size.element_bytes
        if size.pair is Pair.gemm_reduce_scatter:
            multiplied = size.depth + machine.store_depth
            return self._rows_us(piece.rows, is_persistent=True) * (multiplied + machine.add_depth) / multiplied
        if size.pair is Pair.gemm_all_reduce and self._is_by_copies and piece.shift == 0:  # own rows, added to what has come
            depth = size.depth + machine.store_depth + machine.add_depth
            return product_us(piece.rows, size.columns, depth, machine, _KERNEL_TILES)[0] / machine.kernel_share * self._slowed
        if size.pair is Pair.gemm_all_reduce and not self._is_by_copies:  # a reduce-scatter and an all-gather, or the latter
            if size.rows <= FEW_ROWS:  # words that say by themselves that they have come
                return machine.wait_us
            passes = 2 if self.schedule.mover is Mover.other_kernel else 1
            stored = passes * bytes_ * (size.ranks - 1) / size.ranks
            return machine.sum_us + stored / machine.peer_stores / machine.sum_share / 1e3
        return machine.tile_us + 2 * bytes_ / machine.memory / 1e3

    def _contention(self) -> float:
        """The factor on products: as long as pieces are on their way, at most all the time."""
        factors = {Mover.copy_engine: self.machine.contention, Mover.other_kernel: self.machine.kernel_contention}
        is_alone = self.schedule.mover is Mover.other_kernel and len(self.schedule.parts) == 1
        if self.schedule.mover not in factors or is_alone:
            return 1.0
        link_us = self.size.link_bytes / self.machine.peer_copies / 1e3
        product = self.size.operations / self.machine.teraflops / 1e6
        return 1 + (factors[self.schedule.mover] - 1) * min(1.0, link_us / product)


def product_us(
    rows: int, columns: int, depth: float, machine: Machine, tiles: Sequence[tuple[int, int, float]] = _TILES
) -> tuple[float, float]:
    """Return the microseconds of a product with the tiles that suit it, and of one round: a tile on each multiprocessor."""

    def of_tiles(tile: tuple[int, int, float]) -> tuple[float, float]:
        tile_rows, tile_columns, share = tile
        rounds = math.ceil(math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns) / machine.multiprocessors)
        round_us = 2 * tile_rows * tile_columns * depth * machine.multiprocessors / machine.teraflops / 1e6 / share
        return rounds * round_us, round_us

    return min(map(of_tiles, tiles))
