"""Statistics of columns: mean and deviation, quantiles, and a random sample of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.datasets.hashing import derive_key, split_mix
from dlrm_fused.datasets.transformation import DenseKind, DenseTransform

QUANTILES = 256
SAMPLE_ROWS = 2**18
_SAMPLE_KEY = derive_key(3)

Float = NDArray[np.float64]


@dataclass
class Moments:
    """Number, mean and sum of squared deviations of values that come in parts, without the cancellation of sums of squares.

    Chan, Golub, LeVeque: Algorithms for computing the sample variance, The American Statistician 37, 1983, eq. 2.1.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Float) -> Moments:
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


def quantiles(name: str, sample: Float) -> DenseTransform:
    """Return the transform to the share of rows below a value, from a sample without NaN [n].

    Equal values lie in the middle of their share.
    """
    values, counts = np.unique(sample, return_counts=True)
    middle = (counts.cumsum() - counts / 2) / counts.sum()
    chosen = np.unique(np.searchsorted(middle, np.linspace(middle[0], middle[-1], QUANTILES)))
    points, positions = values[chosen], 2 * middle[chosen] - 1
    return DenseTransform(name, DenseKind.quantile, points=tuple(points.tolist()), positions=tuple(positions.tolist()))


def row_bits(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """64 random bits for each of the rows [first, first + count)."""
    return split_mix(key, np.arange(first, first + count)).view(np.uint64)


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


def sample_bits(first: int, count: int) -> NDArray[np.uint64]:
    """Return the random numbers by which rows are sampled, however a table is cut into blocks."""
    return row_bits(_SAMPLE_KEY, first, count)
