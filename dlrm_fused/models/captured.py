"""A function of tensors and its gradient, each replayed as one CUDA graph.

The host launches two graphs instead of a hundred kernels, which at small batches take longer to launch than to run. The
gradients of all parameters are there at once, so that one AllReduce and one optimizer's step can take them
(:attr:`CapturedFunction.takes_gradients`).

Source: "CUDA Graphs" in PyTorch's notes, https://docs.pytorch.org/docs/stable/notes/cuda.html. Its ``make_graphed_callables``
copies all inputs, and must come before DistributedDataParallel (DDP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from dlrm_fused.compat.torch import copy_all, modules_of, tensors_of
from dlrm_fused.cuda_graphs import RUNS_BEFORE_CAPTURE, GraphRecorder
from dlrm_fused.symmetric.call_order import CallOrder

R = TypeVar("R", Tensor, tuple[Tensor, Tensor])


class TakesGradients(Protocol):
    """Who takes the gradients of parameters, instead of autograd."""

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy them, None for 0; called within a capture, or in each backward pass that is not replayed."""

    def use(self) -> None:
        """They have been stored; called in each backward pass."""


# Captures that read large inputs where they are, and captures that copy all.
_MOST_IN_PLACE, _MOST_COPIED = 2, 2
# Of an input. To copy this much takes less time than a launch.
_COPIED_BYTES = 2**23


class CapturedFunction(Generic[R]):
    """A function that GPUs capture when it is called first, and then replay; for calls in which gradients are wanted.

    On the CPU it runs as it is. For a capture, inputs are copied to where the graphs read them. Large ones, such as pooled
    embeddings, are read where they are instead, and when they come from another address, the function is captured again. After
    two captures it is captured with copies of all inputs, whatever their addresses, for two shapes at most; what would need
    more captures runs as it is, too.

    There is a capture for each set of :func:`modes`: training or evaluation, autocast, deterministic algorithms, and the
    precision of fp32 products. Other switches of ``torch.backends`` count as they were set at the capture. Where a parameter or
    a buffer was replaced or has moved (:func:`places`), the next call is not captured, and then all is captured again. Under
    ``no_grad`` the function runs as it is.

    Args:
        function: maps tensors to one, or to two of which the first is differentiable. It launches the same kernels whatever the
            values are, and does not wait for the device.
        layers: returns the modules whose parameters and buffers the function uses; called at each call.

    Attributes:
        takes_gradients: who takes the gradients of :meth:`parameters`, in their order; to be set before the first call. Then
            those of inputs lie in memory to which the next backward pass writes; who keeps one beyond it copies it. None:
            autograd gets all gradients, as copies, and accumulates those of parameters in ``grad``, where DDP finds them.
    """

    def __init__(self, function: Callable[..., R], layers: Callable[[], Sequence[nn.Module]]) -> None:
        self._function: Callable[..., R] = function
        self._layers = layers
        self.takes_gradients: TakesGradients | None = None
        self._in_place: dict[Any, _Capture] = {}
        self._copied: dict[Any, _Capture] = {}
        self._memory: _SharedMemory | None = None
        self._held: list[Tensor] = []  # so that no other tensor gets their ids
        self._places: list[object] | None = None

    def __call__(self, *inputs: Tensor) -> R:
        """The function's results, with which the caller does as it likes.

        Raises:
            RuntimeError: in the backward pass, if the function has been called again before.
        """
        if not torch.is_grad_enabled():
            return self._function(*inputs)
        capture = self._capture(inputs) if inputs[0].is_cuda else None
        run = capture or _Run(self._function, self.parameters(), self.takes_gradients)
        results = _Replay.apply(run, *inputs, *run.parameters)
        return cast(R, results if len(results) > 1 else results[0])

    def parameters(self) -> list[nn.Parameter]:
        """Those that gradients are wanted of."""
        return [p for layer in self._layers() for p in layer.parameters() if p.requires_grad]

    def _keeps_places(self, modules: Sequence[nn.Module]) -> bool:
        """Whether captures read the parameters and buffers that the modules have now; if not, captures are dropped."""
        held, was_captured = tensors_of(modules), self._places is not None
        of_today = places(held)
        if of_today == self._places:
            return True
        self._held, self._places = held, of_today
        self._in_place.clear()
        self._copied.clear()
        self._memory = None
        return not was_captured  # weights that are replaced at every call are not worth a capture

    def _capture(self, inputs: Sequence[Tensor]) -> _Capture | None:
        """The capture for inputs like these; None if there are too many already, or what they read was just replaced."""
        modules = modules_of(self._layers())
        if not self._keeps_places(modules):
            return None
        of_today = modes(modules, inputs[0].device.type)
        in_place = [t.nbytes > _COPIED_BYTES for t in inputs]
        for captures, most, is_read_in_place in (
            (self._in_place, _MOST_IN_PLACE, in_place),
            (self._copied, _MOST_COPIED, [False] * len(inputs)),
        ):
            of_inputs: list[object] = [
                (t.shape, t.dtype, t.requires_grad, (t.data_ptr(), t.stride()) if reads else None)
                for t, reads in zip(inputs, is_read_in_place, strict=True)
            ]
            key = (of_today, *of_inputs)
            if key not in captures and len(captures) < most:
                self._memory = self._memory or _SharedMemory(inputs[0].device)
                captures[key] = _Capture(
                    self._function, inputs, is_read_in_place, self._layers(), self._memory, self.takes_gradients
                )
            if key in captures:
                return captures[key]
        return None


