"""The expert layer in plain torch and torch.distributed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.compat.torch import is_rocm
from dlrm_fused.ops.common.all_to_all import all_to_all
from dlrm_fused.ops.moe.activations import Activation


def reference(
    process_group: dist.ProcessGroup | None,
    x: Tensor,
    experts: Tensor,
    gates: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    gradient_scale: float = 1.0,
    activation: str = "silu",
) -> Tensor:
    """out[t] = sum over j of ``gates[t, j] * (silu(x[t] @ w_in[e].T) @ w_out[e].T)``, e = experts[t, j].

    With ``activation="swiglu"``, ``silu(x[t] @ gate.T) * (x[t] @ up.T)`` in place of the silu, w_in[e] being gate and up one
    above the other.

    This is what ``comm=baseline`` runs: All-to-All of tokens, products, All-to-All of results. Without a process group there is
    one rank.

    Counts pass through the host: All-to-All needs them there.
    """
    ranks = 1 if process_group is None else process_group.size()
    (tokens, top_k), local = experts.shape, w_in.shape[0]
    slots = experts.flatten()
    counts = slots.new_zeros(1 + ranks * local).scatter_add_(0, slots + 1, torch.ones_like(slots))
    to_receive = all_to_all(counts[1:], process_group).view(ranks, local)
    to_send = counts[1:].view(ranks, local).sum(1)
    unrouted, *numbers = torch.cat([counts[:1], to_send, to_receive.flatten()]).tolist()
    sent = numbers[:ranks]
    received = [sum(numbers[ranks + rank * local : ranks + (rank + 1) * local]) for rank in range(ranks)]
    per_expert = [sum(numbers[ranks + expert :: local]) for expert in range(local)]

    # Slots by expert, those without one left out; what arrives is by source, and then by expert.
    order = torch.argsort(slots, stable=True)[unrouted:]
    rows = all_to_all(_Take.apply(x, order, top_k), process_group, received, sent)
    of_expert = torch.arange(local, device=x.device).repeat(ranks)
    by_expert = torch.argsort(of_expert.repeat_interleave(to_receive.flatten(), output_size=sum(received)), stable=True)
    rows = _Take.apply(rows, by_expert, 1)
    hidden = _grouped_product(rows, _with_scaled_gradient(w_in, gradient_scale), per_expert)
    hidden = Activation.named(activation, "reference").of(hidden)
    rows = _grouped_product(hidden, _with_scaled_gradient(w_out, gradient_scale), per_expert)
    rows = all_to_all(_put(rows, by_expert, sum(received)), process_group, sent, received)
    by_token = _put(rows, order, tokens * top_k).view(tokens, top_k, x.shape[1])
    return torch.bmm(gates[:, None], by_token.float())[:, 0].to(x.dtype)


class _Take(torch.autograd.Function):
    """Rows ``index // repeats``; no two indices are equal, so that the gradient needs no atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, repeats: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count, ctx.repeats = rows.shape[0], repeats
        return rows.index_select(0, index if repeats == 1 else index // repeats)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (index,), (gradient,) = ctx.saved_tensors, gradients
        by_index = gradient.new_zeros(ctx.count * ctx.repeats, gradient.shape[1]).index_copy_(0, index, gradient)
        return by_index.view(ctx.count, ctx.repeats, gradient.shape[1]).sum(1), None, None


def _put(rows: Tensor, index: Tensor, count: int) -> Tensor:
    """``count`` rows: those given where ``index`` says, zeros elsewhere."""
    return rows.new_zeros(count, rows.shape[1]).index_copy_(0, index, rows)


def _with_scaled_gradient(weight: Tensor, scale: float) -> Tensor:
    if scale == 1 or not weight.requires_grad:
        return weight
    view = weight.view_as(weight)
    view.register_hook(lambda gradient: gradient * scale)
    return view


def _grouped_product(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return [rows, N]: the first counts[0] rows times ``weight[0].T`` of weight [L, N, K], and so on."""
    on_nvidia = rows.is_cuda and not is_rocm()
    has_kernel = on_nvidia and rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    if has_kernel and len(rows):
        ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32).to(rows.device, non_blocking=True)
        return torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    parts = rows.split(list(counts))
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight, strict=True)])
