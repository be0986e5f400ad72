"""The files of a checkpoint: raw tensors of each rank, and DCP's metadata that says where in them each shard lies.

DCP itself writes tensors with ``torch.save``, which holds Python's interpreter lock while it copies, so that a checkpoint
in the background would slow training down; and reads them with ``torch.load``. Raw bytes are written straight from the
staged tensors without the lock, are read by mapping the file, no more of it than is needed, and cannot contain code.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dlrm_fused.compat.torch import storage_info
from dlrm_fused.errors import CheckpointError


class RawWriter(FileSystemWriter):
    """Writes all tensors of this rank into one file, one after the other."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.bin"
        results = []
        with (Path(self.path) / name).open("wb", buffering=0) as file:
            for item in plan.items:
                content = _bytes(planner.resolve_data(item))
                begin = file.tell()
                _write_all(file, content.numpy().data)
                results.append(WriteResult(item.index, content.numel(), storage_info(name, begin, content.numel())))
            os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _bytes(tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"only tensors are written to checkpoints, not {type(tensor).__name__}")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _write_all(file: io.RawIOBase, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


class RawReader(FileSystemReader):
    """Reads a checkpoint without executing any code that it may contain.

    Raises:
        CheckpointError: if the metadata is damaged, asks for anything but tensors, or does not fit the files.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing") from None
        except Exception as error:  # a damaged pickle may raise anything
            raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error})") from None
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: damaged (no metadata in it)")
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{path}: {key} is not a tensor; only tensors are read from checkpoints")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._entries = metadata.state_dict_metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            stored = self._stored_tensor(item)
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _stored_tensor(self, item: ReadItem) -> Tensor:
        info = self.storage_data[item.storage_index]
        path = Path(self.path) / Path(info.relative_path).name
        dtype, shape = self._stored_type(item.storage_index)
        expected = torch.Size(shape).numel() * dtype.itemsize
        if info.length != expected:
            raise CheckpointError(f"{path}: damaged: {item.storage_index.fqn} has {info.length} bytes instead of {expected}")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if path.stat().st_size < info.offset + info.length:
            raise CheckpointError(
                f"{path}: cut off: {path.stat().st_size} bytes, at least {info.offset + info.length} expected"
            )
        if expected == 0:
            return torch.empty(shape, dtype=dtype)
        content = np.memmap(path, np.uint8, "c", info.offset, (info.length,))
        return torch.from_numpy(content).view(dtype).view(shape)

    def _stored_type(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        entry = cast(TensorStorageMetadata, self._entries[index.fqn])
        shape = next(chunk.sizes for chunk in entry.chunks if index.offset is None or chunk.offsets == index.offset)
        return entry.properties.dtype, shape


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's metadata is a pickle: only the plain records that DCP itself writes are allowed in it, no code."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("pathlib", "PosixPath"),
            ("collections", "OrderedDict"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise CheckpointError(f"its metadata asks for {module}.{name}, which no checkpoint of ours contains")


def reason_of(error: BaseException) -> str:
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {' '.join(str(cause).split())[:300]}"
    return " ".join(str(error).split())[:300]
