"""The model spread over ranks: sharded embedding tables with their fused optimizer, dense layers in data parallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan, ShardingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from dlrm_fused.config import (
    Comm,
    ComputeKernel,
    Config,
    DenseOptimizerConfig,
    DenseOptimizerKind,
    EmbeddingConfig,
    EmbeddingOptimizerConfig,
    EmbeddingOptimizerKind,
    WireDtype,
)
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.sharding.groups import (
    ModelParallelGroups,
    average_gradients,
    data_parallel_wrapper,
    sharded_parameters,
)
from dlrm_fused.sharding.options import AUTO, FUSED, Mode
from dlrm_fused.sharding.planning import make_plan
from dlrm_fused.sharding.sharded_module import FusedShardedEmbeddingBagCollection
from dlrm_fused.sharding.sharder import FusedEmbeddingBagCollectionSharder

_FUSED_KINDS = {
    EmbeddingOptimizerKind.rowwise_adagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbeddingOptimizerKind.adagrad: EmbOptimType.EXACT_ADAGRAD,
    EmbeddingOptimizerKind.sgd: EmbOptimType.EXACT_SGD,
    EmbeddingOptimizerKind.adam: EmbOptimType.ADAM,
}
_WIRE_TYPES = {WireDtype.fp32: CommType.FP32, WireDtype.fp16: CommType.FP16, WireDtype.bf16: CommType.BF16}
# Rows whose initial weights come from one generator state; a shard draws only the blocks it overlaps.
_INIT_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class ShardedModel:
    """A model ready to train.

    Attributes:
        optimizer: steps the dense layers, and hands the learning rate to the optimizer fused into the embedding backward.
            Its ``param_groups`` hold the learning rates in effect.
        plan: where each table lies.
        paths: by table, how its pooled embeddings are computed and delivered; empty for ``comm=baseline``.
        groups: of layers that ranks share; None for a model without any.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    plan: ShardingPlan
    paths: Mapping[str, str]
    groups: ModelParallelGroups | None


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

    Raises:
        ConfigError: if no plan satisfies the config, or the device lacks the embedding optimizer or wire format.
        UsageError: with ``comm_strict``, if ``comm=fused`` does not cover some table.
    """
    sharders: list[ModuleSharder[nn.Module]] = [make_sharder(config.embedding, device, config.comm, config.comm_strict)]
    plan = make_plan(config, schema, task, sharders, device)
    model = DistributedModelParallel(
        module=task,
        env=ShardingEnv.from_process_group(cast(dist.ProcessGroup, dist.GroupMember.WORLD)),
        device=device,
        plan=plan,
        sharders=sharders,
        data_parallel_wrapper=data_parallel_wrapper(task),
    )
    initialize_tables(model, config, schema)
    return ShardedModel(model, make_optimizer(model, config, groups), plan, table_paths(model), groups)


def table_paths(model: nn.Module) -> dict[str, str]:
    """By table: ``fused``, ``auto`` or ``torchrec: <why>``; nothing for tables of TorchRec's own sharder."""
    modules = [module for module in model.modules() if isinstance(module, FusedShardedEmbeddingBagCollection)]
    return {table: path for module in modules for table, path in module.paths.items()}


class _RowWiseOnCpu(EmbeddingBagCollectionSharder):
    """Offers row-wise plans on the CPU, too: TorchRec keeps them for GPUs, but they work there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(super().sharding_types("cuda" if compute_device_type == "cpu" else compute_device_type))


class Sharder(_RowWiseOnCpu):
    """TorchRec's sharder, for ``comm=baseline``."""


class FusedSharder(_RowWiseOnCpu, FusedEmbeddingBagCollectionSharder):
    """The sharder of this package, for ``comm=fused`` and ``comm=auto``."""


