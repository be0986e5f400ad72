"""The first pass over a table: what it holds, and what the transformation is learned from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.table.columns import (
    read_categories,
    read_labels,
    read_numbers,
    read_weights,
)
from dlrm_fused.datasets.preparation.table.files import Block
from dlrm_fused.datasets.preparation.table.splits import TRAIN, Split
from dlrm_fused.datasets.preparation.table.statistics import Moments, RowSample, sample_bits
from dlrm_fused.datasets.preparation.value_counts import ValueCounter
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.transformation import DenseKind, SparseColumn, Values, file_stem, signed_log
from dlrm_fused.datasets.values import NONE, NullMarkers

_NO_LENGTH = 2**31 - 1  # longer than any
_DASHES = ("-", "\u2013", "\u2014")
# Texts that programs write for a missing value. Each may also be a real value: NA is Namibia, too.
_SUSPECTS = ("\\N", "NULL", "Null", "null", "NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "None", "(null)", "?", *_DASHES)


@dataclass(frozen=True)
class Question:
    """The things to find out about each block.

    Attributes:
        counted: names of the sparse columns whose values are counted.
        nulls: values of dense and sparse columns that are missing ones.
        escaped_quote: a quote behind a backslash, as values hold it where ``--escape`` names none; empty if no file is text.
    """

    labels: tuple[str, ...]
    dense: dict[str, DenseKind]
    sparse: tuple[SparseColumn, ...]
    split: Split
    counted: frozenset[str]
    sample_weight: str = ""
    nulls: NullMarkers = NONE
    escaped_quote: str = ""


@dataclass(frozen=True)
class ValueLengths:
    """Numbers of values of a sparse column in training rows: in all, missing, and the least and the most in a row."""

    values: int = 0
    missing: int = 0
    shortest: int = 0
    longest: int = 0


@dataclass
class BlockSurvey:
    """The contribution of one block; all of it but ``rows``, ``positives`` and ``weight`` is of training rows.

    Attributes:
        weight: sum of the weights of each split's rows; their number without weights.
        sampled: random numbers by which rows are sampled, and the columns of these rows for quantiles [n, Q].
        counts: distinct values and their numbers, by name of the column.
        suspects: how often a value occurs that may stand for a missing one, by column and value.
        escaped: a value with an escaped quote, by column.
    """

    rows: NDArray[np.int64]
    positives: NDArray[np.int64]
    weight: NDArray[np.float64]
    moments: list[Moments] = field(default_factory=list)
    extremes: list[tuple[float, float]] = field(default_factory=list)
    sampled: tuple[NDArray[np.uint64], NDArray[np.float64]] | None = None
    lengths: list[ValueLengths] = field(default_factory=list)
    counts: dict[str, tuple[pa.Array, NDArray[np.int64]]] = field(default_factory=dict)
    suspects: Counter[tuple[str, str]] = field(default_factory=Counter)
    escaped: dict[str, str] = field(default_factory=dict)


def survey_block(block: Block, question: Question) -> BlockSurvey:
    """
    Raises:
        DataError: if a value cannot be used.
    """
    split = question.split.assign(block)
    positives = [np.bincount(split, read_labels(block, name), len(SPLITS)) for name in question.labels]
    weights = read_weights(block, question.sample_weight) if question.sample_weight else None
    survey = BlockSurvey(
        np.bincount(split, minlength=len(SPLITS)),
        np.stack(positives).astype(np.int64),
        np.bincount(split, weights, len(SPLITS)).astype(np.float64),
    )
    is_train = split == TRAIN
    _survey_dense(block, question, is_train, survey)
    for column in question.sparse:
        _survey_sparse(block, column, question, is_train, survey)
    return survey


def _survey_dense(block: Block, question: Question, is_train: NDArray[np.bool_], survey: BlockSurvey) -> None:
    sampled = []
    for name, kind in question.dense.items():
        values = read_numbers(block, name, question.nulls)[is_train]
        known = values[~np.isnan(values)]
        survey.moments.append(Moments.of(signed_log(known) if kind is DenseKind.log else known))
        survey.extremes.append((known.min(initial=np.inf), known.max(initial=-np.inf)))
        if kind is DenseKind.quantile:
            sampled.append(values)
    if sampled:
        bits = sample_bits(block.first, len(block))[is_train]
        survey.sampled = bits, np.stack(sampled, axis=1)


def _survey_sparse(
    block: Block, column: SparseColumn, question: Question, is_train: NDArray[np.bool_], survey: BlockSurvey
) -> None:
    values = read_categories(block, column, question.nulls)
    lengths = np.ones(len(block), np.int64) if values.offsets is None else np.diff(values.offsets)
    number = values.number[is_train if values.offsets is None else np.repeat(is_train, lengths)]
    of_train = lengths[is_train]
    counts = np.bincount(number + 1, minlength=len(values.distinct) + 1)
    missing, counts = int(counts[0]), counts[1:]
    shortest, longest = int(of_train.min(initial=_NO_LENGTH)), int(of_train.max(initial=0))
    survey.lengths.append(ValueLengths(number.size, missing, shortest, longest))
    if column.name in question.counted:
        survey.counts[column.name] = values.distinct, counts
    if column.values is Values.text:
        for at in np.flatnonzero(pc.is_in(values.distinct, pa.array(_SUSPECTS)).to_numpy(zero_copy_only=False)):
            survey.suspects[column.name, values.distinct[int(at)].as_py()] += int(counts[at])
        if question.escaped_quote:
            found = values.distinct.filter(pc.match_substring(values.distinct, question.escaped_quote))
            if len(found):
                survey.escaped[column.name] = found[0].as_py()


class Survey:
    """The findings of all blocks together, about training rows unless stated otherwise.

    Args:
        scratch: folder for files of counts.

    Attributes:
        rows, positives, weight: as of a block; splits by their position in ``SPLITS``.
    """

    def __init__(self, question: Question, scratch: Path) -> None:
        self.question = question
        self.rows = np.zeros(len(SPLITS), np.int64)
        self.positives = np.zeros((len(question.labels), len(SPLITS)), np.int64)
        self.weight = np.zeros(len(SPLITS))
        self.moments = {name: Moments() for name in question.dense}
        self.extremes = dict.fromkeys(question.dense, (np.inf, -np.inf))
        self.lengths: dict[str, ValueLengths] = {}
        self.counters = {
            column.name: ValueCounter(scratch / file_stem(column.name))
            for column in question.sparse
            if column.name in question.counted
        }
        self.suspects: Counter[tuple[str, str]] = Counter()
        self.escaped: dict[str, str] = {}
        self._sample = RowSample()

    def add(self, block: BlockSurvey) -> None:
        """Add the block that comes next."""
        self.rows += block.rows
        self.positives += block.positives
        self.weight += block.weight
        for name, moments, (low, high) in zip(self.question.dense, block.moments, block.extremes, strict=True):
            self.moments[name].add(moments)
            self.extremes[name] = min(self.extremes[name][0], low), max(self.extremes[name][1], high)
        if block.sampled:
            self._sample.add(*block.sampled)
        for column, lengths in zip(self.question.sparse, block.lengths, strict=True):
            self.lengths[column.name] = _joined(self.lengths.get(column.name), lengths)
        for name, (values, counts) in block.counts.items():
            self.counters[name].add(values, counts)
        self.suspects += block.suspects  # leaves out values that occur in no training row
        self.escaped = block.escaped | self.escaped

    def sample(self) -> dict[str, NDArray[np.float64]]:
        """Return a sample of the known values of each column with quantiles: [m]."""
        names = [name for name, kind in self.question.dense.items() if kind is DenseKind.quantile]
        if not names:
            return {}
        return {name: column[~np.isnan(column)] for name, column in zip(names, self._sample.values().T, strict=True)}


def _joined(left: ValueLengths | None, right: ValueLengths) -> ValueLengths:
    if left is None:
        return right
    return ValueLengths(
        left.values + right.values,
        left.missing + right.missing,
        min(left.shortest, right.shortest),
        max(left.longest, right.longest),
    )
