"""A random sample of rows that does not depend on how a table is cut into blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.datasets.hashing import derive_key, split_mix

SAMPLE_ROWS = 2**18
_KEY = derive_key(3)


def row_bits(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """64 random bits for each of the rows [first, first + count)."""
    return split_mix(key, np.arange(first, first + count)).view(np.uint64)


class RowSample:
    """Holds the ``SAMPLE_ROWS`` rows with the smallest random numbers, or all rows if there are no more."""

    def __init__(self) -> None:
        self._bits: list[NDArray[np.uint64]] = []
        self._values: list[NDArray[Any]] = []
        self._limit = np.uint64(2**64 - 1)
        self._held = 0

    def add(self, bits: NDArray[np.uint64], values: NDArray[Any]) -> None:
        """Offer rows ``values`` [n, ...] with the random numbers ``bits`` [n]."""
        keep = bits <= self._limit
        self._bits.append(bits[keep])
        self._values.append(values[keep])
        self._held += int(keep.sum())
        if self._held > 2 * SAMPLE_ROWS:
            self._shrink()

    def values(self) -> NDArray[Any]:
        """Return the sample, [m, ...]."""
        self._shrink()
        return self._values[0]

    def _shrink(self) -> None:
        bits, values = np.concatenate(self._bits), np.concatenate(self._values)
        if len(bits) > SAMPLE_ROWS:
            smallest = np.sort(np.argpartition(bits, SAMPLE_ROWS)[:SAMPLE_ROWS])
            bits, values = bits[smallest], values[smallest]
            self._limit = bits.max()
        self._bits, self._values, self._held = [bits], [values], len(bits)


def sample_bits(first: int, count: int) -> NDArray[np.uint64]:
    """Return the random numbers by which rows are sampled."""
    return row_bits(_KEY, first, count)
