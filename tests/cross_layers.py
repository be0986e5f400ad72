"""Cross layers with random weights, compared with the reference in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_fused.models.cross_layers import reference
from dlrm_fused.models.cross_layers.op import cross_layers


@dataclass(frozen=True)
class CrossLayers:
    """So many layers of a width N and a rank r, for a batch whose x_0 has this dtype."""

    layers: int
    batch: int
    width: int
    rank: int
    dtype: torch.dtype
    device: torch.device

    def inputs(self) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
        """x_0, and by layer v, w and bias: all float32 but x_0, and all exact in its dtype. The same at each call."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator)).to(self.device, self.dtype)

        weights = [
            [random(*shape, scale=scale).float().requires_grad_() for _ in range(self.layers)]
            for shape, scale in (
                ((self.rank, self.width), self.width**-0.5),
                ((self.width, self.rank), self.rank**-0.5),
                ((self.width,), 1.0),
            )
        ]
        return random(self.batch, self.width).requires_grad_(), weights[0], weights[1], weights[2]


def check(case: CrossLayers) -> None:
    """The operator's result and gradients are those of the reference, within the rounding of its dtype."""
    inputs = case.inputs()
    tensors = [inputs[0], *inputs[1], *inputs[2], *inputs[3]]
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    n = case.layers
    found = cross_layers(*inputs)
    expected = reference.cross_layers(exact[0], exact[1 : n + 1], exact[n + 1 : 2 * n + 1], exact[2 * n + 1 :])
    assert found.dtype == case.dtype
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(case.device, case.dtype)
    of_found = torch.autograd.grad(found, tensors, weights)
    of_exact = torch.autograd.grad(expected, exact, weights.double())
    assert [gradient.dtype for gradient in of_found] == [tensor.dtype for tensor in tensors]
    for left, right in zip((found, *of_found), (expected, *of_exact), strict=True):
        error = (left.double() - right).abs().max() / right.abs().max()
        assert error < 8 * torch.finfo(case.dtype).eps
