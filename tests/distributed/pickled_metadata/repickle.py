"""Read a checkpoint's pickled metadata and pickle it again, as the Python that runs this does; it needs no torch.

    python3.13 repickle.py 3.11.7.pickle 3.13.0.pickle

The classes are stand-ins with the names and the state of those of torch and torch.distributed.checkpoint: which names and
opcodes a pickle has depends on Python's own classes of enumerations, dataclasses and paths.
"""

import pickle
import sys
import types
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

METADATA = "torch.distributed.checkpoint.metadata"


class Size(tuple):
    def __reduce__(self) -> tuple:
        return Size, (tuple(self),)


class Named:
    """A dtype: pickled by its name."""

    def __init__(self, name: str) -> None:
        self.name, self.__module__ = name, "torch"

    def __reduce__(self) -> str:
        return self.name


class Layout:
    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple:
        return _get_layout, (self.name,)


def _get_layout(name: str) -> Layout:
    return Layout(name)


class _MEM_FORMAT_ENCODING(Enum):  # noqa: N801
    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


class TensorProperties:
    """Its state is the tuple that __getstate__ of torch gives."""

    def __getstate__(self) -> object:
        return self.state

    def __setstate__(self, state: object) -> None:
        self.state = state


@dataclass(frozen=True)
class MetadataIndex:
    fqn: str
    offset: object = None
    index: object = None


def record(name: str) -> type:
    return dataclass(type(name, (), {}))


def stand_in(module: str, *classes: object, **values: object) -> None:
    made = sys.modules.setdefault(module, types.ModuleType(module))
    for each in classes:
        each.__module__ = module
        setattr(made, each.__name__, each)
    vars(made).update(values)


for package in ("torch", "torch.distributed", "torch.distributed.checkpoint"):
    stand_in(package)
stand_in("torch", Size, float32=Named("float32"), uint8=Named("uint8"), int64=Named("int64"))
stand_in("torch.serialization", _get_layout)
stand_in("torch.distributed.checkpoint.filesystem", record("_StorageInfo"))
names = ("Metadata", "ChunkStorageMetadata", "TensorStorageMetadata", "StorageMeta")
stand_in(METADATA, _MEM_FORMAT_ENCODING, TensorProperties, MetadataIndex, *map(record, names))
sys.modules["pathlib._local"] = sys.modules["pathlib"] if sys.version_info < (3, 13) else sys.modules["pathlib._local"]

source, target = map(Path, sys.argv[1:])
target.write_bytes(pickle.dumps(pickle.loads(source.read_bytes())))
