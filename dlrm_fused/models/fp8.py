"""Matrix products of linear layers in 8-bit floating point, forward and backward; what is between them stays in bf16.

A product reads half the bytes of bf16, and tensor cores multiply at twice the rate. The range of these formats is small, so
each operand is multiplied by a power of two first, and the product divided by it: *per-tensor scaling*, with e4m3 forward and
e5m2 for gradients, of Micikevicius et al., *FP8 Formats for Deep Learning*, arXiv 2209.05433.

To look for the largest element of all takes one more pass over an operand, which costs what the product saves
(docs/performance/training.md). So the power of two is chosen by a sample of rows, with room for larger elements in the others.
What computes an operand can then write it in 8 bits at once. Nothing is kept from step to step, so a run that goes on later has
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_fused.compat.torch import scaled_product

LEAST_CAPABILITY = (8, 9)  # for computing, of a GPU with such products

OPERAND, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2

# Rows of an operand by which its scale is chosen.
_SAMPLED_ROWS = 1024
# The sample's largest element gets this value. Those of other rows may be 16 and 896 times as large; beyond, they are cut off.
# Smaller by 2^14 and 2^22 they become 0.
_LARGEST_OF_SAMPLE = {OPERAND: 28.0, GRADIENT: 64.0}
# Below so many columns on either side, or rows, products gain less than the conversion of their operands costs.
_FEWEST_COLUMNS, _FEWEST_ROWS = 512, 16_384
_MULTIPLE = 16  # of all sizes of a product, as cuBLAS has it


class Fp8Products(nn.Module):
    """The products of a model's large layers.

    Attributes:
        cut_off: [] int64, the elements of forward operands that were too large for their scale since it was read, in a second
            sample of rows; gradients have room enough.
    """

    cut_off: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cut_off", torch.zeros((), dtype=torch.int64), persistent=False)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As ``torch.nn.functional.linear``, by :func:`fp8_linear` in training, where it gains and autocast would take bf16."""
        in_bf16 = torch.is_grad_enabled() and torch.is_autocast_enabled(x.device.type)
        if not (in_bf16 and x.dim() == 2 and gains(len(x), weight.shape)):
            return linear(x, weight, bias)
        x = x.to(torch.bfloat16)
        with torch.no_grad():
            scale = _scale_of(x, OPERAND)
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


def multiply_in_8_bits(model: nn.Module, products: Fp8Products) -> list[Sequence[int]]:
    """Let a model's linear and low-rank cross layers multiply by ``products``; return the shapes of their weights.

    Parameters stay as they are, with their names.
    """
    weights: list[Tensor] = []
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Fp8Linear
            weights.append(layer.weight)
        elif isinstance(layer, LowRankCrossNet):  # as dlrm_fused.models.dlrm.cross_layers reads it
            weights += [*layer.V_kernels, *layer.W_kernels]
        else:
            continue
        cast(Any, layer).multiply = products.multiply
    return [weight.shape for weight in weights]


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
        f"rank ({', '.join(in_8_bits) or 'none'}); the others would gain nothing: 8 bits pay from {_FEWEST_ROWS:,} samples, "
        f"{_FEWEST_COLUMNS} inputs and {_FEWEST_COLUMNS} outputs on, all multiples of {_MULTIPLE}"
    )


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor) -> Tensor:
    """As ``torch.nn.functional.linear``, with all three products of forward and backward pass in 8 bits.

    Args:
        x: [rows, K] bf16; all sizes are multiples of 16.
        weight: [N, K].
        bias: [N].
        x_scale: [] float32, by which ``x`` is multiplied.

    Returns:
        [rows, N] in bf16. NaN stays NaN; infinity is cut off like what is too large.
    """
    return cast(Tensor, _Linear.apply(x, weight, bias, x_scale))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, x_scale: Tensor) -> Tensor:
        x8, weight_scale = _in_8_bits(x, x_scale, OPERAND), _scale_of(weight, OPERAND, len(weight))
        weight8 = _in_8_bits(weight, weight_scale, OPERAND)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.has_bias = bias is not None
        y = _multiply(x8, x_scale, weight8, weight_scale, has_short_sums=True)
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        scale = _scale_of(gradient, GRADIENT)
        gradient8 = _in_8_bits(gradient, scale, GRADIENT)
        of_x = _multiply(gradient8, scale, weight8.t(), weight_scale)
        transposed = gradient8.t().contiguous()
        of_weight = _multiply(transposed, scale, x8.t(), x_scale)
        # The sum reads the 8 bits that are there, not what they were made of.
        of_bias = transposed.float().sum(1) / scale if ctx.has_bias else None
        return of_x, of_weight, of_bias, None


def _rows_of(x: Tensor, rows: int = _SAMPLED_ROWS, second: bool = False) -> Tensor:
    """Return a sample of about so many rows, evenly spaced; ``second``: those in the middle between them."""
    step = max(1, len(x) // rows)
    return x[step // 2 if second else 0 :: step]


def _scale_of(x: Tensor, dtype: torch.dtype, rows: int = _SAMPLED_ROWS) -> Tensor:
    """Return the power of two, [] float32, by which to multiply a matrix; by a sample of its rows."""
    largest = _rows_of(x, rows).abs().amax().float()
    return torch.where(largest > 0, (_LARGEST_OF_SAMPLE[dtype] / largest).log2().floor().exp2(), 1.0)


def _in_8_bits(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix times its scale in 8 bits; what is too large becomes the largest number."""
    limit = torch.finfo(dtype).max
    return (x * scale).clamp(-limit, limit).to(dtype)


def _multiply(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, has_short_sums: bool = False) -> Tensor:
    """Multiply [M, K] by the transpose of [N, K]; [M, N] in bf16."""
    inverses = left_scale.reciprocal(), right_scale.reciprocal()
    if not left.is_cuda:  # slower than bf16: for tests of what is learned
        product: Tensor = (left.float() @ right.float().t()) * (inverses[0] * inverses[1])
        return product.to(torch.bfloat16)
    # Tensor cores of Hopper take 8-bit operands only where K is the contiguous dimension of both.
    return scaled_product(left.contiguous(), right.contiguous().t(), inverses, has_short_sums)
