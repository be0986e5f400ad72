"""Reader of Parquet files that are not prepared; :mod:`dlrm_fused.datasets.parquet_files` describes their columns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets.batch import Samples, sparse_from_features
from dlrm_fused.datasets.data_settings import rows_of_tables
from dlrm_fused.datasets.parquet_files import (
    DecodedRowGroup,
    NamedColumns,
    RowGroup,
    check_same_columns,
    decode,
    dense_columns,
    open_files,
    read_times,
    schema_of,
)
from dlrm_fused.datasets.row_group_order import RowGroupOrder, equal_runs
from dlrm_fused.datasets.schema import labels_shape
from dlrm_fused.datasets.storage import ranges
from dlrm_fused.errors import DataError

_Content = TypeVar("_Content")


class ParquetDataset:
    """The Parquet files of a folder for each split, read row group by row group in background threads.

    Memory is that of the row groups in use, see :class:`RowGroupCache`.

    Args:
        config: ``data``, ``embedding.rows`` and ``embedding.max_rows`` are used.

    Raises:
        ConfigError: if ``embedding.rows`` is missing although the files do not state the rows of all tables, or has another
            number of entries.
        DataError: if a folder that is there holds no files, or one that is damaged or empty, or columns differ.

    Attributes:
        schema: with tables as the config caps them.
        stored_schema: the schema of the files, whose ids are in [0, rows) of it.
        has_dense: whether the files have a dense feature; without, it is a constant.
    """

    generator_device = None

    def __init__(self, config: Config) -> None:
        self._folder = Path(config.data.path)
        if not self._folder.is_dir():
            raise DataError(f"data.path={self._folder}: no such folder; it needs a folder of Parquet files for each split")
        opened = {split: open_files(self._folder / split.name) for split in Split if (self._folder / split.name).is_dir()}
        if not opened:
            names = ", ".join(split.name for split in Split)
            raise DataError(f"data.path={self._folder}: none of the folders {names}; put the Parquet files of each split there")
        groups, schema = next(iter(opened.values()))
        for others, other_schema in opened.values():
            check_same_columns(other_schema, str(others[0].path), schema, str(groups[0].path))
        self._named, self._columns = NamedColumns.of(config), schema.names
        self.stored_schema = stored = schema_of(schema, groups, self._named, config.embedding.rows)
        self.has_dense = bool(dense_columns(stored, schema.names, self._named))
        self.schema = stored.with_table_rows(rows_of_tables(config, [feature.rows for feature in stored.tables]))
        self._jagged = [feature.name for feature in stored.sparse_features if feature.jagged]
        pool = ThreadPoolExecutor(config.data.workers, thread_name_prefix="parquet")
        self._splits = {split: _SplitGroups(groups, self._decode, pool) for split, (groups, _) in opened.items()}

    def samples(self, split: Split) -> int:
        return int(self._groups(split).starts[-1])

    def training_order(self, config: Config, world_size: int) -> RowGroupOrder:
        groups = self._groups(Split.train).groups
        if len(groups) < world_size:
            raise DataError(
                f"{self._folder / Split.train.name}: fewer row groups ({len(groups)}) than ranks ({world_size}); "
                "write the files with smaller row groups"
            )
        return self.window_order(config, 0, self.samples(Split.train))

    def times(self, split: Split) -> NDArray[np.int64]:
        """Read when each sample of a split happened: int64 [samples], microseconds since 1970.

        Raises:
            DataError: if there are none, rows of training are not in the order of time, or as :func:`read_times` does.
        """
        of_split, column = self._groups(split), self._named.time
        if column not in self._columns:
            raise DataError(
                f"{of_split.groups[0].path}: column {column}, of data.sample_time, is missing; its columns are "
                f"{', '.join(self._columns)}"
            )
        times = read_times(of_split.groups, column)
        earlier = 1 + np.flatnonzero(times[1:] < times[:-1])
        if split is Split.train and earlier.size:
            number = int(np.searchsorted(of_split.starts, earlier[0], side="right")) - 1
            raise DataError(
                f"{of_split.groups[number]}: row {earlier[0] - of_split.starts[number]} has an earlier {column} "
                "than the one before; for data.windows sort the split by it, over all files in the order of their names"
            )
        return times

    def window_order(self, config: Config, first: int, samples: int) -> RowGroupOrder:
        """Return an order of a part of the training split; see :class:`~dlrm_fused.datasets.dataset.KnowsTimes`."""
        starts = self._groups(Split.train).starts
        parts = np.diff(starts.clip(first, first + samples))
        batch_size, window_rows = config.training.global_batch_size, config.data.shuffle_window_rows
        largest = int(np.diff(starts)[parts > 0].max())  # which is read as a whole
        return RowGroupOrder(parts[parts > 0].tolist(), batch_size, window_rows, config.seed, largest)

    def read_ahead(self, split: Split, rows: Tensor) -> None:
        self._groups(split).request(rows.numpy())

    def read(self, split: Split, rows: Tensor) -> Samples:
        positions = rows.numpy()
        groups = self._groups(split)
        requested = groups.request(positions)
        features = self.schema.sparse_features
        dense = np.empty((positions.size, len(self.schema.dense_features)), np.float32)
        labels = np.empty((positions.size, *labels_shape(self.schema.labels)), np.float32)
        weights = np.empty(positions.size, np.float32) if self.schema.has_weights else None
        # As in the row groups, a row for each sample; transposed when complete.
        single = np.empty((positions.size, len(features) - len(self._jagged)), np.int32)
        lengths = {name: np.empty(positions.size, np.int64) for name in self._jagged}
        ids: dict[str, list[NDArray[np.int32]]] = {name: [] for name in self._jagged}
        for run, number, within in groups.runs(positions):
            group = requested[number].result()
            # With "clip", NumPy writes to `out` without a copy between; all are in range.
            group.dense.take(within, axis=0, out=dense[run], mode="clip")
            group.labels.take(within, axis=0, out=labels[run], mode="clip")
            if weights is not None and group.weights is not None:
                group.weights.take(within, out=weights[run], mode="clip")
            group.single.take(within, axis=0, out=single[run], mode="clip")
            for name, (values, offsets) in group.jagged.items():
                starts = offsets.take(within).astype(np.int64)
                lengths[name][run] = offsets.take(within + 1) - starts
                ids[name].append(values.take(ranges(starts, lengths[name][run])))
        columns = iter(np.ascontiguousarray(single.T))
        return Samples(
            dense=torch.from_numpy(dense),
            sparse=sparse_from_features(
                [feature.name for feature in features],
                [np.concatenate(ids[feature.name]) if feature.jagged else next(columns) for feature in features],
                [lengths[feature.name] if feature.jagged else 1 for feature in features],
                positions.size,
            ),
            labels=torch.from_numpy(labels),
            weights=None if weights is None else torch.from_numpy(weights),
        )

    def _groups(self, split: Split) -> _SplitGroups:
        if split not in self._splits:
            there = ", ".join(known.name for known in self._splits)
            raise DataError(f"{self._folder}: holds no split {split.name}, only {there}; put Parquet files into {split.name}/")
        return self._splits[split]

    def _decode(self, group: RowGroup) -> DecodedRowGroup:
        table_rows = [feature.rows for feature in self.schema.sparse_features]
        return decode(group, self.stored_schema, self._named, table_rows)


class RowGroupCache(Generic[_Content]):
    """Reads row groups in background threads, each once for as long as it is in use; all methods may be called by any thread.

    It holds twice as many row groups as the largest request names, and two more: those that batches are made of, and those
    that follow. What was used last is kept.

    Args:
        read: gives the content of a row group, by its number.
    """

    def __init__(self, read: Callable[[int], _Content], pool: ThreadPoolExecutor) -> None:
        self._read = read
        self._pool = pool
        self._lock = Lock()
        self._held: OrderedDict[int, Future[_Content]] = OrderedDict()
        self._largest_request = 0

    def request(self, numbers: Collection[int]) -> dict[int, Future[_Content]]:
        """Have row groups read, in the order of ``numbers``; does not wait.

        Returns:
            For each number, its content once it is read; or the exception that ``read`` raised.
        """
        with self._lock:
            self._largest_request = max(self._largest_request, len(numbers))
            for number in numbers:
                if number not in self._held:
                    self._held[number] = self._pool.submit(self._read, number)
                self._held.move_to_end(number)
            requested = {number: self._held[number] for number in numbers}
            while len(self._held) > 2 * self._largest_request + 2:
                self._held.popitem(last=False)
            return requested

    def __len__(self) -> int:
        return len(self._held)


class _SplitGroups:
    """The row groups of a split, and which rows lie in which."""

    def __init__(
        self, groups: Sequence[RowGroup], decode_group: Callable[[RowGroup], DecodedRowGroup], pool: ThreadPoolExecutor
    ) -> None:
        self.groups = groups
        self.starts = np.cumsum([0, *(group.rows for group in groups)])
        self._cache = RowGroupCache(lambda number: decode_group(groups[number]), pool)

    def request(self, rows: NDArray[np.int64]) -> dict[int, Future[DecodedRowGroup]]:
        """Have the row groups of ``rows`` read, by their numbers."""
        return self._cache.request(dict.fromkeys(self._numbers(rows).tolist()))

    def runs(self, rows: NDArray[np.int64]) -> Iterator[tuple[slice, int, NDArray[np.int64]]]:
        """Parts of ``rows`` that lie in one row group: which part, the row group's number, rows counted from its first."""
        numbers = self._numbers(rows)
        within = rows - self.starts[numbers]
        for run in equal_runs(numbers):
            yield run, int(numbers[run.start]), within[run]

    def _numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self.starts, rows, side="right") - 1


def open_parquet(config: Config, device: torch.device) -> ParquetDataset:
    """Return the set of ``data.source=parquet``; an :data:`~dlrm_fused.datasets.OpenDataset`."""
    return ParquetDataset(config)
