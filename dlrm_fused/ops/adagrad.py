"""Adagrad that steps a tensor with one kernel. Torch's takes several, and sorts lists of tensors on the host before.

Source: Duchi et al., *Adaptive Subgradient Methods*, JMLR 2011, as ``torch.optim.Adagrad`` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.launches import ceil_div

_ELEMENTS = 1024  # of a program


class Adagrad(torch.optim.Adagrad):
    """``torch.optim.Adagrad`` of one tensor: on GPUs a kernel, whose results differ by rounding at most.

    Args:
        parameter: float32 and contiguous, as its gradient must be.
        lr, weight_decay, eps: as torch's.
    """

    def __init__(self, parameter: Tensor, *, lr: float, weight_decay: float, eps: float) -> None:
        super().__init__([parameter], lr=lr, weight_decay=weight_decay, eps=eps)
        self._parameter = parameter

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make a step, if there is a gradient."""
        parameter, gradient = self._parameter, self._parameter.grad
        if not uses_kernels(parameter.device):
            super().step()
        elif gradient is not None:
            state, group, count = self.state[parameter], self.param_groups[0], parameter.numel()
            state["step"] += 1
            adagrad_kernel[(ceil_div(count, _ELEMENTS),)](
                parameter, gradient, state["sum"], count, group["lr"], group["weight_decay"], group["eps"], ELEMENTS=_ELEMENTS
            )


@triton.jit
def adagrad_kernel(parameter, gradient, sums, count, rate, weight_decay, eps, ELEMENTS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = place < count
    value = tl.load(parameter + place, mask=inside)
    slope = tl.load(gradient + place, mask=inside) + weight_decay * value
    total = tl.load(sums + place, mask=inside) + slope * slope
    tl.store(sums + place, total, mask=inside)
    tl.store(parameter + place, value - rate * tl.div_rn(slope, tl.sqrt_rn(total) + eps), mask=inside)
