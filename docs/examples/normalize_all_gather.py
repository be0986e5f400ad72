"""RMS normalization and All-Gather as one kernel: every rank's normalized rows, on every rank.

A program normalizes one row and stores it straight into the output of each rank, while others still compute.
"""
# Kernels follow Triton's ways: constants in capitals.
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.symmetric import Channel, SymmetricMemory
from dlrm_fused.symmetric.device import begin, finish, peer_pointer, wait_until_ready


@triton.jit
def normalize_all_gather_kernel(x, width, addresses, channel, COLUMNS: tl.constexpr):
    epoch = begin(channel, 0, width)  # ready to receive at offset 0; width must be equal
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    values = tl.load(x + row * width + column, mask=column < width, other=0.0)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / width + 1e-6)
    place = (channel.rank * tl.num_programs(0) + row).to(tl.int64) * width * 4
    for turn in tl.static_range(channel.world):  # the next rank first, this one last: all links are busy from the start
        peer = (channel.rank + 1 + turn) % channel.world
        ready = wait_until_ready(channel, peer, epoch, width)
        output = peer_pointer(addresses, peer, place, tl.float32)
        tl.store(output + column, values, mask=(column < width) & (ready >= 0))
    finish(channel, epoch)  # all rows of all ranks are here


def normalize_all_gather(x: Tensor, memory: SymmetricMemory, channel: Channel) -> Tensor:
    """fp32 [rows, width] on each rank to [ranks * rows, width]; it lies in ``memory`` and is overwritten by the next call."""
    (rows, width), ranks = x.shape, channel.group.world_size
    channel.raise_fault()
    columns = triton.next_power_of_2(width)
    normalize_all_gather_kernel[(rows,)](x, width, memory.addresses, channel.args, COLUMNS=columns)
    return memory.local.view(torch.float32)[: ranks * rows * width].view(ranks * rows, width)