def make_sharder(
    embedding: EmbeddingConfig, device: torch.device, comm: Comm = Comm.baseline, strict: bool = False
) -> Sharder | FusedSharder:
    """A sharder with the config's fused optimizer and wire formats.

    Args:
        strict: as ``comm_strict``.

    Raises:
        ConfigError: if the device lacks one of them.
    """
    if device.type == "cpu":
        _refuse_managed_memory("embedding.compute_kernel", embedding.compute_kernel)
        for name, table in embedding.tables.items():
            _refuse_managed_memory(f"embedding.tables.{name}.compute_kernel", table.compute_kernel)
    optimizer = embedding.optimizer
    if device.type == "cpu" and optimizer.kind is EmbeddingOptimizerKind.adam:
        raise ConfigError(
            "embedding.optimizer.kind=adam: FBGEMM has it on GPUs only; on the CPU: rowwise_adagrad, adagrad, sgd"
        )
    if device.type == "cpu" and optimizer.weight_decay:
        raise ConfigError(f"embedding.optimizer.weight_decay={optimizer.weight_decay}: on the CPU FBGEMM has none; allowed: 0")
    for key in ("forward_wire", "backward_wire"):
        if device.type == "cpu" and getattr(embedding, key) is WireDtype.bf16:
            raise ConfigError(f"embedding.{key}=bf16: gloo cannot send bf16; on the CPU: fp32, fp16")
    fused_params: dict[str, Any] = {
        "optimizer": _FUSED_KINDS[optimizer.kind],
        "learning_rate": optimizer.learning_rate,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "beta1": optimizer.beta1,
        "beta2": optimizer.beta2,
    }
    if optimizer.weight_decay and optimizer.kind is EmbeddingOptimizerKind.rowwise_adagrad:
        fused_params["weight_decay_mode"] = WeightDecayMode.DECOUPLE
    wire = QCommsConfig(
        forward_precision=_WIRE_TYPES[embedding.forward_wire], backward_precision=_WIRE_TYPES[embedding.backward_wire]
    )
    codecs = get_qcomm_codecs_registry(wire, device=device)
    if comm is Comm.baseline:
        return Sharder(fused_params, codecs)
    mode: Mode = AUTO if comm is Comm.auto else FUSED
    return FusedSharder(fused_params, codecs, mode=mode, strict=strict)


def _refuse_managed_memory(key: str, kernel: ComputeKernel) -> None:
    if kernel in (ComputeKernel.fused_uvm, ComputeKernel.fused_uvm_caching):
        raise ConfigError(f"{key}={kernel.name}: it is for tables that a GPU reads from host memory; on the CPU: auto, fused")


def make_optimizer(
    model: DistributedModelParallel, config: Config, groups: ModelParallelGroups | None = None
) -> CombinedOptimizer:
    """All optimizers as one; a data-parallel table is updated like a dense layer, by the embedding's own optimizer."""
    dense = {name: p for name, p in model.named_parameters() if not is_table(name)}

    def of_dense(parameters: list[Tensor]) -> torch.optim.Optimizer:
        optimizer = _dense_optimizer(parameters, config.training.dense_optimizer)
        if groups is not None and groups.data_parallel.size() > 1:
            sharded, data_parallel = list(sharded_parameters(model).values()), groups.data_parallel
            optimizer.register_step_pre_hook(lambda *_: average_gradients(sharded, data_parallel))
        return optimizer

    optimizers = [model.fused_optimizer, KeyedOptimizerWrapper(dense, of_dense)]
    tables = dict(data_parallel_tables(model))
    if tables:
        optimizers.append(KeyedOptimizerWrapper(tables, lambda p: _table_optimizer(p, config.embedding.optimizer)))
    return CombinedOptimizer(optimizers)


