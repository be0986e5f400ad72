"""The number of floating-point operations that a model's matrix products need.

A multiplication with its addition counts as two, a backward pass as two forward passes: the convention of model FLOPs
utilization in Chowdhery et al., *PaLM*, arXiv 2204.02311, appendix B. What an implementation does beside it (elementwise work,
lookups, recomputation) does not count.

Products count as the models here have them: DLRM's interaction takes all pairs of vectors in both orders, and attention has no
discount for its causal mask. Those of blocks over histories, and of their experts, are for the longest history,
``history_length``: samples with shorter ones need fewer. Experts count for the ``top_k`` of each token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

from dlrm_fused.config import Config, ModelKind
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.models.embedding_tables import pooled_columns
from dlrm_fused.models.multi_task import top_widths
from dlrm_fused.models.product_choice import FEED_FORWARD_FACTOR
from dlrm_fused.ops.moe.activations import ACTIVATIONS

_FORWARD_PASSES_OF_A_STEP = 3
Product = tuple[int, int, int]  # of [rows, inner] by [inner, columns]


def training_flops(config: Config, schema: DatasetSchema) -> int | None:
    """Return the FLOPs of one sample's forward and backward pass; None for a kind of model that is not counted here."""
    forward = forward_flops(config, schema)
    return None if forward is None else _FORWARD_PASSES_OF_A_STEP * forward


def forward_flops(config: Config, schema: DatasetSchema) -> int | None:
    """Return the FLOPs of one sample's forward pass; None for a kind of model that is not counted here."""
    products = _PRODUCTS.get(config.model.kind)
    if products is None:
        return None
    bottom = _mlp(len(schema.dense_features), *config.model.bottom_mlp)
    return 2 * sum(map(math.prod, itertools.chain(bottom, products(config, schema))))


def _mlp(*widths: int) -> Iterator[Product]:
    for columns_in, columns_out in itertools.pairwise(widths):
        yield 1, columns_in, columns_out


def _dlrm(config: Config, schema: DatasetSchema) -> Iterator[Product]:
    yield from _interaction(config, schema)
    yield from _top(config, schema, config.embedding.dim + math.comb(_vectors(schema), 2))


def _dcnv2(config: Config, schema: DatasetSchema) -> Iterator[Product]:
    features = config.embedding.dim + pooled_columns(config.embedding, schema.sparse_features)
    for _ in range(config.model.cross_layers):
        yield from _mlp(features, config.model.cross_rank, features)
    yield from _top(config, schema, features)


def _with_histories(
    config: Config, schema: DatasetSchema, block: Callable[[Config, int, int], Iterator[Product]]
) -> Iterator[Product]:
    width, tokens = config.model.d_model, schema.history_length + 1
    yield tokens, pooled_columns(config.embedding, schema.token_features), width
    for layer in range(config.model.layers):
        # Only the candidate's result of the last block is used.
        yield from block(config, tokens, tokens if layer + 1 < config.model.layers else 1)
    yield from _interaction(config, schema)
    features = config.embedding.dim + math.comb(_vectors(schema), 2) + width
    yield from _mlp(features, *top_widths(config, schema))


def _block(config: Config, tokens: int, queries: int) -> Iterator[Product]:
    """Yield the products of one block of the Transformer whose result is needed for ``queries`` of the tokens."""
    width = config.model.d_model
    yield from ((queries, width, 2 * width), (tokens, width, 2 * width))  # queries and output; keys and values
    yield from ((queries, width, tokens), (queries, tokens, width))  # attention, of all heads together
    for _ in range(queries):
        yield from _experts(config, width) if config.model.experts.count else _mlp(width, FEED_FORWARD_FACTOR * width, width)


def _hstu_block(config: Config, tokens: int, queries: int) -> Iterator[Product]:
    """Yield the products of one block of HSTU, as :func:`_block` does."""
    width = config.model.d_model
    yield from ((queries, width, 3 * width), (tokens, width, 2 * width))  # queries, gates and output; keys and values
    yield from ((queries, width, tokens), (queries, tokens, width))


def _experts(config: Config, width: int) -> Iterator[Product]:
    """Yield a token's products: the router, its experts and their weighted sum, and the expert that all tokens have."""
    experts = config.model.experts
    yield from ((1, width, experts.count), (1, experts.top_k, width))
    matrices = 1 + ACTIVATIONS[experts.activation.name].parts
    yield from ((experts.top_k * matrices, width, experts.hidden), (matrices, width, experts.shared_hidden))


def _top(config: Config, schema: DatasetSchema, features: int) -> Iterator[Product]:
    """Yield the top MLP of DLRM and DCNv2, with its experts."""
    widths = top_widths(config, schema)
    yield from _mlp(features, *widths)
    if config.model.experts.count:
        yield from _experts(config, widths[0])


def _interaction(config: Config, schema: DatasetSchema) -> Iterator[Product]:
    dim = config.embedding.dim
    own_dims = (config.embedding.dim_of(feature.name) for feature in schema.sparse_features)
    yield from ((1, own, dim) for own in own_dims if own != dim)
    yield _vectors(schema), dim, _vectors(schema)


def _vectors(schema: DatasetSchema) -> int:
    """Return how many vectors interact: pooled embeddings and the bottom MLP's result."""
    return len(schema.sparse_features) + 1


_PRODUCTS: dict[ModelKind, Callable[[Config, DatasetSchema], Iterator[Product]]] = {
    ModelKind.dlrm: _dlrm,
    ModelKind.dcnv2: _dcnv2,
    ModelKind.transformer: partial(_with_histories, block=_block),
    ModelKind.hstu: partial(_with_histories, block=_hstu_block),
}
