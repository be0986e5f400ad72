"""RMS normalization and All-Gather as one kernel: every rank's normalized rows, on every rank.

A program normalizes one row and stores it straight into the output of each rank, while others still compute. This is the
example of docs/extending.md: a kernel, its launch, the reference that it is tested with, and its gradient.
"""
# Kernels follow Triton's ways: constants in capitals.
# ruff: noqa: N803

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.symmetric import Channel, SymmetricMemory, abort_peers_on_error
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
    """fp32 [rows, width] on each rank to [ranks * rows, width]; it lies in ``memory`` and is overwritten by the next call.

    Raises:
        UsageError: x has another dtype, or ``memory`` no room; the other ranks raise CommunicationError, with this one's name.
        CommunicationError: a peer is lost, was waited for too long, or failed. On a GPU, from a later call.
    """
    (rows, width), ranks = x.shape, channel.group.world_size
    channel.begin_call()
    with abort_peers_on_error(channel):
        if x.dtype != torch.float32 or not x.is_contiguous() or ranks * x.nbytes > memory.size:
            shape = [ranks * rows, width]
            raise UsageError(f"x is {x.dtype} {list(x.shape)}; needed: contiguous fp32, {shape} within {memory.size} bytes")
    columns = triton.next_power_of_2(width)
    normalize_all_gather_kernel[(rows,)](x, width, memory.addresses, channel.args, COLUMNS=columns)
    return memory.local.view(torch.float32)[: ranks * rows * width].view(ranks * rows, width)


def normalize(x: Tensor) -> Tensor:
    """Rows over the root of their mean square (Zhang and Sennrich, arXiv 1910.07467)."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6)


def reference(process_group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    """What :func:`normalize_all_gather` computes, unfused: what tests compare with."""
    rows = normalize(x)
    blocks = [torch.empty_like(rows) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(blocks, rows, group=process_group)
    return torch.cat(blocks)


class NormalizeAllGather(torch.autograd.Function):
    """:func:`normalize_all_gather` with gradients: ``NormalizeAllGather.apply(x, memory, channel)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: SymmetricMemory, channel: Channel) -> Tensor:
        ctx.save_for_backward(x)
        ctx.group = channel.group
        return normalize_all_gather(x, memory, channel)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Every rank has used these rows: their gradient is the sum over ranks. Collective."""
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=ctx.group.process_group)
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            rows = normalize(x)
        (of_x,) = torch.autograd.grad(rows, x, summed.chunk(ctx.group.world_size)[ctx.group.rank])
        return of_x, None, None
