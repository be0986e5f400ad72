"""Reader of the sets that data/prepare.py writes; data/README.md describes the files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets.batch import Samples, sparse_from_features
from dlrm_fused.datasets.data_settings import folder_of, rows_of_tables
from dlrm_fused.datasets.order import SampleOrder
from dlrm_fused.datasets.schema import INTERACTIONS, SCHEMA_FILE, PreparedInfo, SparseFeature, checksums_of, labels_shape
from dlrm_fused.datasets.storage import IdColumns, SetFolder, check_finite, check_labels, check_weights, ranges
from dlrm_fused.errors import DataError

logger = logging.getLogger("dlrm_fused")


class PreparedDataset:
    """A prepared set, memory-mapped.

    Args:
        table_rows: rows of every table, in order of ``schema.tables``; ids are taken modulo them. Default: those of the set.
        reads_times: whether samples have the times of tokens, if the set has them.

    Raises:
        DataError: if a file is missing, truncated, or contradicts ``dataset.json``, or a split that it names has no samples.

    Attributes:
        schema: with tables of ``table_rows``.
        stored_schema: of the files: their ids are in [0, rows) of it.
    """

    generator_device = None

    def __init__(self, folder: str | Path, table_rows: Sequence[int] | None = None, reads_times: bool = True) -> None:
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"data.path={folder}: no such folder; prepare a data set with data/prepare.py")
        info = PreparedInfo.load(folder)
        self.stored_schema = stored = info.schema
        self.schema = stored.with_table_rows(table_rows) if table_rows else stored
        checksums = checksums_of(folder)
        if checksums is None:
            logger.warning("%s: made by an earlier release, without checksums: damage of its bytes cannot be seen", folder)
        self._splits = {
            split: _SplitFiles(SetFolder(folder, split.name, checksums), split, info)
            for split in Split
            if split.name in info.samples
        }
        self._folder = folder
        self._sparse_modulo = _modulo(stored.sparse_features, self.schema.sparse_features)
        self._token_modulo = _modulo(stored.token_features, self.schema.token_features)
        self._interactions = None
        if stored.token_features:
            self._interactions = _Interactions(SetFolder(folder, INTERACTIONS, checksums), info, reads_times)

    def samples(self, split: Split) -> int:
        return self._files(split).samples

    def times(self, split: Split) -> NDArray[np.int64]:
        """Return when each sample of a split happened: int64 [samples], microseconds since 1970, as they are mapped.

        Raises:
            DataError: if that is not known, or the split is not there.
        """
        times = self._files(split).times
        if times is None:
            raise DataError(
                f"{self._folder}: does not say when its samples happened; for data.windows prepare it with --split-by-time, "
                "with movielens --split time"
            )
        return times.all()

    def window_order(self, config: Config, first: int, samples: int) -> SampleOrder:
        """Return an order of the samples of a window of time; see :class:`~dlrm_fused.datasets.dataset.KnowsTimes`."""
        return SampleOrder(samples, config.data.shuffle_window_rows, config.seed)

    def read(self, split: Split, rows: Tensor) -> Samples:
        files, positions = self._files(split), rows.numpy()
        ids, lengths = files.ids.read(positions)
        names = [feature.name for feature in self.schema.sparse_features]
        samples = Samples(
            dense=torch.from_numpy(files.read_dense(positions)),
            sparse=sparse_from_features(names, _take_modulo(ids, self._sparse_modulo), lengths, positions.size),
            labels=torch.from_numpy(files.read_labels(positions)),
            weights=files.read_weights(positions),
        )
        if self._interactions is not None:
            windows = files.read_windows(positions)
            ids, lengths, samples.token_times = self._interactions.read(windows)
            names = [feature.name for feature in self.schema.token_features]
            bags = positions.size * (self.schema.history_length + 1)
            samples.tokens = sparse_from_features(names, _take_modulo(ids, self._token_modulo), lengths, bags)
            samples.history_lengths = torch.from_numpy((windows[:, 1] - windows[:, 0]).astype(np.int32))
        return samples

    def _files(self, split: Split) -> _SplitFiles:
        if split not in self._splits:
            there = ", ".join(known.name for known in self._splits)
            raise DataError(
                f"{self._folder}: holds no split {split.name}, only {there}; name another split, or prepare a set that has it"
            )
        return self._splits[split]


def _modulo(stored: Sequence[SparseFeature], wanted: Sequence[SparseFeature]) -> list[np.int32 | None]:
    return [np.int32(new.rows) if new.rows < old.rows else None for old, new in zip(stored, wanted, strict=True)]


def _take_modulo(ids: list[NDArray[np.int32]], modulo: list[np.int32 | None]) -> list[NDArray[np.int32]]:
    return [column if rows is None else column % rows for column, rows in zip(ids, modulo, strict=True)]


class _SplitFiles:
    """The mapped files of one split."""

    def __init__(self, folder: SetFolder, split: Split, info: PreparedInfo) -> None:
        schema = info.schema
        self._info, self._folder = info, folder.root / folder.name
        self._where = f"{folder.root}, split {split.name}"
        self._dense_names = schema.dense_features
        self.samples = info.samples[split.name]
        if self.samples < 1:
            raise DataError(f"{folder.root / SCHEMA_FILE}: split {split.name} has {self.samples} samples, expected 1 or more")
        self._dense = folder.map("dense.npy", [self.samples, len(schema.dense_features)], ["float32"])
        self._labels = folder.map("labels.npy", [self.samples, *labels_shape(schema.labels)], ["uint8"])
        self._weights = folder.map("weights.npy", [self.samples], ["float32"]) if schema.has_weights else None
        self.ids = IdColumns(folder, schema.sparse_features, self.samples, self._where)
        self._windows = folder.map("history.npy", [self.samples, 3], ["int64"]) if schema.token_features else None
        self.times = folder.map("times.npy", [self.samples], ["int64"]) if schema.has_times else None

    def read_dense(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        dense = self._dense.take(rows)
        check_finite(dense, self._dense_names, self._where)
        return dense

    def read_labels(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        labels = self._labels.take(rows)
        check_labels(labels, self._where)
        return labels.astype(np.float32)

    def read_weights(self, rows: NDArray[np.int64]) -> Tensor | None:
        if self._weights is None:
            return None
        weights = self._weights.take(rows)
        check_weights(weights, self._where)
        return torch.from_numpy(weights)

    def read_windows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """First, stop and candidate of the samples' histories: [b, 3].

        Raises:
            DataError: if one is out of range, or a history reaches its candidate or what comes after it.
        """
        assert self._windows is not None
        interactions, length = self._info.interactions, self._info.schema.history_length
        windows = self._windows.take(rows)
        first, stop, candidate = windows.T
        fits = (first >= 0) & (first <= stop) & (stop <= candidate) & (candidate < interactions) & (stop - first <= length)
        wrong = np.flatnonzero(~fits)
        if wrong.size:
            row, found = rows[wrong[0]], windows[wrong[0]].tolist()
            raise DataError(
                f"{self._folder / 'history.npy'}: row {row} holds {found}, expected first <= stop <= candidate in "
                f"[0, {interactions}), and a history of at most {length}; prepare the set again"
            )
        return windows


class _Interactions:
    """The mapped interactions of all splits."""

    def __init__(self, folder: SetFolder, info: PreparedInfo, reads_times: bool) -> None:
        self._features = info.schema.token_features
        self._tokens = info.schema.history_length + 1
        self._ids = IdColumns(folder, self._features, info.interactions, f"{folder.root / folder.name}")
        self._path = folder.root / folder.name / "times.npy"
        has_times = reads_times and info.schema.has_token_times
        self._times = folder.map(self._path.name, [info.interactions], ["int64"]) if has_times else None

    def read(self, windows: NDArray[np.int64]) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64] | int], Tensor | None]:
        """Return each token feature's ids in all tokens of b samples, how many each of the b * T tokens has, and the times of
        the tokens ([b, T], as in :class:`Samples`; None where these are not known).

        Args:
            windows: [b, 3], of :meth:`_SplitFiles.read_windows`.

        Raises:
            DataError: if an id is out of range, times of a history decrease, or one is not before its candidate's.
        """
        first, stop, candidate = windows.T
        occupied = stop - first + 1
        candidates = occupied.cumsum() - 1  # where each sample's last token is
        rows = ranges(first, occupied)
        rows[candidates] = candidate
        bags = ranges(np.arange(len(windows)) * self._tokens, occupied)
        of_history = np.ones(rows.size, bool)
        of_history[candidates] = False

        ids, lengths = self._ids.read(rows)
        for number, feature in enumerate(self._features):
            per_token = np.broadcast_to(lengths[number], rows.size)
            if feature.history_only:
                ids[number] = ids[number][np.repeat(of_history, per_token) if feature.jagged else of_history]
                per_token = per_token * of_history
            of_bag = np.zeros(len(windows) * self._tokens, np.int64)
            of_bag[bags] = per_token
            lengths[number] = of_bag
        if self._times is None:
            return ids, lengths, None
        times = self._times.take(rows)
        self._check_times(times, rows, of_history)
        of_tokens = np.repeat(times[candidates], self._tokens)
        of_tokens[bags] = times
        return ids, lengths, torch.from_numpy(of_tokens).view(len(windows), self._tokens)

    def _check_times(self, times: NDArray[np.int64], rows: NDArray[np.int64], of_history: NDArray[np.bool_]) -> None:
        """Check the times of interactions ``rows``, histories and candidates in turn: all [n]."""
        earlier, later, in_history = times[:-1], times[1:], of_history[1:]
        wrong = np.flatnonzero(of_history[:-1] & ((earlier > later) | (~in_history & (earlier == later))))
        if wrong.size:
            at = wrong[0]
            allowed = "times that do not decrease" if in_history[at] else "a time before that of the candidate, the latter"
            raise DataError(
                f"{self._path}: rows {rows[at]} and {rows[at + 1]}, one after the other in a sample, hold {times[at]} and "
                f"{times[at + 1]}, expected {allowed}; prepare the set again"
            )


def open_prepared(config: Config, device: torch.device) -> PreparedDataset:
    """Return the set of ``data.source=prepared``; an :data:`~dlrm_fused.datasets.OpenDataset`."""
    folder = folder_of(config)
    schema = PreparedInfo.load(folder).schema
    table_rows = rows_of_tables(config, [feature.rows for feature in schema.tables])
    return PreparedDataset(folder, table_rows, config.model.kind.reads_times)
