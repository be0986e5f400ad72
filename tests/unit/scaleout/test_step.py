"""A step in time: streams keep their order, tasks wait for what they name, and communication shares the network."""

from __future__ import annotations

import json

import pytest

from dlrm_fused.errors import UsageError
from dlrm_fused.scaleout.collectives import all_reduce_ring, all_to_all_direct
from dlrm_fused.scaleout.step import Communicate, Compute, ComputeAndSend, Task, Timeline, simulate
from dlrm_fused.scaleout.topologies import Pattern, Switch

# 3 of 4 parts of 80 bytes leave a rank at 10 bytes/s: 6 s.
FOUR_RANKS = Switch(4, 10.0, 0.25)
ALL_TO_ALL = Communicate(all_to_all_direct(FOUR_RANKS, 80))


def fused(seconds: float, slices: int) -> ComputeAndSend:
    """A lookup whose result is that All-to-All's."""
    return ComputeAndSend(seconds, FOUR_RANKS.flows(Pattern.all_pairs), 20, slices)


def duration(work: Compute | Communicate | ComputeAndSend) -> float:
    return simulate([Task("work", "main", work)], FOUR_RANKS).seconds


def test_tasks_of_a_stream_follow_one_another() -> None:
    timeline = simulate([Task("first", "main", Compute(1)), Task("second", "main", Compute(2))], FOUR_RANKS)
    assert (timeline["second"].start, timeline.seconds) == (1, 3)


def test_communication_runs_beside_computation_and_is_waited_for() -> None:
    timeline = simulate(
        [
            Task("lookup", "main", Compute(1)),
            Task("all-to-all", "communication", ALL_TO_ALL, after=("lookup",)),
            Task("bottom MLP", "main", Compute(2)),
            Task("interaction", "main", Compute(1), after=("all-to-all",)),
        ],
        FOUR_RANKS,
    )
    assert timeline["interaction"].start == pytest.approx(1 + 6.25)
    assert [span.task.name for span in timeline.critical_path()] == ["lookup", "all-to-all", "interaction"]


def test_two_collectives_at_once_share_the_links() -> None:
    timeline = simulate(
        [
            Task("all-to-all", "one", ALL_TO_ALL),
            Task("all-reduce", "another", Communicate(all_reduce_ring(FOUR_RANKS, 40))),
        ],
        FOUR_RANKS,
    )
    # A ring has one flow a port where the All-to-All has three: a quarter of the port each, until the All-to-All has sent all.
    assert timeline["all-to-all"].end == pytest.approx(8 + 0.25)
    half_of_the_all_reduce = 3 * 10  # bytes of a port; 20 have been sent in these 8 s
    assert timeline["all-reduce"].end == pytest.approx(8 + 1 + 3 * 0.25 + half_of_the_all_reduce / 10 + 3 * 0.25)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        pytest.param(60, 60 + 6 / 6 + 0.25, id="bound by the lookup: the last slice follows it"),
        pytest.param(0.6, 0.6 / 6 + 6 + 0.25, id="bound by the link: it starts with the first slice"),
    ],
)
def test_a_fused_operator_hides_the_shorter_of_computation_and_communication(seconds: float, expected: float) -> None:
    assert duration(fused(seconds, slices=6)) == pytest.approx(expected)
    unfused = simulate([Task("lookup", "main", Compute(seconds)), Task("all-to-all", "main", ALL_TO_ALL)], FOUR_RANKS)
    assert unfused.seconds == pytest.approx(seconds + 6.25)


def test_one_slice_is_no_fusion() -> None:
    assert duration(fused(3, slices=1)) == pytest.approx(3 + 6.25)


def test_the_trace_has_every_task_on_its_stream_in_microseconds() -> None:
    timeline = simulate([Task("lookup", "main", Compute(1)), Task("all-to-all", "wire", ALL_TO_ALL, ("lookup",))], FOUR_RANKS)
    events = json.loads(json.dumps(timeline.trace_events()))["traceEvents"]
    streams = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(event["name"], streams[event["tid"]], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [("lookup", "main", 0, 1e6), ("all-to-all", "wire", 1e6, pytest.approx(6.25e6))]


def test_a_step_without_tasks_takes_no_time() -> None:
    timeline: Timeline = simulate([], FOUR_RANKS)
    assert (timeline.seconds, timeline.critical_path()) == (0, [])


def test_names_are_unique() -> None:
    with pytest.raises(UsageError, match="two tasks are named 'lookup'"):
        simulate(2 * [Task("lookup", "main", Compute(1))], FOUR_RANKS)


def test_a_task_comes_after_earlier_ones() -> None:
    with pytest.raises(UsageError, match=r"task 'interaction' comes after \['lookup'\]"):
        simulate([Task("interaction", "main", Compute(1), after=("lookup",))], FOUR_RANKS)
