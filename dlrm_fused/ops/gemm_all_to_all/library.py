"""GEMM + All-to-All by the library's product and torch.distributed's All-to-All: for shapes where nothing fused is faster.

Beside the product the ranks of a host meet in an epoch of the channel, so that a lost rank, or one that makes another call, is
noticed as by the other schedules. On GPUs the host hears of it from a later call. NCCL's own wait ends at the process group's
limit, as does any wait for ranks of other hosts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.common.meeting import meet_beside
from dlrm_fused.symmetric import Channel, name_lost_peer


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
    product = meet_beside(lambda: torch.nn.functional.linear(x, weight), channel, stream, fingerprint)
    if channel.group.process_group is None:
        return product
    result = torch.empty_like(product)
    with name_lost_peer():  # lost between the epoch and here
        dist.all_to_all_single(result, product, group=channel.group.process_group)
    return result
