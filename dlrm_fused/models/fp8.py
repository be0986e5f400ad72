"""Matrix products of linear layers in 8-bit floating point, forward and backward; what is between them stays in bf16.

A product reads half the bytes of bf16, and tensor cores multiply at twice the rate. The range of these formats is small, so
each operand is multiplied by a power of two first, and the product divided by it: *per-tensor scaling*, with e4m3 forward and
e5m2 for gradients, of Micikevicius et al., *FP8 Formats for Deep Learning*, arXiv 2209.05433.

To look for the largest element of all takes one more pass over an operand, which costs what the product saves
(docs/performance/training.md). So the power of two is chosen by a sample of rows, with room for larger elements in others.
What computes an operand can then write it in 8 bits at once. Nothing is kept from step to step, so a run that goes on later has
the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_fused.compat.torch import scaled_product
from dlrm_fused.errors import ConfigError
from dlrm_fused.models.dlrm import linear_plus_bias
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.ops.common.gpus import FP8_CAPABILITY

OPERAND, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2

# A scale is chosen by about so many rows.
_SAMPLED_ROWS = 1024
# The largest element of the sample becomes at most this number. Those of other rows may be 16 times as large.
_LARGEST_OPERAND = 28.0
# The mean magnitude of the sample's gradients becomes at most this number. Where positives are rare, gradients of most rows are
# small, and those of few are larger by the inverse of the rate: 450,000 times the mean has room. What is 8,000 times smaller
# becomes 0.
_MEAN_GRADIENT = 0.125
_LARGEST_EXPONENT = 100  # so that scales and their inverses are finite
# Products of fewer columns on either side, or of fewer rows, gain less than the conversion of their operands costs.
_FEWEST_COLUMNS, _FEWEST_ROWS = 512, 16_384
_MULTIPLE = 16  # cuBLAS takes sizes that this number divides


class Fp8Products(nn.Module):
    """The products of a model's large layers.

    Attributes:
        weights: the shapes of the weights of all layers that ask for them.
        cut_off: [] int64, the elements of forward operands that were too large for their scale since it was read, in a second
            sample of rows. A step that is captured as a CUDA graph counts three times. Gradients are not counted.
    """

    cut_off: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Sequence[int]] = []
        self.register_buffer("cut_off", torch.zeros((), dtype=torch.int64), persistent=False)

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, otherwise: Callable[..., Tensor] = linear
    ) -> Tensor:
        """Compute a linear layer by :func:`fp8_linear` in training, where that gains and autocast would take bf16.

        Args:
            otherwise: computes it elsewhere.
        """
        in_bf16 = torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type)
        if not (in_bf16 and x.dim() == 2 and gains(len(x), weight.shape)):
            return otherwise(x, weight, bias)
        x = x.to(torch.bfloat16)
        with torch.no_grad():
            scale = _scale_by_largest(_rows_of(x))
            self.cut_off += (_rows_of(x, second=True).abs() * scale > torch.finfo(OPERAND).max).sum()
        return fp8_linear(x, weight, bias, scale)

    def take_cut_off(self) -> int:
        """Return :attr:`cut_off` of all ranks, and begin at 0. Collective; waits for the device."""
        dist.all_reduce(self.cut_off)
        count = int(self.cut_off)
        self.cut_off.zero_()
        return count


class Fp8Linear(nn.Linear):
    """A linear layer whose product is that of ``multiply``."""

    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """Map [rows, K] to [rows, N]."""
        return self.multiply(input, self.weight, self.bias)


def multiply_in_8_bits(model: nn.Module, products: Fp8Products) -> None:
    """Let a model's linear and low-rank cross layers, but those of experts, multiply by ``products``.

    Parameters stay as they are, with their names.
    """
    of_experts = {layer for experts in model.modules() if isinstance(experts, MixtureOfExperts) for layer in experts.modules()}
    for layer in model.modules():
        if type(layer) is nn.Linear and layer not in of_experts:
            layer.__class__ = Fp8Linear
            cast(Fp8Linear, layer).multiply = products.multiply
            products.weights.append(layer.weight.shape)
        elif isinstance(layer, LowRankCrossNet):
            # The function cross_layers reads this attribute.
            cast(Any, layer).multiply = partial(products.multiply, otherwise=linear_plus_bias)
            products.weights += [weight.shape for weight in (*layer.V_kernels, *layer.W_kernels)]


def gains(rows: int, weight: Sequence[int]) -> bool:
    """Return whether a linear layer is large enough that 8 bits save time, and has sizes that the product takes.

    Args:
        rows: of the layer's input, [rows, K].
        weight: its shape, N and K.
    """
    is_large = rows >= _FEWEST_ROWS and min(weight) >= _FEWEST_COLUMNS
    return is_large and not any(size % _MULTIPLE for size in (rows, *weight))


def describe(weights: Sequence[Sequence[int]], rows: int) -> str:
    """Return a line on which of a model's layers are multiplied in 8 bits, by the shapes of their weights."""
    in_8_bits = [f"{n} x {k}" for n, k in weights if gains(rows, (n, k))]
    return (
        f"training.precision=fp8: {len(in_8_bits)} of {len(weights)} layers are multiplied in 8 bits with {rows:,} samples a "
        f"rank ({', '.join(in_8_bits) or 'none'}); it takes {_FEWEST_ROWS:,} samples, {_FEWEST_COLUMNS} inputs and "
        f"{_FEWEST_COLUMNS} outputs or more, all multiples of {_MULTIPLE}"
    )


