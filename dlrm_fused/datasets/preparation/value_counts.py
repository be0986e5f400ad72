"""Counting how often each value of a column occurs, in bounded memory.

Counts are added up in memory. When there are too many, they are moved to a file, sorted by parts; at the end polars adds up one
part after the other over all files, of which it reads the row groups of that part.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

ENTRIES_IN_MEMORY = 2**19
PARTS = 64
_ORDER = ("first", "count", "value")


class ValueCounter:
    """Counts the values of one column, and keeps where each occurs first.

    Args:
        path: files of counts are beside it, with its name before theirs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[pl.DataFrame] = []
        self._entries = 0
        self._files: list[Path] = []
        self.distinct = 0  # known after frequent()

    def add(self, values: pa.Array, counts: NDArray[np.int64], first: NDArray[np.int64] | None = None) -> None:
        """Add distinct values.

        Args:
            values: [n], texts or whole numbers; all of int64 but those in arrays of decimals.
            counts: [n], of each; those that are 0 are left out.
            first: [n], the row of each one's first occurrence, if the order of the result depends on it.
        """
        columns = {"value": pl.from_arrow(values), "count": counts, "first": np.zeros_like(counts) if first is None else first}
        self._pending.append(pl.DataFrame(columns).filter(pl.col("count") > 0))
        self._entries += self._pending[-1].height
        if self._entries > ENTRIES_IN_MEMORY:
            self._pending = [_sum(frame.lazy() for frame in self._pending)]
            self._entries = self._pending[0].height
            if self._entries > ENTRIES_IN_MEMORY // 2:
                self._spill()

    def frequent(self, threshold: int) -> pa.Table:
        """Return the values that occur ``threshold`` times or more, with columns ``value``, ``count`` and ``first``.

        They are in the order of their first rows; of equal ones in descending order of their counts, and then in that of their
        values: without first rows, whatever the order of rows.
        """
        if self._files:
            self._spill()
            files = [pl.scan_parquet(path) for path in self._files]
            counts = [[file.filter(pl.col("part") == part).drop("part") for file in files] for part in range(PARTS)]
        else:
            counts = [[frame.lazy() for frame in self._pending]]
        kept = []
        for of_part in counts:
            sums = _sum(of_part)
            self.distinct += sums.height
            kept.append(sums.filter(pl.col("count") >= threshold).lazy())
        for path in self._files:
            path.unlink()
        table = _joined(kept).sort(_ORDER, descending=[False, True, False]).collect().to_arrow()
        value = table.schema.field("value").type
        is_text = pa.types.is_string_view(value) or pa.types.is_large_string(value)
        return table.set_column(0, "value", table["value"].cast(pa.string() if is_text else value))

    def _spill(self) -> None:
        """Move the counts to the next file."""
        path = self._path.with_name(f"{self._path.name}.{len(self._files)}")
        # The text is hashed, since a number then has the same part whatever its type.
        part = (pl.col("value").cast(pl.String).hash() % PARTS).cast(pl.UInt8)
        counts = _joined(frame.lazy() for frame in self._pending).with_columns(part=part).sort("part").collect()
        counts.write_parquet(path, row_group_size=max(1, counts.height // PARTS))
        self._files.append(path)
        self._pending, self._entries = [counts.drop("part").clear()], 0


def _sum(counts: Iterable[pl.LazyFrame]) -> pl.DataFrame:
    """Return the sum of counts, by value."""
    sums = _joined(counts).group_by("value").agg(pl.sum("count"), pl.min("first"))
    return sums.collect(engine="streaming")


def _joined(counts: Iterable[pl.LazyFrame]) -> pl.LazyFrame:
    """Return all counts, their values as decimals if some are: one is then beyond int64."""
    frames = list(counts)
    types = {frame.collect_schema()["value"] for frame in frames}
    wide = [kind for kind in types if kind.is_decimal()]
    return pl.concat([frame.cast({"value": wide[0]}) if wide else frame for frame in frames])
