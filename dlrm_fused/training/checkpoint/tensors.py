"""``tensors.json``: which piece of which tensor lies where in a checkpoint, and the checksums of its bytes.

It is made from and into the metadata of torch.distributed.checkpoint (DCP), whose own file depends on the Python that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dlrm_fused.errors import CheckpointError
from dlrm_fused.records import read_record, write_record

TENSORS_FILE = "tensors.json"
_FORMAT_VERSION = 1


@dataclass(frozen=True)
class Slot:
    """A place in one of a checkpoint's files.

    Attributes:
        file: name within the checkpoint's folder.
        begin, length: in bytes.
        sums: checksums of its blocks, by :func:`dlrm_fused.checksums.to_hex`; None in checkpoints of earlier releases.
    """

    file: str
    begin: int
    length: int
    sums: str | None


@dataclass(frozen=True)
class _Chunk:
    """A rectangle of a tensor: the index of its first element, its shape, and its place."""

    offset: Sequence[int]
    shape: Sequence[int]
    slot: Slot


@dataclass(frozen=True)
class _Tensor:
    dtype: str
    shape: Sequence[int]
    chunks: Sequence[_Chunk]


@dataclass(frozen=True)
class _Tensors:
    tensors: dict[str, _Tensor]
    format_version: int = field(default=_FORMAT_VERSION)


def write_tensors(folder: Path, metadata: Metadata, slots: Mapping[MetadataIndex, Slot]) -> None:
    tensors = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = [_Chunk(tuple(c.offsets), tuple(c.sizes), slots[MetadataIndex(key, c.offsets)]) for c in entry.chunks]
        tensors[key] = _Tensor(str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size), chunks)
    write_record(folder / TENSORS_FILE, _Tensors(tensors))


def read_tensors(folder: Path, remedy: str) -> Metadata:
    """DCP's metadata; its ``storage_data`` are :class:`Slot`.

    Raises:
        CheckpointError: the file is damaged, or contradicts itself.
    """
    path = folder / TENSORS_FILE
    record = read_record(path, _Tensors, CheckpointError, remedy, _FORMAT_VERSION)
    metadata = Metadata({}, storage_data={})
    for key, tensor in record.tensors.items():
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{path}: damaged: {key} has the dtype {tensor.dtype}, which does not exist; {remedy}")
        chunks = []
        for chunk in tensor.chunks:
            offset, shape = torch.Size(chunk.offset), torch.Size(chunk.shape)
            if shape.numel() * dtype.itemsize != chunk.slot.length:
                raise CheckpointError(
                    f"{path}: damaged: {key} has {chunk.slot.length} bytes for the shape {list(shape)}; {remedy}"
                )
            chunks.append(ChunkStorageMetadata(offset, shape))
            cast(dict[MetadataIndex, Slot], metadata.storage_data)[MetadataIndex(key, offset)] = chunk.slot
        metadata.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks
        )
    return metadata
