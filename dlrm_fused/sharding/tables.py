"""The embedding tables of a sharded model: which parameters they are, where their shards lie, their initial weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingType

from dlrm_fused.config import Config
from dlrm_fused.datasets.feature_names import feature_name
from dlrm_fused.datasets.schema import DatasetSchema

# Rows whose initial weights come from one generator state; a shard draws only the blocks it overlaps.
_INIT_BLOCK_ROWS = 65_536


def is_table(parameter_name: str) -> bool:
    """Whether a parameter of the model is the weight of an embedding table."""
    return ".embedding_bags." in parameter_name


def table_name(parameter_name: str) -> str:
    """The feature of ``...embedding_bags.<its module>.weight``."""
    return feature_name(parameter_name.split(".embedding_bags.")[1].removesuffix(".weight"))


def data_parallel_tables(model: DistributedModelParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and weight of every table that each rank holds a copy of."""
    replicated = {
        feature_name(table)
        for module_plan in model.plan.plan.values()
        for table, sharding in module_plan.items()
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value
    }
    for name, parameter in model.named_parameters():
        if is_table(name) and table_name(name) in replicated:
            yield name, parameter


def local_table_shards(model: DistributedModelParallel) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """Yield (table, (first row, first column), weight) of every shard of a table on this rank; weights are the live ones."""
    for name, sharded in model.fused_optimizer.params.items():
        for local in sharded.local_shards():
            row, column = local.metadata.shard_offsets
            yield table_name(name), (row, column), local.tensor.detach()
    for name, parameter in data_parallel_tables(model):
        yield table_name(name), (0, 0), parameter.detach()


def initialize_tables(model: DistributedModelParallel, config: Config, schema: DatasetSchema) -> None:
    """Draw this rank's part of every table's initial weights."""
    features = {feature.name: (i, feature.rows) for i, feature in enumerate(schema.tables)}
    for name, offsets, weight in local_table_shards(model):
        index, rows = features[name]
        bound = config.embedding.init_std * 3**0.5 or (1 / rows) ** 0.5
        fill_uniform(weight, offsets, (rows, config.embedding.dim_of(name)), bound, seed=config.seed * 1_000_003 + index)


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
        generator.manual_seed((seed * 2_000_003 + block) % 2**64)  # all that a generator takes
        values = torch.empty(stop - start, dim, device=weight.device).uniform_(-bound, bound, generator=generator)
        low, high = max(start, first_row), min(stop, end_row)
        weight[low - first_row : high - first_row] = values[
            low - start : high - start, first_column : first_column + weight.shape[1]
        ]
