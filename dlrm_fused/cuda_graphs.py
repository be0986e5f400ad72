"""Work that is captured as CUDA graphs, so that the host launches it with one call.

* :class:`GraphRecorder` captures: on a stream of its own, with memory of its own.
* :class:`CapturedCall` is a forward and a backward graph, and the memory that they read and write.
* :class:`Captures` keeps captures by key, for as long as what they read stays where it is (:class:`Generation`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import compress
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlrm_fused.compat.torch import copy_all

C = TypeVar("C")
R = TypeVar("R", bound=Sequence[Tensor])

# The first calls compile, tune and load, which cannot be captured.
RUNS_BEFORE_CAPTURE = 2


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
        """Run captures, and the calls before them, after the work of the current stream, which then waits for them."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextmanager
    def record(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture what is launched within as one graph."""
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL and of readers go on meanwhile, and may make calls that a capture of all threads would forbid.
        with (
            _without_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            yield graph


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing an older graph, which would spoil a capture that is under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CapturedCall:
    """A function of tensors and its gradient as two CUDA graphs, with the memory from which they read and to which they write.

    The graphs keep the tensors of one call at a time: a forward pass overwrites those of the call before.

    Args:
        device: on which the work runs.
        inputs: tensors to copy; the graphs read the copies. None for one that they read where it is.
        pool: memory to share with other calls, of which one runs at a time. Default: memory of its own.

    Attributes:
        copies: the copies, and None as in ``inputs``.
        gradients: what the backward graph writes.
    """

    def __init__(self, device: torch.device, inputs: Sequence[Tensor | None], pool: Any = None) -> None:
        self._recorder = GraphRecorder(device, pool)
        self.copies = [None if tensor is None else tensor.detach().clone() for tensor in inputs]
        self._is_copied = [tensor is not None for tensor in inputs]
        self._targets = [copy for copy in self.copies if copy is not None]

    def on_its_stream(self) -> AbstractContextManager[None]:
        """Run captures, and the calls before them, after the work of the current stream, which then waits for them."""
        return self._recorder.on_its_stream()

    def record_forward(self, function: Callable[[], R]) -> R:
        """Capture the forward pass; return its results, of which the first is differentiable."""
        with self._recorder.record() as self._forward:
            results = function()
        self._results = [result.detach() for result in results]
        self._upstream = torch.empty_like(results[0])
        return results

    def record_backward(self, function: Callable[[Tensor], Sequence[Tensor | None]]) -> None:
        """Capture the backward pass, which maps the first result's gradient to the gradients that are wanted."""
        with self._recorder.record() as self._backward:
            self.gradients = function(self._upstream)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay the forward pass; return copies of its results."""
        copy_all(self._targets, list(compress(inputs, self._is_copied)))
        self._forward.replay()
        return tuple(result.clone() for result in self._results)

    def backward(self, upstream: Tensor) -> None:
        """Replay the backward pass, which writes :attr:`gradients`."""
        self._upstream.copy_(upstream)
        self._backward.replay()


def places(tensors: Sequence[Tensor]) -> list[object]:
    """Return a value that stays equal as long as the tensors are the same, in the same memory."""
    return [(id(t), t.data_ptr(), t.stride(), t.requires_grad) for t in tensors]


class Generation:
    """The state that captures read besides their inputs; two are equal if their objects are the same, in the same memory.

    Args:
        tensors: read by the captures.
        owners: other objects that stand for the memory that they own.
    """

    def __init__(self, tensors: Sequence[Tensor], owners: Sequence[object] = ()) -> None:
        self._held = tensors, owners  # so that no other object gets their ids
        self._places = [*places(tensors), *map(id, owners)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Generation) and self._places == other._places

    __hash__ = None  # type: ignore[assignment]

    def hold(self) -> None:
        """Keep the memory in which the tensors are now, so that a graph may still run when they have moved."""
        self._memory = [tensor.detach() for tensor in self._held[0]]


class Captures(dict[Hashable, C]):
    """Captures by key, all of one generation.

    Args:
        most: captures to keep; each keeps memory.

    Attributes:
        generation: what they read; None before the first.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self.generation: Generation | None = None

    @property
    def has_room(self) -> bool:
        """Whether one more may be kept."""
        return len(self) < self._most

    def renew(self, generation: Generation) -> bool:
        """Drop all captures if they read another generation; return whether there was another."""
        if generation == self.generation:
            return False
        was_first = self.generation is None
        self.clear()
        self.generation = generation
        return not was_first
