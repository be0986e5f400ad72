"""The tasks of one call, in the order in which a rank starts them: what a schedule means for a pair and a number of ranks.

All ranks make the same plan, each with its own peers: with ``shift`` s a rank sends to rank + s, and receives from rank - s.
So while a rank's move of shift s is on its way, what it receives with that shift is too, and a task that waits for a peer's
move is described by the rank's own move of the same piece.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dlrm_fused.ops.schedules.schedule import Mover, Pair, Schedule

# Pieces begin at multiples of so many rows, where they have as many: the rows of a tile of a matrix product.
ROW_UNIT = 128


class Kind(enum.StrEnum):
    """The work of a task."""

    begin = "begin"  # meets the peers, which can receive then
    compute = "compute"
    move = "move"
    mark = "mark"  # tells the peer that a piece has come
    gate = "gate"  # waits until a piece has come
    combine = "combine"  # puts what has come where it belongs, or adds it up
    end = "end"  # the caller's stream waits for this rank's last move


class Lane(enum.StrEnum):
    """The stream on which a task runs: tasks of a lane follow each other."""

    main = "main"  # the caller's stream
    beside = "beside"  # a stream of its own, of moves and of what tells of them: a copy engine makes all copies one by one


class Piece(NamedTuple):
    """A part of the rows that go to, or come from, one rank.

    Attributes:
        shift: of the rank; 0 is this one.
        first, last: rows of the shard, ``last`` exclusive.
        number: of the piece among those of its rank.
    """

    shift: int
    first: int
    last: int
    number: int = 0

    @property
    def rows(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Task:
    """One step of a call.

    Attributes:
        pieces: with which it deals, in that order.
        after: earlier tasks of the other lane for which it waits; of a task of several pieces, for that of its own piece.
        arrivals: by which the peers send what it needs: moves, or their marks, of its pieces in their order; none for own ones.
        is_inside: whether the kernel of another task does it, in which case nothing is to be started for it.
    """

    kind: Kind
    lane: Lane
    pieces: tuple[Piece, ...] = ()
    after: tuple[int, ...] = ()
    arrivals: tuple[int, ...] = ()
    is_inside: bool = False


Tasks = tuple[Task, ...]


class Plan(Tasks):
    """The tasks of one call.

    Attributes:
        started: those that are to be started, with their numbers.
        awaited: the numbers of those for which others wait.
    """

    @functools.cached_property
    def started(self) -> list[tuple[int, Task]]:
        return [(number, task) for number, task in enumerate(self) if not task.is_inside]

    @functools.cached_property
    def awaited(self) -> set[int]:
        return {number for _, task in self.started for number in task.after}


# Calls repeat a few shapes, step after step.
_KEPT_PLANS = 1024

# Not beside a product: its programs may fill all multiprocessors before the one that begins has found a place.
_BEGIN = Task(Kind.begin, Lane.main)


@functools.lru_cache(maxsize=_KEPT_PLANS)
def make_plan(pair: Pair, schedule: Schedule, ranks: int, shard_rows: int) -> Plan:
    """The tasks of a call.

    Args:
        shard_rows: rows that go from one rank to another; of an all-reduce by another kernel, those of the whole matrix.

    Raises:
        ValueError: the pair cannot be run so.
    """
    return Plan(_tasks(pair, schedule, ranks, shard_rows))


def _tasks(pair: Pair, schedule: Schedule, ranks: int, shard_rows: int) -> Tasks:
    if schedule.mover is Mover.other_kernel:
        if pair is not Pair.gemm_all_reduce:
            raise ValueError(f"{pair}: schedule {schedule.name} adds up over the ranks; of {Pair.gemm_all_reduce} alone")
        return _sums_beside(schedule, shard_rows)
    own = Piece(0, 0, shard_rows)
    remote = _pieces_of_peers(schedule, ranks, shard_rows)
    if schedule.mover is Mover.same_kernel:
        return _in_one_kernel(pair, own, remote)
    if pair is Pair.gemm_all_reduce:
        if schedule.is_one_product:
            raise ValueError(f"{pair}: schedule {schedule.name}: copy engines take products of pieces, not one of all")
        return _reduced(schedule, ranks, shard_rows, remote)
    return _gathered(schedule, own, remote) if pair.moves_first else _scattered(pair, own, remote)


def cut(rows: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each piece; pieces without rows are left out."""
    unit = ROW_UNIT if rows >= ROW_UNIT * len(parts) else 1
    ends = [min(rows, round(rows * end / sum(parts) / unit) * unit) for end in itertools.accumulate(parts)]
    bounds = [0, *ends[:-1], rows]
    return [(first, last) for first, last in itertools.pairwise(bounds) if first < last]


def _pieces_of_peers(schedule: Schedule, ranks: int, shard_rows: int) -> list[Piece]:
    """Return the pieces in the order of travel: one of every peer, then the next of each, so that all links are busy."""
    return [
        Piece(shift, first, last, number)
        for number, (first, last) in enumerate(cut(shard_rows, schedule.parts))
        for shift in range(1, ranks)
    ]


