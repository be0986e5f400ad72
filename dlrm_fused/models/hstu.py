"""Hierarchical Sequential Transduction Units (HSTU) over the user's past interactions and the candidate item.

A block has two linear layers and no softmax::

    U, V, Q, K = silu(X W1)
    A = silu(Q K^T / sqrt(d_head) + bias) / T
    Y = X + (norm(A V) * U) W2

The bias of two tokens is learned for each head: by how far apart they are in the sequence, and in time where the data set has
the times of tokens. T, the number of a sample's tokens, is the same for all samples.

What differs from the paper: X is normed by RMSNorm, as in the Transformer's blocks; A V is normed head by head, so that a
tensor-parallel rank needs its own heads alone (generative-recommenders offers the same as ``use_group_norm``); the bias is one
for each head, not one for all.

Source: Zhai et al., *Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations*, arXiv 2402.17152, section 3, equations 1 to 3.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dlrm_fused.config import Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.models.history import HistoryBlock, HistoryDLRM, HistoryEncoder, build_history_dlrm
from dlrm_fused.models.jagged import JaggedBatch
from dlrm_fused.models.product_choice import choose_product
from dlrm_fused.models.tensor_parallel import (
    NORM_EPS,
    ColumnParallelLinear,
    LayerProducts,
    RowParallelLinear,
    parameter_of_heads,
)
from dlrm_fused.ops.common.dispatch import without_autocast
from dlrm_fused.ops.hstu_attention import BUCKETS, JaggedQueries, RelativeBias, hstu_attention

# Queries, keys, values, and what gates the attention's result.
_PARTS = 4


class HstuBlock(HistoryBlock):
    """One block of HSTU; no biases.

    Args:
        tokens: T, of a sample.
        reads_times: whether two tokens' distance in time counts.

    Attributes:
        projection: [heads * 4 * d_head, d_model], head after head: queries, keys, values and gates.
        by_distance: [heads, T], the bias of tokens that are so many places apart.
        by_time: [heads, buckets], the bias by their distance in time; None without times.
        gated_norm: [heads, d_head], the weight of the norm of the attention's result, as ``scales`` of ``out``.
    """

    def __init__(self, d_model: int, heads: int, tokens: int, product: LayerProducts, reads_times: bool) -> None:
        super().__init__()
        self._d_head, self._tokens, self._product = d_model // heads, tokens, product
        self.attention_norm = nn.Parameter(torch.ones(d_model))
        self.experts = None
        self.projection = ColumnParallelLinear(d_model, _PARTS * d_model, product)
        self.by_distance = parameter_of_heads(torch.zeros(heads, tokens), product)
        self.by_time = parameter_of_heads(torch.zeros(heads, BUCKETS), product) if reads_times else None
        self.gated_norm = parameter_of_heads(torch.ones(heads, self._d_head), product)
        self.out = RowParallelLinear(d_model, d_model, product)

    def project(self, normed: Tensor) -> Tensor:
        """Map [n, d_model] to queries, keys, values and gates of this rank's heads, [n, heads / ranks, 4, d_head]."""
        return F.silu(self.projection(normed)).unflatten(-1, (-1, _PARTS, self._d_head))

    def attend(self, batch: JaggedBatch, normed: Tensor) -> Tensor:
        queries, keys, values, gates = self.project(normed).unbind(2)
        rows = JaggedQueries.among_all(batch.bounds, self._tokens)
        return self.gated(queries, keys, values, gates, rows, batch.times)

    def attend_from_candidates(self, batch: JaggedBatch, normed: Tensor, candidates: Tensor) -> Tensor:
        weight = self.projection.weight.unflatten(0, (-1, _PARTS, self._d_head))
        of_candidates = normed.index_select(0, candidates)
        queries, gates = self._parts(of_candidates, weight[:, ::3])  # not by a list, which would be copied to the device
        keys, values = self._parts(normed, weight[:, 1:3])
        each = torch.arange(batch.candidates.shape[0] + 1, device=normed.device)
        rows = JaggedQueries(batch.bounds, each, batch.candidates, self._tokens, most_queries=1)
        return self.gated(queries, keys, values, gates, rows, batch.times)

    def finish(self, attended: Tensor, x: Tensor, next_norm: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.out(attended.flatten(-2), x, next_norm, self.gated_norm)

    def _parts(self, normed: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Map [n, d_model] by weights [heads / ranks, parts, d_head, d_model] to each part, [rows, heads / ranks, d_head]."""
        projected = F.silu(self._product.columns(normed, weight.flatten(0, 2)))
        return projected.unflatten(-1, (-1, weight.shape[1], self._d_head)).unbind(2)

    def gated(
        self, queries: Tensor, keys: Tensor, values: Tensor, gates: Tensor, rows: JaggedQueries, times: Tensor | None
    ) -> Tensor:
        """Return the attention's result, normed without a weight and gated, [queries, heads / ranks, d_head].

        Args:
            queries, keys, values, gates: [queries or keys, heads / ranks, d_head].
            times: int64 [keys], of a model that reads times.
        """
        own = self._product.of_all_ranks
        by_distance = own(self.by_distance)
        if rows.longest > self._tokens:  # since all candidates are at one place, none is further away
            by_distance = F.pad(by_distance, (0, rows.longest - self._tokens))
        bias = RelativeBias(by_distance, None if self.by_time is None else own(self.by_time), times)
        scale = self._d_head**-0.5
        attended = hstu_attention(queries, keys, values, rows, scale=scale, divisor=float(self._tokens), bias=bias)
        return _normed(attended) * gates


@without_autocast
def _normed(attended: Tensor) -> Tensor:
    """Return the norm of each head's results [n, heads, d_head], in their dtype. Autocast would copy them to float32 first."""
    return F.layer_norm(attended, attended.shape[-1:], eps=NORM_EPS)


class Hstu(HistoryEncoder[HstuBlock]):
    """Encodes histories by blocks of HSTU."""

    def make_block(self, index: int) -> HstuBlock:
        return HstuBlock(self.d_model, self.heads, self.history_length + 1, self.product, self.reads_times)


def build(config: Config, schema: DatasetSchema, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    """Return the model of ``model.kind=hstu``, a :data:`~dlrm_fused.models.task.BuildModel`.

    The ranks of the group share the weights of its blocks.
    """
    return build_hstu(config, schema, choose_product(config, group, schema.history_length + 1, device))


def build_hstu(config: Config, schema: DatasetSchema, product: LayerProducts) -> HistoryDLRM:
    """Return the model of ``model.kind=hstu``, whose layers are sharded over the ranks of ``product``.

    Raises:
        ConfigError: if the data set has no histories.
    """
    return build_history_dlrm(config, schema, partial(Hstu, product=product, reads_times=schema.has_token_times))
