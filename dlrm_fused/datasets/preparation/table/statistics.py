"""Statistics of a dense column: the share of known values, mean and deviation, quantiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.datasets.transformation import DenseKind, DenseTransform, signed_log

QUANTILES = 256

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


def scaling(name: str, kind: DenseKind, moments: Moments) -> DenseTransform:
    """Return the transform that scales to mean 0 and standard deviation 1."""
    return DenseTransform(name, kind, moments.mean, moments.deviation)


def quantiles(name: str, sample: Float) -> DenseTransform:
    """Return the transform to the share of rows below a value, from a sample without NaN [n].

    Equal values lie in the middle of their share.
    """
    values, counts = np.unique(sample, return_counts=True)
    middle = (counts.cumsum() - counts / 2) / counts.sum()
    chosen = np.unique(np.searchsorted(middle, np.linspace(middle[0], middle[-1], QUANTILES)))
    points, positions = values[chosen], 2 * middle[chosen] - 1
    return DenseTransform(name, DenseKind.quantile, points=tuple(points.tolist()), positions=tuple(positions.tolist()))


def before_scaling(kind: DenseKind, values: Float) -> Float:
    """Return the values of which mean and deviation are taken: their signed logarithms if ``kind`` is ``log``."""
    return signed_log(values) if kind is DenseKind.log else values
