"""A causal Transformer over the user's past interactions and the candidate item.

Sources: Chen et al., *Behavior Sequence Transformer for E-commerce Recommendation in Alibaba*, arXiv 1905.06874; pre-norm
blocks with RMSNorm: Zhang and Sennrich, arXiv 1910.07467. Blocks whose feed-forward layer is a Mixture of Experts: Fedus et
al., *Switch Transformers*, arXiv 2101.03961.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from dlrm_fused.config import Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import UsageError
from dlrm_fused.models.history import HistoryBlock, HistoryDLRM, HistoryEncoder, build_history_dlrm, check_divisible
from dlrm_fused.models.jagged import JaggedBatch
from dlrm_fused.models.moe import MixtureOfExperts, build_experts
from dlrm_fused.models.product_choice import FEED_FORWARD_FACTOR, choose_product
from dlrm_fused.models.tensor_parallel import ColumnParallelLinear, LayerProducts, RowParallelLinear, group_size, rms_norm


class Block(HistoryBlock):
    """A pre-norm Transformer block: attention, then a feed-forward layer with GELU, or one of experts; no biases.

    Args:
        experts: instead of the feed-forward layer of width d_ff.

    Attributes:
        qkv: [heads * 3 * d_head, d_model], head after head, so that a rank's piece is that of whole heads.
    """

    def __init__(
        self, d_model: int, heads: int, d_ff: int, product: LayerProducts, experts: MixtureOfExperts | None = None
    ) -> None:
        super().__init__()
        self._d_head, self._product = d_model // heads, product
        self.attention_norm = nn.Parameter(torch.ones(d_model))
        self.qkv = ColumnParallelLinear(d_model, 3 * d_model, product)
        self.attention_out = RowParallelLinear(d_model, d_model, product)
        self.feed_forward_norm = nn.Parameter(torch.ones(d_model))
        self.experts = experts
        if experts is None:
            self.feed_forward_in = ColumnParallelLinear(d_model, d_ff, product)
            self.feed_forward_out = RowParallelLinear(d_ff, d_model, product)

    def project(self, normed: Tensor) -> Tensor:
        """Map [..., d_model] to queries, keys and values of this rank's heads, [..., heads / ranks, 3, d_head]."""
        projected: Tensor = self.qkv(normed)
        return projected.unflatten(-1, (-1, 3, self._d_head))

    def project_for(self, normed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Map [n, d_model] to queries of these rows, [m] int64, and to keys and values of all.

        Returns:
            [m, heads / ranks, d_head] and [n, heads / ranks, 2, d_head].
        """
        weight = self.qkv.weight.unflatten(0, (-1, 3, self._d_head))
        queries = self._product.columns(normed.index_select(0, rows), weight[:, 0].flatten(0, 1))
        keys_and_values = self._product.columns(normed, weight[:, 1:].flatten(0, 2))
        return queries.unflatten(-1, (-1, self._d_head)), keys_and_values.unflatten(-1, (-1, 2, self._d_head))

    def attend(self, batch: JaggedBatch, normed: Tensor) -> Tensor:
        return batch.attend(self.project(normed))

    def attend_from_candidates(self, batch: JaggedBatch, normed: Tensor, candidates: Tensor) -> Tensor:
        return batch.attend_from_candidates(*self.project_for(normed, candidates))

    def finish(self, attended: Tensor, x: Tensor, next_norm: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, normed = self.attention_out(attended.flatten(-2), x, self.feed_forward_norm)
        if self.experts is not None:
            x = x + self.experts(normed.flatten(0, -2), None if real is None else real.flatten()).view_as(x)
            return x, rms_norm(x, next_norm)
        return self.feed_forward_out(F.gelu(self.feed_forward_in(normed)), x, next_norm)


class HistoryTransformer(HistoryEncoder[Block]):
    """Encodes histories by Transformer blocks.

    Args:
        d_ff: width of the feed-forward layers, which the ranks of ``product`` must divide.
        experts: of each block, in place of its feed-forward layer; then ``product`` is of one rank.
        layers, product, shape: as of :class:`~dlrm_fused.models.history.HistoryEncoder`.

    Raises:
        UsageError: if a number does not divide another as it must, or numbers of layers differ.
    """

    def __init__(
        self,
        *,
        layers: int,
        d_ff: int,
        product: LayerProducts | None = None,
        experts: Sequence[MixtureOfExperts] = (),
        **shape: int,
    ) -> None:
        ranks = group_size(product.group if product else None)
        check_divisible("d_ff", d_ff, ranks)
        if experts and (len(experts) != layers or ranks > 1):
            raise UsageError(
                f"{len(experts)} layers of experts for layers={layers} on {ranks} tensor-parallel ranks: "
                "needed: one for each layer, on one rank"
            )
        self._d_ff, self._experts = d_ff, tuple(experts)
        super().__init__(layers=layers, product=product, reads_times=False, **shape)
        del self._experts  # blocks have them

    def make_block(self, index: int) -> Block:
        experts = self._experts[index] if self._experts else None
        return Block(self.d_model, self.heads, self._d_ff, self.product, experts)


def build(config: Config, schema: DatasetSchema, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    """Return the model of ``model.kind=transformer``, a :data:`~dlrm_fused.models.task.BuildModel`.

    The ranks of the group share the weights of its blocks: those of experts, or all.
    """
    shape, tokens = config.model, schema.history_length + 1
    if not shape.experts.count:
        return build_transformer(config, schema, choose_product(config, group, tokens, device))
    experts = build_experts(config, group, layers=shape.layers, width=shape.d_model, tokens=tokens, device=device)
    return build_transformer(config, schema, LayerProducts(), experts)


def build_transformer(
    config: Config, schema: DatasetSchema, product: LayerProducts, experts: Sequence[MixtureOfExperts] = ()
) -> HistoryDLRM:
    """Return the model of ``model.kind=transformer``, whose layers are sharded over the ranks of ``product``.

    Args:
        experts: of each block; none for a model without experts.

    Raises:
        ConfigError: if the data set has no histories.
    """
    d_ff = FEED_FORWARD_FACTOR * config.model.d_model
    return build_history_dlrm(config, schema, partial(HistoryTransformer, d_ff=d_ff, product=product, experts=experts))
