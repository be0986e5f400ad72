"""Cross layers as an operator of PyTorch, ``torch.ops.dlrm_fused.cross_layers``, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from dlrm_fused.models.cross_layers import kernel, reference
from dlrm_fused.symmetric.device import uses_kernels

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def cross_layers(x_0: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], bias: Sequence[Tensor]) -> Tensor:
    """As :func:`~dlrm_fused.models.cross_layers.reference.cross_layers`; with x_0 of 16 bits, by kernels where they run.

    There the products have the dtype of x_0, as under autocast, and what is added to them is added in float32 before they are
    rounded, where the reference rounds in between.
    """
    if x_0.dtype not in _KERNEL_DTYPES or not uses_kernels(x_0.device):
        return reference.cross_layers(x_0, v, w, bias)
    needs_gradient = torch.is_grad_enabled()
    weights = [[weight.to(x_0.dtype) for weight in weights] for weights in (v, w)]
    biases = [one.float() for one in bias]
    result: Tensor = torch.ops.dlrm_fused.cross_layers(x_0.contiguous(), *weights, biases, needs_gradient)[0]
    return result


# Returns the result; and with needs_gradient the inputs of all layers but the first, each layer's V x, and its W V x + b.
torch.library.define(
    "dlrm_fused::cross_layers", "(Tensor x_0, Tensor[] v, Tensor[] w, Tensor[] bias, bool needs_gradient) -> Tensor[]"
)
# Returns the gradients of x_0, v, w and bias, by layer.
torch.library.define(
    "dlrm_fused::cross_layers_backward",
    "(Tensor gradient, Tensor[] inputs, Tensor[] v, Tensor[] w, Tensor[] us, Tensor[] ys) -> Tensor[]",
)


@torch.library.impl("dlrm_fused::cross_layers", ["cpu", "cuda"])
def _forward(x_0: Tensor, v: list[Tensor], w: list[Tensor], bias: list[Tensor], needs_gradient: bool) -> list[Tensor]:
    x, inputs, us, ys = x_0, [], [], []
    for v_l, w_l, bias_l in zip(v, w, bias, strict=True):
        u, y = x @ v_l.t(), torch.empty_like(x) if needs_gradient else None
        if y is not None:
            inputs.append(x)
            us.append(u)
            ys.append(y)
        x = kernel.forward(u, w_l, bias_l, x_0, x, y)
    return [x, *inputs[1:], *us, *ys]


@torch.library.register_fake("dlrm_fused::cross_layers")
def _fake_forward(x_0: Tensor, v: list[Tensor], w: list[Tensor], bias: list[Tensor], needs_gradient: bool) -> list[Tensor]:
    if not needs_gradient:
        return [torch.empty_like(x_0)]
    us = [x_0.new_empty(len(x_0), len(v_l)) for v_l in v]
    return [*(torch.empty_like(x_0) for _ in v), *us, *(torch.empty_like(x_0) for _ in v)]


@torch.library.impl("dlrm_fused::cross_layers_backward", ["cpu", "cuda"])
def _backward(
    gradient: Tensor, inputs: list[Tensor], v: list[Tensor], w: list[Tensor], us: list[Tensor], ys: list[Tensor]
) -> list[Tensor]:
    layers = len(v)
    gradients, dv, dw, dbias = ([torch.empty(0)] * layers for _ in range(4))
    du: Tensor | None = None
    for layer in reversed(range(layers)):
        following = None if du is None else v[layer + 1]
        gradient, dy, dbias[layer] = kernel.backward(gradient, inputs[0], du, following)
        gradients[layer] = gradient
        dw[layer] = dy.t() @ us[layer]
        du = dy @ w[layer]
        dv[layer] = du.t() @ inputs[layer]
    assert du is not None
    return [kernel.input_gradient(gradients, ys, du, v[0]), *dv, *dw, *dbias]


@torch.library.register_fake("dlrm_fused::cross_layers_backward")
def _fake_backward(gradient: Tensor, inputs: list[Tensor], v: list[Tensor], w: list[Tensor], *_: Any) -> list[Tensor]:
    dbias = [gradient.new_empty(gradient.shape[1], dtype=torch.float32) for _ in v]
    return [torch.empty_like(gradient), *(torch.empty_like(weight) for weight in (*v, *w)), *dbias]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x_0, v, w, _, ctx.needs_gradient = inputs
    ctx.layers = len(v)
    ctx.save_for_backward(*v, *w, x_0, *output[1:])


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    n = ctx.layers
    v, w, inputs, us, ys = (ctx.saved_tensors[n * i : n * (i + 1)] for i in range(5))
    dx, *of_weights = torch.ops.dlrm_fused.cross_layers_backward(gradients[0].contiguous(), inputs, v, w, us, ys)
    dv, dw, dbias = (of_weights[n * i : n * (i + 1)] for i in range(3))
    return dx, dv, dw, dbias, None


torch.library.register_autograd("dlrm_fused::cross_layers", _differentiate, setup_context=_save_for_backward)


@register_flop_formula(torch.ops.dlrm_fused.cross_layers)
def _forward_flops(x_0: Sequence[int], v: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    """Two products by layer, for torch.utils.flop_counter; arguments are the shapes of the operator's."""
    return 2 * sum(2 * x_0[0] * rank * width for rank, width in v)


@register_flop_formula(torch.ops.dlrm_fused.cross_layers_backward)
def _backward_flops(gradient: Sequence[int], inputs: Any, v: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    return 2 * _forward_flops(gradient, v)
