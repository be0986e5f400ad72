"""The model spread over ranks: sharded embedding tables with their fused optimizer, dense layers in data parallel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    WeightDecayMode,
)
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer

from dlrm_fused.config import (
    Comm,
    ComputeKernel,
    Config,
    EmbeddingConfig,
    EmbeddingOptimizerKind,
    OutputDtype,
    WireDtype,
)
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.sharding.dense_gradients import fix_order_of_sums, sum_gradients_over_hosts
from dlrm_fused.sharding.flat_parameters import FlatDataParallel, GivesGradientsAtOnce
from dlrm_fused.sharding.groups import ModelParallelGroups, data_parallel_wrapper
from dlrm_fused.sharding.module_support import tables_of_bags
from dlrm_fused.sharding.optimizers import describe_table_optimizers, make_optimizer
from dlrm_fused.sharding.options import AUTO, FUSED, Mode
from dlrm_fused.sharding.planning import make_plan
from dlrm_fused.sharding.sharded_module import FusedShardedEmbeddingBagCollection
from dlrm_fused.sharding.sharder import FusedEmbeddingBagCollectionSharder
from dlrm_fused.sharding.tables import initialize_tables, is_table
from dlrm_fused.sharding.without_tables import check_that_ranks_have_rows, receive_the_dtype_of_the_others

FBGEMM_OPTIMIZERS = {
    EmbeddingOptimizerKind.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbeddingOptimizerKind.adagrad: EmbOptimType.EXACT_ADAGRAD,
    EmbeddingOptimizerKind.sgd: EmbOptimType.EXACT_SGD,
    EmbeddingOptimizerKind.adam: EmbOptimType.ADAM,
    EmbeddingOptimizerKind.rowwise_adam: EmbOptimType.PARTIAL_ROWWISE_ADAM,
}
_OUTPUT_TYPES = {OutputDtype.fp32: SparseType.FP32, OutputDtype.fp16: SparseType.FP16, OutputDtype.bf16: SparseType.BF16}
_WIRE_TYPES = {WireDtype.fp32: CommType.FP32, WireDtype.fp16: CommType.FP16, WireDtype.bf16: CommType.BF16}


@dataclass(frozen=True)
class ShardedModel:
    """A model ready to train.

    Attributes:
        optimizer: steps the dense layers, and hands the learning rate to the optimizer fused into the embedding backward.
            Its ``param_groups`` hold the learning rates in effect.
        plan: where each table lies.
        groups: of layers that ranks share; None for a model without any.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    plan: ShardingPlan
    groups: ModelParallelGroups | None

    @property
    def paths(self) -> Mapping[str, str]:
        """The path on which the pooled embeddings of each table are computed and delivered; empty for ``comm=baseline``."""
        return table_paths(self.model)


def shard(
    task: nn.Module,
    config: Config,
    schema: DatasetSchema,
    device: torch.device,
    groups: ModelParallelGroups | None = None,
) -> ShardedModel:
    """Plan, shard and initialize the model. Collective.

    Initial embedding weights depend on (seed, table, row, column) only, so every plan on any number of ranks starts from
    the same model.

    Args:
        task: if its attribute ``captured`` is not None and uses all dense parameters, these become
            :class:`~dlrm_fused.sharding.flat_parameters.FlatParameters`, otherwise DDP averages their gradients.

    Raises:
        ConfigError: if no plan satisfies the config, or the device lacks the embedding optimizer or wire format.
        UsageError: with ``comm_strict``, if ``comm=fused`` does not cover some table.
    """
    output_dtype = pooled_dtype(config, device)
    at_once: GivesGradientsAtOnce | None = getattr(task, "captured", None)
    flat = FlatDataParallel(at_once) if at_once is not None and groups is None and _uses_all(at_once, task) else None
    sharders: list[ModuleSharder[nn.Module]] = [
        make_sharder(config.embedding, device, config.comm, config.comm_strict, output_dtype, schema.has_fixed_shapes)
    ]
    describe_table_optimizers(task, config.embedding)
    plan = make_plan(config, schema, task, sharders, device)
    world = cast(dist.ProcessGroup, dist.GroupMember.WORLD)
    model = DistributedModelParallel(
        module=task,
        env=ShardingEnv.from_process_group(world),
        device=device,
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=flat or data_parallel_wrapper(task),
    )
    if config.comm is not Comm.baseline:
        sum_gradients_over_hosts(model, world, measured=config.comm is Comm.auto)
    fix_order_of_sums(model)
    initialize_tables(model, config, schema)
    optimizer = make_optimizer(model, config, groups, flat.flat if flat is not None else None)
    return ShardedModel(model, optimizer, plan, groups)


