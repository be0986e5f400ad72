"""Cross layers as operations of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear


def cross_layers(x_0: Tensor, v: Sequence[Tensor], w: Sequence[Tensor], bias: Sequence[Tensor]) -> Tensor:
    """x_0 * (W V x + b) + x by layer, from x = x_0 on. The result has the dtype of x_0.

    TorchRec's module lets results grow to float32 where the bias has that, twice the bytes that the layers read and write; here
    only what is computed in between does. For x_0 in float32 the bits are the same.

    Args:
        x_0: [b, N].
        v: by layer [r, N].
        w: by layer [N, r].
        bias: by layer [N].
    """
    x = x_0
    for v_l, w_l, bias_l in zip(v, w, bias, strict=True):
        x = (x_0 * (linear(linear(x, v_l), w_l) + bias_l) + x).to(x_0.dtype)
    return x
