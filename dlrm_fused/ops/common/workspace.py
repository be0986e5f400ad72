"""What the workspaces of all operators have in common: numbers that name them, and settings that must be equal on all ranks."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from dlrm_fused.errors import UsageError
from dlrm_fused.symmetric import SymmetricGroup

T = TypeVar("T")

# Of matrices that operators multiply.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_numbers = itertools.count()


class Handles(Generic[T]):
    """The living workspaces of one kind by their handles: operators of PyTorch take numbers, not objects."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._workspaces: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, workspace: T) -> int:
        """Returns the workspace's handle, unique in this process."""
        handle = next(_numbers)
        self._workspaces[handle] = workspace
        return handle

    def get(self, handle: int) -> T:
        """Raises UsageError if there is no such workspace, or no more."""
        workspace = self._workspaces.get(handle)
        if workspace is None:
            raise UsageError(f"workspace={handle}: no such {self._kind} in this process; keep it alive as long as it is used")
        return workspace


def fingerprint_of(*what: object) -> int:
    """What must be equal on all ranks in a call, as 31 bits."""
    return zlib.crc32(repr(what).encode()) >> 1


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises UsageError, for the workspace ``name``, if its operator has no kernel for the dtype."""
    if dtype not in DTYPES:
        raise UsageError(f"{name}: dtype={dtype}; allowed: float32, bfloat16, float16")


def agree_on_settings(group: SymmetricGroup, name: str, check: Callable[[], Mapping[str, object]]) -> None:
    """Collective: ``check`` validates this rank's settings and returns those that must be equal on all ranks.

    Raises:
        UsageError: on all ranks, if ``check`` raises it on one of them, or a setting differs.
    """

    def checked() -> dict[str, str]:
        if group.process_group is None and group.world_size > 1:
            raise UsageError(f"{name}: its group is closed")
        return {key: str(value) for key, value in check().items()}

    first, *others = group.gather(checked)
    for rank, other in enumerate(others, start=1):
        for key in {**first, **other}:
            if first.get(key) != other.get(key):
                raise UsageError(
                    f"{name}: {key} differs between ranks: {first.get(key)} on rank 0, {other.get(key)} on rank {rank}; "
                    "all ranks must give the same"
                )
