"""Arrays on disk, mapped rather than loaded, and checks of what was read from them.

They stay NumPy arrays: what NumPy does with them runs on the calling thread without the interpreter lock, while torch would add
a team of OpenMP threads to each thread of a loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.errors import DataError


def map_array(path: Path, shape: Sequence[int | None], dtypes: Sequence[str]) -> NDArray[Any]:
    """Map a ``.npy`` file.

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
    check_array(array, str(path), shape, dtypes)
    return np.asarray(array)


def check_array(array: NDArray[Any], name: str, shape: Sequence[int | None], dtypes: Sequence[str]) -> None:
    """Raise DataError unless a mapped array is what :func:`map_array` expects; ``name`` is for the message."""
    fits = len(array.shape) == len(shape) and all(want in (None, have) for have, want in zip(array.shape, shape, strict=True))
    if not fits or array.dtype.name not in dtypes:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise DataError(
            f"{name}: holds {array.dtype.name} of shape {list(array.shape)}, expected {' or '.join(dtypes)} of shape [{wanted}]"
        )
    if not array.flags.c_contiguous:
        raise DataError(f"{name}: stored in column-major order, expected row-major; write it with np.ascontiguousarray")


def check_below(ids: NDArray[Any], rows: int, feature: str, where: str) -> None:
    """Raise DataError unless all ids are in [0, rows)."""
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        raise DataError(
            f"{where}: feature {feature} has the id {low if low < 0 else high}, allowed: 0 to {rows - 1}; prepare the set again"
        )


def check_finite(dense: NDArray[np.float32], names: Sequence[str], where: str) -> None:
    """Raise DataError unless all values of the dense features ([b, D]) are finite."""
    # One NaN or infinity makes its sum so.
    for name, total in zip(names, dense.sum(axis=0, dtype=np.float64), strict=True):
        if not np.isfinite(total):
            raise DataError(f"{where}: dense feature {name} has a NaN or infinite value; prepare the set again")


def check_labels(labels: NDArray[Any], where: str) -> None:
    """Raise DataError unless all labels are 0 or 1."""
    low, high = labels.min(), labels.max()
    if low < 0 or high > 1:
        raise DataError(f"{where}: a label is {low if low < 0 else high}, allowed: 0 and 1; prepare the set again")
