"""Tensors of which a rank holds parts, as torch.distributed.checkpoint (DCP) writes and reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class LocalShards:
    """The parts of a tensor of which this rank holds some; DCP reads and writes it like a sharded tensor.

    Attributes:
        shape: of the whole tensor.
        pieces: (index of the first element, such as (row, column), and tensor) of each part.
        is_written: whether this rank writes its parts; false where another rank holds the same ones and does.
    """

    def __init__(
        self, shape: tuple[int, ...], pieces: Sequence[tuple[tuple[int, ...], Tensor]], is_written: bool = True
    ) -> None:
        self.shape = shape
        self.pieces = list(pieces)
        self.is_written = is_written

    def map(self, function: Callable[[Tensor], Tensor]) -> LocalShards:
        return LocalShards(self.shape, [(at, function(tensor)) for at, tensor in self.pieces], self.is_written)

    def piece(self, index: MetadataIndex) -> Tensor:
        return next(tensor for at, tensor in self.pieces if torch.Size(at) == index.offset)

    # The protocol by which DCP asks an object for its parts (torch.distributed._checkpointable).
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
            for chunk, (_, tensor) in zip(self.__create_chunk_list__(), self.pieces, strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), tensor.size()) for at, tensor in self.pieces]


State = dict[str, Tensor | LocalShards]


def map_tensors(value: Tensor | LocalShards, function: Callable[[Tensor], Tensor]) -> Tensor | LocalShards:
    return value.map(function) if isinstance(value, LocalShards) else function(value)


def tensors_of(value: Tensor | LocalShards) -> Iterator[Tensor]:
    if isinstance(value, LocalShards):
        yield from (tensor for _, tensor in value.pieces)
    else:
        yield value
