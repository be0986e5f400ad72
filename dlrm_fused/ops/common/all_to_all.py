"""The All-to-All of torch.distributed with a gradient, for the reference of an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all(
    rows: Tensor,
    process_group: dist.ProcessGroup | None,
    received: Sequence[int] | None = None,
    sent: Sequence[int] | None = None,
) -> Tensor:
    """The rows that all ranks send to this one, in the order of ranks. Collective; differentiable.

    Args:
        rows: [R, ...]: those for rank 0 first, and so on.
        process_group: None for one rank.
        received, sent: rows from and to each rank; None for equal blocks.
    """
    if process_group is None or process_group.size() == 1:
        return rows
    result: Tensor = _AllToAll.apply(rows, process_group, received, sent)
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, process_group: dist.ProcessGroup, received: Any, sent: Any) -> Tensor:
        ctx.process_group, ctx.received, ctx.sent = process_group, received, sent
        result = rows.new_empty(len(rows) if received is None else sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=process_group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(gradients[0], ctx.process_group, ctx.sent, ctx.received), None, None, None