def data_parallel_tables(model: DistributedModelParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and weight of every table that each rank holds a copy of."""
    replicated = {
        table
        for module_plan in model.plan.plan.values()
        for table, sharding in module_plan.items()
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value
    }
    for name, parameter in model.named_parameters():
        if is_table(name) and table_name(name) in replicated:
            yield name, parameter


def is_table(parameter_name: str) -> bool:
    """Whether a parameter of the model is the weight of an embedding table."""
    return ".embedding_bags." in parameter_name


def table_name(parameter_name: str) -> str:
    """``...embedding_bags.<table>.weight`` -> ``<table>``."""
    return parameter_name.split(".embedding_bags.")[1].removesuffix(".weight")


def _dense_optimizer(parameters: list[Tensor], settings: DenseOptimizerConfig) -> torch.optim.Optimizer:
    rate, decay, eps = settings.learning_rate, settings.weight_decay, settings.eps
    if settings.kind is DenseOptimizerKind.adagrad:
        return torch.optim.Adagrad(parameters, lr=rate, weight_decay=decay, eps=eps)
    if settings.kind is DenseOptimizerKind.adam:
        betas = (settings.beta1, settings.beta2)
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, eps=eps, betas=betas)
    return torch.optim.SGD(parameters, lr=rate, weight_decay=decay, momentum=settings.momentum)


def _table_optimizer(parameters: list[Tensor], settings: EmbeddingOptimizerConfig) -> torch.optim.Optimizer:
    rate, decay, eps = settings.learning_rate, settings.weight_decay, settings.eps
    if settings.kind is EmbeddingOptimizerKind.rowwise_adagrad:
        return cast(torch.optim.Optimizer, RowWiseAdagrad(parameters, lr=rate, weight_decay=decay, eps=eps))
    if settings.kind is EmbeddingOptimizerKind.adagrad:
        return torch.optim.Adagrad(parameters, lr=rate, weight_decay=decay, eps=eps)
    if settings.kind is EmbeddingOptimizerKind.adam:
        betas = (settings.beta1, settings.beta2)
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay, eps=eps, betas=betas)
    return torch.optim.SGD(parameters, lr=rate, weight_decay=decay)


def set_optimizer_step(model: nn.Module, step: int) -> None:
    """Tell the fused optimizers how many steps they have made (Adam's bias correction), after loading a checkpoint."""
    for module in model.modules():
        if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen):
            module.set_optimizer_step(step)


def initialize_tables(model: DistributedModelParallel, config: Config, schema: DatasetSchema) -> None:
    """Draw this rank's part of every table's initial weights."""
    features = {feature.name: (i, feature.rows) for i, feature in enumerate(schema.tables)}
    for name, offsets, weight in local_table_shards(model):
        index, rows = features[name]
        bound = config.embedding.init_std * 3**0.5 or (1 / rows) ** 0.5
        fill_uniform(weight, offsets, (rows, config.embedding.dim), bound, seed=config.seed * 1_000_003 + index)


def local_table_shards(model: DistributedModelParallel) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """Yield (table, (first row, first column), weight) of every shard of a table on this rank; weights are the live ones."""
    for name, sharded in model.fused_optimizer.params.items():
        for local in sharded.local_shards():
            row, column = local.metadata.shard_offsets
            yield table_name(name), (row, column), local.tensor.detach()
    for name, parameter in data_parallel_tables(model):
        yield table_name(name), (0, 0), parameter.detach()


def fill_uniform(weight: Tensor, offsets: tuple[int, int], shape: tuple[int, int], bound: float, seed: int) -> None:
    """Fill ``weight``, the shard at ``offsets`` of a table of ``shape``, with its part of a uniform(-bound, bound) draw.

    The draw of the whole table depends on its shape and the seed alone, on a given kind of device: it is made in blocks of
    rows with a seed each, always as a whole, since a CUDA generator's numbers depend on the size of the draw.
    """
    (first_row, first_column), (rows, dim) = offsets, shape
    end_row = first_row + weight.shape[0]
    generator = torch.Generator(weight.device)
    for block in range(first_row // _INIT_BLOCK_ROWS, -(-end_row // _INIT_BLOCK_ROWS)):
        start, stop = block * _INIT_BLOCK_ROWS, min((block + 1) * _INIT_BLOCK_ROWS, rows)
        generator.manual_seed(seed * 2_000_003 + block)
        values = torch.empty(stop - start, dim, device=weight.device).uniform_(-bound, bound, generator=generator)
        low, high = max(start, first_row), min(stop, end_row)
        weight[low - first_row : high - first_row] = values[
            low - start : high - start, first_column : first_column + weight.shape[1]
        ]
