"""The work and traffic of a rank in a step of the trainer, from its config, its model and the planner's plan.

All ranks are taken as alike: each has the work of the one that the plan gives most, since all wait for that one.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology as PlannersTopology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType

from dlrm_fused.compat.torch import ranks_without_peers
from dlrm_fused.config import Comm, Compile, Config, DenseOptimizerKind, ModelKind, OutputDtype, TableDtype
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import ConfigError
from dlrm_fused.models import RankingTask, build_model
from dlrm_fused.models.history import HistoryDLRM
from dlrm_fused.scaleout.dense_trace import DenseWork, trace
from dlrm_fused.sharding.estimates import UNCOVERED_ACROSS_HOSTS
from dlrm_fused.sharding.groups import expert_parallel_size, tensor_parallel_size
from dlrm_fused.sharding.optimizers import describe_table_optimizers
from dlrm_fused.sharding.parallel import make_sharder, pooled_dtype
from dlrm_fused.sharding.planning import planner_for
from dlrm_fused.training.efficiency import bags_per_sample, bytes_on_the_wire, ids_per_sample, placed, state_bytes

# Readers give ids and lengths of bags as int32.
_ID_BYTES, _LENGTH_BYTES = 4, 4
# Numbers that an optimizer keeps for each parameter.
_STATES = {DenseOptimizerKind.sgd: 0, DenseOptimizerKind.adagrad: 1, DenseOptimizerKind.adam: 2}
_DTYPES = {OutputDtype.fp32: torch.float32, OutputDtype.fp16: torch.float16, OutputDtype.bf16: torch.bfloat16}


@dataclass(frozen=True)
class Workload:
    """The work of one rank's step; bytes are those of the rank's whole batch, its own part of an exchange included.

    Args:
        group_ranks: Ranks that share the weights of layers, experts or a Transformer's blocks; 1 without such layers.
        id_bytes: What an input dist sends: ids and the lengths of bags, to each shard that needs them.
        id_imbalance: What the rank that receives most of them does, over the average.
        lookup_bytes, update_bytes: Of rows, on the rank that has most of them.
        pooled_bytes, pooled_gradient_bytes: What the average rank sends of pooled embeddings and of their gradients.
        imbalance: What the rank that sends most of them sends, over the average; 1 for an even plan.
        is_covered: Whether ``comm=fused`` covers all tables of the plan; the others it leaves to TorchRec's path.
        parameter_bytes: Read and written by the dense optimizer.
        top_k: Experts of a token.
    """

    samples: float
    dense: DenseWork
    group_ranks: int
    id_bytes: float
    id_imbalance: float
    lookup_bytes: float
    update_bytes: float
    pooled_bytes: float
    pooled_gradient_bytes: float
    imbalance: float
    is_covered: bool
    parameter_bytes: float
    is_on_cpu: bool = False
    top_k: int = 1


def workload(
    config: Config,
    schema: DatasetSchema,
    ranks: int,
    ranks_per_host: int,
    memory_gib: float,
    traces: dict[str, DenseWork] | None = None,
) -> Workload:
    """Return a rank's work in a step of ``training.global_batch_size`` samples: a GPU's, or a core's on the CPU.

    Args:
        traces: dense parts that were traced before, by what they depend on; receives this one.

    Raises:
        ConfigError: ranks that layers cannot be shared by; no plan fits into ``memory_gib`` a rank; ``model.kind=hstu``.
    """
    if config.model.kind is ModelKind.hstu:
        raise ConfigError("model.kind=hstu: the time of its attention is not known; allowed here: dlrm, dcnv2, transformer")
    device = torch.device("cpu" if config.runtime.device == "cpu" else "cuda")
    output = pooled_dtype(config, device)
    samples = max(1, config.training.global_batch_size // ranks)
    group_ranks = _group_ranks(config, ranks, ranks_per_host)
    with _quiet(), ranks_without_peers(ranks):
        task = _on_many_ranks(config, schema, ranks, group_ranks)
        compiles = config.training.compile is Compile.always or (
            config.training.compile is Compile.auto and device.type == "cuda"
        )
        compiled = compiles and task.dense_part is not None
        captured = compiles and isinstance(task.model, HistoryDLRM) and task.model.transformer.can_be_captured
        of_a_rank = replace(config.training, global_batch_size=samples)
        key = repr((replace(config, comm=Comm.baseline, training=of_a_rank), group_ranks))
        traces = {} if traces is None else traces
        if key not in traces:
            modes = {"compiled": compiled, "captured": captured}
            traces[key] = trace(task, schema, config.embedding, samples, _DTYPES[output], **modes)

    sharder = make_sharder(config.embedding, device, config.comm, False, output)
    try:
        with _quiet():
            topology = PlannersTopology(
                world_size=ranks,
                compute_device=device.type,
                local_world_size=min(ranks, ranks_per_host),
                hbm_cap=int(memory_gib * 2**30),
            )
            describe_table_optimizers(task, config.embedding)
            plan = planner_for(config, schema, topology).plan(task, [sharder])
    except PlannerError as error:
        raise ConfigError(f"no plan for {ranks} ranks of {memory_gib:g} GiB: {' '.join(str(error).split())[:200]}") from None

    parameters = sum(parameter.numel() for layer in task.dense_layers() for parameter in layer.parameters())
    embedding = config.embedding
    load = _Load(config, schema, plan, ranks)
    return Workload(
        samples=samples,
        dense=traces[key],
        group_ranks=group_ranks,
        id_bytes=load.input_bytes * samples,
        id_imbalance=load.input_imbalance,
        lookup_bytes=load.rows_of_busiest * load.weight_bytes,
        update_bytes=load.rows_of_busiest * (2 * load.weight_bytes + state_bytes(config)),
        pooled_bytes=load.pooled_columns * samples * bytes_on_the_wire(embedding.forward_wire, output),
        pooled_gradient_bytes=load.pooled_columns * samples * bytes_on_the_wire(embedding.backward_wire, output),
        imbalance=load.imbalance,
        is_covered=ranks <= ranks_per_host or not load.sharding_types.intersection(UNCOVERED_ACROSS_HOSTS),
        parameter_bytes=4 * parameters * (3 + 2 * _STATES[config.training.dense_optimizer.kind]),
        is_on_cpu=device.type == "cpu",
        top_k=config.model.experts.top_k,
    )


def _group_ranks(config: Config, ranks: int, ranks_per_host: int) -> int:
    if config.model.experts.count:
        return expert_parallel_size(config.model.experts, ranks)
    if config.model.kind.reads_histories:
        return tensor_parallel_size(config.model, [min(ranks, ranks_per_host)] * ranks)
    return 1


def _on_many_ranks(config: Config, schema: DatasetSchema, ranks: int, group_ranks: int) -> RankingTask:
    """Return the model of rank 0, whose operations and collectives are in turn."""
    in_turn = replace(config, comm=Comm.baseline, training=replace(config.training, compile=Compile.never))
    group = dist.new_group(list(range(group_ranks))) if group_ranks < ranks else dist.group.WORLD
    return build_model(in_turn, schema, ranks, torch.device("cpu"), cast(dist.ProcessGroup, group))


class _Load:
    """The rows and columns that the plan gives each rank.

    Attributes: as of :class:`Workload`; rows are counted in columns of weights, ``input_bytes`` and ``pooled_columns`` are of a
    sample.
    """

    def __init__(self, config: Config, schema: DatasetSchema, plan: ShardingPlan, ranks: int) -> None:
        self.weight_bytes = 2 if config.embedding.dtype is TableDtype.fp16 else 4
        rows: defaultdict[int, float] = defaultdict(float)
        columns: defaultdict[int, float] = defaultdict(float)
        ids, bags = ids_per_sample(config, schema), bags_per_sample(schema)
        batch = max(ranks, config.training.global_batch_size)
        self.sharding_types: set[str] = set()
        inputs: defaultdict[int, float] = defaultdict(float)
        for name, sharding in placed(plan):
            self.sharding_types.add(sharding.sharding_type)
            for piece in _pieces(sharding):
                rows[piece.rank] += batch * ids[name] * piece.share_of_ids * piece.columns
                columns[piece.rank] += piece.sent_columns * bags[name]
                inputs[piece.rank] += _ID_BYTES * ids[name] * piece.share_of_ids + _LENGTH_BYTES * bags[name]
        self.rows_of_busiest = max(rows.values(), default=0.0)
        self.pooled_columns = sum(columns.values())
        self.imbalance = _of_busiest(columns, ranks)
        self.input_bytes, self.input_imbalance = sum(inputs.values()), _of_busiest(inputs, ranks)


def _of_busiest(load: Mapping[int, float], ranks: int) -> float:
    """Over the average of all ranks; 1 where there is no load."""
    return max(load.values()) * ranks / sum(load.values()) if load else 1.0


@dataclass(frozen=True)
class _Piece:
    """A shard: its rank, its columns, those of its results that go to other hosts, and its share of the table's ids."""

    rank: int
    columns: int
    sent_columns: float
    share_of_ids: float


def _pieces(sharding: ParameterSharding) -> Iterator[_Piece]:
    if sharding.sharding_type == ShardingType.DATA_PARALLEL.value or sharding.sharding_spec is None:
        return
    shards = [shard for shard in sharding.sharding_spec.shards if shard.shard_sizes[0]]
    rows = max(shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards)
    # The ranks of a host add what they have of a table, before it is sent.
    is_summed_in_hosts = sharding.sharding_type in (ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
    for shard in shards:
        columns = shard.shard_sizes[1]
        share = shard.shard_sizes[0] / rows
        yield _Piece(shard.placement.rank(), columns, columns * share if is_summed_in_hosts else columns, share)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the planner's warnings, of kernels that the config excludes, for each table, and of a topology that is described
    here; and without the tracer's, of calls that only other tracers need."""
    loggers = [logging.getLogger(name) for name in ("torchrec", "torch.fx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
