"""Plans of schedules: what holds of all, whatever the pair, the ranks and the rows; and how a rank starts their tasks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlrm_fused.ops.schedules import MOST_PIECES, SCHEDULES, Kind, Lane, Mover, Pair, Piece, Schedule, Streams, Task, make_plan
from dlrm_fused.ops.schedules.piece_flags import ends_of
from dlrm_fused.ops.schedules.plan import ROW_UNIT, Plan, cut

GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter
BLOCKS, SUMS = Pair.gemm_all_to_all, Pair.gemm_all_reduce
# In pieces, of which each rank has one of every other.
OF_SHARDS = [schedule for schedule in SCHEDULES.values() if schedule.mover in (Mover.same_kernel, Mover.copy_engine)]
PLANS = [
    *((pair, schedule) for pair in (GATHER, SCATTER, BLOCKS) for schedule in OF_SHARDS),
    (SUMS, SCHEDULES["kernel"]),
]
# Fewer rows than pieces; of whole tiles, and not.
ROWS = (1, 7, 100, 1024, 5000)


def ids(value: object) -> str | None:
    return value.name if isinstance(value, Schedule) else None


by_plan = pytest.mark.parametrize(("pair", "schedule"), PLANS, ids=ids)


def plans(pair: Pair, schedule: Schedule) -> Iterable[tuple[int, int, Plan]]:
    """With the numbers of ranks and of rows of a shard."""
    for ranks, rows in itertools.product((2, 3, 4), ROWS):
        yield ranks, rows, make_plan(pair, schedule, ranks, rows)


def tasks(plan: Plan, *kinds: Kind) -> list[tuple[int, Task]]:
    return [(number, task) for number, task in enumerate(plan) if task.kind in kinds]


def products(plan: Plan) -> list[tuple[int, Piece]]:
    """Pieces in the order in which they are computed, with the number of the task."""
    computed = [(number, piece) for number, task in tasks(plan, Kind.compute) for piece in task.pieces]
    if any(piece.shift == 0 for _, piece in computed):
        return computed
    # Own rows are computed where what has come is added to them.
    return [*computed, *((number, piece) for number, task in tasks(plan, Kind.combine) for piece in task.pieces)]


def rows_of(pieces: Iterable[Piece], shift: int) -> list[int]:
    """Return the rows of a peer's shard that pieces cover, in order, each as often as it is covered."""
    own = [piece for piece in pieces if piece.shift == shift]
    return sorted(row for piece in own for row in range(piece.first, piece.last))


def is_after(plan: Plan, later: int, earlier: int) -> bool:
    """Whether a task cannot begin before another has ended: tasks follow those before them in their lane, and ``after``."""
    before = {later}
    for number in range(later, -1, -1):
        if number in before:
            of_lane = [other for other in range(number) if plan[other].lane is plan[number].lane]
            before |= {*plan[number].after, *of_lane[-1:]}
    return earlier in before


@by_plan
def test_every_row_of_every_shard_is_computed_once(pair: Pair, schedule: Schedule) -> None:
    for ranks, rows, plan in plans(pair, schedule):
        pieces = [piece for _, piece in products(plan)]
        assert rows_of(pieces, shift=0) == list(range(rows))
        for shift in range(1, ranks):
            assert rows_of(pieces, shift) == list(range(rows))
        assert max(piece.shift for piece in pieces) == ranks - 1


@by_plan
def test_every_row_moves_once_to_each_peer_and_none_to_this_rank(pair: Pair, schedule: Schedule) -> None:
    for ranks, rows, plan in plans(pair, schedule):
        moved = [piece for _, task in tasks(plan, Kind.move) for piece in task.pieces]
        for shift in range(1, ranks):
            assert rows_of(moved, shift) == list(range(rows))
        assert {piece.shift for piece in moved} == set(range(1, ranks))


@by_plan
def test_a_mark_follows_each_move_unless_a_kernel_tells_itself(pair: Pair, schedule: Schedule) -> None:
    for _, _, plan in plans(pair, schedule):
        moves = [(number, task) for number, task in tasks(plan, Kind.move) if not task.is_inside]
        assert len(tasks(plan, Kind.mark)) == len(moves)
        for number, move in moves:
            mark = plan[number + 1]
            assert (mark.kind, mark.lane, mark.pieces) == (Kind.mark, move.lane, move.pieces)


