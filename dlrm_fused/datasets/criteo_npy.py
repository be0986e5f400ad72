"""Reader of Criteo days as TorchRec's and MLPerf's scripts write them, without another preparation.

======================================  =======================  ======================================================
file                                    shape, dtype             content
======================================  =======================  ======================================================
``day_<i>_dense.npy``                   [rows, 13] float32       dense features, as the script transformed them
``day_<i>_sparse.npy``                  [rows, 26] int32, int64  one id for each feature
``day_<i>_labels.npy``                  [rows, 1] int32          0 or 1; [rows] and other integer types also do
``day_<i>_sparse_multi_hot.npz``        [rows, hotness] each     members "0" to "25" of np.savez; preferred to ``sparse.npy``
======================================  =======================  ======================================================

All days but the last are for training; the first half of the last one is for validation, the second for testing. A single
day is divided 80/10/10 by position. Sources: torchrec/datasets/criteo.py; torchrec_dlrm of facebookresearch/dlrm and of
mlcommons/training.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.checksums import map_bytes
from dlrm_fused.config import Config, Split
from dlrm_fused.datasets.batch import Samples, sparse_from_features
from dlrm_fused.datasets.data_settings import folder_of, rows_of_tables
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.datasets.storage import check_finite, check_labels, map_array
from dlrm_fused.errors import ConfigError, DataError

DENSE_NAMES = tuple(f"int_{i}" for i in range(13))
SPARSE_FEATURES = 26
_INTEGERS = ("int32", "int64")
_Rows = tuple[NDArray[Any], ...]  # dense features [b, 13], labels [b], and of each sparse feature its ids, [b, hotness] or [b]


class CriteoNpyDataset:
    """Days of Criteo, memory-mapped.

    Args:
        table_rows: rows of the 26 tables; ids are taken modulo them (TorchRec's ``hashes``).

    Raises:
        ConfigError: if ``table_rows`` has not 26 entries.
        DataError: names the file that is missing, truncated, or contradicts the others of its day.
    """

    generator_device = None

    def __init__(self, folder: str | Path, table_rows: Sequence[int]) -> None:
        if len(table_rows) != SPARSE_FEATURES:
            raise ConfigError(
                f"embedding.rows={list(table_rows)}: allowed: {SPARSE_FEATURES} numbers for data.source=criteo_npy"
            )
        days = [_Day(Path(folder), number) for number in _day_numbers(Path(folder))]
        hotness = days[0].hotness
        for day in days:
            if day.hotness != hotness:
                raise DataError(f"{day.name}: {day.hotness} ids a sample, {days[0].name} has {hotness}; expected the same")
        self._hotness = hotness
        self._splits = {split: _SplitOfDays(parts, split) for split, parts in _divide(days).items()}
        self.schema = DatasetSchema(
            dense_features=DENSE_NAMES,
            sparse_features=tuple(
                SparseFeature(f"cat_{i}", rows, float(ids))
                for i, (rows, ids) in enumerate(zip(table_rows, hotness, strict=True))
            ),
        )

    def samples(self, split: Split) -> int:
        return self._splits[split].samples

    def read(self, split: Split, rows: Tensor) -> Samples:
        dense, labels, *ids = self._splits[split].read(rows.numpy())
        features = self.schema.sparse_features
        modulo = [_modulo(column, feature.rows) for column, feature in zip(ids, features, strict=True)]
        return Samples(
            dense=torch.from_numpy(dense),
            sparse=sparse_from_features([feature.name for feature in features], modulo, self._hotness, rows.numel()),
            labels=torch.from_numpy(labels),
        )


def _modulo(ids: NDArray[Any], rows: int) -> NDArray[np.int32]:
    # Division is slow, and multi-hot ids are mostly in range already.
    in_range = ids.min() >= 0 and ids.max() < rows
    return (ids if in_range else ids % rows).astype(np.int32, copy=False)


class _Day:
    """The mapped files of one day."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = f"{folder}/day_{number}"
        self.dense = map_array(folder / f"day_{number}_dense.npy", [None, len(DENSE_NAMES)], ["float32"])
        self.samples = self.dense.shape[0]
        if not self.samples:
            raise DataError(f"{self.name}_dense.npy: has no rows")
        self.labels = _map_labels(folder / f"day_{number}_labels.npy", self.samples)
        multi_hot = folder / f"day_{number}_sparse_multi_hot.npz"
        self.single: NDArray[Any] | None = None
        self.multi_hot: list[NDArray[Any]] = []
        if multi_hot.exists():
            self.multi_hot = _map_multi_hot(multi_hot, self.samples)
            self.hotness = [column.shape[1] for column in self.multi_hot]
        else:
            self.single = map_array(folder / f"day_{number}_sparse.npy", [self.samples, SPARSE_FEATURES], _INTEGERS)
            self.hotness = [1] * SPARSE_FEATURES

    def read_ids(self, rows: NDArray[np.int64]) -> list[NDArray[Any]]:
        """Return each feature's ids, [b, hotness] or [b]."""
        if self.single is not None:
            return list(np.ascontiguousarray(self.single.take(rows, axis=0).T))
        # Taking bytes, since members of a zip file lie at odd addresses: NumPy would first copy all of an unaligned array.
        return [column.view(np.uint8).take(rows, axis=0).view(column.dtype) for column in self.multi_hot]


def _day_numbers(folder: Path) -> list[int]:
    found = sorted(
        int(m[1]) for path in folder.glob("day_*_dense.npy") if (m := re.fullmatch(r"day_(\d+)_dense\.npy", path.name))
    )
    if not found:
        raise DataError(f"data.path={folder}: no day_<i>_dense.npy in it, as TorchRec's and MLPerf's Criteo scripts write them")
    missing = sorted(set(range(found[-1])) - set(found))
    if missing and found[0] == 0:
        raise DataError(f"{folder}/day_{missing[0]}_dense.npy: missing, though day_{found[-1]} is there")
    return found


def _map_labels(path: Path, samples: int) -> NDArray[Any]:
    dtypes = ["int32", "int64", "uint8", "int8"]
    try:
        return map_array(path, [samples, 1], dtypes).reshape(-1)
    except DataError:
        return map_array(path, [samples], dtypes)


def _map_multi_hot(path: Path, samples: int) -> list[NDArray[Any]]:
    """Return the arrays "0" to "25" of an uncompressed ``.npz``, mapped where they lie in it."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: damaged or truncated ({error}); make it again") from None
    data, columns = map_bytes(path), []
    for number in range(SPARSE_FEATURES):
        info = members.get(f"{number}.npy")
        name = f"{path}, member {number}"
        if info is None:
            raise DataError(f"{name}: missing; expected members 0 to {SPARSE_FEATURES - 1}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise DataError(
                f"{name}: compressed, so it cannot be mapped; write the file with np.savez, not np.savez_compressed"
            )
        columns.append(map_array(name, [samples, None], _INTEGERS, _member(data, info)))
    return columns


def _member(data: NDArray[np.uint8], info: zipfile.ZipInfo) -> NDArray[np.uint8]:
    """Return the bytes of a zip file from an uncompressed member on (PKWARE APPNOTE 4.3.7: local file header)."""
    header = data[info.header_offset :][:30].tobytes()
    return data[info.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28)) :]


@dataclass(frozen=True)
class _Part:
    """Rows [start, stop) of a day."""

    day: _Day
    start: int
    stop: int

    def read(self, rows: NDArray[np.int64], split: str) -> _Rows:
        """Read rows, counted from ``start``."""
        rows = rows + self.start
        labels = self.day.labels.take(rows)
        check_labels(labels, f"{self.day.name}_labels.npy, split {split}")
        dense = self.day.dense.take(rows, axis=0)
        check_finite(dense, DENSE_NAMES, f"{self.day.name}_dense.npy, split {split}")
        return dense, labels.astype(np.float32), *self.day.read_ids(rows)


def _divide(days: list[_Day]) -> dict[Split, list[_Part]]:
    last = days[-1]
    if len(days) == 1:
        borders = [last.samples * 8 // 10, last.samples * 9 // 10, last.samples]
        train = [_Part(last, 0, borders[0])]
    else:
        borders = [0, last.samples // 2, last.samples]
        train = [_Part(day, 0, day.samples) for day in days[:-1]]
    held_out = {split: [_Part(last, *of)] for split, of in zip((Split.validation, Split.test), pairwise(borders), strict=True)}
    return {Split.train: train, **held_out}


class _SplitOfDays:
    """Parts of days, one after the other."""

    def __init__(self, parts: list[_Part], split: Split) -> None:
        self._parts, self._split = parts, split.name
        self._starts = np.cumsum([0, *(part.stop - part.start for part in parts)])
        self.samples = int(self._starts[-1])
        if not self.samples:
            raise DataError(f"{parts[0].day.name}_dense.npy: too few rows, split {split.name} has no samples")

    def read(self, rows: NDArray[np.int64]) -> _Rows:
        part_of_row = np.searchsorted(self._starts, rows, side="right") - 1
        numbers = np.unique(part_of_row).tolist()
        places = [np.flatnonzero(part_of_row == number) for number in numbers]
        read = [
            self._parts[number].read(rows[mine] - self._starts[number], self._split)
            for number, mine in zip(numbers, places, strict=True)
        ]
        if len(read) == 1:
            return read[0]
        restore = np.concatenate(places).argsort()  # to the order that was asked for
        return tuple(np.concatenate(column)[restore] for column in zip(*read, strict=True))


def open_criteo_npy(config: Config, device: torch.device) -> CriteoNpyDataset:
    """Return the set of ``data.source=criteo_npy``; an :data:`~dlrm_fused.datasets.OpenDataset`."""
    return CriteoNpyDataset(folder_of(config), rows_of_tables(config, config.embedding.rows))
