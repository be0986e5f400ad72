"""How long a call takes on one rank alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_ROUNDS = 7
_MOST_CYCLES_PER_SECOND = 2e9  # of today's GPUs


def seconds_of(
    device: torch.device, function: Callable[[], object], *, captured: bool = True, launched_ahead: bool = True
) -> float:
    """Of one call, the median of several rounds after a warm-up.

    Args:
        captured: on a GPU, calls are replayed from a CUDA graph.
        launched_ahead: of other calls, whether the GPU begins when all are launched, so that the host's time is left out.
    """
    for _ in range(3):
        function()
    if device.type != "cuda":
        return statistics.median(_wall_seconds(function, 3) for _ in range(_ROUNDS))
    calls = 20
    run = _graph(function, calls) if captured else (lambda: [function() for _ in range(calls)])
    torch.cuda.synchronize()
    launches = _wall_seconds(run, 1) if launched_ahead and not captured else 0.0
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(2 * launches * _MOST_CYCLES_PER_SECOND))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


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
