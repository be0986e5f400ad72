"""Product + AllReduce by the library's product and torch.distributed's all-reduce: for shapes where nothing fused is faster."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.common.meeting import meet_beside
from dlrm_fused.symmetric import Channel


def multiply_and_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    channel: Channel,
    stream: torch.cuda.Stream | None,
    fingerprint: int,
) -> Tensor:
    """[m, N]: the sum over ranks of x @ weight.T, + bias + residual, rounded after each step. One epoch: collective.

    Args:
        x, weight, bias, residual: as of :func:`~dlrm_fused.ops.gemv_all_reduce.op.gemv_all_reduce`.
        stream: for the epoch, beside the product; None on the CPU.
        fingerprint: must be equal on all ranks.
    """
    out = meet_beside(lambda: torch.nn.functional.linear(x, weight), channel, stream, fingerprint)
    if channel.group.process_group is not None:
        dist.all_reduce(out, group=channel.group.process_group)
    for part in (bias, residual):
        if part is not None:
            out += part
    return out
