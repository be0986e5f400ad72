"""Place parts of embedding tables on ranks: TorchRec's planner, told what the config says."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType

from dlrm_fused.config import (
    Comm,
    ComputeKernel,
    Config,
    EmbeddingConfig,
    EmbeddingOptimizerKind,
    Sharding,
    TableConfig,
    TableDtype,
)
from dlrm_fused.datasets.feature_names import feature_name, module_name
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.errors import CommunicationError, ConfigError
from dlrm_fused.sharding.estimates import fused_enumerator
from dlrm_fused.sharding.groups import ranks_of_hosts
from dlrm_fused.symmetric import symmetric_group

_WITHIN_HOSTS = (Sharding.table_row_wise, Sharding.grid_shard)
_COLUMN_SHARDINGS = (Sharding.column_wise, Sharding.table_column_wise, Sharding.grid_shard)


def make_plan(
    config: Config,
    schema: DatasetSchema,
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    device: torch.device,
) -> ShardingPlan:
    """Plan on rank 0 and hand the plan to all ranks. Collective.

    Raises:
        ConfigError: if no plan satisfies the config.
    """
    hosts = ranks_of_hosts()
    world_size, local_world_size = len(hosts), hosts[dist.get_rank()]
    memory = _memory(device, local_world_size)

    def topology(ranks_of_a_host: int) -> Topology:
        return Topology(world_size=world_size, compute_device=device.type, local_world_size=ranks_of_a_host, **memory)

    reached = ranks_by_stores(config, device, local_world_size)
    if reached is None:
        config, reached = replace(config, comm=Comm.baseline), local_world_size
    try:
        planner = planner_for(config, schema, topology(local_world_size), topology(reached), hosts_differ=len(set(hosts)) > 1)
        return planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    except (PlannerError, RuntimeError) as error:
        if getattr(error, "error_type", None) is PlannerErrorType.INSUFFICIENT_STORAGE:
            weights = sum(feature.rows * config.embedding.dim_of(feature.name) for feature in schema.tables)
            reason = (
                f"{weights:,} weights, the states of their optimizer and the batches do not fit into memory; lower "
                "embedding.max_rows, embedding.dim or training.global_batch_size, or start more ranks"
            )
        else:
            reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"embedding.sharding={config.embedding.sharding.name}: no plan for {world_size} ranks: {reason}"
        ) from None


def ranks_by_stores(config: Config, device: torch.device, local_world_size: int) -> int | None:
    """Number of ranks that reach each other by stores, which plans cost by: one where GPUs lack peer access. Collective.

    Args:
        local_world_size: ranks of this machine.

    Returns:
        None where all tables run on TorchRec's path, for lack of memory that ranks share.
    """
    if config.comm is Comm.baseline or device.type != "cuda":
        return local_world_size
    try:
        hosts = symmetric_group(dist.GroupMember.WORLD, device).hosts
    except CommunicationError:  # raised by all ranks, and said where tables are sharded
        return None
    embedding = config.embedding
    told = {embedding.sharding, *(table.sharding for table in embedding.tables.values())}
    if told & {*_WITHIN_HOSTS}:  # TorchRec adds up their partial results within a machine
        return local_world_size
    return math.gcd(*map(len, hosts.ranks))


def planner_for(
    config: Config,
    schema: DatasetSchema,
    topology: Topology,
    by_stores: Topology | None = None,
    *,
    hosts_differ: bool = False,
) -> EmbeddingShardingPlanner:
    """The planner of the config for the ranks of a topology, which need not be there.

    Args:
        topology: its hosts are machines, whose ranks have the devices of these numbers.
        by_stores: its hosts are ranks that reach each other by stores, which is what the fused path costs by; None if these
            are all ranks of a machine.
        hosts_differ: whether hosts have different numbers of ranks.

    Raises:
        ConfigError: as of :func:`table_constraints`.
    """
    world_size, by_stores = topology.world_size, by_stores or topology
    batch_size = max(1, config.training.global_batch_size // world_size)
    # Between hosts the fused path has no table-row-wise plans, with which TorchRec's planner divides tables there.
    cuts_columns = (
        config.comm is not Comm.baseline and topology.compute_device == "cuda" and by_stores.local_world_size < world_size
    )
    ranks = Ranks(world_size, cuts_columns, on_cpu=topology.compute_device == "cpu", hosts_differ=hosts_differ)
    constraints = table_constraints(config.embedding, schema, ranks)
    return _Planner(
        topology=topology,
        batch_size=batch_size,
        enumerator=None if config.comm is Comm.baseline else fused_enumerator(by_stores, batch_size, constraints),
        constraints=constraints,
        debug=False,
    )


class _Planner(EmbeddingShardingPlanner):
    """TorchRec's planner, without its warning of each data-parallel table that it has no sharding spec.

    There is nothing wrong with such a table: a spec says where shards lie, and each rank has a copy of the whole.
    """

    def plan(self, *args: Any, **kwargs: Any) -> ShardingPlan:
        root = logging.getLogger()  # to which TorchRec gives this one
        root.addFilter(_is_no_missing_spec)
        try:
            return super().plan(*args, **kwargs)
        finally:
            root.removeFilter(_is_no_missing_spec)


def _is_no_missing_spec(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Sharding spec not found")


def _memory(device: torch.device, local_world_size: int) -> dict[str, int]:
    """Bytes of each rank: those of its GPU, and its share of the host's, which all ranks there divide among them."""
    memory = {"ddr_cap": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size}
    if device.type == "cuda":
        memory["hbm_cap"] = torch.cuda.get_device_properties(device).total_memory
    return memory


