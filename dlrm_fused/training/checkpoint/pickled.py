"""The metadata of checkpoints of earlier releases: a pickle of the classes of torch.distributed.checkpoint (DCP).

It depends on the Python that wrote it: 3.11.0 to 3.11.3 pickle the member of an enumeration as an attribute of its class, and
3.13 has paths in a module of its own. All forms are read, and only the plain records in them: no code.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dlrm_fused.errors import CheckpointError
from dlrm_fused.training.checkpoint.tensors import Slot

PICKLED_FILE = ".metadata"

_MEMORY_FORMAT = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
_ALLOWED = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        _MEMORY_FORMAT,
        ("collections", "OrderedDict"),
    }
)


def read_pickled(path: Path) -> Metadata:
    """DCP's metadata; its ``storage_data`` are :class:`~dlrm_fused.training.checkpoint.tensors.Slot`.

    Raises:
        CheckpointError: the file is missing or damaged, holds anything but tensors, or asks for code.
    """
    try:
        metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError("damaged (no metadata in it)")
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise CheckpointError(f"{key} is not a tensor; only tensors are read from checkpoints")
        assert metadata.storage_data is not None
        metadata.storage_data = {index: info.slot() for index, info in metadata.storage_data.items()}
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}: {error})") from None
    return metadata


class _StorageInfo:
    """DCP's private record of where a tensor lies, filled by pickle."""

    relative_path: str
    offset: int
    length: int

    def slot(self) -> Slot:
        return Slot(Path(self.relative_path).name, int(self.offset), int(self.length), None)


def _member(enumeration: Any, name: str) -> Any:
    """``getattr`` of Python 3.11.0 to 3.11.3's pickles: for the members of the one enumeration in metadata alone."""
    from_dcp = _Unpickler(io.BytesIO(b"")).find_class(*_MEMORY_FORMAT)
    if enumeration is not from_dcp:
        raise CheckpointError("its metadata asks for builtins.getattr, which no checkpoint of ours contains")
    return from_dcp[name]


_STAND_INS = {
    ("builtins", "getattr"): _member,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _STAND_INS:
            return _STAND_INS[module, name]
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise CheckpointError(f"its metadata asks for {module}.{name}, which no checkpoint of ours contains")
