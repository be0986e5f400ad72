"""DLRM and DLRM-DCNv2, TorchRec's implementations, or our Transformer, with the loss of click prediction on top.

With ``model.experts``, the top MLP of the first two and the feed-forward layers of the third have a Mixture of Experts.

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
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config, EmbeddingConfig, ModelKind, Precision, TableDtype
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.errors import ConfigError
from dlrm_fused.models.expert_parallel import choose_computations
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.models.row_parallel import FEED_FORWARD_FACTOR, choose_product
from dlrm_fused.models.tensor_parallel import RowParallelProduct
from dlrm_fused.models.transformer import HistoryTransformer, TransformerDLRM

_TABLE_DTYPES = {TableDtype.fp32: DataType.FP32, TableDtype.fp16: DataType.FP16}


class Output(NamedTuple):
    """What a forward pass leaves for the metrics; all are detached.

    Attributes:
        loss: [] this rank's share of the cross-entropy, such that the mean over ranks is the mean over the global batch.
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

    In training, the auxiliary losses of layers of experts are added to what gradients are taken of. They are no part of the
    :class:`Output`, so losses of models with and without experts compare.

    Attributes:
        expert_layers: the model's layers of experts, in their order.
    """

    def __init__(self, model: nn.Module, precision: Precision, world_size: int, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self.expert_layers = tuple(layer for layer in model.modules() if isinstance(layer, MixtureOfExperts))
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
            real = (batch.weights > 0,) if self.expert_layers else ()
            logits = self.model(batch.dense, batch.sparse, *histories, *real).squeeze(-1)
        logits = logits.float()
        losses = binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="sum")
        loss = losses * (self._world_size / batch.global_size)
        output = Output(loss.detach(), logits.detach(), batch.labels, batch.weights)
        for layer in self.expert_layers:
            auxiliary = layer.take_auxiliary_loss()
            if auxiliary is not None:
                loss = loss + auxiliary
        return loss, output


class ExpertTop(nn.Module):
    """A top MLP with experts after its first layer: x + experts(x).

    Args:
        layer_sizes: two or more; the first is the experts' width.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], experts: MixtureOfExperts) -> None:
        super().__init__()
        *hidden, last = layer_sizes
        self.first = MLP(in_features, hidden[:1])
        self.experts = experts
        self.rest = nn.Sequential(MLP(hidden[0], hidden[1:]), nn.Linear(hidden[-1], last))

    def forward(self, features: Tensor, real: Tensor) -> Tensor:
        """features [b, in_features] and real [b] bool, false for padding, to logits [b, 1]."""
        x = self.first(features)
        logits: Tensor = self.rest(x + self.experts(x, real))
        return logits


class ExpertDLRM(nn.Module):
    """DLRM or DCNv2 with experts in its top MLP. Its parts have the names of TorchRec's.

    Args:
        dlrm: whose other parts are taken.
    """

    def __init__(self, dlrm: DLRM, layer_sizes: list[int], experts: MixtureOfExperts) -> None:
        super().__init__()
        self.sparse_arch, self.dense_arch, self.inter_arch = dlrm.sparse_arch, dlrm.dense_arch, dlrm.inter_arch
        in_features = next(dlrm.over_arch.parameters()).shape[1]
        self.over_arch = ExpertTop(in_features, layer_sizes, experts)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor, real: Tensor) -> Tensor:
        """[b, dense features], features of stride b, and [b] bool, false for padding, to logits [b, 1]."""
        interactions = self.inter_arch(self.dense_arch(dense), self.sparse_arch(sparse))
        logits: Tensor = self.over_arch(interactions, real)
        return logits


def build_model(
    config: Config,
    schema: DatasetSchema,
    world_size: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> RankingTask:
    """Build the model of the config: dense layers on the CPU (so that their initial weights are the same for every
    device), embedding tables on the meta device until they are sharded.

    Args:
        group: the ranks that share experts, or the layers of ``model.kind=transformer``; then this is collective over them.
            None for this rank alone.

    Raises:
        ConfigError: if the model reads histories, and the data set has none.
        UsageError, CommunicationError: as of the choices for layers that ranks share.
    """
    model: nn.Module
    if config.model.kind is ModelKind.transformer:
        model = _build_transformer_on_ranks(config, schema, device, group)
    else:
        model = _build_dlrm(config, schema)
        if config.model.experts.count:
            top = config.model.top_mlp
            (experts,) = build_experts(config, group, layers=1, width=top[0], tokens=1, device=device)
            model = ExpertDLRM(model, top, experts)
    return RankingTask(model, config.training.precision, world_size, device)


def _build_dlrm(config: Config, schema: DatasetSchema) -> DLRM:
    shape, tables = config.model, _tables(config.embedding, schema.sparse_features)
    dense_features = len(schema.dense_features)
    if shape.kind is ModelKind.dcnv2:
        return DLRM_DCN(tables, dense_features, shape.bottom_mlp, shape.top_mlp, shape.cross_layers, shape.cross_rank)
    return DLRM(tables, dense_features, shape.bottom_mlp, shape.top_mlp)


def build_experts(
    config: Config, group: dist.ProcessGroup | None, *, layers: int, width: int, tokens: int, device: torch.device
) -> list[MixtureOfExperts]:
    """Layers of experts; arguments and errors are those of :func:`~dlrm_fused.models.expert_parallel.choose_computations`."""
    computations = choose_computations(config, group, layers, width, tokens, device)
    return [MixtureOfExperts(width, config.model.experts, computation) for computation in computations]


def _build_transformer_on_ranks(
    config: Config, schema: DatasetSchema, device: torch.device, group: dist.ProcessGroup | None
) -> TransformerDLRM:
    """Blocks whose weights the ranks of the group share: their experts, or all."""
    shape, tokens = config.model, schema.history_length + 1
    if not shape.experts.count:
        return build_transformer(config, schema, choose_product(config, group, tokens, device))
    experts = build_experts(config, group, layers=shape.layers, width=shape.d_model, tokens=tokens, device=device)
    return build_transformer(config, schema, RowParallelProduct(), experts)


def build_transformer(
    config: Config, schema: DatasetSchema, product: RowParallelProduct, experts: Sequence[MixtureOfExperts] = ()
) -> TransformerDLRM:
    """The model of ``model.kind=transformer``, whose layers are cut over the ranks of ``product``. Otherwise as
    :func:`build_model`, which says what it raises.

    Args:
        experts: of each block; none for a model without experts.
    """
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
        experts=experts,
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