@dataclass(frozen=True)
class Ranks:
    """The ranks over which tables are divided.

    Attributes:
        count: all of them.
        cut_columns: whether they may cut tables with ``auto`` as finely as column-wise ones.
        on_cpu: whether FBGEMM's kernels of the CPU look up, which need a row of each table on each rank that has the table.
        hosts_differ: whether hosts have different numbers of them. TorchRec divides tables within hosts of one size only; with
            others, ranks would wait for each other.
    """

    count: int
    cut_columns: bool = False
    on_cpu: bool = False
    hosts_differ: bool = False


def table_constraints(embedding: EmbeddingConfig, schema: DatasetSchema, ranks: Ranks) -> dict[str, ParameterConstraints]:
    """The planner's choices for each table, by the name of its module.

    Raises:
        ConfigError: if ``embedding.tables`` names a table that the data set does not have, or a data-parallel one is fp16, or
            has weight decay or an optimizer that is only fused.
    """
    names = {feature.name for feature in schema.tables}
    for name in embedding.tables:
        if name not in names:
            raise ConfigError(f"embedding.tables.{name}: no such table; the data set has: {', '.join(sorted(names))}")
    bags = {feature.name: schema.history_length + 1 for feature in schema.token_features}
    return {
        module_name(feature.name): _constraint(embedding, feature, bags.get(feature.name, 1), ranks)
        for feature in schema.tables
    }


def _constraint(embedding: EmbeddingConfig, feature: SparseFeature, bags: int, ranks: Ranks) -> ParameterConstraints:
    """Return the choices for one table; ``bags`` are pooled embeddings of a sample."""
    table, optimizer = embedding.tables.get(feature.name, TableConfig()), embedding.optimizer
    sharding = table.sharding if table.sharding is not Sharding.auto else embedding.sharding
    kernel = table.compute_kernel if table.compute_kernel is not ComputeKernel.auto else embedding.compute_kernel

    if ranks.hosts_differ and sharding in _WITHIN_HOSTS:
        raise ConfigError(
            f"embedding.sharding={sharding.name}: {feature.name} would be divided within a host, and hosts have different "
            "numbers of ranks; start as many on each, or set another sharding"
        )
    if ranks.on_cpu and _leaves_a_rank_no_row(feature.rows, ranks.count):
        if sharding is Sharding.row_wise:
            raise ConfigError(
                f"embedding.sharding=row_wise: {feature.name} has {feature.rows} rows for {ranks.count} ranks, so that one has "
                f"none, which FBGEMM cannot train on the CPU; set embedding.tables.{feature.name}.sharding=table_wise"
            )
        sharding = Sharding.table_wise if sharding is Sharding.auto else sharding

    def refuse(setting: str, why: str) -> NoReturn:
        raise ConfigError(f"embedding.{setting}: {feature.name} is data_parallel, {why}")

    if sharding is Sharding.data_parallel and embedding.dtype is TableDtype.fp16:
        refuse("dtype=fp16", "and its optimizer would keep fp16 state; allowed: fp32")
    if sharding is Sharding.data_parallel and optimizer.kind is EmbeddingOptimizerKind.rowwise_adam:
        why = "and its optimizer runs after the backward pass, where there is no such one"
        refuse("optimizer.kind=rowwise_adam", f"{why}; allowed: rowwise_adagrad, adagrad, sgd, adam")
    if sharding is Sharding.data_parallel and optimizer.weight_decay:
        why = "whose optimizer would decay other rows than the fused one; allowed: 0"
        refuse(f"optimizer.weight_decay={optimizer.weight_decay}", why)
    return ParameterConstraints(
        sharding_types=_sharding_types(sharding, ranks),
        compute_kernels=_compute_kernels(sharding, kernel),
        min_partition=shard_columns(embedding, embedding.dim_of(feature.name), ranks.count)
        if sharding in _COLUMN_SHARDINGS or (ranks.cut_columns and sharding is Sharding.auto)
        else None,
        pooling_factors=[table.pooling_factor or feature.pooling_factor],
        num_poolings=[float(bags)],
    )


