"""Work that is captured as CUDA graphs, so that the host launches it with one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.compat.torch import copy_all

# What is compiled, tuned or loaded at the first calls cannot be captured.
RUNS_BEFORE_CAPTURE = 2
_MOST_CAPTURES = 4
_MOST_COUNTED = 1000


class GraphRecorder:
    """Captures graphs that share memory: each may use what those before have left there, so they are replayed in their order.

    Args:
        pool: memory to share with the graphs of another recorder, of ``torch.cuda.graph_pool_handle()``.
    """

    def __init__(self, pool: Any = None) -> None:
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = torch.cuda.Stream()

    @contextmanager
    def on_its_stream(self) -> Iterator[None]:
        """Make what is captured, and what comes before: after what the current stream has been given, which then waits."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def record(self) -> Iterator[torch.cuda.CUDAGraph]:
        """The graph of what is launched within."""
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and of readers go on meanwhile, and may make calls that a capture of all threads would forbid.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            yield graph


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


class ReplayedFunction:
    """A function of tensors without gradients that is replayed from the third call with inputs of some shapes on.

    It is run as it is on the CPU, within a capture, and for other shapes when there are four captures.

    Args:
        function: returns tensors that are new in each call. It launches the same kernels whatever the inputs' values are, and
            does not wait for the device. Other tensors that it reads stay where they are.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function = function
        self._captures: dict[Any, tuple[list[Tensor], torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._runs = RunCounter()
        self._last: torch.cuda.Event | None = None  # of what has used the captures' memory, on any stream

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not inputs[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return self._function(*inputs)
        key = (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), *((t.shape, t.dtype) for t in inputs))
        if key not in self._captures:
            if len(self._captures) == _MOST_CAPTURES or self._runs.runs(key) < RUNS_BEFORE_CAPTURE:
                self._runs.count(key)
                return self._function(*inputs)
            self._captures[key] = self._capture(inputs)
        copies, graph, results = self._captures[key]
        if self._last is not None:
            torch.cuda.current_stream().wait_event(self._last)
        copy_all(copies, inputs)
        graph.replay()
        own_results = tuple(result.clone() for result in results)
        self._last = torch.cuda.current_stream().record_event()
        return own_results

    def _capture(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        copies, recorder = [tensor.clone() for tensor in inputs], GraphRecorder()
        with recorder.on_its_stream(), recorder.record() as graph:
            results = self._function(*copies)
        return copies, graph, results
