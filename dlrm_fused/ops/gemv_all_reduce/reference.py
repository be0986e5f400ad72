"""GEMV + AllReduce in plain torch and torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def reference(
    process_group: dist.ProcessGroup | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor | None]:
    """out = (sum over ranks of ``x @ weight.T``) + bias + residual, and the RMSNorm of out: what ``comm=baseline`` runs.

    Without a process group there is one rank.

    The product is rounded to the dtype of x on every rank before it is summed.
    """
    out = torch.nn.functional.linear(x, weight)
    if process_group is not None and process_group.size() > 1:
        out = _AllReduce.apply(out, process_group)
    if bias is not None:
        out = out + bias
    if residual is not None:
        out = out + residual
    normed = None
    if norm_weight is not None:
        normed = torch.nn.functional.rms_norm(out, (out.shape[-1],), norm_weight, norm_eps)
    return out, normed


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        # In place: nobody else sees the product.
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=process_group)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
