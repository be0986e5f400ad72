"""Counting how often each value of a column occurs, in bounded memory.

Counts are added up in memory. When there are too many, they are moved to a file, in parts by the keys of the values (as in a
hash join on disk); at the end one part after the other is added up over all files.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.table.columns import WIDE, keys_of

ENTRIES_IN_MEMORY = 2**19
PARTS = 64
_SCHEMA_OF = {kind: pa.schema([("value", kind), ("count", pa.int64())]) for kind in (pa.int64(), WIDE, pa.string())}


class ValueCounter:
    """Counts the values of one column.

    Args:
        value_type: int64, which becomes ``WIDE`` with the first value beyond it, or string.
    """

    def __init__(self, value_type: pa.DataType, path: Path) -> None:
        self._schema = _SCHEMA_OF[value_type]
        self._path = path
        self._pending: list[pa.Table] = []
        self._entries = 0
        self._files: list[Path] = []
        self.distinct = 0  # known after frequent()

    def add(self, values: pa.Array, counts: NDArray[np.int64]) -> None:
        """Add ``counts`` [n] of distinct ``values`` [n]; those that are 0 are left out."""
        if values.type == WIDE:
            self._schema = _SCHEMA_OF[WIDE]
        table = pa.table([values, counts], ["value", "count"]).cast(self._schema)
        self._pending.append(table if counts.all() else table.filter(counts > 0))
        self._entries += len(self._pending[-1])
        if self._entries > ENTRIES_IN_MEMORY:
            merged = self._merged()
            self._pending, self._entries = [merged], len(merged)
            if self._entries > ENTRIES_IN_MEMORY // 2:
                self._spill(merged)

    def frequent(self, threshold: int) -> pa.Table:
        """Return the values that occur ``threshold`` times or more, with columns ``value`` and ``count``.

        They are in descending order of their counts, those of equal counts in that of their values: whatever the order of rows.
        """
        kept = []
        for part in self._parts():
            self.distinct += len(part)
            kept.append(part.filter(pc.greater_equal(part["count"], threshold)))
        return pa.concat_tables(kept).sort_by([("count", "descending"), ("value", "ascending")]).combine_chunks()

    def _parts(self) -> Iterator[pa.Table]:
        """Return all counts, each value in one part only."""
        if not self._files:
            yield self._merged()
            return
        if self._entries:
            self._spill(self._merged())
        for number in range(PARTS):
            yield _merge([self._read(path, number).cast(self._schema) for path in self._files])
        for path in self._files:
            path.unlink()

    def _spill(self, counts: pa.Table) -> None:
        """Move the counts to the next file, one batch for each part."""
        values = counts["value"].combine_chunks()
        part = (keys_of(values).view(np.uint64) % np.uint64(PARTS)).astype(np.uint8)
        sorted_counts = counts.take(np.argsort(part, kind="stable")).combine_chunks()
        sizes = np.bincount(part, minlength=PARTS).tolist()
        path = self._path.with_name(f"{self._path.name}.{len(self._files)}")
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self._schema) as writer:
            start = 0
            for size in sizes:
                columns = [column.chunk(0).slice(start, size) for column in sorted_counts.columns]
                writer.write_batch(pa.record_batch(columns, schema=self._schema))
                start += size
        self._files.append(path)
        self._pending, self._entries = [], 0

    def _read(self, path: Path, number: int) -> pa.Table:
        with pa.OSFile(str(path)) as source:
            return pa.Table.from_batches([pa.ipc.open_file(source).get_batch(number)])

    def _merged(self) -> pa.Table:
        return _merge([self._schema.empty_table(), *(table.cast(self._schema) for table in self._pending)])


def _merge(tables: list[pa.Table]) -> pa.Table:
    counted = pa.concat_tables(tables).group_by("value").aggregate([("count", "sum")])
    return counted.rename_columns({"count_sum": "count"}).select(["value", "count"])
