"""The embedding tables of a model, before they are sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType

from dlrm_fused.config import EmbeddingConfig, TableDtype
from dlrm_fused.datasets.schema import SparseFeature

_TABLE_DTYPES = {TableDtype.fp32: DataType.FP32, TableDtype.fp16: DataType.FP16}


def embedding_tables(embedding: EmbeddingConfig, features: Sequence[SparseFeature]) -> EmbeddingBagCollection:
    """A table for each feature, of its name, on the meta device: sharding gives it memory and weights."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=feature.name,
                feature_names=[feature.name],
                num_embeddings=feature.rows,
                embedding_dim=embedding.dim,
                data_type=_TABLE_DTYPES[embedding.dtype],
            )
            for feature in features
        ],
        device=torch.device("meta"),
    )
