"""The second pass over a table: applying a transformation to its rows and writing them as a prepared set.

Rows are encoded in the order of the files. Of histories, where each row is an interaction of its user, what they need is kept
until all rows are there, since the rows of a user may lie anywhere. Then about 300 bytes of memory are taken for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm_fused.datasets.parallel import map_on_threads
from dlrm_fused.datasets.preparation.histories import GAP_ROWS, find_histories, write_interactions
from dlrm_fused.datasets.preparation.table.columns import Categories, read_categories, read_labels, read_numbers, read_weights
from dlrm_fused.datasets.preparation.table.files import Block, TableFile, read_blocks
from dlrm_fused.datasets.preparation.table.splits import Split, TimeSplit
from dlrm_fused.datasets.preparation.table.times import read_times
from dlrm_fused.datasets.preparation.writer import SPLITS, NpyAppender, SplitFiles, id_columns
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature, labels_shape
from dlrm_fused.datasets.table_format import MICROSECONDS, TableFormat
from dlrm_fused.datasets.transformation import (
    MISSING,
    UNSEEN,
    HistoryColumns,
    IdEncoding,
    Int,
    SparseColumn,
    Transformation,
    token_name,
)
from dlrm_fused.datasets.values import NONE, NullMarkers

HISTORY = "--history"
TOKEN_LABEL, TOKEN_GAP = "token_label", "token_gap"
LABEL_ROWS = 2


_SPLIT, _USER, _ITEM, _TIME = "split", "user", "item", "time"  # columns beside those of tokens; times in microseconds


@dataclass(frozen=True)
class InteractionColumns:
    """The columns of which interactions are made.

    Attributes:
        first_time: of the table of the transformation, if it is another one: microseconds since 1970.
    """

    user: SparseColumn
    item: SparseColumn
    tokens: tuple[str, ...]
    time: str
    time_format: str
    nulls: NullMarkers = NONE
    first_time: int | None = None

    def read(self, block: Block, split: NDArray[np.uint8], labels: NDArray[np.uint8], ids: pl.DataFrame) -> pl.DataFrame:
        """Return what histories need of n rows. A row whose user is missing is of a user of its own.

        Args:
            split, labels: [n], of each row.
            ids: of each row, a column for each sparse feature.
        """
        users = _row_keys(read_categories(block, self.user, self.nulls, HISTORY))
        nobody = users == 0
        users[nobody] = -1 - block.first - np.flatnonzero(nobody)
        items = _row_keys(read_categories(block, self.item, self.nulls, HISTORY))
        times = read_times(block, self.time, HISTORY, self.time_format)
        last = int(times.argmax())
        if TableFormat(time=self.time_format).is_of_another_unit(int(times[last]), self.first_time):
            block.refuse(self.time, HISTORY, last, f"times in {self.time_format}; --time-format tells another unit")
        of_rows = {_SPLIT: split, _USER: users, _ITEM: items, _TIME: times, TOKEN_LABEL: labels}
        return pl.DataFrame(of_rows).hstack(ids.select(self.tokens).rename(token_name))


def rows_of_tokens(history: HistoryColumns, rows: Mapping[str, int]) -> dict[str, int]:
    """Return the rows of each token feature's table, in their order; ``rows`` are those of the sparse features."""
    return {**{token_name(item): rows[item] for item in history.items}, TOKEN_LABEL: LABEL_ROWS, TOKEN_GAP: GAP_ROWS}


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
    times = table[_TIME].to_numpy()
    histories = find_histories(table[_USER].to_numpy(), table[_ITEM].to_numpy(), times, length, MICROSECONDS)
    split = table[_SPLIT].to_numpy()
    for number, name in enumerate(SPLITS):
        with NpyAppender(output / name / "history.npy", np.int64, (3,)) as file:
            file.append(histories.windows[split == number])
    rows = rows_of_tokens(transformation.history, {encoding.column.name: encoding.rows for encoding in transformation.sparse})
    table = table.select(name for name in rows if name != TOKEN_GAP)
    tokens = table[histories.order].with_columns(pl.Series(TOKEN_GAP, histories.gap[histories.order]))
    seconds = times[histories.order] // MICROSECONDS
    return write_interactions(output, tokens, seconds, rows, TOKEN_LABEL, histories.windows, length)


@dataclass(frozen=True)
class EncodedBlock:
    """Rows of one block as they are written.

    Attributes:
        split: [n], position in ``SPLITS``.
        labels: [n] uint8, or [n, L] of several.
        dense: [n, D] float32.
        ids: a column of int32, or of lists of them, for each sparse feature.
        interactions: what histories need; None without.
        weights: [n] float32; None without.
        times: [n] int64, microseconds since 1970; None unless rows are split by them.
        unseen: [S, 2] of each sparse feature, how many of its values have no id of their own, and how many are not missing.
    """

    split: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    dense: NDArray[np.float32]
    ids: pl.DataFrame
    interactions: pl.DataFrame | None
    weights: NDArray[np.float32] | None
    times: NDArray[np.int64] | None
    unseen: Int


