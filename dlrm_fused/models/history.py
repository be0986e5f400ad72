"""DLRM that also reads the user's history: what all such models have, whatever the blocks that encode it.

A sample's tokens are its n past interactions, oldest first, the candidate, and padding: T = history_length + 1 in all. Blocks
read the real ones alone, as rows of a jagged batch (:mod:`dlrm_fused.models.jagged`). The vector that they give for the
candidate joins DLRM's other features. A token attends to itself and to those before it, and the history is encoded without the
candidate: positions are counted back from it. The history's encoding can therefore be kept and used for many candidates
(:mod:`dlrm_fused.inference.online.scorer`).

Source: Chen et al., *Behavior Sequence Transformer for E-commerce Recommendation in Alibaba*, arXiv 1905.06874.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

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
from dlrm_fused.models.jagged import NUMBERS_OF_ROWS, JaggedBatch
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.models.multi_task import top_widths
from dlrm_fused.models.tensor_parallel import LayerProducts, group_size, numbers_of_ranks, rms_norm

BlockT = TypeVar("BlockT", bound="HistoryBlock")


class HistoryBlock(nn.Module, ABC):
    """A block of a :class:`HistoryEncoder`: attention among the tokens of each sample, and what follows it.

    Its own norm comes from outside: each row-parallel product also gives the norm of its result that the next layer takes.

    Attributes:
        attention_norm: [d_model], the weight of the norm of the block's input.
        experts: in the block; None without.
    """

    attention_norm: nn.Parameter
    experts: MixtureOfExperts | None

    @abstractmethod
    def attend(self, batch: JaggedBatch, normed: Tensor) -> Tensor:
        """Map the input's norm [n, d_model] to the attention's result of all rows, [n, heads / ranks, d_head]."""

    @abstractmethod
    def attend_from_candidates(self, batch: JaggedBatch, normed: Tensor, candidates: Tensor) -> Tensor:
        """Return the attention's result of these rows, [b] int64, each its sample's candidate: [b, heads / ranks, d_head]."""

    @abstractmethod
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


class HistoryEncoder(nn.Module, ABC, Generic[BlockT]):
    """Encodes each sample's tokens into one vector, that of the candidate.

    Args:
        token_width: W, of the tokens' embeddings.
        d_model: of the blocks; a multiple of ``heads``.
        history_length: past interactions of a sample, at most.
        product: how row-parallel layers multiply, and the ranks that the blocks are sharded over, this one alone by default.
            These must divide ``heads``.
        reads_times: whether blocks read when a token happened.

    Attributes:
        ask_ranks: returns the numbers that the ranks of a group call it with.

    Raises:
        UsageError: if a number does not divide another as it must.
    """

    def __init__(
        self,
        *,
        token_width: int,
        d_model: int,
        heads: int,
        layers: int,
        history_length: int,
        product: LayerProducts | None = None,
        reads_times: bool = False,
    ) -> None:
        super().__init__()
        product = product or LayerProducts()
        _check_shape(d_model, heads, layers, history_length, group_size(product.group))
        self.d_model, self.heads, self.history_length, self.product = d_model, heads, history_length, product
        self.reads_times = reads_times
        self.ask_ranks: Callable[[int, dist.ProcessGroup | None], list[int]] = numbers_of_ranks
        self.input = nn.Linear(token_width, d_model)
        self.positions = nn.Parameter(torch.randn(history_length + 1, d_model) * 0.02)
        self.final_norm = nn.Parameter(torch.ones(d_model))
        self.blocks = nn.ModuleList(self.make_block(index) for index in range(layers))

    @abstractmethod
    def make_block(self, index: int) -> BlockT:
        """Return a new block. The encoder has drawn its own weights, and has all attributes but ``blocks``."""

    def stages(self) -> list[tuple[BlockT, Tensor]]:
        """Return each block with the weight of the norm that follows it."""
        blocks = cast(list[BlockT], list(self.blocks))
        return list(zip(blocks, [*(block.attention_norm for block in blocks[1:]), self.final_norm], strict=True))

    def forward(
        self,
        tokens: Tensor,
        history_lengths: Tensor,
        real: Tensor | None = None,
        token_count: int | None = None,
        token_times: Tensor | None = None,
    ) -> Tensor:
        """Collective over the ranks of ``product``, which must have the same number of samples, or over those of the experts.

        Args:
            tokens: [b * T, W], the embeddings of each sample's tokens; row i * T + t is token t of sample i.
            history_lengths: [b], past interactions of each sample.
            real: [b] bool, false for samples that are padding, for a model with experts.
            token_count: the sum of all ``history_lengths``, plus b; with b * T, padding is computed like real tokens. None
                asks the device for it.
            token_times: [b, T] int64, seconds since 1970 of each token, for blocks that read times.

        Returns:
            [b, d_model], the normed encoding of each candidate.
        """
        own, rows_of_all = self._jagged(history_lengths, token_count, token_times)
        return self._encode(own.rows_of(tokens), own, rows_of_all, real)

    @property
    def can_be_captured(self) -> bool:
        """Whether a training step launches the same for as many rows: no rank shares its layers, and none are experts."""
        return group_size(self.product.group) == 1 and self.stages()[0][0].experts is None

    def rows_to_encode(
        self, tokens: Tensor, history_lengths: Tensor, token_count: int | None = None, token_times: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return what :meth:`encode` takes where gradients are wanted: in few numbers of rows, so that each can be captured.

        Args:
            tokens, history_lengths, token_count, token_times: as of :meth:`forward`.
        """
        own, _ = self._jagged(history_lengths, token_count, token_times, in_few_numbers=torch.is_grad_enabled())
        return own.rows_of(tokens), *own.tensors

    def encode(self, rows: Tensor, *of_batch: Tensor) -> Tensor:
        """Return the encoding that :meth:`forward` gives, from the tensors of :meth:`rows_to_encode`. Local."""
        return self._encode(rows, JaggedBatch.of_tensors(self.history_length + 1, *of_batch), rows.shape[0], None)

    def _encode(self, rows: Tensor, own: JaggedBatch, rows_of_all: int, real: Tensor | None) -> Tensor:
        x = self.input(rows.to(self.input.weight.dtype))  # embeddings may be in 16 bits
        x = x + F.embedding(own.distances, self.positions).to(x.dtype)  # with autocast, half as much to gather
        x, everyones = self.product.enter(x), own.gathered(self.product.group)
        if not self.product.shards and group_size(self.product.group) > 1:
            x, everyones = everyones.trimmed(x, rows_of_all)
        candidates = (own if self.product.shards else everyones).candidate_rows
        *full, (last, final_norm) = stages = self.stages()
        real_rows = None if last.experts is None else own.real_rows(real)
        normed = rms_norm(x, stages[0][0].attention_norm)
        for block, next_norm in full:
            x, normed = block.finish(block.attend(everyones, normed), x, next_norm, real_rows)
        # Only the candidates' outputs of the last block are used.
        attended = last.attend_from_candidates(everyones, normed, candidates)
        _, encoded = last.finish(attended, x.index_select(0, candidates), final_norm, real)
        return self.product.leave(encoded)

    def _jagged(
        self, history_lengths: Tensor, token_count: int | None, token_times: Tensor | None, in_few_numbers: bool = False
    ) -> tuple[JaggedBatch, int]:
        """Return where this rank's tokens are, as many rows on each rank that it shares layers with, and for how many rows all
        of these ranks compute layers that do not shard them. Collective."""
        if token_count is None:
            token_count = int(history_lengths.sum()) + len(history_lengths)
        experts, tokens = self.stages()[0][0].experts, self.history_length + 1
        group, most = self.product.group if experts is None else experts.computation.group, history_lengths.shape[0] * tokens
        counts, ranks = self.ask_ranks(token_count, group), group_size(group)
        rows, rows_of_all = token_count, sum(counts)
        if ranks > 1 or in_few_numbers:
            rows, rows_of_all = _rounded(max(counts), most), _rounded(rows_of_all, ranks * most)
        times = token_times if self.reads_times else None
        return JaggedBatch.of(history_lengths.long(), tokens, rows, times), rows_of_all


