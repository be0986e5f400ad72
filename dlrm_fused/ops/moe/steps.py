"""The expert layer's computation on one rank between its transfers: both products of the experts, padding, the weighted sum.

Rows lie as :mod:`~dlrm_fused.ops.moe.dispatch` says. R is the number of rows of a receive block, L that of this rank's
experts, d the width of a token, f that of the hidden layer, p the parts of w_in (1 with SiLU, 2 with SwiGLU), k the number of
experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES
from dlrm_fused.ops.common.scatter_rows import scatter_rows
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups, Routes, grouped_gemm
from dlrm_fused.ops.gemm_all_to_all.weight_gradient import grouped_weight_gradient
from dlrm_fused.ops.moe.activations import Activation
from dlrm_fused.ops.moe.dispatch import clear_rows
from dlrm_fused.ops.moe.products import hidden_layer, hidden_layer_gradient
from dlrm_fused.symmetric.launches import ceil_div, kinds_of, launch_again, layout_of, next_power_of_2

# Columns of a program's row, at most.
_COLUMNS = 2048
_PAD_ROWS = 16


class HostSteps:
    """Between processes on the CPU: what is computed, in plain torch. Tiles have one row there, so that nothing is padded.

    All but :meth:`combine`, an epoch of a channel, are local.
    """

    def __init__(self, activation: Activation, expected_rows: float = 0.0) -> None:
        """``expected_rows``: of an expert on average; decides on tiles alone."""
        self.activation, self.expected_rows = activation, expected_rows

    def zero_pads(self, rows: Tensor, destinations: Tensor, groups: Groups) -> None:
        """Zero those rows [R, d] of the groups whose destination, int32 [R], is negative."""

    def hidden(self, rows: Tensor, w_in: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """``h = rows @ w_in[e].T``, [R, p * f], and the activation of it, [R, f]."""
        h = rows.new_zeros(rows.shape[0], w_in.shape[1])
        for expert, part in enumerate(groups.slices()):
            h[part] = rows[part] @ w_in[expert].T
        return h, self.activation.of(h)

    def hidden_gradient(self, gradient: Tensor, w_out: Tensor, h: Tensor, groups: Groups) -> Tensor:
        """Return h's gradient [R, p * f] from the results' [R, d]; that of the activation is ``gradient @ w_out[e]``."""
        h_gradient = torch.empty_like(h)
        for expert, part in enumerate(groups.slices()):
            h_gradient[part] = self.activation.gradient(gradient[part] @ w_out[expert], h[part])
        return h_gradient

    def weight_gradient(self, gradient: Tensor, rows: Tensor, groups: Groups, scale: float, dtype: torch.dtype) -> Tensor:
        """``scale * gradient[rows of e].T @ rows[rows of e]`` for each expert: [L, N, K] from [R, N] and [R, K].

        It is rounded to the dtype of the rows, and then given in ``dtype``: that, or float32.
        """
        return torch.stack([scale * (gradient[part].T @ rows[part]) for part in groups.slices()]).to(dtype)

    def combine(self, rows: Tensor, weight: Tensor, routes: Routes, window: ReceiveWindow, *, transposed: bool) -> None:
        """Multiply rows by their expert's weight, and store each in its slot at its token's rank. Collective.

        Args:
            weight: [L, N, K], K the width of ``rows``; if transposed [L, K, N].
            window: in which ranks receive [slots, N].
        """
        by_expert = weight if transposed else weight.transpose(1, 2)
        results = torch.cat([rows[part] @ by_expert[expert] for expert, part in enumerate(routes.groups.slices())])
        scatter_rows(results, routes.destinations[: len(results)], window, rows_per_rank=routes.slots)

    def sum_slots(self, slots: Tensor, targets: Tensor, gates: Tensor | None, tokens: int, top_k: int) -> Tensor:
        """``sum over j of gates[t, j] * slots[t * k + j]``, j ascending, in fp32; [T, d]. Without gates, they are 1.

        Slots whose target is negative are left out.
        """
        rows = _rows_of_slots(slots, targets, tokens, top_k)
        total = torch.zeros(tokens, slots.shape[1], device=slots.device)
        for choice in range(top_k):
            total += rows[:, choice] if gates is None else gates[:tokens, choice, None] * rows[:, choice]
        return total.to(slots.dtype)

    def gates_gradient(self, gradient: Tensor, slots: Tensor, targets: Tensor, top_k: int) -> Tensor:
        """Return fp32 [T, k]: the products of each token's row of ``gradient`` with the rows of its slots; 0 without target."""
        return (gradient.float()[:, None] * _rows_of_slots(slots, targets, len(gradient), top_k)).sum(-1)


