"""The embedding tables of a model, before they are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_fused.config import EmbeddingConfig, TableDtype
from dlrm_fused.datasets.feature_names import module_name
from dlrm_fused.datasets.schema import SparseFeature

_TABLE_DTYPES = {TableDtype.fp32: DataType.FP32, TableDtype.fp16: DataType.FP16}


def embedding_tables(embedding: EmbeddingConfig, features: Sequence[SparseFeature]) -> EmbeddingBagCollection:
    """Return a table for each feature, of its module's name, on the meta device: sharding gives it memory and weights."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=module_name(feature.name),
                feature_names=[feature.name],
                num_embeddings=feature.rows,
                embedding_dim=embedding.dim_of(feature.name),
                data_type=_TABLE_DTYPES[embedding.dtype],
            )
            for feature in features
        ],
        device=torch.device("meta"),
    )


def pooled_columns(embedding: EmbeddingConfig, features: Sequence[SparseFeature]) -> int:
    """Columns of the features' pooled embeddings, side by side."""
    return sum(embedding.dim_of(feature.name) for feature in features)


class InFeatureOrder(nn.Module):
    """Pooled embeddings by the order of the tables' features; a sharded collection has an order of its own, by its plan.

    A module of its own, since TorchRec's pipeline traces what calls tables, where keys cannot be compared.
    """

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.features = [feature for config in tables.embedding_bag_configs() for feature in config.feature_names]

    def forward(self, pooled: KeyedTensor) -> Tensor:
        """Return [b, sum of dimensions]; a view of the collection's result if that has this order."""
        if pooled.keys() == self.features:
            return pooled.values()
        by_key = pooled.to_dict()
        return torch.cat([by_key[feature] for feature in self.features], dim=1)


class SparseArch(nn.Module):
    """The lookup of a model. Its tables have the names of TorchRec's ``SparseArch``."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = tables
        self.in_feature_order = InFeatureOrder(tables)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Features of stride b to [b, sum of dimensions], in the order of the tables' features."""
        return self.in_feature_order(self.embedding_bag_collection(features))
