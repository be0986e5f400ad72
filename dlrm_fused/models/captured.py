"""A function of tensors and its gradient, each replayed as one CUDA graph: the host launches two graphs instead of a hundred
kernels, and the GPU does not wait between these.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, whose ``make_graphed_callables`` copies every input
into memory of its own, and must come before DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Maps tensors to one to differentiate, and others.
Function = Callable[..., tuple[Tensor, ...]]

_MOST_CAPTURES = 4


class CapturedFunction:
    """A function that is captured when it is called first, and then replayed.

    An input that requires a gradient, such as pooled embeddings, is large: it is read where it is, and the function is captured
    anew when it comes from another address or has another shape, up to four times. Calls that would need more are not captured.
    Other inputs are copied. Gradients lie in memory that the next backward pass writes to; what DistributedDataParallel does
    with them, to copy them into its buckets at once, is right.

    Args:
        function: its first result is differentiable; those that follow are given detached. It may not wait for the device.
        layers: returns the modules whose parameters it uses; called when it is captured.
    """

    def __init__(self, function: Function, layers: Callable[[], Sequence[nn.Module]]) -> None:
        self._function = function
        self._layers = layers
        self._captures: dict[Any, _Capture] = {}
        self._turn = _Turn()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Raises RuntimeError in the backward pass of a call that another has followed."""
        key = tuple((t.shape, t.dtype, t.requires_grad and (t.data_ptr(), t.stride())) for t in inputs)
        capture = self._captures.get(key)
        if capture is None:
            if len(self._captures) == _MOST_CAPTURES:
                return self._function(*inputs)
            capture = self._captures[key] = _Capture(self._function, inputs, self._layers(), self._turn)
        results: tuple[Tensor, ...] = _Replay.apply(capture, *inputs, *capture.parameters)
        return results


class _Turn:
    """Which call the memory of all captures belongs to: they share it."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.number = 0


class _Capture:
    """The two graphs of one set of addresses.

    Attributes:
        parameters: of the layers.
    """

    def __init__(self, function: Function, inputs: Sequence[Tensor], layers: Sequence[nn.Module], turn: _Turn) -> None:
        self._turn = turn
        self.parameters = [parameter for layer in layers for parameter in layer.parameters()]
        static = [t.detach().requires_grad_() if t.requires_grad else t.clone() for t in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        settings: dict[str, Any] = {"pool": turn.pool, "stream": stream, "capture_error_mode": "thread_local"}
        # Leaves of their own: autograd would let the captured stream wait for that on which the parameters' own were made.
        with _other_leaves(layers) as leaves, torch.cuda.stream(stream):
            wanted = [*(t for t in static if t.requires_grad), *leaves]
            for _ in range(2):  # compiles, tunes and allocates what may not be while a graph is captured
                torch.autograd.grad(function(*static)[0], wanted, allow_unused=True)
            with torch.cuda.graph(self._forward, **settings):
                results = function(*static)
            self._upstream = torch.ones_like(results[0])
            with torch.cuda.graph(self._backward, **settings):
                gradients = torch.autograd.grad(results[0], wanted, self._upstream, allow_unused=True)
        torch.cuda.current_stream().wait_stream(stream)
        self._results = [result.detach() for result in results]
        self._gradients = gradients
        # Not those that are read where they are: their memory belongs to the caller.
        self._copies = [None if t.requires_grad else t for t in static]

    def forward(self, inputs: Sequence[Tensor]) -> tuple[int, tuple[Tensor, ...]]:
        """The number of this turn, and the results."""
        for copy, given in zip(self._copies, inputs, strict=True):
            if copy is not None:
                copy.copy_(given)
        self._forward.replay()
        self._turn.number += 1
        return self._turn.number, tuple(result.clone() for result in self._results)

    def backward(self, turn: int, upstream: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the inputs and of the parameters."""
        if turn != self._turn.number:
            raise RuntimeError("backward pass of a captured function that was called again since: call backward before")
        self._upstream.copy_(upstream)
        self._backward.replay()
        gradients = iter(None if gradient is None else gradient.detach() for gradient in self._gradients)
        of_inputs = [next(gradients) if copy is None else None for copy in self._copies]
        return of_inputs, list(gradients)


class _Replay(torch.autograd.Function):
    """Arguments: a capture, its inputs, its parameters."""

    @staticmethod
    def forward(ctx: Any, capture: _Capture, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: len(tensors) - len(capture.parameters)]
        ctx.capture = capture
        # The backward pass reads them again.
        ctx.save_for_backward(*(t for t in inputs if t.requires_grad))
        ctx.turn, results = capture.forward(inputs)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_inputs, of_parameters = ctx.capture.backward(ctx.turn, upstream[0])
        return None, *of_inputs, *of_parameters


@contextmanager
def _other_leaves(layers: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Within, the layers' parameters are others with the same memory; in the order of ``parameters()``."""
    places = [(module, name) for layer in layers for module in layer.modules() for name in module._parameters]
    originals = [getattr(module, name) for module, name in places]
    leaves = {p: nn.Parameter(p.detach(), p.requires_grad) for layer in layers for p in layer.parameters()}
    try:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, leaves.get(original))
        yield list(leaves.values())
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)