def _leaves_a_rank_no_row(rows: int, world_size: int) -> bool:
    """Return whether the last rank has no row of a row-wise table: shards are as long, but for the last one with rows."""
    return -(-rows // world_size) * (world_size - 1) >= rows


def _sharding_types(sharding: Sharding, ranks: Ranks) -> list[str] | None:
    if sharding is Sharding.auto and ranks.hosts_differ:
        return [kind.value for kind in (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.ROW_WISE)]
    if sharding is Sharding.auto:
        # Not a list of all: from that the planner would also take kinds that it leaves out by itself, for good reason.
        return None
    if ranks.count == 1 and sharding is not Sharding.data_parallel:
        # A single rank holds whole tables, or slices of columns; TorchRec has no row-wise plan for it.
        sharding = Sharding.column_wise if sharding is Sharding.column_wise else Sharding.table_wise
    return [ShardingType[sharding.name.upper()].value]


def _compute_kernels(sharding: Sharding, kernel: ComputeKernel) -> list[str] | None:
    if sharding is Sharding.data_parallel:
        return [EmbeddingComputeKernel.DENSE.value]
    if kernel is ComputeKernel.auto:
        # The planner would otherwise consider unfused kernels, which need an optimizer step of their own.
        return [EmbeddingComputeKernel.FUSED.value]
    return [kernel.value]


def shard_columns(embedding: EmbeddingConfig, dim: int, world_size: int) -> int:
    """Columns of one column-wise shard of a table: as configured, or the narrowest legal width that needs no more shards than
    ranks.

    Args:
        dim: columns of the table.
    """
    if embedding.shard_columns:
        return embedding.shard_columns
    legal = [width for width in range(4, dim + 1, 4) if dim % width == 0]
    return next(width for width in legal if width * world_size >= dim)


def describe_plan(
    plan: ShardingPlan, schema: DatasetSchema, embedding: EmbeddingConfig, paths: Mapping[str, str] | None = None
) -> str:
    """The plan as a text table: one line a table, and the GiB of weights of each rank.

    Args:
        paths: by table's module, how its pooled embeddings are computed and delivered, for another column.
    """
    paths = paths or {}
    features = {feature.name: feature for feature in schema.tables}
    ranks_heading = f"{'ranks':<15} path" if paths else "ranks"
    lines = [f"{'table':<20} {'rows':>12} {'dim':>5} {'pooling':>8}  {'sharding':<16} {'kernel':<16} {ranks_heading}"]
    weights: Counter[int] = Counter()
    for module_plan in plan.plan.values():
        for table, sharding in sorted(module_plan.items(), key=lambda item: list(features).index(feature_name(item[0]))):
            name = feature_name(table)
            feature, dim = features[name], embedding.dim_of(name)
            ranks = sharding.ranks or []
            lines.append(
                f"{name:<20} {feature.rows:>12,} {dim:>5} {feature.pooling_factor:>8.2f}  "
                f"{sharding.sharding_type:<16} {sharding.compute_kernel:<16} {','.join(map(str, ranks)):<15} "
                f"{paths.get(table, '')}".rstrip()
            )
            if sharding.sharding_spec is None:  # data parallel: a copy on each rank
                weights.update(dict.fromkeys(ranks, feature.rows * dim))
            else:
                for shard in sharding.sharding_spec.shards:
                    weights[shard.placement.rank()] += shard.shard_sizes[0] * shard.shard_sizes[1]
    bytes_per_weight = 2 if embedding.dtype is TableDtype.fp16 else 4
    lines.append("")
    lines += [f"rank {rank}: {count * bytes_per_weight / 2**30:.3f} GiB of weights" for rank, count in sorted(weights.items())]
    return "\n".join(lines) + "\n"