def _uses_all(function: GivesGradientsAtOnce, task: nn.Module) -> bool:
    """Whether the function uses all parameters of the model but tables."""
    dense = {parameter for name, parameter in task.named_parameters() if parameter.requires_grad and not is_table(name)}
    return dense == set(function.parameters())


def table_paths(model: nn.Module) -> dict[str, str]:
    """Return the path of each table, as :attr:`FusedShardedEmbeddingBagCollection.paths`; none of TorchRec's own sharder."""
    modules = [module for module in model.modules() if isinstance(module, FusedShardedEmbeddingBagCollection)]
    return {table: path for module in modules for table, path in module.paths.items()}


def pooled_dtype(config: Config, device: torch.device) -> OutputDtype:
    """Return the number format that ``embedding.output_dtype`` means on this device; never ``auto``.

    Raises:
        ConfigError: if the device lacks it, or it contradicts the format on the wire or ``training.precision``.
    """
    embedding = config.embedding
    chosen, wires = embedding.output_dtype, (embedding.forward_wire, embedding.backward_wire)
    if chosen is OutputDtype.auto:
        is_half = config.training.precision.is_bf16 and device.type == "cuda" and set(wires) == {WireDtype.fp32}
        return OutputDtype.bf16 if is_half else OutputDtype.fp32
    if device.type == "cpu" and chosen is OutputDtype.bf16:
        raise ConfigError("embedding.output_dtype=bf16: FBGEMM has it on GPUs only; on the CPU: auto, fp32, fp16")
    if chosen is OutputDtype.fp16 and config.training.precision.is_bf16:
        raise ConfigError(
            "embedding.output_dtype=fp16: allowed: auto, fp32, bf16 with "
            f"training.precision={config.training.precision.name}, whose autocast takes no fp16"
        )
    for key, wire in zip(("forward_wire", "backward_wire"), wires, strict=True):
        if chosen is not OutputDtype.fp32 and wire is not WireDtype.fp32:
            raise ConfigError(
                f"embedding.{key}={wire.name}: allowed: fp32 with embedding.output_dtype={chosen.name}, in which they are sent"
            )
    return chosen


class _RowWiseOnCpu(EmbeddingBagCollectionSharder):
    """Offers row-wise plans on the CPU, too: TorchRec keeps them for GPUs, but they work there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(super().sharding_types("cuda" if compute_device_type == "cpu" else compute_device_type))


class Sharder(_RowWiseOnCpu):
    """TorchRec's sharder, for ``comm=baseline``."""

    def shard(self, *args: Any, **kwargs: Any) -> ShardedEmbeddingBagCollection:
        module = super().shard(*args, **kwargs)
        receive_the_dtype_of_the_others(module, tables_of_bags(module))
        check_that_ranks_have_rows(module)
        return module


class FusedSharder(_RowWiseOnCpu, FusedEmbeddingBagCollectionSharder):
    """The sharder of this package, for ``comm=fused`` and ``comm=auto``."""


