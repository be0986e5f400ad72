"""A function of tensors and its gradient, each replayed as one CUDA graph.

The host launches two graphs instead of a hundred kernels, which at small batches take longer to launch than to run. The
gradients of all parameters are there at once, so that one AllReduce and one optimizer's step can take them
(:attr:`CapturedFunction.takes_gradients`).

Source: "CUDA Graphs" in PyTorch's notes, https://docs.pytorch.org/docs/stable/notes/cuda.html. Its ``make_graphed_callables``
copies all inputs, and must come before DistributedDataParallel (DDP).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from dlrm_fused.compat.torch import copy_all, modules_of, tensors_of
from dlrm_fused.cuda_graphs import RUNS_BEFORE_CAPTURE, CapturedCall, Captures, Generation
from dlrm_fused.symmetric.call_order import CallOrder

R = TypeVar("R", Tensor, tuple[Tensor, Tensor])

logger = logging.getLogger("dlrm_fused")


class TakesGradients(Protocol):
    """Takes the gradients of parameters, instead of autograd."""

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy the gradients, None for 0; called within a capture, or in each backward pass that is not replayed."""

    def use(self) -> None:
        """Use the gradients that have been stored; called in each backward pass."""


# Most captures that read large inputs where they are, and most captures that copy all.
_MOST_IN_PLACE, _MOST_COPIED = 2, 2
# Bytes of the largest input that is always copied: to copy so much takes less time than a launch.
_COPIED_BYTES = 2**23


