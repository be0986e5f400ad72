"""Processor time of the tests, with that of all processes that they start; a bound notices when tests grow.

A slow machine needs more of it, and so does one whose processors share a core with other work. So bounds are given in seconds
of a machine that does a fixed piece of work in 25 ms, and the piece is done again and again between the tests: how long it
takes then says how many seconds of this machine these are. Ranks that wait for each other spin; bounds leave room for that.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

# Seconds that _fixed_work takes on the machine for which bounds are given.
_RECORDED_SECONDS = 0.025
# Seconds between two pieces of fixed work of a process.
_BETWEEN_WORKS = 4.0
# One test without the mark `slow` may take so long there: the first of a worker starts the server, in 10 s.
MOST_SECONDS_OF_A_TEST = 40.0
_SHOWN_FILES, _SHOWN_TESTS = 30, 10
_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]


def processor_seconds() -> float:
    """Return the seconds of this process, of its ended children, and of the server that forks ranks, with its ended ranks."""
    seconds: float = sum(os.times()[:4])
    stat = Path(f"/proc/{_SERVER._forkserver_pid}/stat")
    if stat.exists():
        # utime, stime, cutime and cstime of proc(5); the name before them may have spaces.
        ticks = stat.read_text().rpartition(")")[2].split()[11:15]
        seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return seconds


def _fixed_work() -> float:
    """Return the seconds of processor time of a fixed piece of work."""
    began = time.process_time()
    total = 0
    for number in range(750_000):
        total += number & 7
    return time.process_time() - began


class ProcessorTime:
    """Plugin of pytest that tells the processor time of the session, and fails it beyond ``most_seconds``."""

    def __init__(self, most_seconds: float | None) -> None:
        self._most_seconds = most_seconds
        self._works = [_fixed_work()]
        self._last_work = time.monotonic()
        self._last = processor_seconds()
        self._of_workers = 0.0
        self._by_test: Counter[str] = Counter()
        self._slow: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        if time.monotonic() - self._last_work > _BETWEEN_WORKS:
            self._works.append(_fixed_work())
            self._last_work = time.monotonic()
        now = processor_seconds()
        # Sent to xdist's controller with the report.
        report.processor_seconds, self._last = now - self._last, now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_test[report.nodeid] += getattr(report, "processor_seconds", 0.0)
        if {"slow", "exhaustive"} & set(report.keywords):
            self._slow.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self._of_workers += output.get("processor_seconds", 0.0)
        self._works += output.get("works", [])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["processor_seconds"], output["works"] = processor_seconds(), self._works
        elif self._excess() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(f"processor time: {self._seconds():.0f} s, slowness {self._slowness():.2f}")
        by_file: Counter[str] = Counter()
        for test, seconds in self._by_test.items():
            by_file[test.split("::")[0]] += seconds
        for what, seconds in (*by_file.most_common(_SHOWN_FILES), *self._by_test.most_common(_SHOWN_TESTS)):
            terminalreporter.line(f"{seconds:6.1f} s  {what}")
        for line in self._excess():
            terminalreporter.line(line, red=True)

    def _seconds(self) -> float:
        # Workers have told their time; that they are children of this process must not count them once more.
        return self._of_workers + sum(os.times()[:2]) if self._of_workers else processor_seconds()

    def _slowness(self) -> float:
        """Return how many times longer than the bounds' machine this one computed during the session; at least 1."""
        return max(1.0, statistics.mean(self._works) / _RECORDED_SECONDS)

    def _excess(self) -> list[str]:
        """Return a line for each bound that the session has exceeded."""
        if self._most_seconds is None:
            return []
        lines, most = [], self._most_seconds * self._slowness()
        if self._seconds() > most:
            lines.append(
                f"The tests took {self._seconds():.0f} s of processor time, more than {most:.0f} s: make them shorter, mark "
                "long forms `slow`, or raise the bound in the Makefile and say why."
            )
        most = MOST_SECONDS_OF_A_TEST * self._slowness()
        for test, seconds in self._by_test.items():
            if seconds > most and test not in self._slow:
                lines.append(
                    f"{test} took {seconds:.0f} s of processor time, more than {most:.0f} s: shorten it or mark it `slow`."
                )
        return lines
