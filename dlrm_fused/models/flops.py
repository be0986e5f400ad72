"""The number of floating-point operations that a model's matrix products need.

A multiplication with its addition counts as two, a backward pass as two forward passes: the convention of model FLOPs
utilization in Chowdhery et al., *PaLM*, arXiv 2204.02311, appendix B. What an implementation does beside it (elementwise work,
lookups, recomputation) does not count.

Products count as the models here have them: DLRM's interaction takes all pairs of vectors in both orders, and attention has no
discount for its causal mask. The Transformer's, and those of its experts, are for the longest history, ``history_length``:
shorter ones are padded to it. Experts count for the ``top_k`` of each token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from dlrm_fused.config import Config, ModelKind
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.models.embedding_tables import pooled_columns
from dlrm_fused.models.multi_task import top_widths
from dlrm_fused.models.product_choice import FEED_FORWARD_FACTOR
from dlrm_fused.ops.moe.activations import ACTIVATIONS

_FORWARD_PASSES_OF_A_STEP = 3


def training_flops(config: Config, schema: DatasetSchema) -> int | None:
    """Return the FLOPs of one sample's forward and backward pass; None for a kind of model that is not counted here."""
    forward = forward_flops(config, schema)
    return None if forward is None else _FORWARD_PASSES_OF_A_STEP * forward


def forward_flops(config: Config, schema: DatasetSchema) -> int | None:
    """Return the FLOPs of one sample's forward pass; None for a kind of model that is not counted here."""
    count = _COUNTS.get(config.model.kind)
    return None if count is None else count(config, schema)


def _dlrm(config: Config, schema: DatasetSchema) -> int:
    vectors = _vectors(schema)
    features = config.embedding.dim + _pairs(vectors)
    return _bottom(config, schema) + _interaction(config, schema) + _top(config, schema, features)


def _dcnv2(config: Config, schema: DatasetSchema) -> int:
    features, rank = config.embedding.dim + pooled_columns(config.embedding, schema.sparse_features), config.model.cross_rank
    cross_layer = _product(1, features, rank) + _product(1, rank, features)
    return _bottom(config, schema) + config.model.cross_layers * cross_layer + _top(config, schema, features)


def _transformer(config: Config, schema: DatasetSchema) -> int:
    vectors, width, tokens = _vectors(schema), config.model.d_model, schema.history_length + 1
    into = _product(tokens, pooled_columns(config.embedding, schema.token_features), width)
    # Only the candidate's result of the last block is used.
    blocks = (config.model.layers - 1) * _block(config, tokens, queries=tokens) + _block(config, tokens, queries=1)
    top = _mlp(config.embedding.dim + _pairs(vectors) + width, top_widths(config, schema))
    return _bottom(config, schema) + into + blocks + _interaction(config, schema) + top


def _block(config: Config, tokens: int, queries: int) -> int:
    """Return the FLOPs of one block of the Transformer whose result is needed for ``queries`` of the tokens."""
    width = config.model.d_model
    projections = _product(tokens, width, 3 * width) + _product(queries, width, width)
    attention = _product(queries, width, tokens) + _product(queries, tokens, width)  # of all heads together
    if config.model.experts.count:
        return projections + attention + queries * _experts_of_a_token(config, width)
    return projections + attention + queries * _mlp(width, [FEED_FORWARD_FACTOR * width, width])


def _experts_of_a_token(config: Config, width: int) -> int:
    """Return the router, the token's experts and their weighted sum, and the expert that all tokens have."""
    experts = config.model.experts
    router, weighted_sum = _product(1, width, experts.count), _product(1, experts.top_k, width)
    matrices = 1 + ACTIVATIONS[experts.activation.name].parts
    own, shared = (matrices * _product(1, width, hidden) for hidden in (experts.hidden, experts.shared_hidden))
    return router + experts.top_k * own + weighted_sum + shared


def _bottom(config: Config, schema: DatasetSchema) -> int:
    return _mlp(len(schema.dense_features), config.model.bottom_mlp)


def _top(config: Config, schema: DatasetSchema, features: int) -> int:
    """Return the top MLP of DLRM and DCNv2, with its experts."""
    widths = top_widths(config, schema)
    return _mlp(features, widths) + (_experts_of_a_token(config, widths[0]) if config.model.experts.count else 0)


def _interaction(config: Config, schema: DatasetSchema) -> int:
    vectors, dim = _vectors(schema), config.embedding.dim
    own_dims = (config.embedding.dim_of(feature.name) for feature in schema.sparse_features)
    projections = sum(_product(1, own, dim) for own in own_dims if own != dim)
    return projections + _product(vectors, dim, vectors)


def _vectors(schema: DatasetSchema) -> int:
    """Return how many vectors interact: pooled embeddings and the bottom MLP's result."""
    return len(schema.sparse_features) + 1


def _pairs(vectors: int) -> int:
    return math.comb(vectors, 2)


def _mlp(in_features: int, widths: Sequence[int]) -> int:
    return sum(_product(1, *layer) for layer in itertools.pairwise([in_features, *widths]))


def _product(rows: int, inner: int, columns: int) -> int:
    """Return the FLOPs of [rows, inner] by [inner, columns]."""
    return 2 * rows * inner * columns


_COUNTS: dict[ModelKind, Callable[[Config, DatasetSchema], int]] = {
    ModelKind.dlrm: _dlrm,
    ModelKind.dcnv2: _dcnv2,
    ModelKind.transformer: _transformer,
}
