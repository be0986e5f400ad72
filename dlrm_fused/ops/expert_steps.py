"""The steps of the expert layer between its exchanges: in plain torch for the CPU, and as kernels.

Rows lie as :mod:`~dlrm_fused.ops.routing` says. R is the number of rows of a receive block, L that of this rank's experts, d
the width of a token, f that of the hidden layer, k the number of experts of a token.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dlrm_fused.ops.put_rows import put_rows
from dlrm_fused.ops.routing import Routes, route_by_host
from dlrm_fused.symmetric import Channel, SymmetricMemory


class ExpertSteps(ABC):
    """Made once for an exchange; all but :meth:`route` and :meth:`send_home`, an epoch of the channel each, are local.

    Args:
        counts: memory for the counts of all ranks: int32 [ranks, experts].
        experts: of all ranks.
        tile_rows, rows: of the receive block of each rank.
        slots: of each rank, at most.
    """

    def __init__(
        self, channel: Channel, counts: SymmetricMemory, *, experts: int, tile_rows: int, rows: int, slots: int
    ) -> None:
        self._channel, self._counts = channel, counts
        self._experts, self._tile_rows, self._rows, self._slots = experts, tile_rows, rows, slots

    @abstractmethod
    def route(self, experts: Tensor, fingerprint: int) -> Routes:
        """Where the rows of int64 [T, k] experts go."""

    @abstractmethod
    def clear_unused(self, rows: Tensor, homes: Tensor | None, routes: Routes) -> None:
        """Zero the rows [R, d] of a receive block that pad an expert's, and set their homes, int32 [R], to -1."""

    @abstractmethod
    def hidden(self, rows: Tensor, w_in: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        """``h = rows @ w_in[e].T`` and ``silu(h)``, both [R, f]."""

    @abstractmethod
    def hidden_gradient(self, gradient: Tensor, w_out: Tensor, h: Tensor, routes: Routes) -> Tensor:
        """The gradient [R, f] of h from that of the results [R, d]: ``(gradient @ w_out[e]) * silu'(h)``."""

    @abstractmethod
    def weight_gradient(self, gradient: Tensor, rows: Tensor, routes: Routes, scale: float) -> Tensor:
        """``scale * gradient[rows of e].T @ rows[rows of e]`` for each expert: [L, N, K] from [R, N] and [R, K]."""

    @abstractmethod
    def send_home(
        self,
        rows: Tensor,
        weight: Tensor,
        homes: Tensor,
        routes: Routes,
        memory: SymmetricMemory,
        *,
        weight_is_transposed: bool,
        receive_offset: int,
        fingerprint: int,
    ) -> None:
        """Multiply rows by their expert's weight, and store each in its slot at its home.

        Args:
            weight: [L, N, K], K the width of ``rows``; if transposed [L, K, N].
            homes: int32 [R]: rank * slots + slot, or -1.
            memory: in which ranks receive [slots, N] at an offset of their own, ``receive_offset`` this one.
        """

    @abstractmethod
    def sum_slots(self, slots: Tensor, targets: Tensor, gates: Tensor | None, tokens: int, top_k: int) -> Tensor:
        """``sum over j of gates[t, j] * slots[t * k + j]``, j ascending, in fp32; [T, d]. Without gates, they are 1.

        Slots whose target is negative are left out.
        """

    @abstractmethod
    def gates_gradient(self, gradient: Tensor, slots: Tensor, targets: Tensor, top_k: int) -> Tensor:
        """fp32 [T, k]: the products of each token's row of ``gradient`` with the rows of its slots; 0 without target."""


class HostSteps(ExpertSteps):
    """Between processes on the CPU. Tiles have one row there, so that nothing is padded."""

    def route(self, experts: Tensor, fingerprint: int) -> Routes:
        return route_by_host(
            experts,
            self._counts,
            self._channel,
            count=self._experts,
            tile_rows=self._tile_rows,
            rows_per_rank=self._rows,
            fingerprint=fingerprint,
        )

    def clear_unused(self, rows: Tensor, homes: Tensor | None, routes: Routes) -> None:
        end = int(routes.bounds[-1])
        rows[end:] = 0
        if homes is not None:
            homes[end:] = -1

    def hidden(self, rows: Tensor, w_in: Tensor, routes: Routes) -> tuple[Tensor, Tensor]:
        h = rows.new_zeros(rows.shape[0], w_in.shape[1])
        for expert, part in enumerate(_parts(routes)):
            h[part] = rows[part] @ w_in[expert].T
        return h, torch.nn.functional.silu(h)

    def hidden_gradient(self, gradient: Tensor, w_out: Tensor, h: Tensor, routes: Routes) -> Tensor:
        h_gradient = torch.zeros_like(h)
        for expert, part in enumerate(_parts(routes)):
            rate = torch.sigmoid(h[part])
            h_gradient[part] = (gradient[part] @ w_out[expert]) * (rate * (1 + h[part] * (1 - rate)))
        return h_gradient

    def weight_gradient(self, gradient: Tensor, rows: Tensor, routes: Routes, scale: float) -> Tensor:
        return torch.stack([scale * (gradient[part].T @ rows[part]) for part in _parts(routes)])

    def send_home(
        self,
        rows: Tensor,
        weight: Tensor,
        homes: Tensor,
        routes: Routes,
        memory: SymmetricMemory,
        *,
        weight_is_transposed: bool,
        receive_offset: int,
        fingerprint: int,
    ) -> None:
        by_expert = weight if weight_is_transposed else weight.transpose(1, 2)
        results = torch.cat([rows[part] @ by_expert[expert] for expert, part in enumerate(_parts(routes))])
        put_rows(
            results,
            homes[: results.shape[0]],
            memory,
            self._channel,
            rows_per_rank=self._slots,
            receive_offset=receive_offset,
            fingerprint=fingerprint,
        )

    def sum_slots(self, slots: Tensor, targets: Tensor, gates: Tensor | None, tokens: int, top_k: int) -> Tensor:
        rows = _rows_of_slots(slots, targets, top_k)
        total = torch.zeros(tokens, slots.shape[1])
        for choice in range(top_k):
            total += rows[:, choice] if gates is None else gates[:, choice, None] * rows[:, choice]
        return total.to(slots.dtype)

    def gates_gradient(self, gradient: Tensor, slots: Tensor, targets: Tensor, top_k: int) -> Tensor:
        return (gradient.float()[:, None] * _rows_of_slots(slots, targets, top_k)).sum(-1)


def _parts(routes: Routes) -> list[slice]:
    """The rows of each expert, where tiles have one row."""
    return [slice(first, end) for first, end in itertools.pairwise(routes.bounds.tolist())]


def _rows_of_slots(slots: Tensor, targets: Tensor, top_k: int) -> Tensor:
    """fp32 [T, k, d], zeros for slots without target."""
    rows = slots[: targets.numel()].float().masked_fill(targets[:, None] < 0, 0)
    return rows.view(-1, top_k, slots.shape[1])
