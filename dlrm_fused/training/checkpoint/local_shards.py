"""A sharded tensor, as torch.distributed.checkpoint (DCP) writes and reads it on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class LocalShards:
    """A tensor that is sharded over ranks, with the shards of this one; DCP reads and writes it like its own sharded tensors.

    Attributes:
        shards: (index of the first element, such as (row, column), and tensor) of each shard on this rank.
        is_written: whether this rank writes its shards; false where another rank holds the same ones and does.
    """

    def __init__(
        self, shape: tuple[int, ...], shards: Sequence[tuple[tuple[int, ...], Tensor]], is_written: bool = True
    ) -> None:
        self.shape = shape
        self.shards = list(shards)
        self.is_written = is_written

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
