"""The live tensors of a model and its optimizers, by their keys in a checkpoint, and how sharded ones are written and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dlrm_fused.sharding.groups import ModelParallelGroups
from dlrm_fused.sharding.parallel import ShardedModel
from dlrm_fused.sharding.tables import data_parallel_tables, is_table, table_name

# torch.optim's names of the states that FBGEMM calls momentum1 and momentum2.
_STATE_NAMES = {"sum": "momentum1", "exp_avg": "momentum1", "exp_avg_sq": "momentum2"}


@dataclass(eq=False)
class LocalShards:
    """A tensor that is sharded over ranks, with the shards of this one; DCP reads and writes it like its own sharded tensors.

    Attributes:
        shards: (index of the first element, such as (row, column), and tensor) of each shard on this rank.
        is_written: whether this rank writes its shards; false where another rank holds the same ones and does.
    """

    shape: tuple[int, ...]
    shards: Sequence[tuple[tuple[int, ...], Tensor]]
    is_written: bool = True

    def map(self, function: Callable[[Tensor], Tensor]) -> LocalShards:
        return LocalShards(self.shape, [(at, function(tensor)) for at, tensor in self.shards], self.is_written)

    def shard(self, index: MetadataIndex) -> Tensor:
        return next(tensor for at, tensor in self.shards if torch.Size(at) == index.offset)

    # The protocol by which DCP asks an object for its shards (torch.distributed._checkpointable).
    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(key, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=torch.Size(self.shape),
                ),
            )
            for chunk, (_, tensor) in zip(self.__create_chunk_list__(), self.shards, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), tensor.size()) for at, tensor in self.shards]


State = dict[str, Tensor | LocalShards]


def map_tensors(value: Tensor | LocalShards, function: Callable[[Tensor], Tensor]) -> Tensor | LocalShards:
    return value.map(function) if isinstance(value, LocalShards) else function(value)


def tensors_of(value: Tensor | LocalShards) -> Iterator[Tensor]:
    if isinstance(value, LocalShards):
        yield from (tensor for _, tensor in value.shards)
    else:
        yield value


def model_state(sharded: ShardedModel) -> State:
    """Return the live tensors of the model, by their keys in a checkpoint."""
    state: State = {}
    parameters = dict(sharded.model.named_parameters())
    for name, value in sharded.model.state_dict().items():
        if not is_table(name):
            state[f"dense.{name}"] = of_dense(value.detach(), parameters.get(name), sharded.groups)
    for name, parameter in data_parallel_tables(sharded.model):
        state[f"table.{table_name(name)}.weight"] = _whole(parameter.detach())
    for name, weight in sharded.model.fused_optimizer.params.items():
        shards = [(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in weight.local_shards()]
        state[f"table.{table_name(name)}.weight"] = LocalShards(tuple(weight.size()), shards)
    return state


def optimizer_state(sharded: ShardedModel) -> State:
    """Return the live tensors of all optimizers, by their keys in a checkpoint."""
    state: State = {}
    fused = sharded.model.fused_optimizer.params
    parameters = dict(sharded.model.named_parameters())
    for name, values in sharded.optimizer.state_dict()["state"].items():
        for state_name, value in values.items():
            if name in fused:
                key = f"table.{table_name(name)}.{state_name.rsplit('.', 1)[-1]}"
                state[key] = _shards_like(fused[name], value)
            elif not is_table(name):
                key = f"dense_optimizer.{name}.{state_name}"
                state[key] = of_dense(value.detach(), parameters[name], sharded.groups)
            elif state_name in _STATE_NAMES:  # the others, counts of steps, follow from the step of the checkpoint
                state[f"table.{table_name(name)}.{_STATE_NAMES[state_name]}"] = _whole(value.detach())
    return state


def of_dense(value: Tensor, parameter: Tensor | None, groups: ModelParallelGroups | None) -> Tensor | LocalShards:
    """Return a dense parameter, or a state of its optimizer: this rank's shard of it if the parameter is sharded."""
    dim = getattr(parameter, "shard_dim", None)
    if dim is None or parameter is None or groups is None or value.shape != parameter.shape:
        return value
    shape, begin = list(value.shape), [0] * value.dim()
    shape[dim] *= groups.model_parallel.size()
    begin[dim] = groups.model_parallel.rank() * value.shape[dim]
    return LocalShards(tuple(shape), [(tuple(begin), value)], is_written=groups.is_first)


def _whole(tensor: Tensor) -> LocalShards:
    return LocalShards(tuple(tensor.shape), [((0, 0), tensor)], is_written=dist.get_rank() == 0)


def _shards_like(weight: Any, value: Any) -> LocalShards:
    """Return the state ``value`` of a sharded table's optimizer, laid out as :mod:`dlrm_fused.training.checkpoint` says."""
    pairs = list(zip(weight.local_shards(), value.local_shards(), strict=True))
    if value.dim() == 2:
        return LocalShards(tuple(weight.size()), [(tuple(w.metadata.shard_offsets), s.tensor.detach()) for w, s in pairs])
    columns = sorted({shard.shard_offsets[1] for shard in weight.metadata().shards_metadata})
    return LocalShards(
        (weight.size(0), len(columns)),
        [
            ((w.metadata.shard_offsets[0], columns.index(w.metadata.shard_offsets[1])), s.tensor.detach().unsqueeze(1))
            for w, s in pairs
        ],
    )


def random_state(rank: int, device: torch.device) -> State:
    """States of this rank's random generators."""
    state: State = {f"random.{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return state
