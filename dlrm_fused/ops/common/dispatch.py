"""The way from an operator's function to what it runs: through PyTorch's dispatcher, or around it where that adds only time.

The dispatcher's way through Python takes the host longer than a launch, in a call with gradients several times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dlrm_fused.compat.torch import has_dispatch_mode, is_in_forward_mode, is_profiled
from dlrm_fused.errors import UsageError

R = TypeVar("R")

_ORDINARY = (Tensor, nn.Parameter)


def needs_dispatcher(tensors: Iterable[Tensor] = ()) -> bool:
    """Return whether a compiler or a ``TorchDispatchMode`` looks at the calls of operators, or a tensor is of another class."""
    return torch.compiler.is_compiling() or has_dispatch_mode() or not all(type(one) in _ORDINARY for one in tensors)


def needs_node(tensors: Iterable[Tensor]) -> bool:
    """Return whether a call needs a node of autograd's graph: for gradients; and in forward mode, where it raises that it has
    no tangent."""
    return (torch.is_grad_enabled() and any(one.requires_grad for one in tensors)) or is_in_forward_mode()


def expect_no_gradient(ctx: Any, output: Tensor) -> None:
    """Let autograd hand None to a backward pass where what was computed of the output has given no gradient, and not zeros for
    each result of a call: ``ctx.zeros()`` makes those of the output."""
    ctx.set_materialize_grads(False)
    ctx.zeros = functools.partial(torch.zeros, output.shape, dtype=output.dtype, device=output.device)


def without_autocast(function: Callable[..., R]) -> Callable[..., R]:
    """Return the function as an operator runs it: its own products have the dtypes that it says, whatever the caller's autocast
    makes of products."""

    @functools.wraps(function)
    def run(*inputs: Any) -> R:
        kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
        for kind in kinds:  # a context of torch's takes as long as a launch
            torch.set_autocast_enabled(kind, False)
        try:
            return function(*inputs)
        finally:
            for kind in kinds:
                torch.set_autocast_enabled(kind, True)

    return run


class _LastGradient(torch.autograd.Function):
    """A gradient as it is, which depends on other tensors, and has no gradient itself."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *_: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise UsageError(
            "a gradient that an operator of dlrm_fused has computed is to be differentiated: it has no second derivative; its "
            "reference in plain torch has"
        )


def differentiable_once(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass that records nothing, and whose gradients raise a UsageError if they are differentiated.

    Torch's ``once_differentiable`` lets that pass where only what the forward pass has saved needs a gradient.
    """

    @functools.wraps(differentiate)
    def run(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return differentiate(ctx, *gradients)
        with torch.no_grad():
            found = differentiate(ctx, *gradients)
        of = [one for one in (*ctx.saved_tensors, *gradients) if one is not None and one.requires_grad]
        return _without_gradients(found, of or [torch.zeros((), requires_grad=True)])

    return run


def _without_gradients(found: Any, of: Sequence[Tensor]) -> Any:
    if isinstance(found, Tensor):
        return _LastGradient.apply(found, *of)
    if isinstance(found, (tuple, list)):
        return type(found)(_without_gradients(one, of) for one in found)
    return found


class Operator:
    """An operator that is defined, made known to PyTorch, and called without its dispatcher where nobody needs that."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        differentiate: Callable[..., tuple[Tensor | None, ...]],
        save_for_backward: Callable[..., None],
    ) -> None:
        """Args:
        name: as it was defined, with its namespace.
        forward: what it runs, on CPUs and GPUs.
        differentiate, save_for_backward: as ``torch.library.register_autograd`` takes them.
        """
        forward, differentiate = without_autocast(forward), without_autocast(differentiable_once(differentiate))
        torch.library.impl(name, ["cpu", "cuda"], forward)
        torch.library.register_autograd(name, differentiate, setup_context=save_for_backward)
        namespace, short_name = name.split("::")
        self._name, self._operator = name, getattr(getattr(torch.ops, namespace), short_name).default
        self._forward, self._function = forward, _function(short_name, forward, differentiate, save_for_backward)

    def __call__(self, *inputs: Any) -> Any:
        """Call the operator with all of its arguments; the result is differentiable if an input is."""
        tensors = [given for given in inputs if isinstance(given, Tensor)]
        if needs_dispatcher(tensors):
            return self._operator(*inputs)
        run = self._function.apply if needs_node(tensors) else self._forward
        if is_profiled():
            with torch.profiler.record_function(self._name):
                return run(*inputs)
        return run(*inputs)


def _function(
    name: str, run: Callable[..., Any], differentiate: Callable[..., Any], save: Callable[..., None]
) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        save(ctx, inputs, output)
        return output

    # Nodes of the graph are named by the class.
    return type(name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(differentiate)})