def _in_one_kernel(pair: Pair, own: Piece, remote: list[Piece]) -> Tasks:
    """One kernel meets the peers, moves and computes: shards before all, results piece by piece, own ones last."""
    begin, arrivals = replace(_BEGIN, is_inside=True), tuple(range(1, len(remote) + 1))
    if pair.moves_first:  # some programs move, while others multiply own rows
        moves = [Task(Kind.move, Lane.beside, (piece,), after=(0,), is_inside=True) for piece in remote]
        return (begin, *moves, Task(Kind.compute, Lane.main, (own, *remote), arrivals=arrivals))
    moves = [Task(Kind.move, Lane.beside, (piece,), after=(1,), is_inside=True) for piece in remote]
    came = tuple(i + 1 for i in arrivals)
    if pair is Pair.gemm_reduce_scatter:
        last = Task(Kind.combine, Lane.main, (own,), arrivals=came, is_inside=True)
        return (begin, Task(Kind.compute, Lane.main, tuple(remote)), *moves, last)
    if pair is Pair.gemm_all_reduce:  # each rank adds up its shard, and tells all
        last = Task(Kind.combine, Lane.main, (own,), arrivals=came)
    else:
        last = Task(Kind.gate, Lane.main, tuple(remote), arrivals=came, is_inside=True)
    return (begin, Task(Kind.compute, Lane.main, (*remote, own)), *moves, last)


def _gathered(schedule: Schedule, own: Piece, remote: list[Piece]) -> Tasks:
    """Shards travel, own first to be multiplied while they do."""
    tasks = [_BEGIN]
    marks = [_add_move(tasks, piece, after=(0,)) for piece in remote]
    if schedule.is_one_product:
        tasks.append(Task(Kind.compute, Lane.main, (own, *remote), arrivals=tuple(marks)))
    else:
        tasks.append(Task(Kind.compute, Lane.main, (own,)))
        for piece, mark in zip(remote, marks, strict=True):
            tasks.append(Task(Kind.gate, Lane.main, (piece,), arrivals=(mark,)))
            tasks.append(Task(Kind.compute, Lane.main, (piece,)))
    return (*tasks, Task(Kind.end, Lane.main, after=tuple(marks[-1:])))


def _scattered(pair: Pair, own: Piece, remote: list[Piece]) -> Tasks:
    """Results travel, while the next ones are computed; own ones are computed last."""
    # Meeting takes longer if other calls use the channel, too; the first move is after a product in any case.
    tasks = [_BEGIN if pair is Pair.gemm_reduce_scatter else Task(Kind.begin, Lane.beside)]
    marks: list[int] = []
    for piece in remote:
        tasks.append(Task(Kind.compute, Lane.main, (piece,)))
        marks.append(_add_move(tasks, piece, after=(len(tasks) - 1,)))
    if pair is Pair.gemm_reduce_scatter:  # the product of own rows is added to what has come, tile by tile
        tasks.append(Task(Kind.combine, Lane.main, (own,), arrivals=tuple(marks)))
    else:
        tasks.append(Task(Kind.compute, Lane.main, (own,)))
        for piece, mark in zip(remote, marks, strict=True):
            tasks.append(Task(Kind.gate, Lane.main, (piece,), after=(0,), arrivals=(mark,)))
            tasks.append(Task(Kind.combine, Lane.main, (piece,)))
    return (*tasks, Task(Kind.end, Lane.main, after=tuple(marks[-1:])))


def _reduced(schedule: Schedule, ranks: int, shard_rows: int, remote: list[Piece]) -> Tasks:
    """Products for the peers travel, own ones are added to what has come, and travel in turn: with later numbers."""
    tasks = [_BEGIN]
    bounds = cut(shard_rows, schedule.parts)
    came: list[list[int]] = [[] for _ in bounds]
    for piece in remote:
        tasks.append(Task(Kind.compute, Lane.main, (piece,)))
        came[piece.number].append(_add_move(tasks, piece, after=(len(tasks) - 1,)))
    returned: list[tuple[Piece, int]] = []
    for number, (first, last) in enumerate(bounds):
        own = Piece(0, first, last, number)
        tasks.append(Task(Kind.combine, Lane.main, (own,), arrivals=tuple(came[number])))
        added = len(tasks) - 1
        for shift in range(1, ranks):
            piece = Piece(shift, first, last, len(bounds) + number)
            returned.append((piece, _add_move(tasks, piece, after=(added,))))
    for piece, mark in returned:
        tasks.append(Task(Kind.gate, Lane.main, (piece,), arrivals=(mark,)))
        tasks.append(Task(Kind.combine, Lane.main, (piece,)))
    return (*tasks, Task(Kind.end, Lane.main, after=tuple(mark for _, mark in returned[-1:])))


def _add_move(tasks: list[Task], piece: Piece, after: tuple[int, ...] = ()) -> int:
    """Add a move and its mark; the number of the mark."""
    tasks.append(Task(Kind.move, Lane.beside, (piece,), after=after))
    tasks.append(Task(Kind.mark, Lane.beside, (piece,)))
    return len(tasks) - 1


def _sums_beside(schedule: Schedule, rows: int) -> Tasks:
    """A chunk of rows is summed over the ranks while the next one is multiplied."""
    tasks: list[Task] = []
    bounds = cut(rows, schedule.parts)
    lane = Lane.beside if len(bounds) > 1 else Lane.main
    for number, (first, last) in enumerate(bounds):
        piece = Piece(0, first, last, number)
        tasks.append(Task(Kind.compute, Lane.main, (piece,)))
        tasks.append(Task(Kind.combine, lane, (piece,), after=(len(tasks) - 1,)))
    return (*tasks, Task(Kind.end, Lane.main, after=(len(tasks) - 1,)))
