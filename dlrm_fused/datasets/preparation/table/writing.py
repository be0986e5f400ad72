"""The second pass over a table: applying a transformation to its rows and writing them as a prepared set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from dlrm_fused.datasets.preparation.writer import SPLITS, SplitFiles
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature, labels_shape
from dlrm_fused.datasets.storage import ranges
from dlrm_fused.datasets.transformation import MISSING, IdEncoding, Int, Transformation


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

    Raises:
        DataError: if a value cannot be used.
    """
    encode = partial(_encode_block, transformation=transformation, split=split, interactions=interactions)
    features = tuple(SparseFeature(each.column.name, each.rows, jagged=each.column.is_list) for each in transformation.sparse)
    weighted = bool(transformation.sample_weight)
    schema = DatasetSchema(transformation.dense_features, features, labels=transformation.label_names, has_weights=weighted)
    for name in SPLITS:
        (output / name).mkdir()
    with ExitStack() as stack:
        splits = [SplitFiles(output / name, schema, stack) for name in SPLITS]
        histories = stack.enter_context(InteractionFiles(output, transformation)) if interactions else None
        for block in _with_progress(map_on_threads(encode, read_blocks(files, columns), workers)):
            _append(block, splits)
            if histories is not None:
                first_label = block.labels.reshape(len(block.labels), -1)[:, 0]
                histories.append(block.split, block.interactions, block.single, block.jagged, first_label)
        token_features = histories.finish() if histories else ()
    samples = {name: written.ids.rows for name, written in zip(SPLITS, splits, strict=True) if written.ids.rows}
    schema = replace(
        schema,
        sparse_features=tuple(_with_pooling_factor(feature, splits) for feature in features),
        token_features=token_features,
        history_length=transformation.history.length if transformation.history else 0,
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


def _append(block: EncodedBlock, splits: Sequence[SplitFiles]) -> None:
    order = np.argsort(block.split, kind="stable")
    stops = np.bincount(block.split, minlength=len(splits)).cumsum()
    for files, start, stop in zip(splits, [0, *stops], stops, strict=False):
        if stop > start:
            rows = order[start:stop]
            lengths = {name: np.diff(offsets)[rows] for name, (_, offsets) in block.jagged.items()}
            jagged = {
                name: (values[ranges(offsets[rows], lengths[name])], lengths[name])
                for name, (values, offsets) in block.jagged.items()
            }
            weights = None if block.weights is None else block.weights[rows]
            files.append(block.labels[rows], block.dense[rows], block.single[rows], jagged, weights)


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
