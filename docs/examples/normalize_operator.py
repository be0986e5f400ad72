"""RMS normalization and All-Gather as the operators of the package are made: a workspace, results that callers keep, torch.ops.

normalize_all_gather.py has the bare kernel and the reference. Here results lie in blocks that are lent out, autograd and
torch.compile know the operator, and it runs on CPUs without kernels too. In the package each of the three parts is a file of
``dlrm_fused/ops/normalize_all_gather/``.
"""
# Kernels follow Triton's ways: constants in capitals.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.dispatch import Operator
from dlrm_fused.ops.common.workspace import Workspace, check_counts, check_tensor, fingerprint_of
from dlrm_fused.symmetric import BlockPool, SymmetricGroup, name_lost_peer
from dlrm_fused.symmetric.device import begin, finish, peer_pointer, uses_kernels, wait_until_ready
from dlrm_fused.symmetric.launches import layout_of, next_power_of_2
from docs.examples.normalize_all_gather import normalize

_HELD_RESULTS = 2  # without a copy; autograd keeps results for the backward pass
_ROW_BYTES = 16  # peer_pointer lets the compiler store so many bytes at once

# workspace.py


class NormalizeWorkspace(Workspace):
    """Memory for the rows of all ranks; fp32, at most ``max_rows`` of ``width`` elements from each rank."""

    def __init__(self, group: SymmetricGroup, *, name: str, max_rows: int, width: int, timeout_seconds: float = 30.0) -> None:
        """Collective.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """

        def check() -> dict[str, object]:
            check_counts(name, max_rows=max_rows, width=width)
            if width * 4 % _ROW_BYTES:
                raise UsageError(f"{name}: width={width}; needed: a multiple of {_ROW_BYTES // 4}")
            if group.hosts.are_many:
                raise UsageError(f"{name}: its ranks are on several hosts; needed: one host")
            return {"name": name, "max_rows": max_rows, "width": width}

        super().__init__(group, name, check, timeout_seconds=timeout_seconds)
        self.max_rows, self.width = max_rows, width
        size = self.world_size * max_rows * width * 4
        self.results = BlockPool.with_spare(group, f"{name}.results", size, _HELD_RESULTS)


# kernel.py


@triton.jit(do_not_specialize=["receive_offset", "fingerprint"])
def normalize_all_gather_kernel(x, width, addresses, channel, receive_offset, fingerprint, COLUMNS: tl.constexpr):
    """A program for each row. Blocks of the ranks' pools lie at different offsets, so a peer says where it receives."""
    epoch = begin(channel, receive_offset, fingerprint)
    row, column = tl.program_id(0), tl.arange(0, COLUMNS)
    values = tl.load(x + row * width + column, mask=column < width, other=0.0)
    values *= tl.rsqrt(tl.sum(values * values, axis=0) / width + 1e-6)
    place = (channel.rank * tl.num_programs(0) + row).to(tl.int64) * width * 4
    for turn in tl.static_range(channel.world):
        peer = (channel.rank + 1 + turn) % channel.world
        offset = wait_until_ready(channel, peer, epoch, fingerprint)
        output = peer_pointer(addresses, peer, offset + place, tl.float32)
        tl.store(output + column, values, mask=(column < width) & (offset >= 0))
    finish(channel, epoch)


def store_rows(workspace: NormalizeWorkspace, x: Tensor, receive_offset: int, fingerprint: int) -> None:
    """Store this rank's normalized rows at all ranks, and receive theirs at ``receive_offset``."""
    memory, channel = workspace.results.memory, workspace.channel
    if uses_kernels(workspace.device):
        columns = next_power_of_2(workspace.width)
        arguments = x, workspace.width, memory.addresses, channel.args, receive_offset, fingerprint
        channel.launches(layout_of(x), normalize_all_gather_kernel, (len(x),), *arguments, COLUMNS=columns)
        return
    rows = normalize(x).flatten().view(torch.uint8)

    def store(peer: int, offset: int) -> None:
        begin_at = offset + workspace.rank * rows.numel()
        memory.peer(peer)[begin_at : begin_at + rows.numel()].copy_(rows)

    channel.run_epoch(store, offset=receive_offset, fingerprint=fingerprint)


# op.py


def normalize_all_gather(workspace: NormalizeWorkspace, x: Tensor) -> Tensor:
    """fp32 [rows, width] on each rank to [ranks * rows, width] on all; rows must be equal. Collective; differentiable.

    Raises:
        UsageError: for another shape, dtype or device; the other ranks raise CommunicationError, with the name of this one.
        CommunicationError: a peer is lost, was waited for too long, or makes another call. On GPUs, from a later call.
    """
    result: Tensor = _operator(x, workspace.handle)
    return result


torch.library.define("dlrm_fused_example::normalize_all_gather", "(Tensor x, int handle) -> Tensor")
torch.library.define("dlrm_fused_example::normalize_all_gather_backward", "(Tensor gradient, Tensor x, int handle) -> Tensor")


def _forward(x: Tensor, handle: int) -> Tensor:
    workspace = NormalizeWorkspace.of(handle)
    workspace.begin_call()

    def check() -> None:
        check_tensor(workspace, "x", x, torch.float32, [x.shape[0], workspace.width])
        if not 1 <= len(x) <= workspace.max_rows:
            raise UsageError(f"{workspace.name}: x has {len(x)} rows; allowed: 1 to max_rows={workspace.max_rows}")

    workspace.check_once(layout_of(x), check)
    result = workspace.results.receive((workspace.world_size * len(x), workspace.width), torch.float32)
    store_rows(workspace, x, workspace.results.offset_of(result), fingerprint_of("normalize", *x.shape))
    return workspace.results.to_hold(result)


@torch.library.impl("dlrm_fused_example::normalize_all_gather_backward", ["cpu", "cuda"])
def _backward(gradient: Tensor, x: Tensor, handle: int) -> Tensor:
    """Every rank has used these rows: their gradient is the sum over ranks. Collective."""
    workspace = NormalizeWorkspace.of(handle)
    summed = gradient.contiguous().clone()
    if workspace.world_size > 1:
        with name_lost_peer():
            dist.all_reduce(summed, group=workspace.group.process_group)
    with torch.enable_grad():
        own = x.detach().requires_grad_()
        rows = normalize(own)
    return torch.autograd.grad(rows, own, summed.chunk(workspace.world_size)[workspace.rank])[0]


@torch.library.register_fake("dlrm_fused_example::normalize_all_gather")
def _fake_forward(x: Tensor, handle: int) -> Tensor:
    return x.new_empty(NormalizeWorkspace.of(handle).world_size * x.shape[0], x.shape[1])


@torch.library.register_fake("dlrm_fused_example::normalize_all_gather_backward")
def _fake_backward(gradient: Tensor, x: Tensor, handle: int) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    x, ctx.handle = inputs
    ctx.save_for_backward(x)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return torch.ops.dlrm_fused_example.normalize_all_gather_backward(gradient, x, ctx.handle), None


_operator = Operator("dlrm_fused_example::normalize_all_gather", _forward, _differentiate, _save)
