"""Runs the tasks of a plan on a rank: a stream for each lane, and events where a task of one waits for a task of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dlrm_fused.compat.torch import current_stream
from dlrm_fused.ops.schedules.plan import Kind, Lane, Plan, Task

Action = Callable[[Task], None]


class Streams:
    """The lanes of one workspace.

    Attributes:
        beside: the stream of :attr:`Lane.beside`; None on the CPU, where tasks run one by one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A task beside a computation shall not wait for all of its programs.
        self.beside = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # By the number of the task that records one: all waits for it are given to streams before it is recorded again.
        self._events: dict[int, torch.cuda.Event] = {}

    def run(self, plan: Plan, actions: Mapping[Kind, Action]) -> None:
        """Start all tasks in their order. The host waits for none of them.

        Args:
            actions: what starts a task of a kind, in the current stream. A kind that needs nothing may be left out.
        """
        if self.beside is None:
            for _, task in plan.started:
                _start(task, actions)
            return
        with torch.cuda.device(self._device.index):
            main = current_stream(self._device)
            try:
                self._start_on_streams(plan, actions, main, self.beside)
            finally:
                torch.cuda.set_stream(main)

    def _start_on_streams(
        self, plan: Plan, actions: Mapping[Kind, Action], main: torch.cuda.Stream, beside: torch.cuda.Stream
    ) -> None:
        current, has_begun_beside = main, False
        for number, task in plan.started:
            stream = main if task.lane is Lane.main else beside
            if stream is not current:  # cheaper than a context for each task, which asks for streams and devices
                torch.cuda.set_stream(stream)
                current = stream
            if stream is beside and not has_begun_beside:
                stream.wait_stream(main)  # what the caller has asked for before comes first
                has_begun_beside = True
            for other in task.after:
                stream.wait_event(self._events[other])
            _start(task, actions)
            if number in plan.awaited:
                if number not in self._events:
                    self._events[number] = torch.cuda.Event()
                self._events[number].record(stream)


def _start(task: Task, actions: Mapping[Kind, Action]) -> None:
    if task.kind in actions:
        actions[task.kind](task)
