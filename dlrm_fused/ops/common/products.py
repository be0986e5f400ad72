"""Products by the library, for what kernels do not compute."""

from __future__ import annotations

import torch
from torch import Tensor


def product_in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, of which nothing is rounded to 16 bits."""
    if x.device.type == "cpu" or x.dtype == torch.float32:
        return torch.nn.functional.linear(x.float(), weight.float())
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, rounded once, to the dtype of x."""
    return product_in_fp32(x, weight).to(x.dtype) if x.device.type == "cpu" else torch.mm(x, weight.T)