def _rounded(rows: int, most: int) -> int:
    """Return no fewer rows: operators choose, and some measure, how to run for each number of rows, so that there are few."""
    step = -(-most // NUMBERS_OF_ROWS) or 1
    return min(-(-rows // step) * step, most)


def _check_shape(d_model: int, heads: int, layers: int, history_length: int, ranks: int) -> None:
    for name, value in {"heads": heads, "layers": layers, "history_length": history_length}.items():
        if value < 1:
            raise UsageError(f"{name}={value}: must be 1 or more")
    if d_model < 1 or d_model % heads:
        raise UsageError(f"d_model={d_model}: must be a positive multiple of heads={heads}")
    check_divisible("heads", heads, ranks)


def check_divisible(name: str, value: int, ranks: int) -> None:
    """Raise UsageError unless tensor-parallel ranks can have equal parts of so many."""
    if value < 1 or value % ranks:
        raise UsageError(f"{name}={value}: must be a positive multiple of the {ranks} tensor-parallel ranks")


class HistorySparseArch(nn.Module):
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


class HistoryOverArch(nn.Module):
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


class HistoryDLRM(nn.Module):
    """DLRM whose prediction also reads the user's history.

    The encoder is called ``transformer``, whatever its blocks are, as checkpoints have it.

    Args:
        token_tables: of the token features; their dimensions sum to the ``token_width`` of the encoder.
        bottom_mlp: widths of the layers over the dense features; the last is D, of the vectors that interact.
        top_mlp: widths of the layers that end in the logits; the last is the number of labels.
    """

    reads_histories = True

    @property
    def reads_times(self) -> bool:
        """Whether the model reads when tokens happened."""
        return self.transformer.reads_times

    def __init__(
        self,
        tables: EmbeddingBagCollection,
        token_tables: EmbeddingBagCollection,
        transformer: HistoryEncoder[Any],
        dense_features: int,
        bottom_mlp: list[int],
        top_mlp: list[int],
    ) -> None:
        super().__init__()
        self.sparse_arch = HistorySparseArch(tables, token_tables)
        self.dense_arch = DenseArch(dense_features, bottom_mlp)
        self.transformer = transformer
        self.over_arch = HistoryOverArch(dims_of(tables), bottom_mlp[-1], transformer.d_model, top_mlp)

    def forward(
        self,
        dense: Tensor,
        sparse: KeyedJaggedTensor,
        tokens: KeyedJaggedTensor,
        history_lengths: Tensor,
        real: Tensor | None = None,
        token_count: int | None = None,
        token_times: Tensor | None = None,
    ) -> Tensor:
        """Collective over the ranks of the encoder, which must have the same number of samples b.

        Args:
            dense: [b, dense_features].
            tokens: the token features, of stride b * T; bag i * T + t is token t of sample i.
            history_lengths: [b], past interactions of each sample.
            real: [b] bool, false for samples that are padding, for a model with experts.
            token_count, token_times: as :meth:`HistoryEncoder.forward` has them.

        Returns:
            logits, [b, labels].
        """
        pooled, token_vectors = self.sparse_arch(sparse, tokens)
        encoded = self.transformer(token_vectors, history_lengths, real, token_count, token_times)
        return self.over_arch(self.dense_arch(dense), pooled, encoded)

    def logits_of_rows(self, dense: Tensor, pooled: Tensor, *rows: Tensor) -> Tensor:
        """Return the logits of :meth:`forward` from what follows the lookups; ``rows`` as :meth:`HistoryEncoder.encode`."""
        return self.over_arch(self.dense_arch(dense), pooled, self.transformer.encode(*rows))


def build_history_dlrm(config: Config, schema: DatasetSchema, encoder: Callable[..., HistoryEncoder[Any]]) -> HistoryDLRM:
    """Return the model of the config around an encoder of histories, which is made of the arguments that all encoders need.

    Raises:
        ConfigError: if the data set has no histories.
    """
    shape = config.model
    if not schema.token_features:
        kind = shape.kind.name
        raise ConfigError(f"model.kind={kind}: the data set has no histories of interactions; allowed with it: dlrm, dcnv2")
    transformer = encoder(
        token_width=pooled_columns(config.embedding, schema.token_features),
        d_model=shape.d_model,
        heads=shape.heads,
        layers=shape.layers,
        history_length=schema.history_length,
    )
    return HistoryDLRM(
        embedding_tables(config.embedding, schema.sparse_features),
        embedding_tables(config.embedding, schema.token_features),
        transformer,
        len(schema.dense_features),
        shape.bottom_mlp,
        top_widths(config, schema),
    )
