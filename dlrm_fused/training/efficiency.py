"""The efficiency of training steps: the work of a step over its time, beside the rates of the GPU.

The work is counted once, from the config, the features of the data set and the sharding plan, so that reporting it costs a step
nothing. It is the mean over ranks: a rank that the plan gives more than others has more to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType

from dlrm_fused.config import Config, EmbeddingOptimizerKind, OutputDtype, Precision, TableConfig, TableDtype, WireDtype
from dlrm_fused.datasets.feature_names import feature_name
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.models.flops import training_flops
from dlrm_fused.ops.common.gpus import Gpu
from dlrm_fused.sharding.parallel import ShardedModel, pooled_dtype
from dlrm_fused.sharding.tables import data_parallel_tables, is_table

_KERNELS_ON_HOST = {EmbeddingComputeKernel.FUSED_UVM.value, EmbeddingComputeKernel.FUSED_UVM_CACHING.value}
# The float32 values that an optimizer keeps for each weight of a table, beside one for a row.
_STATES_OF_A_WEIGHT = {
    EmbeddingOptimizerKind.sgd: 0,
    EmbeddingOptimizerKind.rowwise_adagrad: 0,
    EmbeddingOptimizerKind.adagrad: 1,
    EmbeddingOptimizerKind.adam: 2,
    EmbeddingOptimizerKind.rowwise_adam: 1,
}
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class StepWork:
    """The work of a training step on a rank, on average.

    Attributes:
        flops: of the model's matrix products, forward and backward; None for a model without a count.
        hbm_bytes: of embedding rows, read and written in HBM (:func:`row_bytes`).
        link_bytes: sent to other ranks (:func:`pooled_bytes` and :func:`gradient_bytes`).
    """

    flops: float | None
    hbm_bytes: float
    link_bytes: float


def efficiency(work: StepWork, gpu: Gpu | None, precision: Precision, step_seconds: float) -> dict[str, float]:
    """Return how well the steps of an interval used a GPU.

    Args:
        gpu: by its data sheet; None where that is not known, or there is none.
        step_seconds: mean over the interval.

    Returns:
        nothing without a data sheet; otherwise ``model_flops_utilization``, FLOPs over those of the GPU in ``precision``
        (arXiv 2204.02311, appendix B); ``hbm_gb_per_second`` and ``link_gb_per_second``, in 10^9 bytes; ``floor_ms``, the
        longest of the times that the three kinds of work take at its rates. A kind that there is none of, or no count, is left
        out.
    """
    if gpu is None:
        return {}
    values, floors = {}, [0.0]
    if work.flops is not None:
        floors.append(work.flops / getattr(gpu, precision.name))
        values["model_flops_utilization"] = floors[-1] / step_seconds
    for name, count, peak in (("hbm", work.hbm_bytes, gpu.memory), ("link", work.link_bytes, gpu.fastest_link)):
        if count:
            floors.append(count / peak)
            values[f"{name}_gb_per_second"] = count / step_seconds / 1e9
    return {**values, "floor_ms": 1e3 * max(floors)}


def step_work(config: Config, schema: DatasetSchema, device: torch.device, sharded: ShardedModel, ranks: int) -> StepWork:
    """Return a rank's mean work in a step of ``training.global_batch_size`` samples."""
    flops = training_flops(config, schema)
    samples = config.training.global_batch_size / ranks
    return StepWork(
        flops=None if flops is None else samples * flops,
        hbm_bytes=row_bytes(config, schema, sharded.plan, ranks),
        link_bytes=pooled_bytes(config, schema, sharded.plan, ranks, device) + gradient_bytes(sharded, ranks),
    )