class _SharedMemory:
    """Memory in which the captures of a function keep tensors, those of one call at a time.

    Attributes:
        call: the number of that call.
        order: of replays, also on several streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool, self.order = torch.cuda.graph_pool_handle(), CallOrder(device)
        self.call = 0


class _Capture:
    """The two graphs for inputs of some shapes and addresses.

    Attributes:
        parameters: of the layers, which gradients are wanted of.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Tensor],
        is_read_in_place: Sequence[bool],
        layers: Sequence[nn.Module],
        memory: _SharedMemory,
        takes_gradients: TakesGradients | None,
    ) -> None:
        self._memory = memory
        self.takes_gradients = takes_gradients
        self.parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
        recorder = GraphRecorder(inputs[0].device, memory.pool)
        read = [
            (t.detach() if reads else t.detach().clone()).requires_grad_(t.requires_grad)
            for t, reads in zip(inputs, is_read_in_place, strict=True)
        ]
        with _as_other_leaves(layers) as leaves, recorder.on_its_stream():
            wanted = [t for t in (*read, *leaves) if t.requires_grad]
            for _ in range(RUNS_BEFORE_CAPTURE):
                results = _as_tuple(function(*read))
                torch.autograd.grad(results[0], wanted, torch.ones_like(results[0]), allow_unused=True)
            torch.clear_autocast_cache()  # weights are to be cast in each replay
            with recorder.record() as self._forward:
                results = _as_tuple(function(*read))
            self._upstream = torch.ones_like(results[0])
            with recorder.record() as self._backward:
                gradients = torch.autograd.grad(results[0], wanted, self._upstream, allow_unused=True)
                if takes_gradients is not None:
                    takes_gradients.store(gradients[len(wanted) - len(self.parameters) :])
            torch.clear_autocast_cache()
        self._results = [result.detach() for result in results]
        self._gradients = gradients
        # The others are the caller's, who may free them.
        self._copies = [None if reads else t for t, reads in zip(read, is_read_in_place, strict=True)]
        self._needs_gradient = [t.requires_grad for t in read]

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        pairs = [(copy, given) for copy, given in zip(self._copies, inputs, strict=True) if copy is not None]
        self._memory.order.follow()
        copy_all([copy for copy, _ in pairs], [given for _, given in pairs])
        self._forward.replay()
        self._memory.call += 1
        return tuple(result.clone() for result in self._results)

    def read_in_place(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Those that the backward graph reads again where they are."""
        return [given for copy, given in zip(self._copies, inputs, strict=True) if copy is None]

    @property
    def call(self) -> int:
        """The number of the call whose tensors the memory holds."""
        return self._memory.call

    def backward(self, call: int, upstream: Tensor) -> list[Tensor | None]:
        """Gradients of the inputs and of the parameters, of this call."""
        if call != self._memory.call:
            raise RuntimeError("a captured function was called again before the backward pass of this call")
        self._memory.order.follow()
        self._upstream.copy_(upstream)
        self._backward.replay()
        # Autograd makes `grad` of what only it holds, without a copy, and the next replay would write there. What is held here,
        # too, it copies.
        gradients = iter(self._gradients if self.takes_gradients is not None else _copies(self._gradients))
        return [*(next(gradients) if needed else None for needed in self._needs_gradient), *gradients]


class _Run:
    """One call that is not captured, with gradients all at once as of a :class:`_Capture`."""

    call = 0

    def __init__(
        self, function: Callable[..., Any], parameters: list[nn.Parameter], takes_gradients: TakesGradients | None
    ) -> None:
        self._function = function
        self.parameters = parameters
        self.takes_gradients = takes_gradients

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._read = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with torch.enable_grad():
            results = _as_tuple(self._function(*self._read))
        self._differentiable = results[0]
        return tuple(result.detach() for result in results)

    def read_in_place(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return []  # autograd keeps what it needs

    def backward(self, call: int, upstream: Tensor) -> list[Tensor | None]:
        wanted = [t for t in (*self._read, *self.parameters) if t.requires_grad]
        all_gradients = torch.autograd.grad(self._differentiable, wanted, upstream, allow_unused=True)
        if self.takes_gradients is not None:
            self.takes_gradients.store(all_gradients[len(wanted) - len(self.parameters) :])
        gradients = iter(all_gradients)
        return [*(next(gradients) if t.requires_grad else None for t in self._read), *gradients]


def places(tensors: Sequence[Tensor]) -> list[object]:
    """Equal as long as the tensors are the same, in the same memory."""
    return [(id(t), t.data_ptr(), t.stride(), t.requires_grad) for t in tensors]


def modes(modules: Sequence[nn.Module], device_type: str) -> tuple[object, ...]:
    """The modes of modules and torch that change what a function does, besides its inputs and weights."""
    return (
        tuple([module.training for module in modules]),
        torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.matmul.fp32_precision,
    )


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    given = [tensor for tensor in tensors if tensor is not None]
    copies = [torch.empty_like(tensor) for tensor in given]
    copy_all(copies, given)
    copied = iter(copies)
    return [None if tensor is None else next(copied) for tensor in tensors]


def _as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


class _Replay(torch.autograd.Function):
    """Arguments: a capture or a run, its inputs, its parameters."""

    @staticmethod
    def forward(ctx: Any, run: _Capture | _Run, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: len(tensors) - len(run.parameters)]
        results = run.forward(inputs)
        ctx.run, ctx.call = run, run.call
        ctx.save_for_backward(*run.read_in_place(inputs))
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.run.backward(ctx.call, upstream[0])
        if ctx.run.takes_gradients is not None:
            ctx.run.takes_gradients.use()
            count = len(ctx.run.parameters)
            gradients[len(gradients) - count :] = [None] * count
        return None, *gradients


@contextmanager
def _as_other_leaves(layers: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Within, the layers' parameters are others in the same memory, in the order of ``parameters()``.

    Autograd would let a captured stream wait for the stream on which DDP has first used the parameters, which is not captured.
    """
    originals = {
        (module, name): parameter
        for layer in layers
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    others = {p: nn.Parameter(p.detach(), p.requires_grad) for layer in layers for p in layer.parameters()}
    try:
        for (module, name), parameter in originals.items():
            setattr(module, name, others[parameter])
        yield list(others.values())
    finally:
        for (module, name), parameter in originals.items():
            setattr(module, name, parameter)