class CapturedFunction(Generic[R]):
    """A function that GPUs capture when it is called first, and then replay; for calls in which gradients are wanted.

    On the CPU it runs as it is. For a capture, inputs are copied to where the graphs read them. Large ones, such as pooled
    embeddings, are read where they are instead, and when they come from another address, the function is captured again. After
    two captures it is captured with copies of all inputs, whatever their addresses, for two shapes at most; what would need
    more captures runs as it is, too. With ``most_shapes`` all inputs are always copied, for so many shapes.

    There is a capture for each set of :func:`modes`: training or evaluation, autocast, deterministic algorithms, and the
    precision of fp32 products. Other switches of ``torch.backends`` count as they were set at the capture. Where a parameter or
    a buffer was replaced or has moved (:class:`Generation`), the next call is not captured, and then all is captured again.
    Under ``no_grad`` the function runs as it is. So it does, with a warning, from when a capture finds too little memory: runs
    before a capture need theirs beside that of the captures before.

    Args:
        function: maps tensors to one, or to two of which the first is differentiable. It launches the same kernels whatever the
            values are, and does not wait for the device.
        layers: returns the modules whose parameters and buffers the function uses; called at each call.
        most_shapes: of inputs that differ from call to call; None: of inputs that rarely do.

    Attributes:
        takes_gradients: takes the gradients of :meth:`parameters`, in their order; to be set before the first call. The
            gradients of inputs then lie in memory to which the next backward pass writes; to keep one beyond it, copy it. None:
            autograd gets all gradients, as copies, and accumulates those of parameters in ``grad``, where DDP finds them.
    """

    def __init__(
        self, function: Callable[..., R], layers: Callable[[], Sequence[nn.Module]], most_shapes: int | None = None
    ) -> None:
        self._function: Callable[..., R] = function
        self._layers = layers
        self.takes_gradients: TakesGradients | None = None
        self._in_place: Captures[_Capture] = Captures(_MOST_IN_PLACE if most_shapes is None else 0)
        self._copied: Captures[_Capture] = Captures(most_shapes or _MOST_COPIED)
        self._memory: _SharedMemory | None = None
        self._lacks_memory = False

    def __call__(self, *inputs: Tensor) -> R:
        """Return the function's results, which the caller may change.

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
        """Return the parameters that need a gradient."""
        return [p for layer in self._layers() for p in layer.parameters() if p.requires_grad]

    def _capture(self, inputs: Sequence[Tensor]) -> _Capture | None:
        """Return the capture for inputs like these; None if there are too many already, or weights were just replaced."""
        if self._lacks_memory:
            return None
        modules = modules_of(self._layers())
        generation = Generation(tensors_of(modules))
        self._copied.renew(generation)
        if self._in_place.renew(generation):
            self._memory = None
            return None  # weights that are replaced at every call are not worth a capture
        of_today = modes(modules, inputs[0].device.type)
        in_place = [t.nbytes > _COPIED_BYTES for t in inputs]
        for captures, is_read_in_place in ((self._in_place, in_place), (self._copied, [False] * len(inputs))):
            of_inputs: list[object] = [
                (t.shape, t.dtype, t.requires_grad, (t.data_ptr(), t.stride()) if reads else None)
                for t, reads in zip(inputs, is_read_in_place, strict=True)
            ]
            key = (of_today, *of_inputs)
            if key not in captures and captures.has_room:
                self._memory = self._memory or _SharedMemory(inputs[0].device)
                try:
                    captures[key] = _Capture(
                        self._function, inputs, is_read_in_place, self._layers(), self._memory, self.takes_gradients
                    )
                except torch.OutOfMemoryError as error:
                    self._run_from_now_on(str(error))
                    return None
            if key in captures:
                return captures[key]
        return None

    def _run_from_now_on(self, reason: str) -> None:
        logger.warning("a training step runs without CUDA graphs: too little memory to capture it: %s", reason)
        self._lacks_memory, self._memory = True, None
        for captures in (self._in_place, self._copied):
            for capture in captures.values():
                capture.release()
            captures.clear()
        torch.cuda.empty_cache()


class _SharedMemory:
    """Memory in which all captures of a function keep the tensors of one call at a time, ``call``; ``order`` keeps replays in
    their order, also on several streams."""

    def __init__(self, device: torch.device) -> None:
        self.pool, self.order = torch.cuda.graph_pool_handle(), CallOrder(device)
        self.call = 0


class _Capture:
    """The two graphs for inputs of some shapes and addresses; ``parameters`` are those of the layers that need a gradient."""

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
        to_copy = [None if reads else t for t, reads in zip(inputs, is_read_in_place, strict=True)]
        self._graphs = graphs = CapturedCall(inputs[0].device, to_copy, memory.pool)
        # Inputs that are read in place are the caller's, who may free them: no attribute holds them.
        read = [
            (given.detach() if copy is None else copy).requires_grad_(given.requires_grad)
            for copy, given in zip(graphs.copies, inputs, strict=True)
        ]
        self._needs_gradient = [t.requires_grad for t in read]
        with _as_other_leaves(layers) as leaves, graphs.on_its_stream():
            wanted = [t for t in (*read, *leaves) if t.requires_grad]
            with buffers_restored(layers):
                for _ in range(RUNS_BEFORE_CAPTURE):
                    results = _as_tuple(function(*read))
                    torch.autograd.grad(results[0], wanted, torch.ones_like(results[0]), allow_unused=True)
                    del results
            torch.clear_autocast_cache()  # weights are to be cast in each replay
            results = graphs.record_forward(lambda: _as_tuple(function(*read)))

            def differentiate(upstream: Tensor) -> Sequence[Tensor | None]:
                gradients = torch.autograd.grad(results[0], wanted, upstream, allow_unused=True)
                if takes_gradients is None:
                    return gradients
                of_inputs = len(wanted) - len(self.parameters)
                takes_gradients.store(gradients[of_inputs:])
                return [*gradients[:of_inputs], *[None] * len(self.parameters)]  # what is not kept leaves memory to others

            graphs.record_backward(differentiate)
            torch.clear_autocast_cache()

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay the function; return copies of its results."""
        self._memory.order.follow()
        self._memory.call += 1
        return self._graphs.forward(inputs)

    def read_in_place(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs that the backward graph reads again where they are."""
        return [given for copy, given in zip(self._graphs.copies, inputs, strict=True) if copy is None]

    @property
    def call(self) -> int:
        """Return the number of the call whose tensors the memory holds."""
        return self._memory.call

    def release(self) -> None:
        """Let go of the graphs and their memory, which whoever still has a result of a call would keep."""
        self._memory.call += 1
        del self._graphs

    def backward(self, call: int, upstream: Tensor) -> list[Tensor | None]:
        """Return the gradients of the inputs and of the parameters, of this call.

        Raises:
            RuntimeError: if the memory holds the tensors of another call.
        """
        if call != self._memory.call:
            raise RuntimeError("a captured function was called again before the backward pass of this call")
        self._memory.order.follow()
        self._graphs.backward(upstream)
        # Autograd makes `grad` of a tensor that only it holds, without a copy, and the next replay would write there. It copies
        # a tensor that is held here, too.
        found = self._graphs.gradients
        gradients = iter(found if self.takes_gradients is not None else _copies(found))
        return [*(next(gradients) if needed else None for needed in self._needs_gradient), *gradients]


@dataclass
class _Run:
    """One call that is not captured, with all gradients at once, as a :class:`_Capture` gives them."""

    function: Callable[..., Any]
    parameters: list[nn.Parameter]
    takes_gradients: TakesGradients | None
    call: int = 0

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self._read = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with torch.enable_grad():
            results = _as_tuple(self.function(*self._read))
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


def modes(modules: Sequence[nn.Module], device_type: str) -> tuple[object, ...]:
    """Return the modes of modules and torch that change what a function does, besides its inputs and weights."""
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
    """Runs a capture or a :class:`_Run`; arguments are that, its inputs and its parameters."""

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
def buffers_restored(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Give the layers' buffers back, at the end, the values that they had: runs inside do not count in statistics that layers
    keep, such as those of batch norms."""
    before = {buffer: buffer.clone() for layer in layers for buffer in layer.buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in before.items():
                buffer.copy_(values)


@contextmanager
def _as_other_leaves(layers: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """Put other parameters in the same memory into the layers; yield them, in the order of ``parameters()``.

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
