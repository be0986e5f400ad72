"""DLRM and DLRM-DCNv2, TorchRec's implementations, with the loss of click prediction on top.

Sources: Naumov et al., *Deep Learning Recommendation Model*, arXiv 1906.00091; Wang et al., *DCN V2*, arXiv 2008.13535.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import DataType

from dlrm_fused.config import Config, ModelKind, Precision, TableDtype
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.schema import DatasetSchema

_TABLE_DTYPES = {TableDtype.fp32: DataType.FP32, TableDtype.fp16: DataType.FP16}


class Output(NamedTuple):
    """What a forward pass leaves for the metrics; all are detached.

    Attributes:
        loss: [] this rank's share of the loss, such that the mean over ranks is the mean over the global batch.
        logits, labels, weights: [b] float32; weight 0 marks padding.
    """

    loss: Tensor
    logits: Tensor
    labels: Tensor
    weights: Tensor


class RankingTask(nn.Module):
    """A model that maps (dense features, sparse features) to logits, and its binary cross-entropy.

    The loss is the sum over this rank's samples times ranks / samples of the global batch. TorchRec and DDP average
    gradients over ranks, so the gradient is that of the mean over the global batch however its samples are spread.
    """

    def __init__(self, model: nn.Module, precision: Precision, world_size: int, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._autocast = precision is Precision.bf16
        self._world_size = world_size
        self._device_type = device.type

    @property
    def embedding_stage(self) -> nn.Module:
        """The part of the model that looks up and exchanges pooled embeddings."""
        return cast(nn.Module, self.model.sparse_arch)

    def forward(self, batch: Batch) -> tuple[Tensor, Output]:
        """Return the loss, [], to call backward on, and the detached :class:`Output`."""
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._autocast):
            logits = self.model(batch.dense, batch.sparse).squeeze(-1)
        logits = logits.float()
        losses = binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="sum")
        loss = losses * (self._world_size / batch.global_size)
        return loss, Output(loss.detach(), logits.detach(), batch.labels, batch.weights)


def build_model(config: Config, schema: DatasetSchema, world_size: int, device: torch.device) -> RankingTask:
    """Build the model of the config: dense layers on the CPU (so that their initial weights are the same for every
    device), embedding tables on the meta device until they are sharded."""
    embedding = config.embedding
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=feature.name,
                feature_names=[feature.name],
                num_embeddings=feature.rows,
                embedding_dim=embedding.dim,
                data_type=_TABLE_DTYPES[embedding.dtype],
            )
            for feature in schema.sparse_features
        ],
        device=torch.device("meta"),
    )
    dense_features = len(schema.dense_features)
    shape = config.model
    model: nn.Module
    if shape.kind is ModelKind.dlrm:
        model = DLRM(tables, dense_features, shape.bottom_mlp, shape.top_mlp)
    else:
        model = DLRM_DCN(tables, dense_features, shape.bottom_mlp, shape.top_mlp, shape.cross_layers, shape.cross_rank)
    return RankingTask(model, config.training.precision, world_size, device)
