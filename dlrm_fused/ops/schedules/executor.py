"""Runs the tasks of a plan on a rank: two streams, and events where a task of one waits for a task of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from dlrm_fused.ops.schedules.plan import Kind, Lane, Plan, Task

Action = Callable[[Task], None]


def run_plan(plan: Plan, actions: Mapping[Kind, Action], beside: torch.cuda.Stream | None) -> None:
    """Start all tasks in their order. The host waits for none of them.

    Args:
        actions: what starts a task of a kind, in the current stream. A kind that needs nothing may be left out.
        beside: the stream of :attr:`Lane.beside`, whose first task begins behind all that the current stream has been given
            before; None on the CPU, where tasks run one after the other.
    """
    if beside is None:
        for task in plan:
            _start(task, actions)
        return
    streams = {Lane.main: torch.cuda.current_stream(beside.device), Lane.beside: beside}
    awaited = {number for task in plan for number in task.after}
    events: dict[int, torch.cuda.Event] = {}
    has_begun = False
    for number, task in enumerate(plan):
        if task.is_inside:
            continue
        stream = streams[task.lane]
        if task.lane is Lane.beside and not has_begun:
            beside.wait_stream(streams[Lane.main])
            has_begun = True
        for other in task.after:
            if other in events:
                stream.wait_event(events[other])
        with torch.cuda.stream(stream):
            _start(task, actions)
        if number in awaited:
            events[number] = stream.record_event()


def _start(task: Task, actions: Mapping[Kind, Action]) -> None:
    if not task.is_inside and task.kind in actions:
        actions[task.kind](task)
