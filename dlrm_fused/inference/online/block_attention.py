"""Attention of an encoder's blocks to a kept history: in this alone online scoring of the Transformer and of HSTU differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from dlrm_fused.inference.online.cached_attention import cached_attention, reference
from dlrm_fused.models.history import BlockT
from dlrm_fused.models.hstu import HstuBlock
from dlrm_fused.models.transformer import Block
from dlrm_fused.ops.hstu_attention import JaggedQueries
from dlrm_fused.symmetric.device import uses_kernels


@dataclass(frozen=True)
class History:
    """The encoded history of a user. Made by :meth:`OnlineScorer.encode`, for that scorer.

    Attributes:
        cache: [layers, 2, heads / ranks, n, d_head], keys and values of this rank's heads.
        times: int64 [n], seconds since 1970 of each interaction; None for a model that reads no times.
    """

    cache: Tensor
    times: Tensor | None = None

    def __len__(self) -> int:
        """Return n, the number of interactions."""
        return self.cache.shape[3]


class Kept(NamedTuple):
    """The history that a request is for.

    Attributes:
        history: None where kernels find it by its address.
        address: int64 [2] on the device, address and length of the history's cache.
        candidate_times: int64 [m], seconds since 1970 of each candidate; of a model that reads times.
    """

    history: History | None
    address: Tensor
    candidate_times: Tensor


class BlockAttention(ABC, Generic[BlockT]):
    """The attention of a kind of blocks, whose ``project`` gives queries, keys and values first.

    Attributes:
        can_be_captured: whether one CUDA graph serves histories of all lengths.
    """

    can_be_captured: bool

    @abstractmethod
    def of_history(self, block: BlockT, projected: Tensor, times: Tensor | None) -> Tensor:
        """Map the projections of a history, [n, heads / ranks, parts, d_head], to the attention's result of each token to those
        before it and itself, [n, heads / ranks, d_head].

        Args:
            times: int64 [n], of a model that reads times.
        """

    @abstractmethod
    def of_candidates(self, block: BlockT, projected: Tensor, kept: Kept, layer: int) -> Tensor:
        """Map the projections of m candidates to the attention's result of each to the history and itself, likewise."""


class TransformerAttention(BlockAttention[Block]):
    """Softmax attention.

    Args:
        history_length: the most interactions of a history.
    """

    can_be_captured = True

    def __init__(self, history_length: int) -> None:
        self._history_length = history_length

    def of_history(self, block: Block, projected: Tensor, times: Tensor | None) -> Tensor:
        queries, keys, values = projected.permute(2, 1, 0, 3)
        attended = F.scaled_dot_product_attention(queries[None], keys[None], values[None], is_causal=True)
        return attended[0].transpose(0, 1)

    def of_candidates(self, block: Block, projected: Tensor, kept: Kept, layer: int) -> Tensor:
        if uses_kernels(projected.device):
            return cached_attention(projected, kept.address, layer, self._history_length)
        return reference(projected, *cast(History, kept.history).cache[layer])


class HstuAttention(BlockAttention[HstuBlock]):
    """HSTU's attention, to the history's keys and values with the candidates' behind them."""

    can_be_captured = False

    def of_history(self, block: HstuBlock, projected: Tensor, times: Tensor | None) -> Tensor:
        count = len(projected)
        rows = JaggedQueries.among_all(_numbers(0, count, like=projected), count)
        queries, keys, values, gates = projected.unbind(2)
        return block.gated(queries, keys, values, gates, rows, times)

    def of_candidates(self, block: HstuBlock, projected: Tensor, kept: Kept, layer: int) -> Tensor:
        history, count = cast(History, kept.history), len(projected)
        queries, own_keys, own_values, gates = projected.unbind(2)
        of_history = history.cache[layer].transpose(1, 2)
        keys, values = (torch.cat(parts) for parts in zip(of_history, (own_keys, own_values), strict=True))
        times = None if history.times is None else torch.cat((history.times, kept.candidate_times))
        first = _numbers(len(history), like=projected)
        rows = JaggedQueries(
            _numbers(0, len(keys), like=projected), _numbers(0, count, like=projected), first, len(keys), first, count
        )
        return block.gated(queries, keys, values, gates, rows, times)


def _numbers(*values: int, like: Tensor) -> Tensor:
    return torch.tensor(values).to(like.device, non_blocking=True)