@by_plan
def test_flags_of_the_pieces_of_a_peer_are_different_and_there_is_room_for_them(pair: Pair, schedule: Schedule) -> None:
    for ranks, _, plan in plans(pair, schedule):
        for shift in range(1, ranks):
            moved = [task.pieces[0] for _, task in tasks(plan, Kind.move) if task.pieces[0].shift == shift]
            flags = [piece.number for piece in moved]
            assert len(set(flags)) == len(flags)
            assert set(flags) <= set(range(MOST_PIECES))


@by_plan
def test_nothing_moves_before_the_peers_can_receive(pair: Pair, schedule: Schedule) -> None:
    for _, _, plan in plans(pair, schedule):
        ((begin, _),) = tasks(plan, Kind.begin)
        assert all(is_after(plan, number, begin) for number, _ in tasks(plan, Kind.move))


@pytest.mark.parametrize(("pair", "schedule"), [plan for plan in PLANS if plan[0] is not GATHER], ids=ids)
def test_a_result_moves_when_it_has_been_computed(pair: Pair, schedule: Schedule) -> None:
    for _, _, plan in plans(pair, schedule):
        for number, task in tasks(plan, Kind.move):
            (computed,) = [other for other, piece in products(plan) if piece == task.pieces[0]]
            assert is_after(plan, number, computed)


@by_plan
def test_what_a_peer_has_sent_is_used_when_it_has_come(pair: Pair, schedule: Schedule) -> None:
    """A piece is awaited once, with the peer's move or mark of it: by the task that uses it, or by a gate before that."""
    for _, _, plan in plans(pair, schedule):
        uses = tasks(plan, Kind.compute) if pair is GATHER else tasks(plan, Kind.combine)
        sent = [piece for _, task in tasks(plan, Kind.move) for piece in task.pieces]
        awaited = [piece for task in plan for number in task.arrivals for piece in plan[number].pieces]
        assert Counter(awaited) == Counter(sent)
        for number, task in uses:
            gates = [gate for gate, other in tasks(plan, Kind.gate) if is_after(plan, number, gate)]
            arrived = {piece for waiting in (number, *gates) for i in plan[waiting].arrivals for piece in plan[i].pieces}
            needed = sent if pair in (SCATTER, SUMS) else [piece for piece in task.pieces if piece.shift]
            assert set(needed) <= arrived


@by_plan
def test_nobody_waits_for_a_later_task(pair: Pair, schedule: Schedule) -> None:
    """So ranks that start their tasks in this order never wait for each other in a circle."""
    for _, _, plan in plans(pair, schedule):
        for number, task in enumerate(plan):
            assert all(0 <= other < number for other in (*task.after, *task.arrivals))
            assert all(plan[other].kind in (Kind.move, Kind.mark) for other in task.arrivals)
            assert task.is_inside or all(not plan[other].is_inside for other in task.after)


@by_plan
def test_own_rows_are_computed_first_where_shards_travel_and_last_where_results_do(pair: Pair, schedule: Schedule) -> None:
    for _, _, plan in plans(pair, schedule):
        shifts = [piece.shift for _, piece in products(plan)]
        own = shifts.index(0)
        assert own == (0 if pair.moves_first else len(shifts) - 1)


@by_plan
def test_all_links_are_busy_from_the_start(pair: Pair, schedule: Schedule) -> None:
    """A piece goes to every peer before a second one goes to any."""
    for ranks, _, plan in plans(pair, schedule):
        shifts = [task.pieces[0].shift for _, task in tasks(plan, Kind.move)]
        assert shifts == [*range(1, ranks)] * (len(shifts) // (ranks - 1))


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("pair", "schedule"), PLANS, ids=ids)
def test_destinations_of_different_ranks_are_different(pair: Pair, schedule: Schedule, ranks: int) -> None:
    """Messages that all ranks send with one shift reach each rank once."""
    for _, task in tasks(make_plan(pair, schedule, ranks, 1024), Kind.move):
        (piece,) = task.pieces
        assert {(rank + piece.shift) % ranks for rank in range(ranks)} == set(range(ranks))


