"""DLRM and DLRM-DCNv2, TorchRec's implementations, or our Transformer, with the loss of click prediction on top.

Sources: Naumov et al., *Deep Learning Recommendation Model*, arXiv 1906.00091; Wang et al., *DCN V2*, arXiv 2008.13535.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.embedding_configs import DataType

from dlrm_fused.config import Config, EmbeddingConfig, ModelKind, Precision, TableDtype
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.errors import ConfigError
from dlrm_fused.models.row_parallel import FEED_FORWARD_FACTOR, choose_product
from dlrm_fused.models.tensor_parallel import RowParallelProduct
from dlrm_fused.models.transformer import HistoryTransformer, TransformerDLRM

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
    """A model that maps (dense features, sparse features, and histories if it reads them) to logits, and its cross-entropy.

    The loss is the sum over this rank's samples times ranks / samples of the global batch. TorchRec and DDP average
    gradients over ranks, so the gradient is that of the mean over the global batch however its samples are spread.
    """

    def __init__(self, model: nn.Module, precision: Precision, world_size: int, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._reads_histories = isinstance(model, TransformerDLRM)
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
            # Not by what the batch has: TorchRec's pipeline traces this with a placeholder, which has everything.
            histories = (batch.tokens, batch.history_lengths) if self._reads_histories else ()
            logits = self.model(batch.dense, batch.sparse, *histories).squeeze(-1)
        logits = logits.float()
        losses = binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="sum")
        loss = losses * (self._world_size / batch.global_size)
        return loss, Output(loss.detach(), logits.detach(), batch.labels, batch.weights)


def build_model(
    config: Config,
    schema: DatasetSchema,
    world_size: int,
    device: torch.device,
    tensor_parallel: dist.ProcessGroup | None = None,
) -> RankingTask:
    """Build the model of the config: dense layers on the CPU (so that their initial weights are the same for every
    device), embedding tables on the meta device until they are sharded.

    Args:
        tensor_parallel: the ranks that share the layers of ``model.kind=transformer``, for which this is collective over
            them; None for this rank alone.

    Raises:
        ConfigError: if the model reads histories, and the data set has none.
    """
    shape = config.model
    dense_features = len(schema.dense_features)
    model: nn.Module
    if shape.kind is ModelKind.transformer:
        product = choose_product(config, tensor_parallel, schema.history_length + 1, device)
        model = build_transformer(config, schema, product)
    elif shape.kind is ModelKind.dcnv2:
        tables = _tables(config.embedding, schema.sparse_features)
        model = DLRM_DCN(tables, dense_features, shape.bottom_mlp, shape.top_mlp, shape.cross_layers, shape.cross_rank)
    else:
        model = DLRM(_tables(config.embedding, schema.sparse_features), dense_features, shape.bottom_mlp, shape.top_mlp)
    return RankingTask(model, config.training.precision, world_size, device)


def build_transformer(config: Config, schema: DatasetSchema, product: RowParallelProduct) -> TransformerDLRM:
    """The model of ``model.kind=transformer``, whose layers are cut over the ranks of ``product``. Otherwise as
    :func:`build_model`, which says what it raises."""
    shape = config.model
    if not schema.token_features:
        raise ConfigError("model.kind=transformer: the data set has no histories of interactions; allowed with it: dlrm, dcnv2")
    transformer = HistoryTransformer(
        token_width=len(schema.token_features) * config.embedding.dim,
        d_model=shape.d_model,
        heads=shape.heads,
        layers=shape.layers,
        d_ff=FEED_FORWARD_FACTOR * shape.d_model,
        history_length=schema.history_length,
        product=product,
    )
    return TransformerDLRM(
        _tables(config.embedding, schema.sparse_features),
        _tables(config.embedding, schema.token_features),
        transformer,
        len(schema.dense_features),
        shape.bottom_mlp,
        shape.top_mlp,
    )


def _tables(embedding: EmbeddingConfig, features: Sequence[SparseFeature]) -> EmbeddingBagCollection:
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
