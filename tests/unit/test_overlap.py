"""What parts that run beside each other cost: against hand-drawn timelines, and against a count of single moments."""

from __future__ import annotations

import random

import pytest

from dlrm_fused.training.step_timer import Times, busy_and_exposed

Intervals = list[tuple[str, float, float]]


@pytest.mark.parametrize(
    ("intervals", "expected", "idle"),
    [
        ([], {}, 10),
        ([("a", 0, 10)], {"a": Times(10, 10)}, 0),
        ([("a", 1, 3), ("b", 3, 7)], {"a": Times(2, 2), "b": Times(4, 4)}, 4),
        ([("a", 1, 5), ("b", 3, 7)], {"a": Times(4, 2), "b": Times(4, 2)}, 4),
        ([("a", 1, 9), ("b", 3, 7)], {"a": Times(8, 4), "b": Times(4, 0)}, 2),
        ([("a", 1, 2), ("a", 4, 6)], {"a": Times(3, 3)}, 7),
        ([("a", 1, 5), ("a", 3, 7)], {"a": Times(6, 6)}, 4),
        ([("a", -5, 2), ("b", 8, 12)], {"a": Times(2, 2), "b": Times(2, 2)}, 6),
        ([("a", -5, -1), ("b", 10, 12), ("c", 4, 4)], {"a": Times(), "b": Times(), "c": Times()}, 10),
    ],
    ids=["none", "all the time", "in turn", "overlapping", "hidden", "twice", "beside itself", "cut off", "outside"],
)
def test_timelines(intervals: Intervals, expected: dict[str, Times], idle: float) -> None:
    for order in (intervals, intervals[::-1]):
        assert busy_and_exposed(order, 0, 10) == (expected, idle)


@pytest.mark.parametrize("seed", range(20))
def test_is_what_counting_single_moments_gives(seed: int) -> None:
    random.seed(seed)
    begin, end = 5, 45
    intervals = [(part, *sorted(random.choices(range(50), k=2))) for part in random.choices("abcd", k=8)]
    moments = [{part for part, first, last in intervals if first <= moment < last} for moment in range(begin, end)]
    times, idle = busy_and_exposed(intervals, begin, end)
    assert idle == sum(not running for running in moments)
    for part in {part for part, *_ in intervals}:
        assert times[part] == Times(sum(part in running for running in moments), sum({part} == running for running in moments))
