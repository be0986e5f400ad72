"""Histories of a table's rows: each row is an interaction of its user, at a time, with what its token columns say.

Rows are encoded in the order of the files; what histories need of them is kept until all rows are there, since the rows of a
user may lie anywhere. Then about 300 bytes of memory are taken for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.histories import GAP_ROWS, find_histories, write_interactions
from dlrm_fused.datasets.preparation.table.columns import Categories, read_categories
from dlrm_fused.datasets.preparation.table.files import Block
from dlrm_fused.datasets.preparation.table.times import MICROSECONDS, read_times
from dlrm_fused.datasets.preparation.writer import SPLITS, write_array
from dlrm_fused.datasets.schema import SparseFeature
from dlrm_fused.datasets.transformation import Int, SparseColumn, Transformation, token_name
from dlrm_fused.datasets.values import NONE, NullMarkers

HISTORY = "--history"
TOKEN_LABEL, TOKEN_GAP = "token_label", "token_gap"
LABEL_ROWS = 2


_SPLIT, _USER, _ITEM, _SECONDS = "split", "user", "item", "seconds"  # columns beside those of tokens


@dataclass(frozen=True)
class InteractionColumns:
    """The columns of which interactions are made."""

    user: SparseColumn
    item: SparseColumn
    time: str
    time_format: str
    nulls: NullMarkers = NONE

    def read(self, block: Block, split: NDArray[np.uint8], labels: NDArray[np.uint8], ids: pl.DataFrame) -> pl.DataFrame:
        """Return what histories need of n rows. A row whose user is missing is of a user of its own.

        Args:
            split, labels: [n], of each row.
            ids: of each row, a column for each sparse feature.
        """
        users = _row_keys(read_categories(block, self.user, self.nulls))
        nobody = users == 0
        users[nobody] = -1 - block.first - np.flatnonzero(nobody)
        items = _row_keys(read_categories(block, self.item, self.nulls))
        seconds = read_times(block, self.time, HISTORY, self.time_format) // MICROSECONDS
        of_rows = {_SPLIT: split, _USER: users, _ITEM: items, _SECONDS: seconds, TOKEN_LABEL: labels}
        return pl.DataFrame(of_rows).hstack(ids.rename(token_name))


def _row_keys(values: Categories) -> Int:
    """Return the key of each row's value, 0 for a missing one: [n]."""
    return np.append(values.keys(), 0)[values.number]


def write_histories(output: Path, blocks: list[pl.DataFrame], transformation: Transformation) -> tuple[SparseFeature, ...]:
    """Write ``history.npy`` of all splits and the folder ``interactions``; returns the token features.

    Args:
        blocks: of all rows, from :meth:`InteractionColumns.read`; the list is emptied.
    """
    assert transformation.history is not None
    length = transformation.history.length
    table = pl.concat(blocks, rechunk=True)
    blocks.clear()  # else all rows would be in memory twice
    histories = find_histories(table[_USER].to_numpy(), table[_ITEM].to_numpy(), table[_SECONDS].to_numpy(), length)
    split = table[_SPLIT].to_numpy()
    for number, name in enumerate(SPLITS):
        write_array(output / name / "history.npy", histories.windows[split == number], np.int64)
    names = [*map(token_name, transformation.history.items), TOKEN_LABEL]
    table = table.select(names)
    tokens = table[histories.order].with_columns(pl.Series(TOKEN_GAP, histories.gap[histories.order]))
    rows = {token_name(encoding.column.name): encoding.rows for encoding in transformation.sparse}
    rows |= {TOKEN_LABEL: LABEL_ROWS, TOKEN_GAP: GAP_ROWS}
    return write_interactions(output, tokens, rows, TOKEN_LABEL, histories.windows, length)