def make_sharder(
    embedding: EmbeddingConfig,
    device: torch.device,
    comm: Comm = Comm.baseline,
    strict: bool = False,
    output_dtype: OutputDtype = OutputDtype.fp32,
    fixed_shapes: bool = False,
) -> Sharder | FusedSharder:
    """A sharder with the config's fused optimizer and wire formats.

    Args:
        strict: as ``comm_strict``.
        output_dtype: of pooled embeddings; not ``auto``.
        fixed_shapes: as of :class:`~dlrm_fused.sharding.sharder.FusedEmbeddingBagCollectionSharder`.

    Raises:
        ConfigError: if the device lacks one of them.
    """
    optimizer = embedding.optimizer
    if device.type == "cpu":
        _check_for_cpu(embedding)
    fused_params: dict[str, Any] = {
        "optimizer": FBGEMM_OPTIMIZERS[optimizer.kind],
        "learning_rate": optimizer.learning_rate,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
    }
    if optimizer.weight_decay and optimizer.kind is EmbeddingOptimizerKind.rowwise_adagrad:
        fused_params |= _decoupled_decay(optimizer.counter_halflife)
    if output_dtype is not OutputDtype.fp32:
        fused_params["output_dtype"] = _OUTPUT_TYPES[output_dtype]
    codecs = _codecs(embedding, device)
    if comm is Comm.baseline:
        return Sharder(fused_params, codecs)
    mode: Mode = AUTO if comm is Comm.auto else FUSED
    # The models read the embeddings in that order, so without a copy.
    return FusedSharder(fused_params, codecs, mode=mode, strict=strict, in_feature_order=True, fixed_shapes=fixed_shapes)


def _decoupled_decay(counter_halflife: int) -> dict[str, Any]:
    """FBGEMM's arguments for weight decay of rowwise Adagrad, by the occurrences of each row if there is a half-life."""
    if not counter_halflife:
        return {"weight_decay_mode": WeightDecayMode.DECOUPLE}
    by_counters = CounterBasedRegularizationDefinition(
        counter_weight_decay_mode=CounterWeightDecayMode.DECOUPLE, counter_halflife=counter_halflife
    )
    return {"weight_decay_mode": WeightDecayMode.COUNTER, "counter_based_regularization": by_counters}


def _codecs(embedding: EmbeddingConfig, device: torch.device) -> dict[str, QuantizedCommCodecs] | None:
    """Return the codecs that change the number format on the wire; None where it stays as it is."""
    wires = (embedding.forward_wire, embedding.backward_wire)
    if set(wires) == {WireDtype.fp32}:
        return None
    forward, backward = (_WIRE_TYPES[wire] for wire in wires)
    return get_qcomm_codecs_registry(QCommsConfig(forward_precision=forward, backward_precision=backward), device=device)


def _check_for_cpu(embedding: EmbeddingConfig) -> None:
    """Refuse memory, an optimizer and a wire format that are there on GPUs only."""
    kernels = {"embedding.compute_kernel": embedding.compute_kernel}
    kernels |= {f"embedding.tables.{name}.compute_kernel": table.compute_kernel for name, table in embedding.tables.items()}
    for key, kernel in kernels.items():
        if kernel in (ComputeKernel.fused_uvm, ComputeKernel.fused_uvm_caching):
            reason = "it is for tables that a GPU reads from host memory; on the CPU: auto, fused"
            raise ConfigError(f"{key}={kernel.name}: {reason}")
    optimizer = embedding.optimizer
    if optimizer.kind in (EmbeddingOptimizerKind.adam, EmbeddingOptimizerKind.rowwise_adam):
        reason = "FBGEMM has it on GPUs only; on the CPU: rowwise_adagrad, adagrad, sgd"
        raise ConfigError(f"embedding.optimizer.kind={optimizer.kind.name}: {reason}")
    if optimizer.weight_decay and not optimizer.counter_halflife:
        reason = "on the CPU FBGEMM has it with embedding.optimizer.counter_halflife only; allowed: 0"
        raise ConfigError(f"embedding.optimizer.weight_decay={optimizer.weight_decay}: {reason}")
    for key in ("forward_wire", "backward_wire"):
        if getattr(embedding, key) is WireDtype.bf16:
            raise ConfigError(f"embedding.{key}=bf16: gloo cannot send bf16; on the CPU: fp32, fp16")
