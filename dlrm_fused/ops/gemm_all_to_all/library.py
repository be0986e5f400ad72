"""GEMM + All-to-All by the library's product and torch.distributed's All-to-All: for shapes where nothing fused is faster.

Beside the product the ranks meet in an epoch of the channel, so that a lost rank, or one that makes another call, is noticed as
by the other schedules. On GPUs the host hears of it from a later call, and NCCL's own wait ends at the process group's limit.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.common.meeting import meet
from dlrm_fused.symmetric import Channel


def multiply_and_exchange(
    x: Tensor, weight: Tensor, channel: Channel, stream: torch.cuda.Stream | None, fingerprint: int
) -> Tensor:
    """Row block s of the result is this rank's block of rank s's x @ weight.T. One epoch: collective.

    Args:
        x: [M, K], contiguous; M a multiple of the ranks.
        weight: [N, K].
        stream: for the epoch, beside the product; None on the CPU.
        fingerprint: must be equal on all ranks.

    Returns:
        [M, N], an ordinary tensor.
    """
    group, main = channel.group, torch.cuda.current_stream(x.device) if stream else None
    if stream and main:
        stream.wait_stream(main)
    with torch.cuda.stream(stream) if stream else nullcontext():
        meet(channel, fingerprint)
    product = torch.nn.functional.linear(x, weight)
    if stream and main:
        main.wait_stream(stream)
    else:
        channel.raise_fault()  # rather than wait for a peer that makes another call
    if group.process_group is None:
        return product
    result = torch.empty_like(product)
    dist.all_to_all_single(result, product, group=group.process_group)
    return result
