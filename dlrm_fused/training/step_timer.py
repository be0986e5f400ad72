"""A timer that measures how long the parts of a training step take, and which hold it up, without stalling the step."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dlrm_fused.clocks import CudaClock, HostClock

PARTS = ("data_wait", "input_dist", "embedding", "dense_forward", "backward", "optimizer")
# Parts timed by the host's clock: the host waits for data, and the device takes no part in that.
_HOST_PARTS = frozenset({"data_wait"})


@dataclass
class _Step:
    begin: Any
    end: Any = None
    intervals: list[tuple[str, HostClock, Any, Any]] = field(default_factory=list)


class StepTimer:
    """Mean milliseconds of the parts of a step, and of the whole step.

    ::

        with timer.part("backward"):
            loss.backward()
        timer.step_done()

    A part may run several times in a step (its times add up), on any stream, and parts may overlap: with a pipeline,
    the input dist of a later batch runs beside the backward pass of this one and counts for the step in which it runs.
    A step lasts from the end of the last one to its own end. On CUDA the times are those of the device, except for
    ``data_wait``; on the CPU those of the host.

    Args:
        every: only one in so many steps is measured; the events of a step cost the host some 0.2 ms on CUDA.
    """

    def __init__(self, device: torch.device, every: int = 1) -> None:
        self._every = every
        self._until_next = every
        self.is_measuring = True
        self._host = HostClock()
        self._clock = CudaClock() if device.type == "cuda" else self._host
        self._running: dict[str, Any] = {}
        self._step: _Step | None = None
        self._unread: deque[_Step] = deque()
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._steps_read = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the step."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def start(self, name: str) -> None:
        """Begin a part; for code that cannot use :meth:`part`, such as hooks."""
        if not self.is_measuring:
            return
        self._current_step()
        self._running[name] = self._clock_of(name).mark()

    def stop(self, name: str) -> None:
        """End a part that :meth:`start` began, on the same stream."""
        if not self.is_measuring:
            return
        begin = self._running.pop(name)
        clock = self._clock_of(name)
        self._current_step().intervals.append((name, clock, begin, clock.mark()))

    def step_done(self) -> None:
        """Close the step."""
        if self.is_measuring:
            step = self._current_step()
            step.end = self._clock.mark()
            self._unread.append(step)
            self._read_passed()
        self._until_next = self._until_next - 1 or self._every
        self.is_measuring = self._until_next == self._every
        self._step = _Step(begin=self._clock.mark()) if self.is_measuring else None

    def interrupt(self) -> None:
        """Leave the time until the next part out of the next step: call it after an evaluation or a checkpoint."""
        self._step = None
        self._running.clear()

    def summary(self) -> dict[str, float]:
        """Means over the steps that ended, on the device too, since the last summary: ``step_ms``, ``<part>_ms``.

        ``<part>_exposed_ms`` is the time of the step in which only this part of the device runs; ``idle_ms`` that in which none
        does. ``data_wait``, the host's, has no part in either. ``embedding_share`` is the part of the step that the embedding
        stage's forward pass takes, from 0 to 1. Empty when no step has ended.
        """
        self._read_passed()
        means = {f"{name}_ms": total / self._steps_read for name, total in self._totals.items()}
        if "embedding_ms" in means:
            means["embedding_share"] = means["embedding_ms"] / means["step_ms"]
        self._totals.clear()
        self._steps_read = 0
        return means

    def _clock_of(self, name: str) -> HostClock:
        return self._host if name in _HOST_PARTS else self._clock

    def _current_step(self) -> _Step:
        if self._step is None:
            self._step = _Step(begin=self._clock.mark())
        return self._step

    def _read_passed(self) -> None:
        while self._unread:
            step = self._unread[0]
            if not (self._clock.passed(step.end) and all(clock.passed(end) for _, clock, _, end in step.intervals)):
                return
            self._read(self._unread.popleft())

    def _read(self, step: _Step) -> None:
        self._steps_read += 1
        length = self._clock.milliseconds(step.begin, step.end)
        self._totals["step"] += length
        on_device = []
        for name, clock, begin, end in step.intervals:
            taken = clock.milliseconds(begin, end)
            self._totals[name] += taken
            if name not in _HOST_PARTS:
                # This is negative for work that another stream began before the step.
                since_begin = clock.milliseconds(step.begin, begin)
                on_device.append((name, since_begin, since_begin + taken))
            clock.reuse(begin)
            clock.reuse(end)
        parts, idle = busy_and_exposed(on_device, 0.0, length)
        for name, times in parts.items():
            self._totals[f"{name}_exposed"] += times.exposed
        self._totals["idle"] += idle
        self._clock.reuse(step.begin)
        self._clock.reuse(step.end)


@dataclass
class Times:
    """The times of a part.

    Attributes:
        busy: while it runs, once or several times at once.
        exposed: while it runs and no other part does.
    """

    busy: float = 0.0
    exposed: float = 0.0


def busy_and_exposed(intervals: Iterable[tuple[str, float, float]], begin: float, end: float) -> tuple[dict[str, Times], float]:
    """Return each part's :class:`Times` between two moments, and the time in which no part runs; all in one unit.

    Args:
        intervals: the part, when it begins and when it ends, in any order; what lies outside of the two moments is cut off.

    Returns:
        all parts that have an interval, also those with no time between the moments.
    """
    times: dict[str, Times] = {}
    changes: list[tuple[float, str, int]] = []
    for part, first, last in intervals:
        times.setdefault(part, Times())
        first, last = max(first, begin), min(last, end)
        if first < last:
            changes += [(first, part, 1), (last, part, -1)]
    active: Counter[str] = Counter()
    idle, now = 0.0, begin
    for moment, part, change in [*sorted(changes), (end, "", 0)]:
        running = [name for name, count in active.items() if count]
        for name in running:
            times[name].busy += moment - now
        if len(running) == 1:
            times[running[0]].exposed += moment - now
        idle += 0.0 if running else moment - now
        active[part] += change
        now = moment
    return times, idle
