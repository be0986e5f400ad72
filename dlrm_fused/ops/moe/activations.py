"""The activations of experts, by name, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrm_fused.errors import UsageError


@dataclass(frozen=True)
class Activation:
    """The function that an expert applies to its first product.

    Attributes:
        name: ``silu``: silu(h); or ``swiglu``: silu(left half of h) * right half.
        parts: matrices of a hidden layer's width in w_in, one above the other: with ``swiglu`` that of the gate, and the other.
    """

    name: str
    parts: int

    @classmethod
    def named(cls, name: str, owner: str) -> Activation:
        """Raises UsageError, for the workspace or layer ``owner``, if there is none of that name."""
        if name not in ACTIVATIONS:
            raise UsageError(f"{owner}: activation={name}; allowed: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def width(self, w_in: Tensor) -> int:
        """Return the hidden layer's width f, from the experts' w_in [..., parts * f, d]."""
        return w_in.shape[-2] // self.parts

    def of(self, h: Tensor) -> Tensor:
        """Return [R, f] from the first product, [R, parts * f]. Differentiable."""
        if self.parts == 1:
            return F.silu(h)
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gradient(self, gradient: Tensor, h: Tensor) -> Tensor:
        """Return the gradient of h [R, parts * f], from that of the result of :meth:`of`, [R, f]."""
        gate = h[:, : gradient.shape[1]]
        rate = torch.sigmoid(gate)
        slope = rate * (1 + gate * (1 - rate))
        if self.parts == 1:
            return gradient * slope
        up = h[:, gradient.shape[1] :]
        return torch.cat([gradient * up * slope, gradient * (gate * rate)], dim=1)


ACTIVATIONS = {"silu": Activation("silu", 1), "swiglu": Activation("swiglu", 2)}
