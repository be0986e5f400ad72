"""Arrays on disk as read-only tensors, mapped rather than loaded, and reading rows of them by position."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.errors import DataError


def map_array(path: Path, shape: Sequence[int | None], dtypes: Sequence[str]) -> Tensor:
    """Map a ``.npy`` file as a tensor, which must not be written to.

    Args:
        path: the file.
        shape: what it must be; None is any number.
        dtypes: names of the NumPy types it may have.

    Raises:
        DataError: names the file, if it is missing, truncated, or of another shape or type.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: damaged or truncated ({error}); make it again") from None
    return as_tensor(array, str(path), shape, dtypes)


def as_tensor(array: NDArray[np.generic], name: str, shape: Sequence[int | None], dtypes: Sequence[str]) -> Tensor:
    """A mapped array as a tensor; see :func:`map_array`. ``name`` is for messages."""
    fits = len(array.shape) == len(shape) and all(want in (None, have) for have, want in zip(array.shape, shape, strict=True))
    if not fits or array.dtype.name not in dtypes:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise DataError(
            f"{name}: holds {array.dtype.name} of shape {list(array.shape)}, expected {' or '.join(dtypes)} of shape [{wanted}]"
        )
    if not array.flags.c_contiguous:
        raise DataError(f"{name}: stored in column-major order, expected row-major; write it with np.ascontiguousarray")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(array)


def check_below(ids: Tensor, rows: int, feature: str, where: str) -> None:
    """Raise DataError unless all ids are in [0, rows)."""
    if not ids.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= rows:
        raise DataError(
            f"{where}: feature {feature} has the id {low if low < 0 else high}, allowed: 0 to {rows - 1}; prepare the set again"
        )


def check_labels(labels: Tensor, where: str) -> None:
    """Raise DataError unless all labels are 0 or 1."""
    low, high = (int(bound) for bound in torch.aminmax(labels))
    if low < 0 or high > 1:
        raise DataError(f"{where}: a label is {low if low < 0 else high}, allowed: 0 and 1; prepare the set again")