def row_bytes(config: Config, schema: DatasetSchema, plan: ShardingPlan, ranks: int) -> float:
    """Return the bytes that a rank reads and writes in HBM in a step for rows of embedding tables.

    A row is read for the forward pass; for the update it is read and written, and so are states of the optimizer that are as
    wide as it. Each id of a batch counts as a row of its own, up to the rows of the table: where few ids are frequent, HBM
    moves less. Every row of a data-parallel table is updated. Tables in the host's memory do not count.
    """
    rows_of = {feature.name: feature.rows for feature in schema.tables}
    ids_of, weights = ids_per_sample(config, schema), 0.0
    for name, sharding in placed(plan):
        dim = config.embedding.dim_of(name)
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
            weights += dim * rows_of[name]
        elif sharding.compute_kernel not in _KERNELS_ON_HOST:
            weights += dim * min(config.training.global_batch_size * ids_of[name], rows_of[name]) / ranks
    weight_bytes = 2 if config.embedding.dtype is TableDtype.fp16 else _FLOAT32_BYTES
    return weights * (3 * weight_bytes + state_bytes(config))


def state_bytes(config: Config) -> int:
    """Return the bytes of one weight's optimizer states that an update reads and writes; only states as wide as a row count."""
    return 2 * _STATES_OF_A_WEIGHT[config.embedding.optimizer.kind] * _FLOAT32_BYTES


def pooled_bytes(config: Config, schema: DatasetSchema, plan: ShardingPlan, ranks: int, device: torch.device) -> float:
    """Return the bytes that a rank sends to others: pooled embeddings, forward, and their gradients, backward.

    A shard gives its columns for all samples and gets their gradients, so a table whose rows are cut sends them once for each
    piece. Ids do not count.
    """
    samples = config.training.global_batch_size / ranks
    bags = bags_per_sample(schema)
    # A table that every rank has is not sharded, and sends nothing.
    specs = [(name, sharding.sharding_spec) for name, sharding in placed(plan) if sharding.sharding_spec is not None]
    columns = sum(bags[name] * shard.shard_sizes[1] for name, spec in specs for shard in spec.shards)
    embedding, output = config.embedding, pooled_dtype(config, device)
    both_ways = sum(bytes_on_the_wire(wire, output) for wire in (embedding.forward_wire, embedding.backward_wire))
    return (ranks - 1) / ranks * samples * columns * both_ways


def gradient_bytes(sharded: ShardedModel, ranks: int) -> float:
    """Return the bytes that a rank sends to average the gradients of replicated weights: dense layers, data-parallel tables.

    An AllReduce over n ranks sends 2 (n - 1) / n of its bytes, unless a switch adds them up: Patarasuk and Yuan, *Bandwidth
    optimal all-reduce algorithms for clusters of workstations*, J. Parallel Distrib. Comput. 69, 2009. What tensor-parallel
    layers and experts exchange does not count.
    """
    dense = [p for name, p in sharded.model.named_parameters() if p.requires_grad and not is_table(name)]
    total, groups = 0.0, sharded.groups
    for parameter in [*dense, *(weight for _, weight in data_parallel_tables(sharded.model))]:
        is_shard = getattr(parameter, "shard_dim", None) is not None
        copies = groups.data_parallel.size() if groups is not None and is_shard else ranks
        total += 2 * (copies - 1) / copies * parameter.numel() * parameter.element_size()
    return total


def placed(plan: ShardingPlan) -> Iterator[tuple[str, ParameterSharding]]:
    """Each table's feature, and where it lies."""
    for module_plan in plan.plan.values():
        for table, sharding in module_plan.items():
            yield feature_name(table), sharding


def bags_per_sample(schema: DatasetSchema) -> dict[str, int]:
    """Return the bags of a sample, by table; each bag gives a pooled embedding."""
    tokens = {feature.name for feature in schema.token_features}
    return {feature.name: schema.history_length + 1 if feature.name in tokens else 1 for feature in schema.tables}


def ids_per_sample(config: Config, schema: DatasetSchema) -> dict[str, float]:
    """Return the mean number of a sample's ids, by table."""
    bags, settings = bags_per_sample(schema), config.embedding.tables
    return {
        feature.name: bags[feature.name] * (settings.get(feature.name, TableConfig()).pooling_factor or feature.pooling_factor)
        for feature in schema.tables
    }


def bytes_on_the_wire(wire: WireDtype, output: OutputDtype) -> int:
    """Return the bytes of one number of a pooled embedding on the wire."""
    return 2 if wire is not WireDtype.fp32 or output is not OutputDtype.fp32 else 4
