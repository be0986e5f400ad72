"""The first pass over a table: what it holds, and what the transformation is learned from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm_fused.datasets.preparation.table.columns import (
    read_categories,
    read_labels,
    read_numbers,
    read_weights,
)
from dlrm_fused.datasets.preparation.table.files import Block
from dlrm_fused.datasets.preparation.table.splits import TRAIN, RowSample, Split, sample_bits
from dlrm_fused.datasets.preparation.value_counts import ValueCounter
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.transformation import DenseKind, SparseColumn, Values, file_stem, signed_log
from dlrm_fused.datasets.values import NONE, NullMarkers

_NO_LENGTH = 2**31 - 1  # longer than any
_DASHES = ("-", "\u2013", "\u2014")
# Whole numbers and truths as pandas writes them to text files.
_SPELLED = "^(-?[0-9]+[.]0|True|False|TRUE|FALSE)$"
# Lists as pandas and JSON write them to text files, and as PostgreSQL does.
_BRACKETED = r"^\s*(\[(?s:.*)\]|\{(?s:.*)\})\s*$"
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


@dataclass
class Moments:
    """Number, mean and sum of squared deviations of values that come in parts, without the cancellation of sums of squares.

    Chan, Golub, LeVeque: Algorithms for computing the sample variance, The American Statistician 37, 1983, eq. 2.1.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: NDArray[np.float64]) -> Moments:
        if not values.size:
            return Moments()
        mean = float(values.mean())
        return Moments(values.size, mean, float(((values - mean) ** 2).sum()))

    def add(self, other: Moments) -> None:
        if not other.count:
            return
        total = self.count + other.count
        shift = other.mean - self.mean
        self.squares += other.squares + shift**2 * self.count * other.count / total
        self.mean += shift * other.count / total
        self.count = total

    @property
    def deviation(self) -> float:
        """Standard deviation; 1 where all values are the same, which then become 0."""
        return (self.squares / self.count) ** 0.5 or 1.0


@dataclass(frozen=True)
class ValueLengths:
    """Numbers of values of a sparse column in training rows: in all, missing, and the least and the most in a row."""

    values: int = 0
    missing: int = 0
    shortest: int = _NO_LENGTH
    longest: int = 0

    def __add__(self, other: ValueLengths) -> ValueLengths:
        shortest, longest = min(self.shortest, other.shortest), max(self.longest, other.longest)
        return ValueLengths(self.values + other.values, self.missing + other.missing, shortest, longest)


@dataclass
class Survey:
    """The findings in a block, and those of all blocks together; all but the first three are of training rows.

    Attributes:
        rows, positives, weight: of each split, by position in ``SPLITS``: rows [3], those where each label is 1 [L, 3], sum of
            the weights or else of rows [3].
        moments: of each dense column.
        extremes: its smallest and its largest value.
        lengths: of each sparse column.
        suspects: how often a value occurs that may stand for a missing one, by column and value.
        escaped: a value with an escaped quote, by column.
        spelled: by column of texts, one of its values if all are numbers or truths in another spelling than Arrow's and JSON's,
            such as 7.0 and True; otherwise empty.
        bracketed: likewise by column of single texts, if all look like lists, such as ['a', 'b'].
        counts: of a block, distinct values and their numbers, by name of the column.
        sampled: of a block, random numbers by which rows are sampled, and the columns of these rows for quantiles [n, Q].
        counters, sample: of all blocks, what becomes of these two.
    """

    question: Question
    rows: NDArray[np.int64]
    positives: NDArray[np.int64]
    weight: NDArray[np.float64]
    moments: dict[str, Moments] = field(default_factory=dict)
    extremes: dict[str, tuple[float, float]] = field(default_factory=dict)
    lengths: dict[str, ValueLengths] = field(default_factory=dict)
    suspects: Counter[tuple[str, str]] = field(default_factory=Counter)
    escaped: dict[str, str] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    bracketed: dict[str, str] = field(default_factory=dict)
    counts: dict[str, tuple[pa.Array, NDArray[np.int64]]] = field(default_factory=dict)
    sampled: tuple[NDArray[np.uint64], NDArray[np.float64]] | None = None
    counters: dict[str, ValueCounter] = field(default_factory=dict)
    sample: RowSample = field(default_factory=RowSample)

    @staticmethod
    def of(blocks: Iterable[Survey], question: Question, scratch: Path) -> Survey:
        """Join the findings in all blocks, in their order; counts that are too many are moved to files in ``scratch``."""
        positives = np.zeros((len(question.labels), len(SPLITS)), np.int64)
        survey = Survey(question, np.zeros(len(SPLITS), np.int64), positives, np.zeros(len(SPLITS)))
        survey.moments = {name: Moments() for name in question.dense}
        survey.extremes = dict.fromkeys(question.dense, (np.inf, -np.inf))
        survey.lengths = {column.name: ValueLengths() for column in question.sparse}
        names = [column.name for column in question.sparse if column.name in question.counted]
        survey.counters = {name: ValueCounter(scratch / file_stem(name)) for name in names}
        with tqdm(desc="reading", unit=" rows", unit_scale=True) as bar:
            for block in blocks:
                survey._add(block)
                bar.update(int(block.rows.sum()))
        return survey

    def _add(self, block: Survey) -> None:
        self.rows += block.rows
        self.positives += block.positives
        self.weight += block.weight
        for name, moments in block.moments.items():
            self.moments[name].add(moments)
            low, high = block.extremes[name]
            self.extremes[name] = min(self.extremes[name][0], low), max(self.extremes[name][1], high)
        if block.sampled:
            self.sample.add(*block.sampled)
        for name, lengths in block.lengths.items():
            self.lengths[name] += lengths
        for name, (values, counts) in block.counts.items():
            self.counters[name].add(values, counts)
        self.suspects += block.suspects  # leaves out values that occur in no training row
        self.escaped = block.escaped | self.escaped
        for found, of_block in ((self.spelled, block.spelled), (self.bracketed, block.bracketed)):
            for name, example in of_block.items():
                found[name] = example and found.get(name, example)

    def for_quantiles(self, name: str) -> NDArray[np.float64]:
        """Return a sample of the known values of a column with quantiles: [m]."""
        names = [name for name, kind in self.question.dense.items() if kind is DenseKind.quantile]
        values = self.sample.values()[:, names.index(name)]
        return values[~np.isnan(values)]


