"""Learning a transformation from a survey of training rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.table.columns import keys_of, text_buffers, wide_bits
from dlrm_fused.datasets.preparation.table.splits import TRAIN
from dlrm_fused.datasets.preparation.table.survey import Survey
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.transformation import (
    FIRST_KEPT,
    DenseKind,
    DenseTransform,
    HistoryColumns,
    IdEncoding,
    SparseColumn,
    Transformation,
    Vocabulary,
)
from dlrm_fused.errors import DataError

QUANTILES = 256


def learn(
    survey: Survey, min_frequency: int, hash_buckets: Mapping[str, int], history: HistoryColumns | None
) -> Transformation:
    """
    Args:
        min_frequency: values that occur less often in training rows have no id of their own.
        hash_buckets: rows of the tables of those columns that are hashed instead.

    Raises:
        DataError: if the training rows do not tell what is needed.
    """
    check_survey(survey)
    question = survey.question
    dense = tuple(
        quantiles(name, survey.for_quantiles(name))
        if kind is DenseKind.quantile
        else DenseTransform(name, kind, survey.moments[name].mean, survey.moments[name].deviation)
        for name, kind in question.dense.items()
    )
    sparse = tuple(
        IdEncoding(column, hash_buckets[column.name], None, question.nulls)
        if column.name in hash_buckets
        else _numbered(survey, column, min_frequency)
        for column in question.sparse
    )
    return Transformation(question.labels, dense, sparse, history, question.sample_weight, nulls=question.nulls)


def check_survey(survey: Survey) -> None:
    """
    Raises:
        DataError: if a split has no rows, a column no values in training rows, or those of a label are all the same, or all
            weights of a split 0.
    """
    for name, rows in zip(SPLITS, survey.rows, strict=True):
        if not rows:
            counts = ", ".join(f"{count} {split}" for split, count in zip(SPLITS, survey.rows, strict=True))
            raise DataError(f"--input: no row for the {name} split ({counts}); give more rows, or split them in another way")
    rows = survey.rows[TRAIN]
    for label, positives in zip(survey.question.labels, survey.positives[:, TRAIN], strict=True):
        if positives in (0, rows):
            raise DataError(
                f"--label {label}: is {int(positives > 0)} in all {rows} training rows, so there is nothing to "
                "learn; choose another column or other rows"
            )
    for name, weight in zip(SPLITS, survey.weight, strict=True):
        if not weight:
            raise DataError(
                f"--sample-weight {survey.question.sample_weight}: is 0 in all {name} rows, so that none counts; choose "
                "another column or other rows"
            )
    unknown = [("--dense", name) for name, moments in survey.moments.items() if not moments.count]
    unknown += [("--sparse", name) for name, lengths in survey.lengths.items() if lengths.missing == lengths.values]
    for option, name in unknown:
        raise DataError(f"{option} {name}: all values are missing in {rows} training rows; leave the column out")


def quantiles(name: str, sample: NDArray[np.float64]) -> DenseTransform:
    """Return the transform to the share of rows below a value, from a sample without NaN [n].

    Equal values lie in the middle of their share.
    """
    values, counts = np.unique(sample, return_counts=True)
    middle = (counts.cumsum() - counts / 2) / counts.sum()
    chosen = np.unique(np.searchsorted(middle, np.linspace(middle[0], middle[-1], QUANTILES)))
    points, positions = values[chosen], 2 * middle[chosen] - 1
    return DenseTransform(name, DenseKind.quantile, points=tuple(points.tolist()), positions=tuple(positions.tolist()))


def _numbered(survey: Survey, column: SparseColumn, min_frequency: int) -> IdEncoding:
    counter = survey.counters[column.name]
    kept = counter.frequent(min_frequency)
    check_kept(column.name, len(kept), counter.distinct, min_frequency)
    return IdEncoding(
        column, FIRST_KEPT + len(kept), _vocabulary(column.name, kept["value"].combine_chunks()), survey.question.nulls
    )


def check_kept(name: str, kept: int, distinct: int, min_frequency: int) -> None:
    """
    Raises:
        DataError: if no value of a column is frequent enough for an id of its own.
    """
    if not kept:
        raise DataError(
            f"--sparse {name}: none of its {distinct} values occurs --min-frequency={min_frequency} times in training rows; "
            f"lower that, use --hash-buckets {name}=N, or leave the column out"
        )


def _vocabulary(name: str, values: pa.Array) -> Vocabulary:
    keys = keys_of(values)
    if pa.types.is_decimal(values.type):
        bits, is_beyond = wide_bits(values)
        if ((bits < 0) & ~is_beyond).any():
            raise DataError(
                f"--sparse {name}: has values below 0 and others beyond {2**63 - 1}; allowed: whole numbers of 64 bits, all "
                f"signed or all unsigned, or --hash-buckets {name}=N"
            )
        return Vocabulary.of(keys, bits.view(np.uint64), None)
    if pa.types.is_integer(values.type):
        return Vocabulary.of(keys, values.to_numpy().astype(np.int64), None)
    data, offsets = text_buffers(values)
    stored: tuple[Any, Any] = data.copy(), offsets
    return Vocabulary.of(keys, *stored)
