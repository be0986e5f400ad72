"""How long a call takes by a schedule, on paper: the tasks of its plan, each with a time from sizes alone.

A product takes as many rounds of tiles as the multiprocessors need for them, a move its bytes over the links, one move at a
time. Lanes are as the executor runs them, and peers are assumed to do the same at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_fused.ops.schedules.machine import Machine
from dlrm_fused.ops.schedules.plan import Kind, Lane, Piece, Plan, Task, make_plan
from dlrm_fused.ops.schedules.schedule import Pair, Schedule

# Rows and columns of tiles, with the share of the largest one's speed that each reaches.
_TILES = ((256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8), (64, 64, 0.65))
# Rows up to which a product is bound by reading its weight, and one kernel sums it over the ranks.
FEW_ROWS = 64


@dataclass(frozen=True)
class Size:
    """Of a call on one rank.

    Attributes:
        pair: what is computed and communicated.
        ranks: on one host.
        rows: M, of all ranks together where rows are sharded; of a lookup, samples of all ranks.
        columns: N of the product on this rank; of a lookup, elements of all its tables' pooled rows of a sample.
        depth: K of the product on this rank; of a lookup, rows that are pooled into one.
        element_bytes: of an element of x and of what travels; of a lookup, of what travels.
        row_bytes: of a lookup, bytes of a looked-up element.
    """

    pair: Pair
    ranks: int
    rows: int
    columns: int
    depth: int
    element_bytes: int = 2
    row_bytes: int = 4

    @property
    def travelling(self) -> int:
        """Columns of what travels."""
        return self.depth if self.pair.moves_first else self.columns

    @property
    def shard_rows(self) -> int:
        """Rows that go from one rank to another; of an all-reduce, those of the whole matrix."""
        return self.rows if self.pair is Pair.gemm_all_reduce else self.rows // self.ranks

    @property
    def link_bytes(self) -> float:
        """That a rank sends at least."""
        passes = 2 if self.pair is Pair.gemm_all_reduce else 1
        return passes * self.rows / self.ranks * (self.ranks - 1) * self.travelling * self.element_bytes

    @property
    def operations(self) -> float:
        """Multiplications and additions."""
        return (1 if self.pair is Pair.embedding_all_to_all else 2) * self.rows * self.columns * self.depth

    @property
    def memory_bytes(self) -> float:
        """MK + NK + MN of a product; rows read and pooled rows written of a lookup."""
        if self.pair is Pair.embedding_all_to_all:
            return self.rows * self.columns * (self.depth * self.row_bytes + self.element_bytes)
        elements = self.rows * self.depth + self.columns * self.depth + self.rows * self.columns
        return elements * self.element_bytes

    @property
    def operations_per_byte(self) -> float:
        """The arithmetic intensity of the computation."""
        return self.operations / self.memory_bytes


@dataclass(frozen=True)
class Span:
    """When a task, or a piece of it, runs: microseconds from the beginning of the call."""

    task: Task
    piece: Piece | None
    lane: str
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
    plan = make_plan(size.pair, schedule, size.ranks, size.shard_rows)
    clock = _Clock(size, schedule, machine, plan)
    for number, task in enumerate(plan):
        clock.run(number, task)
    return Timeline(schedule, size, tuple(clock.spans), max(clock.free.values()))


class _Clock:
    """Runs a plan on paper: each lane does one task after the other."""

    def __init__(self, size: Size, schedule: Schedule, machine: Machine, plan: Plan) -> None:
        self.size, self.schedule, self.machine, self.plan = size, schedule, machine, plan
        self.free = dict.fromkeys(("main", "beside", "links"), 0.0)
        self.spans: list[Span] = []
        self.ended: dict[int, dict[Piece, float]] = {}  # by number of a task, and piece
        has_moves = any(task.kind is Kind.move and not task.is_inside for task in plan)
        self.slowed = machine.contention if has_moves else 1.0

    def run(self, number: int, task: Task) -> None:
        started = self.machine.started_us if not task.is_inside else 0.0
        lane = task.lane.value
        begin = max([self.free[lane] + started, *(self._end_of(other, task.pieces) for other in task.after)])
        ends: dict[Piece, float] = {}
        match task.kind:
            case Kind.begin:
                end = begin + self.machine.wait_us
            case Kind.collective:
                end = begin + self.machine.collective_us + self._library_us()
            case Kind.move:
                begin, end = self._move(begin, task)
                ends[task.pieces[0]] = end
                self.free["links"] = end
            case Kind.mark:
                end = begin + self.machine.mark_us
                ends[task.pieces[0]] = end
            case Kind.gate:
                end = max([begin, *self._arrivals(task)]) + self.machine.wait_us
            case Kind.compute | Kind.combine:
                end = self._compute(begin, task, ends)
            case Kind.end:
                end = begin
        self.ended[number] = ends or dict.fromkeys(task.pieces, end)
        if not (task.kind is Kind.move and task.is_inside and task.lane is Lane.beside):
            self.free[lane] = max(self.free[lane], end)
        if not ends and task.kind is not Kind.end:
            self.spans.append(Span(task, None, lane, begin, end))

    def _end_of(self, number: int, pieces: Sequence[Piece]) -> float:
        """When a task, of which these pieces are needed, has ended."""
        ended = self.ended[number]
        return max((end for piece, end in ended.items() if piece in pieces), default=max(ended.values(), default=0.0))

    def _arrivals(self, task: Task) -> list[float]:
        return [max(self.ended[number].values()) for number in task.arrivals]

    def _move(self, begin: float, task: Task) -> tuple[float, float]:
        """Of one piece; inside a kernel, stores go on while later tiles are computed."""
        (piece,) = task.pieces
        bytes_ = piece.rows * self._travelling_of(piece) * self.size.element_bytes
        if task.is_inside:
            rate = self.machine.peer_stores * 1e3
            if task.after:  # from the first round of tiles on
                first = self.spans_of(task.after[0])[0].begin + self._round_us()
                end = max(begin + min(bytes_, self._round_bytes()) / rate, max(first, self.free["links"]) + bytes_ / rate)
                end += self.machine.wait_us
                self.spans.append(Span(task, piece, "links", first, end))
                return first, end
            end = begin + bytes_ / rate + self.machine.wait_us
        else:
            begin = max(begin, self.free["links"])
            end = begin + self.machine.move_us + bytes_ / self.machine.peer_copies / 1e3
        self.spans.append(Span(task, piece, "links", begin, end))
        return begin, end

    def spans_of(self, number: int) -> list[Span]:
        return [span for span in self.spans if span.task is self.plan[number]]

    def _compute(self, begin: float, task: Task, ends: dict[Piece, float]) -> float:
        if task.kind is Kind.combine:
            return self._combine(begin, task, ends)
        arrivals = dict(zip(task.pieces[-len(task.arrivals) :], self._arrivals(task), strict=True)) if task.arrivals else {}
        is_kernel, at = self.schedule.is_one_product, begin + self.machine.tile_us
        for piece in task.pieces:
            came = arrivals.get(piece, 0.0) if self.size.pair.moves_first else 0.0
            first = max(at, came + (self.machine.wait_us if came else 0.0))
            at = first + self._computation_us(piece, is_kernel, is_part=len(task.pieces) > 1)
            ends[piece] = at
            self.spans.append(Span(task, piece, task.lane.value, first, at))
        if len(task.pieces) > 1:  # the last round of tiles is not full
            at += 0.5 * self._round_us()
        return at

    def _combine(self, begin: float, task: Task, ends: dict[Piece, float]) -> float:
        arrivals = self._arrivals(task)
        pair, machine, end = self.size.pair, self.machine, begin
        if pair is Pair.gemm_reduce_scatter and not task.is_inside:
            (own,) = task.pieces
            share = 1 / len(arrivals)
            at = begin + machine.tile_us
            for came in arrivals:  # own rows of a piece, when the peers' have come
                at = max(at, came + machine.wait_us) + share * self._computation_us(own, True, is_part=True)
            end = at + 0.5 * self._round_us()
        elif pair is Pair.gemm_all_reduce:
            (piece,) = task.pieces
            bytes_ = self.size.link_bytes * piece.rows / self.size.rows
            end = max(begin, self.free["links"]) + machine.collective_us / 3 + bytes_ / machine.peer_stores / 1e3
            self.free["links"] = end
        elif pair is Pair.gemm_all_to_all and not task.is_inside:
            (piece,) = task.pieces
            end = max([begin, *arrivals]) + 2 * piece.rows * self.size.columns * self.size.element_bytes / machine.memory / 1e3
        else:
            end = max([begin, *arrivals])
        self.spans.append(Span(task, task.pieces[0], task.lane.value, begin, end))
        for piece in task.pieces:
            ends[piece] = end
        return end

    def _travelling_of(self, piece: Piece) -> float:
        return self.size.travelling / self.schedule.depth_parts if self.size.pair.moves_first else self.size.travelling

    def _computation_us(self, piece: Piece, is_kernel: bool, is_part: bool) -> float:
        """Of a piece; ``is_part``: tiles of other pieces fill its last round."""
        size, machine = self.size, self.machine
        if size.pair is Pair.embedding_all_to_all:
            share = machine.kernel_lookup_share if is_kernel else machine.lookup_share
            return size.memory_bytes * piece.rows / size.rows / machine.memory / 1e3 / share
        parts = self.schedule.depth_parts if piece.shift else 1
        depth = size.depth / parts
        memory = (piece.rows * depth + size.columns * depth + piece.rows * size.columns) * size.element_bytes
        floor = memory / machine.memory / 1e3
        speed = machine.teraflops * (machine.kernel_share if is_kernel else 1.0)
        if is_part:
            return max(floor, 2 * piece.rows * size.columns * depth / speed / 1e6) * self.slowed
        return max(floor, product_us(piece.rows, size.columns, depth, speed, machine.multiprocessors)) * self.slowed

    def _round_us(self) -> float:
        """Of one tile on every multiprocessor."""
        speed = self.machine.teraflops / self.machine.multiprocessors
        return 2 * 128 * 256 * self.size.depth / speed / 1e6 if self.size.pair is not Pair.embedding_all_to_all else 2.0

    def _round_bytes(self) -> float:
        return self.machine.multiprocessors * 128 * 256 * self.size.element_bytes

    def _library_us(self) -> float:
        return self.size.link_bytes / (self.machine.peer_copies * self.machine.library_share) / 1e3


def product_us(rows: int, columns: int, depth: float, teraflops: float, multiprocessors: int) -> float:
    """Of the library, which takes the tiles that suit."""

    def of_tiles(tile: tuple[int, int, float]) -> float:
        tile_rows, tile_columns, share = tile
        rounds = -(-(-(-rows // tile_rows) * -(-columns // tile_columns)) // multiprocessors)
        return rounds * 2 * tile_rows * tile_columns * depth * multiprocessors / teraflops / 1e6 / share

    return min(map(of_tiles, _TILES))