@by_plan
def test_a_call_ends_when_its_moves_have(pair: Pair, schedule: Schedule) -> None:
    for _, _, plan in plans(pair, schedule):
        assert all(is_after(plan, len(plan) - 1, number) for number, task in tasks(plan, Kind.move) if not task.is_inside)


@by_plan
def test_copies_are_beside_and_what_is_computed_is_not(pair: Pair, schedule: Schedule) -> None:
    for _, _, plan in plans(pair, schedule):
        for task in plan:
            if task.kind in (Kind.compute, Kind.combine, Kind.gate, Kind.end):
                assert task.lane is Lane.main
            elif task.kind in (Kind.move, Kind.mark) and not task.is_inside:
                assert task.lane is Lane.beside


@pytest.mark.parametrize("parts", [(1,), (1, 1), (1, 1, 1, 1)])
def test_pieces_of_a_sum_travel_to_who_adds_them_up_and_back(parts: tuple[int, ...]) -> None:
    for ranks, rows, plan in plans(SUMS, Schedule("sums", Mover.copy_engine, parts)):
        bounds, shifts = list(enumerate(cut(rows, parts))), range(1, ranks)
        remote = [Piece(shift, *ends, number) for number, ends in bounds for shift in shifts]
        returned = [Piece(shift, *ends, len(bounds) + number) for number, ends in bounds for shift in shifts]
        assert [task.pieces[0] for _, task in tasks(plan, Kind.compute)] == remote
        assert [task.pieces[0] for _, task in tasks(plan, Kind.move)] == [*remote, *returned]
        made = {task.pieces[0]: number for number, task in tasks(plan, Kind.compute)}
        combined = {task.pieces[0]: (number, task) for number, task in tasks(plan, Kind.combine)}
        for number, ends in bounds:
            added, task = combined[Piece(0, *ends, number)]
            assert {plan[mark].pieces[0] for mark in task.arrivals} == {Piece(shift, *ends, number) for shift in shifts}
            made |= {Piece(shift, *ends, len(bounds) + number): added for shift in shifts}
        for number, task in tasks(plan, Kind.move):
            assert is_after(plan, number, made[task.pieces[0]])
            assert (plan[number + 1].kind, plan[number + 1].pieces) == (Kind.mark, task.pieces)
        for piece in returned:  # awaited, then put where it belongs
            number, _ = combined[piece]
            gate = plan[number - 1]
            assert (gate.kind, gate.pieces, {plan[mark].pieces[0] for mark in gate.arrivals}) == (Kind.gate, (piece,), {piece})
        assert all(is_after(plan, len(plan) - 1, number) for number, _ in tasks(plan, Kind.move))


@pytest.mark.parametrize("parts", [(1,), (1, 1), (1, 1, 1, 1)])
def test_a_chunk_is_summed_while_the_next_is_multiplied(parts: tuple[int, ...]) -> None:
    for _, rows, plan in plans(SUMS, Schedule("sums", Mover.other_kernel, parts)):
        bounds = cut(rows, parts)
        computed, summed = tasks(plan, Kind.compute), tasks(plan, Kind.combine)
        pieces = [(Piece(0, first, last, number),) for number, (first, last) in enumerate(bounds)]
        assert [task.pieces for _, task in computed] == [task.pieces for _, task in summed] == pieces
        for (multiplied, _), (number, task) in zip(computed, summed, strict=True):
            assert task.after == (multiplied,)
            assert task.lane is (Lane.beside if len(bounds) > 1 else Lane.main)
            assert is_after(plan, len(plan) - 1, number)


@settings(deadline=None)
@given(
    pair=st.sampled_from([GATHER, SCATTER, BLOCKS]),
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    is_one_product=st.booleans(),
    ranks=st.integers(1, 6),
    rows=st.integers(1, 3000),
)
def test_schedules_of_any_parts_do_the_whole_work(
    pair: Pair, parts: list[int], is_one_product: bool, ranks: int, rows: int
) -> None:
    schedule = Schedule("any", Mover.copy_engine, tuple(parts), is_one_product=is_one_product)
    plan = make_plan(pair, schedule, ranks, rows)
    computed, moved = [piece for _, piece in products(plan)], [task.pieces[0] for _, task in tasks(plan, Kind.move)]
    for shift in range(ranks):
        assert rows_of(computed, shift) == list(range(rows))
        assert rows_of(moved, shift) == (list(range(rows)) if shift else [])


