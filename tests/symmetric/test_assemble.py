"""Ranks that wait for all on the host, between processes on the CPU."""

from __future__ import annotations

import re
import time

import pytest

from dlrm_fused.errors import CommunicationError
from dlrm_fused.symmetric import Channel
from tests.distributed.launch import cpu_group, run_ranks


def first_and_last_of_meetings() -> list[float]:
    """On a rank: when it has left each meeting, to which another rank comes last."""
    with cpu_group() as group:
        channel, left = Channel(group, "meetings", 60.0), []
        for number in range(3):
            time.sleep(0.3 if group.rank == number else 0.0)
            came = time.monotonic()
            channel.assemble()
            left.append(time.monotonic())
            assert all(left[-1] >= last for last in group.gather(lambda came=came: came))
        return left


def test_no_rank_goes_on_before_all_have_come() -> None:
    assert [len(left) for left in run_ranks(3, first_and_last_of_meetings)] == [3, 3, 3]


def told_where_rank_2_is_late() -> str:
    with cpu_group() as group:
        channel = Channel(group, "meetings", 1.0)
        channel.assemble()
        if group.rank == 2:
            time.sleep(2.5)
        with pytest.raises(CommunicationError) as told:
            channel.assemble()
        group.gather(lambda: None)  # which none has left for the meeting
        return str(told.value)


def test_a_rank_that_comes_too_late_does_not_go_on_alone() -> None:
    *others, late = run_ranks(3, told_where_rank_2_is_late)
    for told in others:
        assert re.search(r"waited for rank 2 .*, longer than 1 s|a call has failed on rank [01]", told)
    assert re.search(r"a call has failed on rank [01]", late)


def told_where_rank_1_refuses() -> str:
    with cpu_group() as group:
        channel = Channel(group, "meetings", 60.0)
        if group.rank == 1:
            channel.refuse()
        with pytest.raises(CommunicationError) as told:
            channel.assemble()
        group.gather(lambda: None)
        return str(told.value)


def test_a_rank_that_refuses_ends_the_wait() -> None:
    for told in run_ranks(2, told_where_rank_1_refuses):
        assert "rank 1" in told
        assert "did not take part because of an error" in told