def write_set(
    files: Sequence[TableFile],
    columns: Sequence[str],
    transformation: Transformation,
    split: Split,
    interactions: InteractionColumns | None,
    output: Path,
    workers: int,
    origin: dict[str, Any],
) -> tuple[PreparedInfo, Int]:
    """Write all files of a prepared set but the transformation; also return :attr:`EncodedBlock.unseen` of all rows.

    Raises:
        DataError: if a value cannot be used.
    """
    encode = partial(_encode_block, transformation=transformation, split=split, interactions=interactions)
    features = tuple(SparseFeature(each.column.name, each.rows, jagged=each.column.is_list) for each in transformation.sparse)
    weighted = bool(transformation.sample_weight)
    schema = DatasetSchema(
        transformation.dense_features,
        features,
        labels=transformation.label_names,
        has_weights=weighted,
        has_times=isinstance(split, TimeSplit),
    )
    interactions_of_blocks = []
    unseen = np.zeros((len(features), 2), np.int64)
    with ExitStack() as stack:
        splits = [SplitFiles(output / name, schema, stack) for name in SPLITS]
        for block in _with_progress(map_on_threads(encode, read_blocks(files, columns), workers)):
            _append(block, splits)
            unseen += block.unseen
            if block.interactions is not None:
                interactions_of_blocks.append(block.interactions)
    token_features = write_histories(output, interactions_of_blocks, transformation) if interactions else ()
    samples = {name: written.ids.rows for name, written in zip(SPLITS, splits, strict=True) if written.ids.rows}
    schema = replace(
        schema,
        sparse_features=tuple(_with_pooling_factor(feature, splits) for feature in features),
        token_features=token_features,
        history_length=transformation.history.length if transformation.history else 0,
        has_token_times=bool(token_features),
    )
    info = PreparedInfo(schema, samples, origin, interactions=sum(samples.values()) if token_features else 0)
    info.save(output)
    return info, unseen


def _encode_block(
    block: Block, transformation: Transformation, split: Split, interactions: InteractionColumns | None
) -> EncodedBlock:
    if isinstance(split, TimeSplit):
        times = split.times(block)
        split_of_row = split.assign_times(times)
    else:
        times, split_of_row = None, split.assign(block)
    dense = [feature.apply(read_numbers(block, feature.name, transformation.nulls)) for feature in transformation.dense]
    encoded = [_ids(block, encoding) for encoding in transformation.sparse]
    ids = pl.DataFrame([series for series, _ in encoded])
    labels = [read_labels(block, name) for name in transformation.labels]
    return EncodedBlock(
        split_of_row,
        np.stack(labels, axis=1).reshape(-1, *labels_shape(transformation.labels)),
        np.stack(dense or [np.ones(len(block), np.float32)], axis=1),
        ids,
        interactions.read(block, split_of_row, labels[0], ids) if interactions else None,
        read_weights(block, transformation.sample_weight) if transformation.sample_weight else None,
        times,
        np.array([counts for _, counts in encoded], np.int64).reshape(-1, 2),
    )


def _ids(block: Block, encoding: IdEncoding) -> tuple[pl.Series, tuple[int, int]]:
    """Return the ids of a column's values, as a list for each row if it has lists; and :attr:`EncodedBlock.unseen` of it."""
    values = read_categories(block, encoding.column, encoding.nulls)
    ids = values.take(encoding.of_keys(values.keys()), MISSING)
    unseen = 0 if encoding.vocabulary is None else int(np.count_nonzero(ids == UNSEEN))
    counts = unseen, int(np.count_nonzero(ids != MISSING))
    if values.offsets is None:
        return pl.Series(encoding.column.name, ids), counts
    return pl.Series(encoding.column.name, pa.LargeListArray.from_arrays(values.offsets, ids)), counts


def _append(block: EncodedBlock, splits: Sequence[SplitFiles]) -> None:
    for number, files in enumerate(splits):
        rows = np.flatnonzero(block.split == number)
        if rows.size:
            weights, times = (None if of_rows is None else of_rows[rows] for of_rows in (block.weights, block.times))
            files.append(block.labels[rows], block.dense[rows], *id_columns(block.ids[rows]), weights, times=times)


def _with_pooling_factor(feature: SparseFeature, splits: Sequence[SplitFiles]) -> SparseFeature:
    if not feature.jagged:
        return feature
    mean = sum(files.ids.count(feature.name) for files in splits) / sum(files.ids.rows for files in splits)
    return replace(feature, pooling_factor=round(mean, 4))


def _with_progress(blocks: Iterator[EncodedBlock]) -> Iterator[EncodedBlock]:
    with tqdm(desc="writing", unit=" rows", unit_scale=True) as bar:
        for block in blocks:
            yield block
            bar.update(len(block.split))
