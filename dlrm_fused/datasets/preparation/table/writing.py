"""The second pass over a table: applying a transformation to its rows and writing them as a prepared set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm_fused.datasets.preparation.parallel import map_on_threads
from dlrm_fused.datasets.preparation.table.columns import Categories, read_categories, read_labels, read_numbers, read_weights
from dlrm_fused.datasets.preparation.table.files import Block, TableFile, read_blocks
from dlrm_fused.datasets.preparation.table.interactions import InteractionColumns, InteractionFiles, Interactions
from dlrm_fused.datasets.preparation.table.splits import Split
from dlrm_fused.datasets.preparation.writer import SPLITS, NpyAppender
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature, labels_shape
from dlrm_fused.datasets.storage import ranges
from dlrm_fused.datasets.transformation import MISSING, IdEncoding, Int, Transformation, file_stem


@dataclass(frozen=True)
class EncodedBlock:
    """Rows of one block as they are written.

    Attributes:
        split: [n], position in ``SPLITS``.
        labels: [n] uint8, or [n, L] of several.
        dense: [n, D] float32.
        single: [n, S] int32, ids of the features with one value a row.
        jagged: values and offsets of the others.
        weights: [n] float32; None without.
    """

    split: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    dense: NDArray[np.float32]
    single: NDArray[np.int32]
    jagged: dict[str, tuple[NDArray[np.int32], Int]]
    interactions: Interactions | None
    weights: NDArray[np.float32] | None


def write_set(
    files: Sequence[TableFile],
    columns: Sequence[str],
    transformation: Transformation,
    split: Split,
    interactions: InteractionColumns | None,
    output: Path,
    workers: int,
    origin: dict[str, Any],
) -> PreparedInfo:
    """Write all files of a prepared set but the transformation.

    Args:
        columns: all that is read.
        interactions: where users and times are, for histories.
        output: an empty folder.

    Raises:
        DataError: if a value cannot be used.
    """
    encode = partial(_encode_block, transformation=transformation, split=split, interactions=interactions)
    with ExitStack() as stack:
        splits = [_SplitFiles(output / name, transformation, stack) for name in SPLITS]
        histories = stack.enter_context(InteractionFiles(output, transformation)) if interactions else None
        for block in _with_progress(map_on_threads(encode, read_blocks(files, columns), workers)):
            _append(block, splits)
            if histories is not None:
                first_label = block.labels.reshape(len(block.labels), -1)[:, 0]
                histories.append(block.split, block.interactions, block.single, block.jagged, first_label)
        token_features = histories.finish() if histories else ()
    samples = {name: written.rows for name, written in zip(SPLITS, splits, strict=True) if written.rows}
    history_length = transformation.history.length if transformation.history else 0
    schema = DatasetSchema(
        transformation.dense_features,
        tuple(_feature(encoding, splits) for encoding in transformation.sparse),
        token_features,
        history_length,
        transformation.label_names,
        bool(transformation.sample_weight),
    )
    info = PreparedInfo(schema, samples, origin, interactions=sum(samples.values()) if token_features else 0)
    info.save(output)
    return info


def _encode_block(
    block: Block, transformation: Transformation, split: Split, interactions: InteractionColumns | None
) -> EncodedBlock:
    dense = [feature.apply(read_numbers(block, feature.name, transformation.nulls)) for feature in transformation.dense]
    single: list[NDArray[np.int32]] = []
    jagged: dict[str, tuple[NDArray[np.int32], Int]] = {}
    for encoding in transformation.sparse:
        values = read_categories(block, encoding.column, encoding.nulls)
        ids = encode(values, encoding)
        if values.offsets is None:
            single.append(ids)
        else:
            jagged[encoding.column.name] = ids, values.offsets
    labels = [read_labels(block, name) for name in transformation.labels]
    return EncodedBlock(
        split.assign(block),
        np.stack(labels, axis=1).reshape(-1, *labels_shape(transformation.labels)),
        np.stack(dense or [np.ones(len(block), np.float32)], axis=1),
        np.stack(single, axis=1) if single else np.zeros((len(block), 0), np.int32),
        jagged,
        interactions.read(block) if interactions else None,
        read_weights(block, transformation.sample_weight) if transformation.sample_weight else None,
    )


def encode(values: Categories, encoding: IdEncoding) -> NDArray[np.int32]:
    """Return the ids of values, row after row: [total]."""
    return values.take(encoding.of_keys(values.keys()), MISSING)


def _append(block: EncodedBlock, splits: Sequence[_SplitFiles]) -> None:
    order = np.argsort(block.split, kind="stable")
    stops = np.bincount(block.split, minlength=len(splits)).cumsum()
    for files, start, stop in zip(splits, [0, *stops], stops, strict=False):
        if stop > start:
            files.append(block, order[start:stop])


class _SplitFiles:
    """The files of one split."""

    def __init__(self, folder: Path, transformation: Transformation, stack: ExitStack) -> None:
        def file(name: str, dtype: type[np.generic], row_shape: tuple[int, ...] = ()) -> NpyAppender:
            return stack.enter_context(NpyAppender(folder / f"{file_stem(name)}.npy", dtype, row_shape))

        folder.mkdir()
        names = [encoding.column.name for encoding in transformation.sparse if encoding.column.is_list]
        self._labels = file("labels", np.uint8, labels_shape(transformation.labels))
        self._weights = file("weights", np.float32) if transformation.sample_weight else None
        self._dense = file("dense", np.float32, (len(transformation.dense_features),))
        singles = len(transformation.sparse) - len(names)
        self._single = file("single", np.int32, (singles,)) if singles else None
        self._values = {name: file(f"{name}.values", np.int32) for name in names}
        self._offsets = {name: file(f"{name}.offsets", np.int64) for name in names}
        for offsets in self._offsets.values():
            offsets.append(np.zeros(1, np.int64))

    @property
    def rows(self) -> int:
        return self._labels.rows

    def values(self, name: str) -> int:
        """Return how many values a jagged feature has in all rows."""
        return self._values[name].rows

    def append(self, block: EncodedBlock, rows: Int) -> None:
        self._labels.append(block.labels[rows])
        self._dense.append(block.dense[rows])
        if self._weights and block.weights is not None:
            self._weights.append(block.weights[rows])
        if self._single:
            self._single.append(block.single[rows])
        for name, (values, offsets) in block.jagged.items():
            starts, lengths = offsets[rows], np.diff(offsets)[rows]
            self._offsets[name].append(self._values[name].rows + lengths.cumsum())
            self._values[name].append(values[ranges(starts, lengths)])


def _feature(encoding: IdEncoding, splits: Sequence[_SplitFiles]) -> SparseFeature:
    name = encoding.column.name
    if not encoding.column.is_list:
        return SparseFeature(name, encoding.rows)
    mean = sum(files.values(name) for files in splits) / sum(files.rows for files in splits)
    return SparseFeature(name, encoding.rows, round(mean, 4), jagged=True)


def _with_progress(blocks: Iterator[EncodedBlock]) -> Iterator[EncodedBlock]:
    with tqdm(desc="writing", unit=" rows", unit_scale=True) as bar:
        for block in blocks:
            yield block
            bar.update(len(block.split))