def check_gpu(device: torch.device) -> None:
    """Raises ConfigError if a GPU cannot multiply in 8 bits."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            f"training.precision=fp8: {torch.cuda.get_device_name(device)} does not multiply in 8 bits, as GPUs of compute "
            f"capability {'.'.join(map(str, FP8_CAPABILITY))} do; allowed here: fp32, tf32, bf16"
        )


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor) -> Tensor:
    """Compute a linear layer with all three products of forward and backward pass in 8 bits.

    Args:
        x: [rows, K] bf16; all sizes are multiples of 16.
        weight: [N, K].
        bias: [N].
        x_scale: [] float32, by which ``x`` is multiplied.

    Returns:
        [rows, N] in bf16. What is not finite makes its row NaN.
    """
    return cast(Tensor, _Linear.apply(x, weight, bias, x_scale))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor) -> Tensor:
        x8, weight_scale = _in_8_bits(x, x_scale, OPERAND), _scale_by_largest(weight)
        weight8 = _in_8_bits(weight, weight_scale, OPERAND)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.has_bias = bias is not None
        y = _multiply(x8, x_scale, weight8, weight_scale, has_short_sums=True)
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        scale = _scale_by_mean(_rows_of(gradient), len(gradient))
        gradient8 = _in_8_bits(gradient, scale, GRADIENT)
        of_x = _multiply(gradient8, scale, weight8.t(), weight_scale)
        transposed = gradient8.t().contiguous()
        of_weight = _multiply(transposed, scale, x8.t(), x_scale)
        # The sum reads the 8 bits that are there, not what they were made of.
        of_bias = transposed.float().sum(1) / scale if ctx.has_bias else None
        return of_x, of_weight, of_bias, None


def _rows_of(x: Tensor, second: bool = False) -> Tensor:
    """Return a sample of rows, evenly spaced; ``second``: those in the middle between them.

    The step is odd, so that rows that repeat after 2, 4, 8, ... are all seen.
    """
    step = len(x) // _SAMPLED_ROWS | 1
    return x[step // 2 if second else 0 :: step]


def _scale_by_largest(sample: Tensor) -> Tensor:
    """Return the power of two, [] float32, that makes the largest element at most ``_LARGEST_OPERAND``."""
    return _power_of_two(_LARGEST_OPERAND / sample.abs().amax().float(), otherwise=1.0)


def _scale_by_mean(sample: Tensor, rows: int) -> Tensor:
    """Return the power of two, [] float32, that makes the mean magnitude at most ``_MEAN_GRADIENT``.

    Without a gradient in the sample, others are taken to be those of a mean over so many rows.
    """
    return _power_of_two(_MEAN_GRADIENT / sample.abs().mean(dtype=torch.float32), otherwise=2.0 ** math.floor(math.log2(rows)))


def _power_of_two(scale: Tensor, otherwise: float) -> Tensor:
    """Round down; ``otherwise`` for what is infinite, zero or NaN."""
    exponent = scale.log2().floor()
    power = exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).exp2()
    return torch.where(exponent.isfinite(), power, otherwise)


def _in_8_bits(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix times its scale in 8 bits; what is too large becomes the largest number, what is infinite NaN."""
    limit = torch.finfo(dtype).max
    return torch.where(x.isinf(), torch.nan, (x * scale).clamp(-limit, limit)).to(dtype)


def _multiply(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, has_short_sums: bool = False) -> Tensor:
    """Multiply [M, K] by the transpose of [N, K]; [M, N] in bf16."""
    inverses = left_scale.reciprocal(), right_scale.reciprocal()
    if not left.is_cuda:  # slower than bf16: for tests of what is learned
        product: Tensor = (left.float() @ right.float().t()) * (inverses[0] * inverses[1])
        return product.to(torch.bfloat16)
    # Tensor cores of Hopper take 8-bit operands only where K is the contiguous dimension of both.
    return scaled_product(left.contiguous(), right.contiguous().t(), inverses, has_short_sums)
