"""AllGather + GEMM, and GEMM + ReduceScatter, in plain torch and torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def reference(process_group: dist.ProcessGroup | None, x: Tensor, weight: Tensor) -> Tensor:
    """[M, N]: the rows of all ranks, gathered, times ``weight.T``. Differentiable; collective, also backward.

    Args:
        process_group: None for one rank.
        x: [M / ranks, K], this rank's rows.
        weight: [N, K].
    """
    gathered: Tensor = x if process_group is None else _Gather.apply(x, process_group)
    return torch.nn.functional.linear(gathered, weight)


def scatter_reference(process_group: dist.ProcessGroup | None, x: Tensor, weight: Tensor) -> Tensor:
    """[M / ranks, N]: this rank's rows of the sum over ranks of ``x @ weight.T``. Differentiable; collective, also backward.

    Args:
        x: [M, K].
        weight: [N, K].
    """
    product = torch.nn.functional.linear(x, weight)
    return product if process_group is None else _Scatter.apply(product, process_group)


def all_gather(x: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, in their order."""
    gathered = x.new_empty(process_group.size() * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(gathered, x.contiguous(), group=process_group)
    return gathered


def reduce_scatter(x: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """Return this rank's block of rows of the sum over ranks."""
    own = x.new_empty(len(x) // process_group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(own, x.contiguous(), group=process_group)
    return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return all_gather(x, process_group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradients[0], ctx.process_group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        return reduce_scatter(x, process_group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradients[0], ctx.process_group), None
