"""A model of one's own: logistic regression on dense features and pooled embeddings."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.models.embedding_tables import SparseArch, embedding_tables, pooled_columns


class LinearModel(nn.Module):
    def __init__(self, config: Config, schema: DatasetSchema) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_tables(config.embedding, schema.sparse_features))
        columns = pooled_columns(config.embedding, schema.sparse_features)
        self.logits = nn.Linear(len(schema.dense_features) + columns, len(schema.labels))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """dense [b, features] and sparse features of stride b to logits [b, labels]."""
        pooled: Tensor = self.sparse_arch(sparse)  # [b, columns of all tables]
        logits: Tensor = self.logits(torch.cat((dense, pooled), dim=1))
        return logits


def build(config: Config, schema: DatasetSchema, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    return LinearModel(config, schema)
