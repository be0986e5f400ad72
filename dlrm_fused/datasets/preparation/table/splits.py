"""The division of rows into training, validation and test, and random samples of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm_fused.datasets.hashing import derive_key, split_mix
from dlrm_fused.datasets.preparation.table.arrow import as_text, decoded, is_text
from dlrm_fused.datasets.preparation.table.files import Block, TableFile, read_blocks
from dlrm_fused.datasets.preparation.table.times import TimeSurvey, read_times
from dlrm_fused.datasets.preparation.writer import SPLITS

TRAIN = SPLITS.index("train")
SAMPLE_ROWS = 2**18
_SAMPLE_KEY = derive_key(3)
BY_TIME, BY_COLUMN = "--split-by-time", "--split-by-column"


class Split(Protocol):
    def assign(self, block: Block) -> NDArray[np.uint8]:
        """Return the split of each row of a block, as its position in ``SPLITS``: [n]."""
        ...


@dataclass(frozen=True)
class FileSplit:
    """Puts all rows of a file into one split."""

    of_files: Mapping[Path, str]

    def assign(self, block: Block) -> NDArray[np.uint8]:
        return np.full(len(block), SPLITS.index(self.of_files[block.path]), np.uint8)


@dataclass(frozen=True)
class RandomSplit:
    """Rows are drawn by the seed and their position in the table.

    Attributes:
        held_out: the share of rows that are not for training; half of it is for validation.
    """

    held_out: float
    seed: int

    def assign(self, block: Block) -> NDArray[np.uint8]:
        drawn = row_bits(derive_key(4, self.seed), block.first, len(block)) / 2.0**64
        return _by_thresholds(drawn, [1 - self.held_out, 1 - self.held_out / 2])


class RowSample:
    """Holds the ``SAMPLE_ROWS`` rows with the smallest random numbers, or all rows if there are no more."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.uint64], NDArray[Any]]] = []

    def add(self, bits: NDArray[np.uint64], values: NDArray[Any]) -> None:
        """Offer rows ``values`` [n, ...] with the random numbers ``bits`` [n]."""
        self._parts.append((bits, values))
        if sum(len(part) for part, _ in self._parts) > 2 * SAMPLE_ROWS:
            self._shrink()

    def values(self) -> NDArray[Any]:
        """Return the sample, [m, ...]."""
        self._shrink()
        return self._parts[0][1]

    def _shrink(self) -> None:
        bits, values = (np.concatenate(part) for part in zip(*self._parts, strict=True))
        if len(bits) > SAMPLE_ROWS:
            smallest = np.sort(np.argpartition(bits, SAMPLE_ROWS)[:SAMPLE_ROWS])
            bits, values = bits[smallest], values[smallest]
        self._parts = [(bits, values)]


@dataclass(frozen=True)
class TimeSplit:
    """The newest rows are for the test, those before them for validation.

    Attributes:
        starts: microseconds since 1970 from which on rows are for validation, and for the test.
        first: those of the first time of the table.
        found: the first and the last time, and how they were read, for people.
    """

    column: str
    option: str
    time_format: str
    starts: tuple[int, int]
    first: int
    found: str

    @staticmethod
    def of(files: Sequence[TableFile], column: str, option: str, time_format: str, held_out: float) -> TimeSplit:
        """Cut the rows of a table by time; rows of equal times stay together. Of very many rows, a sample is cut."""
        sample, survey = RowSample(), TimeSurvey(column, option, time_format)
        for block in read_blocks(files, [column]):
            sample.add(sample_bits(block.first, len(block)), survey.read(block))
        times = np.sort(sample.values())
        at = [min(round(len(times) * share), len(times) - 1) for share in (1 - held_out, 1 - held_out / 2)]
        starts = int(times[at[0]]), int(times[at[1]])
        return TimeSplit(column, option, time_format, starts, survey.first, survey.finish())

    def times(self, block: Block) -> NDArray[np.int64]:
        """Return when each row of a block happened, [n], microseconds since 1970."""
        return read_times(block, self.column, self.option, self.time_format)

    def assign(self, block: Block) -> NDArray[np.uint8]:
        return self.assign_times(self.times(block))

    def assign_times(self, times: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the split of rows by their times."""
        return _by_thresholds(times, list(self.starts))


@dataclass(frozen=True)
class ColumnSplit:
    """A column says which split a row belongs to."""

    column: str

    def assign(self, block: Block) -> NDArray[np.uint8]:
        names = decoded(block.columns[self.column])
        if not is_text(names.type):  # no other value is one of them
            names = pa.nulls(len(names), pa.string())
        found = pc.fill_null(pc.index_in(as_text(names), pa.array(SPLITS)), len(SPLITS)).to_numpy()
        wrong = np.flatnonzero(found == len(SPLITS))
        if wrong.size:
            allowed = f"{', '.join(SPLITS)}; rename the value, or leave the row out"
            block.refuse(self.column, BY_COLUMN, int(wrong[0]), allowed)
        return found.astype(np.uint8)


def _by_thresholds(values: NDArray, starts: Sequence[float]) -> NDArray[np.uint8]:
    return np.searchsorted(starts, values, side="right").astype(np.uint8)


def row_bits(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """64 random bits for each of the rows [first, first + count)."""
    return split_mix(key, np.arange(first, first + count)).view(np.uint64)


def sample_bits(first: int, count: int) -> NDArray[np.uint64]:
    """Return the random numbers by which rows are sampled, however a table is cut into blocks."""
    return row_bits(_SAMPLE_KEY, first, count)
