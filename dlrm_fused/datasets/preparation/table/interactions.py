"""Histories of a table's rows: each row is an interaction of its user, at a time, with what its token columns say.

Rows are encoded in the order of the files; what histories need of them is kept in files until all rows are there, since the
rows of a user may lie anywhere. Then about 200 bytes of memory are taken for each row.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.histories import GAP_ROWS, Histories, find_histories, mean_bag, write_interactions
from dlrm_fused.datasets.preparation.table.columns import Categories, read_categories
from dlrm_fused.datasets.preparation.table.files import Block
from dlrm_fused.datasets.preparation.table.times import MICROSECONDS, read_times
from dlrm_fused.datasets.preparation.writer import SCRATCH, SPLITS, NpyAppender, write_array
from dlrm_fused.datasets.schema import SparseFeature
from dlrm_fused.datasets.storage import ranges
from dlrm_fused.datasets.transformation import Int, SparseColumn, Transformation, file_stem, token_name
from dlrm_fused.datasets.values import NONE, NullMarkers

HISTORY = "--history"
TOKEN_LABEL, TOKEN_GAP = "token_label", "token_gap"
LABEL_ROWS = 2


@dataclass(frozen=True)
class Interactions:
    """The interactions of n rows; each field is [n].

    Attributes:
        users, items: numbers that are different for different ones.
        seconds: since 1970.
    """

    users: Int
    items: Int
    seconds: Int


@dataclass(frozen=True)
class InteractionColumns:
    """The columns of which interactions are made."""

    user: SparseColumn
    item: SparseColumn
    time: str
    time_format: str
    nulls: NullMarkers = NONE

    def read(self, block: Block) -> Interactions:
        """A row whose user is missing is of a user of its own."""
        users = _row_keys(read_categories(block, self.user, self.nulls))
        nobody = users == 0
        users[nobody] = -1 - block.first - np.flatnonzero(nobody)
        return Interactions(
            users,
            _row_keys(read_categories(block, self.item, self.nulls)),
            read_times(block, self.time, HISTORY, self.time_format) // MICROSECONDS,
        )


def _row_keys(values: Categories) -> Int:
    """Return the key of each row's value, 0 for a missing one: [n]."""
    return np.append(values.keys(), 0)[values.number]


class InteractionFiles:
    """Files with the users, times and tokens of all rows in the order of reading; histories are made from them."""

    def __init__(self, output: Path, transformation: Transformation) -> None:
        assert transformation.history is not None
        encodings = {encoding.column.name: encoding for encoding in transformation.sparse}
        self._tokens = [encodings[name] for name in transformation.history.items]
        self._columns = [encoding.column.name for encoding in transformation.sparse if not encoding.column.is_list]
        self._length = transformation.history.length
        self._output = output
        self._folder = output / SCRATCH
        self._stack = ExitStack()

    def __enter__(self) -> InteractionFiles:
        self._folder.mkdir(exist_ok=True)
        dtypes: dict[str, Any] = {
            "split": np.uint8,
            "labels": np.uint8,
            "users": np.int64,
            "items": np.int64,
            "seconds": np.int64,
        }
        for encoding in self._tokens:
            dtypes[token_name(encoding.column.name)] = np.int32
            if encoding.column.is_list:
                dtypes[f"{token_name(encoding.column.name)}.lengths"] = np.int64
        self._files = {name: self._stack.enter_context(NpyAppender(self._path(name), dtype)) for name, dtype in dtypes.items()}
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def append(
        self,
        split: NDArray[np.uint8],
        interactions: Interactions | None,
        single: NDArray[np.int32],
        jagged: dict[str, tuple[NDArray[np.int32], Int]],
        labels: NDArray[np.uint8],
    ) -> None:
        """Add the rows that come next."""
        assert interactions is not None
        parts: dict[str, NDArray[Any]] = {"split": split, "labels": labels, **vars(interactions)}
        for encoding in self._tokens:
            name = encoding.column.name
            if encoding.column.is_list:
                parts[token_name(name)], offsets = jagged[name]
                parts[f"{token_name(name)}.lengths"] = np.diff(offsets)
            else:
                parts[token_name(name)] = single[:, self._columns.index(name)]
        for name, part in parts.items():
            self._files[name].append(part)

    def finish(self) -> tuple[SparseFeature, ...]:
        """Write ``history.npy`` of all splits and the folder ``interactions``; returns the token features."""
        self._stack.close()
        histories = find_histories(self._read("users"), self._read("items"), self._read("seconds"), self._length)
        split = self._read("split")
        for number, name in enumerate(SPLITS):
            write_array(self._output / name / "history.npy", histories.windows[split == number], np.int64)
        features, single, jagged = [], [], {}
        for encoding in self._tokens:
            name = token_name(encoding.column.name)
            if encoding.column.is_list:
                jagged[name] = self._in_order(name, histories.order)
                features.append(self._feature(name, encoding.rows, histories, jagged[name][1]))
            else:
                single.append(self._read(name)[histories.order])
                features.append(self._feature(name, encoding.rows, histories))
        single += [self._read("labels")[histories.order], histories.gap[histories.order]]
        features.append(self._feature(TOKEN_LABEL, LABEL_ROWS, histories, history_only=True))
        features.append(self._feature(TOKEN_GAP, GAP_ROWS, histories))
        write_interactions(self._output, features, np.stack(single, axis=1), jagged)
        shutil.rmtree(self._folder)
        return tuple(features)

    def _in_order(self, name: str, order: Int) -> tuple[Int, Int]:
        """Return the ids of a jagged token feature, and how many each interaction has, in the order of interactions."""
        values, lengths = self._read(name), self._read(f"{name}.lengths")
        starts = (lengths.cumsum() - lengths)[order]
        return values[ranges(starts, lengths[order])], lengths[order]

    def _feature(
        self, name: str, rows: int, histories: Histories, lengths: Int | None = None, history_only: bool = False
    ) -> SparseFeature:
        pooling = mean_bag(histories.windows, self._length, lengths, history_only)
        return SparseFeature(name, rows, pooling, lengths is not None, history_only)

    def _read(self, name: str) -> NDArray[Any]:
        return np.load(self._path(name), mmap_mode="r")

    def _path(self, name: str) -> Path:
        return self._folder / f"{file_stem(name)}.npy"
