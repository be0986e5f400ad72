"""Runs the tasks of a plan on a rank: a stream for each lane, and events where a task of one waits for a task of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dlrm_fused.ops.schedules.plan import Kind, Lane, Plan, Task

Action = Callable[[Task], None]


class Streams:
    """The streams of the lanes beside the caller's, of one workspace. On the CPU there are none: tasks run one by one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # What is begun beside a computation shall not wait for all of its programs.
        lanes = (Lane.beside, Lane.marks) if device.type == "cuda" else ()
        self._own = {lane: torch.cuda.Stream(device, priority=-1) for lane in lanes}

    @property
    def beside(self) -> torch.cuda.Stream | None:
        """That of :attr:`Lane.beside`."""
        return self._own.get(Lane.beside)

    def run(self, plan: Plan, actions: Mapping[Kind, Action]) -> None:
        """Start all tasks in their order. The host waits for none of them.

        Args:
            actions: what starts a task of a kind, in the current stream. A kind that needs nothing may be left out.
        """
        started = [(number, task) for number, task in enumerate(plan) if not task.is_inside]
        if not self._own:
            for _, task in started:
                _start(task, actions)
            return
        main = torch.cuda.current_stream(self._device)
        streams = {Lane.main: main, **self._own}
        awaited = {number for _, task in started for number in task.after}
        events: dict[int, torch.cuda.Event] = {}
        begun = {Lane.main}
        for number, task in started:
            stream = streams[task.lane]
            if task.lane not in begun and not task.after:
                stream.wait_stream(main)  # what the caller has asked for before comes first
            begun.add(task.lane)
            for other in task.after:
                stream.wait_event(events[other])
            with torch.cuda.stream(stream):
                _start(task, actions)
            if number in awaited:
                events[number] = stream.record_event()


def _start(task: Task, actions: Mapping[Kind, Action]) -> None:
    if task.kind in actions:
        actions[task.kind](task)