# Pieces of rows.


@given(rows=st.integers(1, 100_000), parts=st.lists(st.integers(1, 100), min_size=1, max_size=9))
@example(rows=350, parts=[20, 1])  # the whole tile next to 333 ends beyond the rows
def test_pieces_follow_each_other_cover_all_rows_and_are_not_empty(rows: int, parts: list[int]) -> None:
    bounds = cut(rows, parts)
    assert [first for first, _ in bounds] == [0, *(last for _, last in bounds[:-1])]
    assert bounds[-1][1] == rows
    assert all(first < last for first, last in bounds)
    assert len(bounds) <= len(parts)
    assert ends_of(bounds) == tuple(last for _, last in bounds)


@given(rows=st.integers(1, 100_000), parts=st.lists(st.integers(1, 100), min_size=1, max_size=9))
def test_pieces_begin_at_whole_tiles_where_there_is_one_for_each(rows: int, parts: list[int]) -> None:
    if rows >= ROW_UNIT * len(parts):
        assert all(first % ROW_UNIT == 0 for first, _ in cut(rows, parts))


@given(units=st.integers(1, 50), parts=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_pieces_of_whole_tiles_have_the_sizes_that_are_asked_for(units: int, parts: list[int]) -> None:
    bounds = cut(units * ROW_UNIT * sum(parts), parts)
    assert [last - first for first, last in bounds] == [units * ROW_UNIT * part for part in parts]


def test_fewer_rows_than_pieces_are_a_row_each() -> None:
    assert cut(3, (1,) * 8) == [(0, 1), (1, 2), (2, 3)]


# What is refused.


@pytest.mark.parametrize("pair", [GATHER, SCATTER, BLOCKS])
def test_another_kernel_moves_sums_for_all_ranks_alone(pair: Pair) -> None:
    with pytest.raises(ValueError, match=rf"^{pair}: schedule sums_beside adds up over the ranks; of gemm_all_reduce alone$"):
        make_plan(pair, SCHEDULES["sums_beside"], 4, 1024)


def test_sums_for_all_ranks_are_of_several_products() -> None:
    with pytest.raises(ValueError, match=r"^gemm_all_reduce: schedule arriving: copy engines take products of pieces"):
        make_plan(SUMS, SCHEDULES["arriving"], 4, 1024)


@pytest.mark.parametrize("parts", [(), (1, 0), (1, -1)])
def test_a_schedule_of_no_pieces_is_refused(parts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"schedule none: parts=.*; needed: one part at least, of 1 or more"):
        Schedule("none", Mover.copy_engine, parts)


# The executor, on the CPU.


@by_plan
def test_a_rank_starts_every_task_once_in_order_but_those_inside_kernels(pair: Pair, schedule: Schedule) -> None:
    for _, _, plan in plans(pair, schedule):
        started: list[Task] = []
        Streams(torch.device("cpu")).run(plan, dict.fromkeys(Kind, started.append))
        assert list(map(id, started)) == [id(task) for task in plan if not task.is_inside]


def started_by(plan: Plan, kinds: Sequence[Kind]) -> list[Kind]:
    started: list[Kind] = []
    Streams(torch.device("cpu")).run(plan, dict.fromkeys(kinds, lambda task: started.append(task.kind)))
    return started


def test_kinds_without_an_action_are_passed_over() -> None:
    plan = make_plan(GATHER, SCHEDULES["chunks"], 3, 8)
    assert started_by(plan, [Kind.begin, Kind.compute]) == [Kind.begin, *[Kind.compute] * 3]
    assert started_by(plan, []) == []


def test_a_kernel_that_moves_is_all_that_is_started() -> None:
    for pair in (GATHER, SCATTER):
        plan = make_plan(pair, SCHEDULES["kernel"], 4, 8)
        assert started_by(plan, list(Kind)) == [Kind.compute]


def test_the_cpu_has_no_stream_beside() -> None:
    assert Streams(torch.device("cpu")).beside is None
