"""Counting how often each value of a column occurs, in bounded memory.

Counts are added up in memory. When there are too many, they are moved to files, each of which has all counts of the values with
certain keys (as in a hash join on disk); at the end one file after the other is added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.table.columns import keys_of

ENTRIES_IN_MEMORY = 2**19
PARTS = 64
_SCHEMA_OF = {kind: pa.schema([("value", kind), ("count", pa.int64())]) for kind in (pa.int64(), pa.string())}


class ValueCounter:
    """Counts the values of one column.

    Args:
        value_type: int64 or string.
        path: prefix of the files.
    """

    def __init__(self, value_type: pa.DataType, path: Path) -> None:
        self._schema = _SCHEMA_OF[value_type]
        self._path = path
        self._pending: list[pa.Table] = []
        self._entries = 0
        self._writers: list[pa.RecordBatchStreamWriter] = []
        self.distinct = 0  # known after frequent()

    def add(self, values: pa.Array, counts: NDArray[np.int64]) -> None:
        """Add ``counts`` [n] of distinct ``values`` [n]; those that are 0 are left out."""
        table = pa.table([values, counts], self._schema)
        self._pending.append(table if counts.all() else table.filter(counts > 0))
        self._entries += len(self._pending[-1])
        if self._entries > ENTRIES_IN_MEMORY:
            merged = self._merged()
            self._pending, self._entries = [merged], len(merged)
            if self._entries > ENTRIES_IN_MEMORY // 2:
                self._spill(merged)

    def frequent(self, threshold: int) -> pa.Table:
        """The values that occur ``threshold`` times or more, with columns ``value`` and ``count``.

        They are in descending order of their counts, those of equal counts in that of their values: whatever the order of rows.
        """
        kept = []
        for part in self._parts():
            self.distinct += len(part)
            kept.append(part.filter(pc.greater_equal(part["count"], threshold)))
        return pa.concat_tables(kept).sort_by([("count", "descending"), ("value", "ascending")]).combine_chunks()

    def _parts(self) -> Iterator[pa.Table]:
        """All counts, each value in one part only."""
        if not self._writers:
            yield self._merged()
            return
        self._spill(self._merged())
        for writer in self._writers:
            writer.close()
        for number in range(PARTS):
            with pa.OSFile(str(self._file(number))) as source:
                yield _merge([pa.ipc.open_stream(source).read_all()])
            self._file(number).unlink()

    def _spill(self, counts: pa.Table) -> None:
        if not self._writers:
            self._writers = [pa.ipc.new_stream(str(self._file(number)), self._schema) for number in range(PARTS)]
        values = counts["value"].combine_chunks()
        part = (keys_of(values).view(np.uint64) % np.uint64(PARTS)).astype(np.uint8)
        order = np.argsort(part, kind="stable")
        ends = np.searchsorted(part[order], np.arange(PARTS), side="right").tolist()
        for writer, start, stop in zip(self._writers, [0, *ends], ends, strict=False):
            writer.write_table(counts.take(order[start:stop]))
        self._pending, self._entries = [], 0

    def _merged(self) -> pa.Table:
        return _merge([self._schema.empty_table(), *self._pending])

    def _file(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _merge(tables: list[pa.Table]) -> pa.Table:
    counted = pa.concat_tables(tables).group_by("value").aggregate([("count", "sum")])
    return counted.rename_columns({"count_sum": "count"}).select(["value", "count"])
