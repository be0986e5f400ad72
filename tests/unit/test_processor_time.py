"""The bound on the processor time of tests counts every process and fails the session beyond it."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.distributed.launch import run_ranks
from tests.processor_time import MOST_SECONDS_OF_A_TEST, ProcessorTime, processor_seconds


def compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def compute_in_a_child(seconds: float) -> None:
    child = os.fork()
    if child == 0:
        compute(seconds)
        os._exit(0)
    os.waitpid(child, 0)


def compute_on_two_ranks(seconds: float) -> None:
    run_ranks(2, compute, seconds / 2)


@pytest.mark.parametrize("work", [compute, compute_in_a_child, compute_on_two_ranks])
def test_time_of_this_process_of_its_children_and_of_ranks_counts(work: Any) -> None:
    run_ranks(1, compute, 0.0)  # starts the server that forks ranks
    before = processor_seconds()
    work(0.4)
    assert processor_seconds() - before >= 0.35


def test_waiting_does_not_count() -> None:
    before = processor_seconds()
    time.sleep(0.3)
    assert processor_seconds() - before < 0.2


def after_a_test(most_seconds: float | None, seconds: float, *marks: str) -> tuple[int, list[str]]:
    """Return the status of a session in which one test took so many seconds, and what is printed about it."""
    plugin = ProcessorTime(most_seconds)
    printed: list[str] = []
    report = SimpleNamespace(nodeid="test_x.py::test_y", keywords=dict.fromkeys(marks, 1), processor_seconds=seconds)
    plugin.pytest_runtest_logreport(cast(Any, report))
    plugin.pytest_testnodedown(SimpleNamespace(workeroutput={"processor_seconds": seconds}))
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=pytest.ExitCode.OK)
    plugin.pytest_sessionfinish(cast(Any, session))
    terminal = SimpleNamespace(section=printed.append, line=lambda line, **_: printed.append(line))
    plugin.pytest_terminal_summary(terminal)
    return session.exitstatus, printed


FAR_BEYOND = 100 * MOST_SECONDS_OF_A_TEST


@pytest.mark.parametrize("most_seconds", [None, 1e9])
def test_within_the_bounds_the_longest_files_and_tests_are_told_and_no_more(most_seconds: float | None) -> None:
    status, printed = after_a_test(most_seconds, 1.0)
    assert status == pytest.ExitCode.OK
    assert printed[1:] == ["   1.0 s  test_x.py", "   1.0 s  test_x.py::test_y"]


def test_a_session_beyond_its_bound_fails() -> None:
    status, printed = after_a_test(0.001, 5.0)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert "more than" in printed[-1]
    assert "the bound in the Makefile" in printed[-1]


def test_a_long_test_without_a_mark_fails_the_session_and_is_named() -> None:
    status, printed = after_a_test(1e9, FAR_BEYOND)
    assert status == pytest.ExitCode.TESTS_FAILED
    assert printed[-1].startswith("test_x.py::test_y took")


@pytest.mark.parametrize("mark", ["slow", "exhaustive"])
def test_a_test_that_is_marked_may_be_long(mark: str) -> None:
    assert after_a_test(1e9, FAR_BEYOND, mark)[0] == pytest.ExitCode.OK
