"""Work that is captured as CUDA graphs, so that the host launches it with one call."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# What is compiled, tuned or loaded at the first calls cannot be captured.
RUNS_BEFORE_CAPTURE = 2
_MOST_COUNTED = 1000


class GraphRecorder:
    """Captures graphs that share memory: each may use what those before have left there, so they are replayed in their order.

    Args:
        device: on which the work runs.
        pool: memory to share with the graphs of another recorder, of ``torch.cuda.graph_pool_handle()``.
    """

    def __init__(self, device: torch.device, pool: Any = None) -> None:
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def on_its_stream(self) -> Iterator[None]:
        """Make what is captured, and what comes before: after what the current stream has been given, which then waits."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def record(self) -> Iterator[torch.cuda.CUDAGraph]:
        """The graph of what is launched within."""
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and of readers go on meanwhile, and may make calls that a capture of all threads would forbid.
        with (
            _without_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            yield graph


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """What it frees may be an older graph, whose end would spoil a capture that is under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RunCounter:
    """Counts what has been run by its key, for as many keys as a loop of some shapes can have."""

    def __init__(self) -> None:
        self._runs: Counter[Any] = Counter()

    def count(self, key: object) -> None:
        if len(self._runs) == _MOST_COUNTED:  # hardly any comes again
            self._runs.clear()
        self._runs[key] += 1

    def runs(self, key: object) -> int:
        """How often it has been counted."""
        return self._runs[key]
