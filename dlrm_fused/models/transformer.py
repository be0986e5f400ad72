"""DLRM with a causal Transformer over the user's past interactions and the candidate item.

A sample's tokens are its n past interactions, oldest first, the candidate, and padding: T = history_length + 1 in all. Layers
read the real ones alone, as rows of a jagged batch (:mod:`dlrm_fused.models.jagged`). The vector that the Transformer gives for
the candidate joins DLRM's other features. A token attends to itself and to those before it, and the history is encoded without
the candidate: positions are counted back from it. The history's encoding can therefore be kept and used for many candidates
(:mod:`dlrm_fused.inference.online.scorer`).

Sources: Chen et al., *Behavior Sequence Transformer for E-commerce Recommendation in Alibaba*, arXiv 1905.06874; Zhai et al.,
*Actions Speak Louder than Words* (HSTU), arXiv 2402.17152; pre-norm blocks with RMSNorm: Zhang and Sennrich, arXiv 1910.07467.
Blocks whose feed-forward layer is a Mixture of Experts: Fedus et al., *Switch Transformers*, arXiv 2101.03961.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torchrec import EmbeddingBagCollection
from torchrec.models.dlrm import DenseArch, OverArch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError, UsageError
from dlrm_fused.models.embedding_tables import InFeatureOrder, embedding_tables, pooled_columns
from dlrm_fused.models.interaction import Interaction, dims_of
from dlrm_fused.models.jagged import JaggedBatch
from dlrm_fused.models.moe import MixtureOfExperts, build_experts
from dlrm_fused.models.multi_task import top_widths
from dlrm_fused.models.product_choice import FEED_FORWARD_FACTOR, choose_product
from dlrm_fused.models.tensor_parallel import (
    ColumnParallelLinear,
    LayerProducts,
    RowParallelLinear,
    group_size,
    numbers_of_ranks,
    rms_norm,
)

# The most numbers of rows that ranks which share layers may have.
_NUMBERS_OF_ROWS = 16


class Block(nn.Module):
    """A pre-norm Transformer block: attention, then a feed-forward layer with GELU, or one of experts; no biases.

    Its own norms come from outside: each row-parallel product also gives the norm of its result that the next layer takes.

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

    def finish(self, attended: Tensor, x: Tensor, next_norm: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute the rest of the block from the attention's result.

        Args:
            attended: [..., heads / ranks, d_head], the attention's result.
            x: [..., d_model], the block's input.
            next_norm: [d_model], the weight of the norm that follows the block.
            real: [...] bool, false for padding, which is kept from the experts.

        Returns:
            the block's output and its norm, each [..., d_model].
        """
        x, normed = self.attention_out(attended.flatten(-2), x, self.feed_forward_norm)
        if self.experts is not None:
            x = x + self.experts(normed.flatten(0, -2), None if real is None else real.flatten()).view_as(x)
            return x, rms_norm(x, next_norm)
        return self.feed_forward_out(F.gelu(self.feed_forward_in(normed)), x, next_norm)


class HistoryTransformer(nn.Module):
    """Encodes each sample's tokens into one vector, that of the candidate.

    Args:
        token_width: W, of the tokens' embeddings.
        d_model: of the blocks; a multiple of ``heads``.
        history_length: past interactions of a sample, at most.
        product: how row-parallel layers multiply, and the ranks that the blocks are sharded over. These must divide ``heads``
            and ``d_ff``.
        experts: of each block, in place of its feed-forward layer; then ``product`` is of one rank.

    Attributes:
        ask_ranks: returns the numbers that the ranks of a group call it with.

    Raises:
        UsageError: if a number does not divide another as it must, or numbers of layers differ.
    """

    def __init__(
        self,
        *,
        token_width: int,
        d_model: int,
        heads: int,
        layers: int,
        d_ff: int,
        history_length: int,
        product: LayerProducts | None = None,
        experts: Sequence[MixtureOfExperts] = (),
    ) -> None:
        super().__init__()
        product = product or LayerProducts()
        _check_shape(d_model, heads, layers, d_ff, history_length, group_size(product.group))
        if experts and (len(experts) != layers or group_size(product.group) > 1):
            raise UsageError(
                f"{len(experts)} layers of experts for layers={layers} on {group_size(product.group)} tensor-parallel ranks: "
                "needed: one for each layer, on one rank"
            )
        self.d_model, self.heads, self.history_length, self.product = d_model, heads, history_length, product
        self.ask_ranks: Callable[[int, dist.ProcessGroup | None], list[int]] = numbers_of_ranks
        self.input = nn.Linear(token_width, d_model)
        self.positions = nn.Parameter(torch.randn(history_length + 1, d_model) * 0.02)
        of_blocks: Sequence[MixtureOfExperts | None] = experts or [None] * layers
        self.blocks = nn.ModuleList(Block(d_model, heads, d_ff, product, of_block) for of_block in of_blocks)
        self.final_norm = nn.Parameter(torch.ones(d_model))

    def stages(self) -> list[tuple[Block, Tensor]]:
        """Return each block with the weight of the norm that follows it."""
        blocks = [block for block in self.blocks if isinstance(block, Block)]
        return list(zip(blocks, [*(block.attention_norm for block in blocks[1:]), self.final_norm], strict=True))

    def forward(
        self, tokens: Tensor, history_lengths: Tensor, real: Tensor | None = None, token_count: int | None = None
    ) -> Tensor:
        """Collective over the ranks of ``product``, which must have the same number of samples, or over those of the experts.

        Args:
            tokens: [b * T, W], the embeddings of each sample's tokens; row i * T + t is token t of sample i.
            history_lengths: [b], past interactions of each sample.
            real: [b] bool, false for samples that are padding, for a model with experts.
            token_count: the sum of all ``history_lengths``, plus b; with b * T, padding is computed like real tokens. None
                asks the device for it.

        Returns:
            [b, d_model], the normed encoding of each candidate.
        """
        own, rows_of_all = self._jagged(history_lengths, token_count)
        x = self.input(own.rows_of(tokens).to(self.input.weight.dtype))  # embeddings may be in 16 bits
        x = x + F.embedding(own.distances, self.positions).to(x.dtype)  # with autocast, half as much to gather
        x, everyones = self.product.enter(x), own.gathered(self.product.group)
        if not self.product.shards and group_size(self.product.group) > 1:
            x, everyones = everyones.trimmed(x, rows_of_all)
        candidates = (own if self.product.shards else everyones).candidate_rows
        *full, (last, final_norm) = stages = self.stages()
        real_rows = None if last.experts is None else own.real_rows(real)
        normed = rms_norm(x, stages[0][0].attention_norm)
        for block, next_norm in full:
            x, normed = block.finish(everyones.attend(block.project(normed)), x, next_norm, real_rows)
        # Only the candidates' outputs of the last block are used.
        attended = everyones.attend_from_candidates(*last.project_for(normed, candidates))
        _, encoded = last.finish(attended, x.index_select(0, candidates), final_norm, real)
        return self.product.leave(encoded)

    def _jagged(self, history_lengths: Tensor, token_count: int | None) -> tuple[JaggedBatch, int]:
        """Return where this rank's tokens are, as many rows on each rank that it shares layers with, and for how many rows all
        of these ranks compute layers that do not shard them. Collective."""
        if token_count is None:
            token_count = int(history_lengths.sum()) + len(history_lengths)
        experts, tokens = self.stages()[0][0].experts, self.history_length + 1
        group, most = self.product.group if experts is None else experts.computation.group, history_lengths.shape[0] * tokens
        counts, ranks = self.ask_ranks(token_count, group), group_size(group)
        rows, rows_of_all = token_count, sum(counts)
        if ranks > 1:
            rows, rows_of_all = _rounded(max(counts), most), _rounded(rows_of_all, ranks * most)
        return JaggedBatch.of(history_lengths.long(), tokens, rows), rows_of_all


def _rounded(rows: int, most: int) -> int:
    """Return no fewer rows: operators choose, and some measure, how to run for each number of rows, so that there are few."""
    step = -(-most // _NUMBERS_OF_ROWS) or 1
    return min(-(-rows // step) * step, most)


def _check_shape(d_model: int, heads: int, layers: int, d_ff: int, history_length: int, ranks: int) -> None:
    for name, value in {"heads": heads, "layers": layers, "history_length": history_length}.items():
        if value < 1:
            raise UsageError(f"{name}={value}: must be 1 or more")
    if d_model < 1 or d_model % heads:
        raise UsageError(f"d_model={d_model}: must be a positive multiple of heads={heads}")
    for name, value in {"heads": heads, "d_ff": d_ff}.items():
        if value < 1 or value % ranks:
            raise UsageError(f"{name}={value}: must be a positive multiple of the {ranks} tensor-parallel ranks")


class TransformerSparseArch(nn.Module):
    """The lookups of sample features and of token features."""

    def __init__(self, tables: EmbeddingBagCollection, token_tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = tables
        self.token_embedding_bag_collection = token_tables
        self.in_feature_order = InFeatureOrder(tables)
        self.tokens_in_feature_order = InFeatureOrder(token_tables)
        self.features = self.in_feature_order.features
        self.token_features = self.tokens_in_feature_order.features

    def forward(self, sparse: KeyedJaggedTensor, tokens: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Return the pooled embeddings of b samples, [b, sum of dimensions], and those of their tokens, [b * T, the same].

        Columns are in the order of the collections' features: sharded collections have one of their own.
        """
        pooled = self.in_feature_order(self.embedding_bag_collection(sparse))
        pooled_tokens = self.tokens_in_feature_order(self.token_embedding_bag_collection(tokens))
        return pooled, pooled_tokens


class TransformerOverArch(nn.Module):
    """DLRM's interaction of features, beside it the encoding of history and candidate, and the top MLP.

    Args:
        dim: D, of the vectors that interact.
    """

    def __init__(self, dims: Mapping[str, int], dim: int, d_model: int, layer_sizes: list[int]) -> None:
        super().__init__()
        self.interaction = Interaction(dims, dim)
        pairs = math.comb(len(dims) + 1, 2)
        self.over = OverArch(dim + pairs + d_model, layer_sizes)

    def forward(self, dense: Tensor, sparse: Tensor, encoded: Tensor) -> Tensor:
        """Map [b, D], [b, sum of dims] and [b, d_model] to logits, [b, labels]."""
        return self.over(torch.cat((self.interaction(dense, sparse), encoded), dim=1))


class TransformerDLRM(nn.Module):
    """DLRM whose prediction also reads the user's history.

    Args:
        token_tables: of the token features; their dimensions sum to the ``token_width`` of the Transformer.
        bottom_mlp: widths of the layers over the dense features; the last is D, of the vectors that interact.
        top_mlp: widths of the layers that end in the logits; the last is the number of labels.
    """

    reads_histories = True

    def __init__(
        self,
        tables: EmbeddingBagCollection,
        token_tables: EmbeddingBagCollection,
        transformer: HistoryTransformer,
        dense_features: int,
        bottom_mlp: list[int],
        top_mlp: list[int],
    ) -> None:
        super().__init__()
        self.sparse_arch = TransformerSparseArch(tables, token_tables)
        self.dense_arch = DenseArch(dense_features, bottom_mlp)
        self.transformer = transformer
        self.over_arch = TransformerOverArch(dims_of(tables), bottom_mlp[-1], transformer.d_model, top_mlp)

    def forward(
        self,
        dense: Tensor,
        sparse: KeyedJaggedTensor,
        tokens: KeyedJaggedTensor,
        history_lengths: Tensor,
        real: Tensor | None = None,
        token_count: int | None = None,
    ) -> Tensor:
        """Collective over the ranks of the Transformer, which must have the same number of samples b.

        Args:
            dense: [b, dense_features].
            tokens: the token features, of stride b * T; bag i * T + t is token t of sample i.
            history_lengths: [b], past interactions of each sample.
            real: [b] bool, false for samples that are padding, for a model with experts.
            token_count: as :meth:`HistoryTransformer.forward` has it.

        Returns:
            logits, [b, labels].
        """
        pooled, token_vectors = self.sparse_arch(sparse, tokens)
        encoded = self.transformer(token_vectors, history_lengths, real, token_count)
        return self.over_arch(self.dense_arch(dense), pooled, encoded)


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
) -> TransformerDLRM:
    """Return the model of ``model.kind=transformer``, whose layers are sharded over the ranks of ``product``.

    Args:
        experts: of each block; none for a model without experts.

    Raises:
        ConfigError: if the data set has no histories.
    """
    shape = config.model
    if not schema.token_features:
        raise ConfigError("model.kind=transformer: the data set has no histories of interactions; allowed with it: dlrm, dcnv2")
    transformer = HistoryTransformer(
        token_width=pooled_columns(config.embedding, schema.token_features),
        d_model=shape.d_model,
        heads=shape.heads,
        layers=shape.layers,
        d_ff=FEED_FORWARD_FACTOR * shape.d_model,
        history_length=schema.history_length,
        product=product,
        experts=experts,
    )
    return TransformerDLRM(
        embedding_tables(config.embedding, schema.sparse_features),
        embedding_tables(config.embedding, schema.token_features),
        transformer,
        len(schema.dense_features),
        shape.bottom_mlp,
        top_widths(config, schema),
    )
