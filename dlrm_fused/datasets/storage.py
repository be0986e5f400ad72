"""Arrays on disk, mapped rather than loaded, and checks of what was read from them.

They stay NumPy arrays: what NumPy does with them runs on the calling thread without the interpreter lock, while torch would add
a team of OpenMP threads to each thread of a loader.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from dlrm_fused.checksums import BLOCK_BYTES, CHECKSUMS_FILE, CheckedBytes, Checksums, damaged, map_bytes
from dlrm_fused.datasets.schema import SparseFeature
from dlrm_fused.datasets.transformation import PREPARE_AGAIN, file_stem
from dlrm_fused.errors import DataError

# Bytes that the header of any ``.npy`` file has at least; to check them checks the first block of the file.
_HEADER_BYTES = 128
_LONGEST_HEADER = 2**16 + 12  # of format 1.0


def map_array(
    path: Path | str, shape: Sequence[int | None], dtypes: Sequence[str], data: NDArray[np.uint8] | None = None
) -> NDArray[Any]:
    """Map a ``.npy`` file.

    Args:
        path: the file, or its name in messages if ``data`` is given.
        shape: what it must be; None is any number.
        dtypes: names of the NumPy types it may have.
        data: its bytes, if it is mapped already. Each mapping keeps a file open.

    Raises:
        DataError: names the file, if it is missing, truncated, or of another shape or type.
    """
    try:
        array = _array_in(map_bytes(Path(path)) if data is None else data)
    except FileNotFoundError:
        raise DataError(f"{path}: missing") from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: damaged or truncated ({error}); make it again") from None
    fits = len(array.shape) == len(shape) and all(want in (None, have) for have, want in zip(array.shape, shape, strict=True))
    if not fits or array.dtype.name not in dtypes:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise DataError(
            f"{path}: holds {array.dtype.name} of shape {list(array.shape)}, expected {' or '.join(dtypes)} of shape [{wanted}]"
        )
    if not array.flags.c_contiguous:
        raise DataError(f"{path}: stored in column-major order, expected row-major; write it with np.ascontiguousarray")
    return array


def _array_in(data: NDArray[np.uint8]) -> NDArray[Any]:
    """Return the array in the bytes of a ``.npy`` file, not copied. Raises ValueError or TypeError if they hold none."""
    header = io.BytesIO(data[:_LONGEST_HEADER].tobytes())
    version = npy.read_magic(header)
    shape, is_fortran_order, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(header)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return np.ndarray(shape, dtype, data, header.tell(), order="F" if is_fortran_order else "C")


@dataclass(frozen=True)
class SetFolder:
    """A folder of array files of a prepared set.

    Attributes:
        checksums: of the set; None if an earlier release made it.
    """

    root: Path
    name: str
    checksums: Checksums | None

    def map(self, file: str, shape: Sequence[int | None], dtypes: Sequence[str]) -> CheckedRows:
        """Map a file as :func:`map_array` does; whatever is read of it is checked."""
        name, path = f"{self.name}/{file}", self.root / self.name / file
        checked = None
        if self.checksums is not None:
            checked = self.checksums.checked(self.root, name, DataError, PREPARE_AGAIN)
            if not checked.check(0, _HEADER_BYTES):
                raise DataError(damaged(path, CHECKSUMS_FILE, PREPARE_AGAIN))
        return CheckedRows(path, map_array(path, shape, dtypes, checked.data if checked else None), checked)


class CheckedRows:
    """The rows of a mapped ``.npy`` file ([rows, ...]), whose bytes are checked when they are first read, by any thread.

    Attributes:
        array: for what needs no check, its shape.
    """

    def __init__(self, path: Path, array: NDArray[Any], checked: CheckedBytes | None) -> None:
        self.array = array
        self._path = path
        self._checked = checked
        self._row_bytes = array.strides[0]
        self._offset = path.stat().st_size - array.nbytes

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Copy rows ([b]): [b, ...].

        Raises:
            DataError: the file's bytes are not those that were written.
        """
        if self._checked is not None and not self._checked.all_checked and not self._checked.check_blocks(self._blocks(rows)):
            raise DataError(damaged(self._path, CHECKSUMS_FILE, PREPARE_AGAIN))
        return self.array.take(rows, axis=0)

    def all(self) -> NDArray[Any]:
        """Return all rows as they are mapped, without a copy.

        Raises:
            DataError: as :meth:`take`.
        """
        if self._checked is not None and not self._checked.check(0, self._offset + self.array.nbytes):
            raise DataError(damaged(self._path, CHECKSUMS_FILE, PREPARE_AGAIN))
        return self.array

    def _blocks(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        begins = rows * self._row_bytes + self._offset
        first, last = begins // BLOCK_BYTES, (begins + (self._row_bytes - 1)) // BLOCK_BYTES
        return ranges(first, last - first + 1) if self._row_bytes > BLOCK_BYTES else np.concatenate([first, last])


def check_below(ids: NDArray[Any], rows: int, feature: str, where: str, remedy: str = PREPARE_AGAIN) -> None:
    """Raise DataError unless all ids are in [0, rows)."""
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= rows:
        raise DataError(f"{where}: feature {feature} has the id {low if low < 0 else high}, allowed: 0 to {rows - 1}; {remedy}")


def check_finite(dense: NDArray[np.float32], names: Sequence[str], where: str, remedy: str = PREPARE_AGAIN) -> None:
    """Raise DataError unless all values of the dense features ([b, D]) are finite."""
    # One NaN or infinity makes its sum so.
    for name, total in zip(names, dense.sum(axis=0, dtype=np.float64), strict=True):
        if not np.isfinite(total):
            raise DataError(f"{where}: dense feature {name} has a NaN, an infinite value or one beyond float32; {remedy}")


def check_labels(labels: NDArray[Any], where: str) -> None:
    """Raise DataError unless all labels are 0 or 1."""
    low, high = labels.min(), labels.max()
    if low < 0 or high > 1:
        raise DataError(f"{where}: a label is {low if low < 0 else high}, allowed: 0 and 1; prepare the set again")


def check_weights(weights: NDArray[np.float32], where: str, remedy: str = PREPARE_AGAIN) -> None:
    """Raise DataError unless all weights of samples are finite and 0 or more."""
    wrong = weights[~((weights >= 0) & (weights < np.inf))]
    if wrong.size:
        raise DataError(f"{where}: the weight of a sample is {wrong[0]:g}, allowed: finite numbers, 0 or more; {remedy}")


class IdColumns:
    """The mapped ids of several features: ``single.npy``, and values and offsets of each jagged feature.

    Args:
        folder: holds the files that data/README.md describes.

    Raises:
        DataError: if a file is missing, truncated, or of another shape or type.
    """

    def __init__(self, folder: SetFolder, features: Sequence[SparseFeature], rows: int, where: str) -> None:
        self._features = features
        self._where = where
        single = sum(not feature.jagged for feature in features)
        self._single = folder.map("single.npy", [rows, single], ["int32"]) if single else None
        self._jagged = {f.name: _JaggedColumn(folder, f.name, rows) for f in features if f.jagged}

    def read(self, rows: NDArray[np.int64]) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64] | int]]:
        """Return each feature's ids in ``rows`` ([b]), row after row [n_f] and checked, and their number in each row.

        Raises:
            DataError: if an id is not in [0, rows of its feature).
        """
        # [S, b]: one row of ids for each feature.
        single = iter(() if self._single is None else np.ascontiguousarray(self._single.take(rows).T))
        ids: list[NDArray[np.int32]] = []
        lengths: list[NDArray[np.int64] | int] = []
        for feature in self._features:
            if feature.jagged:
                column, length = self._jagged[feature.name].read(rows)
                lengths.append(length)
            else:
                column = next(single)
                lengths.append(1)
            check_below(column, feature.rows, feature.name, self._where)
            ids.append(column)
        return ids, lengths


class _JaggedColumn:
    """The mapped values and offsets of one jagged feature."""

    def __init__(self, folder: SetFolder, name: str, rows: int) -> None:
        stem = file_stem(name)
        offsets_path = folder.root / folder.name / f"{stem}.offsets.npy"
        self._values = folder.map(f"{stem}.values.npy", [None], ["int32"])
        self._offsets = folder.map(offsets_path.name, [rows + 1], ["int64"])
        first, last = self._offsets.take(np.array([0, rows])).tolist()
        if first != 0 or last != self._values.array.size:
            raise DataError(
                f"{offsets_path}: runs from {first} to {last}, expected 0 to {self._values.array.size}, "
                f"the length of {stem}.values.npy; prepare the set again"
            )
        self._path = offsets_path

    def read(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of the rows, row after row [n], and how many each has [b]."""
        starts = self._offsets.take(rows)
        lengths = self._offsets.take(rows + 1) - starts
        if (lengths < 0).any():
            raise DataError(f"{self._path}: offsets decrease; prepare the set again")
        return self._values.take(ranges(starts, lengths)), lengths


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers [start, start + length) of every pair, one range after the other."""
    ends = lengths.cumsum()
    return np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)