def survey_block(block: Block, question: Question) -> Survey:
    """
    Raises:
        DataError: if a value cannot be used.
    """
    split = question.split.assign(block)
    positives = [np.bincount(split, read_labels(block, name), len(SPLITS)) for name in question.labels]
    weights = read_weights(block, question.sample_weight) if question.sample_weight else None
    survey = Survey(
        question,
        np.bincount(split, minlength=len(SPLITS)),
        np.stack(positives).astype(np.int64),
        np.bincount(split, weights, len(SPLITS)).astype(np.float64),
    )
    is_train = split == TRAIN
    _survey_dense(block, is_train, survey)
    for column in question.sparse:
        _survey_sparse(block, column, is_train, survey)
    return survey


def _survey_dense(block: Block, is_train: NDArray[np.bool_], survey: Survey) -> None:
    sampled = []
    for name, kind in survey.question.dense.items():
        values = read_numbers(block, name, survey.question.nulls)[is_train]
        known = values[~np.isnan(values)]
        survey.moments[name] = Moments.of(signed_log(known) if kind is DenseKind.log else known)
        survey.extremes[name] = known.min(initial=np.inf), known.max(initial=-np.inf)
        if kind is DenseKind.quantile:
            sampled.append(values)
    if sampled:
        survey.sampled = sample_bits(block.first, len(block))[is_train], np.stack(sampled, axis=1)


def _all_match(texts: pa.Array, pattern: str) -> bool:
    first = texts[:1]  # of most columns it is none, which saves looking at all
    return all(pc.all(pc.match_substring_regex(some, pattern)).as_py() for some in (first, texts))


def _survey_sparse(block: Block, column: SparseColumn, is_train: NDArray[np.bool_], survey: Survey) -> None:
    name, question = column.name, survey.question
    values = read_categories(block, column, question.nulls)
    lengths = np.ones(len(block), np.int64) if values.offsets is None else np.diff(values.offsets)
    number = values.number[is_train if values.offsets is None else np.repeat(is_train, lengths)]
    of_train = lengths[is_train]
    counts = np.bincount(number + 1, minlength=len(values.distinct) + 1)
    missing, counts = int(counts[0]), counts[1:]
    shortest, longest = int(of_train.min(initial=_NO_LENGTH)), int(of_train.max(initial=0))
    survey.lengths[name] = ValueLengths(number.size, missing, shortest, longest)
    if name in question.counted:
        survey.counts[name] = values.distinct, counts
    if column.values is Values.text:
        for at in np.flatnonzero(pc.is_in(values.distinct, pa.array(_SUSPECTS)).to_numpy(zero_copy_only=False)):
            survey.suspects[name, values.distinct[int(at)].as_py()] += int(counts[at])
        if len(values.distinct):
            first = values.distinct[0].as_py()
            survey.spelled[name] = first if _all_match(values.distinct, _SPELLED) else ""
            survey.bracketed[name] = first if not column.is_list and _all_match(values.distinct, _BRACKETED) else ""
        if question.escaped_quote:
            found = values.distinct.filter(pc.match_substring(values.distinct, question.escaped_quote))
            if len(found):
                survey.escaped[name] = found[0].as_py()
