"""AllGather + GEMM, and GEMM + ReduceScatter, in plain torch and torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def reference(process_group: dist.ProcessGroup | None, x: Tensor, weight: Tensor) -> Tensor:
    """[M, N]: the rows of all ranks, gathered, times ``weight.T``. Differentiable; collective, also backward.

    Args:
        process_group: None for one rank.
        x: [M / ranks, K], this rank's rows.
        weight: [N, K].
    """
    gathered: Tensor = x if process_group is None else _Collective.apply(x, process_group, all_gather, reduce_scatter)
    return torch.nn.functional.linear(gathered, weight)


def scatter_reference(process_group: dist.ProcessGroup | None, x: Tensor, weight: Tensor) -> Tensor:
    """[M / ranks, N]: this rank's rows of the sum over ranks of ``x @ weight.T``. Differentiable; collective, also backward.

    Args:
        x: [M, K].
        weight: [N, K].
    """
    product = torch.nn.functional.linear(x, weight)
    return product if process_group is None else _Collective.apply(product, process_group, reduce_scatter, all_gather)


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


class _Collective(torch.autograd.Function):
    """A collective of rows, whose gradient takes the other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: dist.ProcessGroup, collective: Collective, other: Collective) -> Tensor:
        ctx.process_group, ctx.other = process_group, other
        return collective(x, process_group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.other(gradients[0], ctx.process_group), None, None, None
