"""A model of one's own: logistic regression on dense features and pooled embeddings."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.models.dlrm import SparseArch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.models.tables import embedding_tables


class LinearModel(nn.Module):
    def __init__(self, config: Config, schema: DatasetSchema) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_tables(config.embedding, schema.sparse_features))
        columns = len(schema.dense_features) + len(schema.sparse_features) * config.embedding.dim
        self.logits = nn.Linear(columns, len(schema.labels))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """dense [b, features] and sparse features of stride b to logits [b, labels]."""
        pooled: Tensor = self.sparse_arch(sparse)  # [b, sparse features, embedding.dim]
        logits: Tensor = self.logits(torch.cat((dense, pooled.flatten(1)), dim=1))
        return logits


def build(config: Config, schema: DatasetSchema, device: torch.device, group: dist.ProcessGroup | None) -> nn.Module:
    return LinearModel(config, schema)