class KernelSteps(HostSteps):
    """The steps on GPUs, and under Triton's interpreter. Nothing waits for the device."""

    def zero_pads(self, rows: Tensor, destinations: Tensor, groups: Groups) -> None:
        zero_pads_kernel[(groups.local_from.numel(), ceil_div(groups.tile_rows, _PAD_ROWS))](
            rows, destinations, groups.bounds, groups.tile_rows, rows.shape[1],
            ROWS=_PAD_ROWS, COLUMNS=_columns(rows), num_warps=4,
        )  # fmt: skip

    def hidden(self, rows: Tensor, w_in: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        h = rows.new_empty(rows.shape[0], w_in.shape[1])
        activated = rows.new_empty(rows.shape[0], self.activation.width(w_in))
        hidden_layer(rows, w_in, groups, h, activated)
        return h, activated

    def hidden_gradient(self, gradient: Tensor, w_out: Tensor, h: Tensor, groups: Groups) -> Tensor:
        h_gradient = torch.empty_like(h)
        hidden_layer_gradient(gradient, w_out, h, groups, h_gradient)
        return h_gradient

    def weight_gradient(self, gradient: Tensor, rows: Tensor, groups: Groups, scale: float, dtype: torch.dtype) -> Tensor:
        result = rows.new_empty(groups.local_from.numel(), gradient.shape[1], rows.shape[1], dtype=dtype)
        grouped_weight_gradient(gradient, rows, groups, result, scale, expected_rows=self.expected_rows)
        return result

    def combine(self, rows: Tensor, weight: Tensor, routes: Routes, window: ReceiveWindow, *, transposed: bool) -> None:
        grouped_gemm(rows, weight, routes, window, weight_is_transposed=transposed)

    def sum_slots(self, slots: Tensor, targets: Tensor, gates: Tensor | None, tokens: int, top_k: int) -> Tensor:
        width = slots.shape[1]
        out = slots.new_empty(tokens, width)
        if tokens:
            columns = _columns(slots)
            launch_again(
                (layout_of(slots, targets, gates), top_k), sum_slots_kernel, (tokens, ceil_div(width, columns)),
                slots, targets, slots if gates is None else gates, out, width,
                TOP_K=top_k, WEIGHTED=gates is not None, DTYPE=TRITON_DTYPES[slots.dtype], COLUMNS=columns,
                num_warps=4,
            )  # fmt: skip
        return out

    def gates_gradient(self, gradient: Tensor, slots: Tensor, targets: Tensor, top_k: int) -> Tensor:
        tokens, width = gradient.shape
        result = torch.empty(tokens, top_k, dtype=torch.float32, device=gradient.device)
        if tokens:
            launch_again(
                (kinds_of(gradient, slots, targets), width, top_k), gates_gradient_kernel, (tokens,),
                gradient, slots, targets, result, width, TOP_K=top_k, COLUMNS=_columns(slots), num_warps=4,
            )  # fmt: skip
        return result


def _columns(rows: Tensor) -> int:
    return min(next_power_of_2(rows.shape[1]), _COLUMNS)


@triton.jit
def zero_pads_kernel(rows, destinations, bounds, tile_rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """See :meth:`HostSteps.zero_pads`. Only the last tile of a group, program p's on the first axis, has pads."""
    group = tl.program_id(0)
    end = tl.load(bounds + group + 1)
    if end > tl.load(bounds + group):
        in_tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        row = (end - 1) * tile_rows + in_tile
        is_pad = (tl.load(destinations + row, mask=in_tile < tile_rows, other=0) < 0) & (in_tile < tile_rows)
        clear_rows(rows, row, is_pad, width, ROWS, COLUMNS)


@triton.jit
def sum_slots_kernel(
    slots, targets, gates, out, width,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, DTYPE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See :meth:`HostSteps.sum_slots`. One token a program of the first axis."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        is_there = tl.load(targets + slot) >= 0
        row = tl.load(slots + slot * tl.multiple_of(width, 4) + column, mask=inside & is_there, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.where(is_there, tl.load(gates + slot), 0.0)
        total += row
    tl.store(out + token * tl.multiple_of(width, 4) + column, total.to(DTYPE), mask=inside)


@triton.jit
def gates_gradient_kernel(gradient, slots, targets, result, width, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    """See :meth:`HostSteps.gates_gradient`. One token a program."""
    token = tl.program_id(0).to(tl.int64)
    width = tl.multiple_of(width, 4)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        is_there = tl.load(targets + slot) >= 0
        products = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = (column < width) & is_there
            row = tl.load(slots + slot * width + column, mask=inside, other=0.0).to(tl.float32)
            products += row * tl.load(gradient + token * width + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(result + slot, tl.sum(products, axis=0))


def _rows_of_slots(slots: Tensor, targets: Tensor, tokens: int, top_k: int) -> Tensor:
    """Return fp32 [tokens, k, d], zeros for slots without target."""
    count = tokens * top_k
    return slots[:count].float().masked_fill(targets[:count, None] < 0, 0).view(tokens, top_k, slots.shape[1])
