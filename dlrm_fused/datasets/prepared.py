"""Reader of the sets that data/prepare.py writes; :mod:`dlrm_fused.datasets.schema` describes the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.config import Split
from dlrm_fused.datasets.batch import Samples, sparse_from_features
from dlrm_fused.datasets.schema import SCHEMA_FILE, DatasetSchema, PreparedInfo, SparseFeature
from dlrm_fused.datasets.storage import check_below, check_finite, check_labels, map_array
from dlrm_fused.errors import DataError


class PreparedDataset:
    """A prepared set, memory-mapped.

    Args:
        folder: holds ``dataset.json``.
        table_rows: rows of every table, in order of the features; ids are taken modulo them. Default: those of the set.

    Raises:
        DataError: if a file is missing, truncated, or contradicts ``dataset.json``, or a split has no samples.
    """

    generator_device = None

    def __init__(self, folder: str | Path, table_rows: Sequence[int] | None = None) -> None:
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"data.path={folder}: no such folder; prepare a data set with data/prepare.py")
        info = PreparedInfo.load(folder)
        self._splits = {split: _SplitFiles(folder, split, info) for split in Split}
        self._modulo = [
            np.int32(rows) if rows < feature.rows else None
            for feature, rows in zip(info.schema.sparse_features, table_rows or _stored_rows(info.schema), strict=True)
        ]
        self.schema = with_table_rows(info.schema, table_rows or _stored_rows(info.schema))

    def samples(self, split: Split) -> int:
        return self._splits[split].samples

    def read(self, split: Split, rows: Tensor) -> Samples:
        files, positions = self._splits[split], rows.numpy()
        ids, lengths = files.read_ids(positions)
        ids = [column if modulo is None else column % modulo for column, modulo in zip(ids, self._modulo, strict=True)]
        names = [feature.name for feature in self.schema.sparse_features]
        return Samples(
            dense=torch.from_numpy(files.read_dense(positions)),
            sparse=sparse_from_features(names, ids, lengths, positions.size),
            labels=torch.from_numpy(files.read_labels(positions)),
        )


def with_table_rows(schema: DatasetSchema, table_rows: Sequence[int]) -> DatasetSchema:
    """The schema with other numbers of rows."""
    features = zip(schema.sparse_features, table_rows, strict=True)
    return replace(schema, sparse_features=tuple(replace(feature, rows=rows) for feature, rows in features))


def _stored_rows(schema: DatasetSchema) -> list[int]:
    return [feature.rows for feature in schema.sparse_features]


class _SplitFiles:
    """The mapped files of one split."""

    def __init__(self, folder: Path, split: Split, info: PreparedInfo) -> None:
        schema = info.schema
        self._where = f"{folder}, split {split.name}"
        self._features = schema.sparse_features
        self._dense_names = schema.dense_features
        self.samples = info.samples.get(split.name, 0)
        if self.samples < 1:
            raise DataError(f"{folder / SCHEMA_FILE}: split {split.name} has {self.samples} samples, expected 1 or more")
        path = folder / split.name
        single = [feature for feature in schema.sparse_features if not feature.jagged]
        self._dense = map_array(path / "dense.npy", [self.samples, len(schema.dense_features)], ["float32"])
        self._labels = map_array(path / "labels.npy", [self.samples], ["uint8"])
        self._single = map_array(path / "single.npy", [self.samples, len(single)], ["int32"]) if single else None
        self._jagged = {f.name: _JaggedColumn(path, f, self.samples) for f in schema.sparse_features if f.jagged}

    def read_dense(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        dense = self._dense.take(rows, axis=0)
        check_finite(dense, self._dense_names, self._where)
        return dense

    def read_labels(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        labels = self._labels.take(rows)
        check_labels(labels, self._where)
        return labels.astype(np.float32)

    def read_ids(self, rows: NDArray[np.int64]) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64] | int]]:
        """For each feature its ids [n_f], checked, and their number in each sample."""
        # [S, b]: one row of ids for each feature.
        single = iter(() if self._single is None else np.ascontiguousarray(self._single.take(rows, axis=0).T))
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

    def __init__(self, path: Path, feature: SparseFeature, samples: int) -> None:
        offsets_path = path / f"{feature.name}.offsets.npy"
        self._values = map_array(path / f"{feature.name}.values.npy", [None], ["int32"])
        self._offsets = map_array(offsets_path, [samples + 1], ["int64"])
        first, last = int(self._offsets[0]), int(self._offsets[-1])
        if first != 0 or last != self._values.size:
            raise DataError(
                f"{offsets_path}: runs from {first} to {last}, expected 0 to {self._values.size}, "
                f"the length of {feature.name}.values.npy; prepare the set again"
            )
        self._path = offsets_path

    def read(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of the rows, row after row [n], and how many each has [b]."""
        starts = self._offsets.take(rows)
        lengths = self._offsets.take(rows + 1) - starts
        if (lengths < 0).any():
            raise DataError(f"{self._path}: offsets decrease; prepare the set again")
        ends = lengths.cumsum()
        # Position in values = start of the row + position within the row.
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        return self._values.take(positions), lengths
