"""The time of a call on one rank alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")

_WARMUPS, _ROUNDS = 3, 7
_LONGEST_LAUNCHES = 0.02  # seconds of the host, for one call
_MOST_CYCLES_PER_SECOND = 2e9  # of today's GPUs


def seconds_of(
    device: torch.device, function: Callable[[], object], *, captured: bool = True, launched_ahead: bool = True
) -> float:
    """Return the seconds of one call, the median of several rounds after a warm-up.

    Args:
        captured: on a GPU, calls are replayed from a CUDA graph.
        launched_ahead: of other calls, whether the GPU begins when all are launched, so that the host's time is left out.
    """
    for _ in range(_WARMUPS):
        function()
    if device.type != "cuda":
        return statistics.median(_wall_seconds(function, 3) for _ in range(_ROUNDS))
    calls = 20
    run = _graph(function, calls) if captured else (lambda: [function() for _ in range(calls)])
    torch.cuda.synchronize()
    launches = _wall_seconds(run, 1) if launched_ahead and not captured else 0.0
    return statistics.median(_device_seconds(run, 2 * launches) for _ in range(_ROUNDS)) / calls


def seconds_after(device: torch.device, prepare: Callable[[], T], function: Callable[[T], object]) -> float:
    """Return the seconds of one call with the result of ``prepare``, which has ended: the median of rounds after a warm-up."""
    times = []
    for _ in range(_WARMUPS + _ROUNDS):
        prepared = prepare()
        if device.type != "cuda":
            times.append(_wall_seconds(partial(function, prepared), 1))
            continue
        torch.cuda.synchronize()
        times.append(_device_seconds(partial(function, prepared), _LONGEST_LAUNCHES))
    return statistics.median(times[_WARMUPS:])


def _device_seconds(run: Callable[[], object], launches: float) -> float:
    """By the GPU, which begins when the host has launched all, in so many seconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(launches * _MOST_CYCLES_PER_SECOND))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _wall_seconds(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def _graph(function: Callable[[], object], calls: int) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return graph.replay
