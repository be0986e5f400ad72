"""The module that is trained: a config's model with the loss of click prediction on top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_fused.config import Compile, Config, Precision
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.models.captured import CapturedFunction
from dlrm_fused.models.dense_part import DensePart, cross_entropy, is_compiled
from dlrm_fused.models.fp8 import Fp8Products, multiply_in_8_bits
from dlrm_fused.models.history import HistoryDLRM
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.models.multi_task import task_weights

# Builds a model of a config for a data set: dense layers on the CPU, tables on the meta device. The other two arguments are the
# device that it will run on, and the ranks that share weights of its layers; None is this rank alone. The model maps (dense [b,
# features], sparse features of stride b) to logits [b, labels]. Its attribute `sparse_arch` is the part that looks up
# embeddings. A model whose attribute `reads_histories` is true is also called with tokens, history lengths and `token_count=`
# of the batch, one whose `reads_times` is true with its `token_times=`, one with layers of experts with [b] bool, false for
# padding. One with a method `logits_of`, a LogitsOf, is called in two parts: embeddings and what follows. That may be compiled,
# and on GPUs captured as a CUDA graph. So is a HistoryDLRM whose encoder can be captured, but not compiled.
BuildModel = Callable[[Config, DatasetSchema, torch.device, dist.ProcessGroup | None], nn.Module]


class Output(NamedTuple):
    """The results of a forward pass that metrics read; all are detached.

    Attributes:
        loss: [] this rank's share of the cross-entropy, such that the mean over ranks is the mean over the global batch.
        logits, labels: [b] float32, or [b, L] of several labels.
        weights: [b] float32; 0 marks padding.
        sample_weights: [b] float32, what each sample counts; ``weights`` where all count the same.
    """

    loss: Tensor
    logits: Tensor
    labels: Tensor
    weights: Tensor
    sample_weights: Tensor


class RankingTask(nn.Module):
    """A model that maps (dense features, sparse features, and histories if it reads them) to logits, and its cross-entropy.

    The loss is the sum over this rank's samples times ranks / samples of the global batch. TorchRec and DDP average
    gradients over ranks, so the gradient is that of the mean over the global batch however its samples are spread.

    A sample's weight multiplies its loss. The sum is still divided by the number of samples, not by the sum of their weights:
    what a sample adds to the gradient then depends neither on the rank nor on the samples beside it.

    In training, the auxiliary losses of layers of experts are added to what gradients are taken of. They are no part of the
    :class:`Output`, so losses of models with and without experts compare.

    Args:
        task_weights: of the labels' losses in their sum; 1 for a single label.
        fp8_products: by which the model's layers multiply.

    Attributes:
        dense_part: what follows the embeddings; None for a model that is not called in two parts.
    """

    def __init__(
        self,
        model: nn.Module,
        precision: Precision,
        world_size: int,
        device: torch.device,
        compile: Compile = Compile.never,
        task_weights: Sequence[float] = (1.0,),
        has_sample_weights: bool = False,
        fp8_products: Fp8Products | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._task_weights = task_weights
        self._has_sample_weights = has_sample_weights
        self.expert_layers = tuple(layer for layer in model.modules() if isinstance(layer, MixtureOfExperts))
        self.fp8_products = fp8_products
        self._reads_histories = getattr(model, "reads_histories", False)
        self._reads_times = getattr(model, "reads_times", False)
        self._autocast = precision.is_bf16
        self._world_size = world_size
        self._device_type = device.type
        logits_of = getattr(model, "logits_of", None)
        has_experts = bool(self.expert_layers)
        is_one_graph, rows_of = not has_experts and is_compiled(compile, device), None
        if is_one_graph and isinstance(model, HistoryDLRM) and model.transformer.can_be_captured:
            logits_of, rows_of = model.logits_of_rows, model.transformer.rows_to_encode
        self.dense_part: DensePart | None = None
        if logits_of is not None:
            shape = device.type, self._autocast, is_one_graph, has_experts, self.dense_layers, task_weights
            self.dense_part = DensePart(logits_of, *shape, rows_of)

    @property
    def embedding_stage(self) -> nn.Module:
        """The part of the model that looks up and exchanges pooled embeddings."""
        return cast(nn.Module, self.model.sparse_arch)

    @property
    def captured(self) -> CapturedFunction[tuple[Tensor, Tensor]] | None:
        """The function that computes all dense parameters' gradients at once; None for a model that autograd runs through."""
        return self.dense_part.captured if self.dense_part is not None else None

    def forward(self, batch: Batch) -> tuple[Tensor, Output]:
        """Return the loss, [], to call backward on, and the detached :class:`Output`."""
        # Not by what the batch has: TorchRec's pipeline traces this with a placeholder, which has everything.
        counted = cast(Tensor, batch.sample_weights) if self._has_sample_weights else batch.weights
        if self.dense_part is not None:
            losses, logits = self._by_dense_part(self.dense_part, batch, counted)
        else:
            losses, logits = cross_entropy(self._logits(batch), batch.labels, counted, self._task_weights)
        loss = losses * (self._world_size / batch.global_size)
        output = Output(loss.detach(), logits.detach(), batch.labels, batch.weights, counted)
        for layer in self.expert_layers:
            auxiliary = layer.take_auxiliary_loss()
            if auxiliary is not None:
                loss = loss + auxiliary
        return loss, output

    def dense_layers(self) -> list[nn.Module]:
        """Return the model's layers without tables."""
        return [layer for layer in self.model.children() if layer is not self.model.sparse_arch]

    def _by_dense_part(self, dense_part: DensePart, batch: Batch, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses' sum, [], and the logits."""
        if not self._reads_histories:
            pooled, sample_weights = self.embedding_stage(batch.sparse), counted if self._has_sample_weights else None
            return dense_part(batch.dense, pooled, batch.labels, batch.weights, sample_weights)
        pooled, tokens = self.embedding_stage(batch.sparse, batch.tokens)
        histories = (tokens, batch.history_lengths, batch.token_count, batch.token_times if self._reads_times else None)
        return dense_part(batch.dense, pooled, batch.labels, batch.weights, counted, histories)

    def _logits(self, batch: Batch) -> Tensor:
        """Return [b, labels]."""
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._autocast):
            # As in forward, not by what the batch has.
            histories = (batch.tokens, batch.history_lengths) if self._reads_histories else ()
            real = (batch.weights > 0,) if self.expert_layers else ()
            of_tokens: dict[str, Tensor | int | None] = {"token_count": batch.token_count} if self._reads_histories else {}
            if self._reads_times:
                of_tokens["token_times"] = batch.token_times
            logits: Tensor = self.model(batch.dense, batch.sparse, *histories, *real, **of_tokens)
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
        ConfigError: if the model reads histories, and the data set has none, or it cannot be compiled, and must be; if
            ``training.task_weights`` does not go with the labels; or if there is no ``training.precision=fp8`` for it.
        UsageError, CommunicationError: as of the choices for layers that ranks share.
    """
    build = cast(BuildModel, resolve_name(config.model.kind.value))
    model, training = build(config, schema, device, group), config.training
    products = _in_8_bits(config, model) if training.precision is Precision.fp8 else None
    if training.compile is Compile.always and not hasattr(model, "logits_of"):
        raise ConfigError(
            f"training.compile=always: model.kind={config.model.kind.name} is not compiled; allowed with it: auto, never"
        )
    weights = task_weights(training.task_weights, schema.labels)
    return RankingTask(model, training.precision, world_size, device, training.compile, weights, schema.has_weights, products)


def _in_8_bits(config: Config, model: nn.Module) -> Fp8Products:
    """Let large layers be multiplied in 8 bits; return what multiplies them.

    Raises:
        ConfigError: if the model has no such products.
    """
    if not hasattr(model, "logits_of"):
        raise ConfigError(
            f"training.precision=fp8: model.kind={config.model.kind.name} is not multiplied in 8 bits; allowed with it: "
            "fp32, tf32, bf16"
        )
    products = Fp8Products()
    multiply_in_8_bits(model, products)
    return products
