"""The choice that ``auto`` makes among an operator's schedules: the fastest that was measured, so that it loses to none."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from dlrm_fused.auto_choice import CallSeconds, call_seconds
from dlrm_fused.ops.common.recorded import Shape as Shape
from dlrm_fused.symmetric import Channel

logger = logging.getLogger("dlrm_fused")

AUTO = "auto"
_ROUNDS = 3


class Choice(NamedTuple):
    """The fastest schedules: of calls that the host launches, whose time counts where it is longer than the device's, and of
    those in a CUDA graph."""

    launched: str
    captured: str


class Schedules:
    """The fastest schedule of a workspace's calls, by shape: from a table, or measured by the first call with a shape.

    Attributes:
        measured_here: by this workspace.
    """

    def __init__(self, name: str, channel: Channel, *, may_measure: bool, recorded: Mapping[Shape, str]) -> None:
        """Args:
        name: of the workspace, for the log.
        channel: of its calls, whose faults a measurement raises.
        may_measure: whether calls may, on GPUs.
        recorded: the fastest schedule on this GPU, by shape.
        """
        self._name, self._channel, self._device = name, channel, channel.group.device
        self._may_measure = may_measure
        self._recorded = recorded
        self.measured_here: dict[Shape, Choice] = {}
        self._ruled: dict[Shape, str] = {}
        self._logged: set[tuple[str, Shape]] = set()

    def known(self, shape: Shape) -> str | None:
        """Return the fastest schedule of a shape where the host launches calls; None if nobody has measured it."""
        choice = self.measured_here.get(shape)
        return choice.launched if choice else self._recorded.get(shape)

    def choose(self, shape: Shape, names: Sequence[str], run: Callable[[str], object], rule: Callable[[], str]) -> str:
        """Return the schedule that ``auto`` takes for a call. Collective: all ranks choose alike, if all capture it or none.

        A shape that nobody has measured is measured now, on GPUs and outside of a CUDA graph's capture. The host then waits
        for the device.

        Args:
            names: the schedules to choose from.
            run: makes the call by one of them.
            rule: tells which is taken where nothing is known, and nothing may be measured.

        Raises:
            CommunicationError: while it measures, as the call itself.
        """
        schedule, why = self.known(shape), "measured before"
        if shape in self.measured_here and self._is_capturing():
            schedule = self.measured_here[shape].captured
        if schedule not in names:  # a table may name what cannot run here
            schedule = None
        if schedule is None and self._can_measure():
            seconds = self._seconds(names, run)
            launched, captured = (
                min(names, key=lambda name: max(seconds[name])),
                min(names, key=lambda name: seconds[name].device),
            )
            self.measured_here[shape] = Choice(launched, captured)
            times = (f"{name} {own.device * 1e3:.3f} ms, host {own.host * 1e3:.3f}" for name, own in seconds.items())
            schedule, why = launched, f"in graphs {captured}; measured: {'; '.join(times)}"
        if schedule is None:
            if shape not in self._ruled:
                self._ruled[shape] = rule()
            schedule, why = self._ruled[shape], "by rule, not measured"
        self._log(schedule, shape, why)
        return schedule

    def _can_measure(self) -> bool:
        return self._may_measure and self._device.type == "cuda" and not self._is_capturing()

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _seconds(self, names: Sequence[str], run: Callable[[str], object]) -> dict[str, CallSeconds]:
        """Return the seconds of a call by each schedule, each on its slowest rank. Collective.

        The schedules take turns, and medians count: a disturbance of one measurement decides nothing.
        """
        own: dict[str, list[CallSeconds]] = {name: [] for name in names}
        for name in [*names] * _ROUNDS:
            own[name].append(call_seconds(partial(run, name), self._device))
            self._channel.raise_fault()
        self._channel.assemble()
        of_ranks = self._channel.group.gather(lambda: own)

        def median(name: str, of: Callable[[CallSeconds], float]) -> float:
            rounds = zip(*(times[name] for times in of_ranks), strict=True)
            return statistics.median(max(map(of, of_round)) for of_round in rounds)

        return {name: CallSeconds(median(name, lambda one: one.device), median(name, lambda one: one.host)) for name in names}

    def _log(self, schedule: str, shape: Shape, why: str) -> None:
        """Once for each choice, on rank 0."""
        if self._channel.group.rank == 0 and (schedule, shape) not in self._logged:
            self._logged.add((schedule, shape))
            rows, columns, depth = shape
            what = f"x [{rows}, {depth}] and weight [{columns}, {depth}]"
            logger.info("%s: schedule %s for %s (%s)", self._name, schedule, what, why)
