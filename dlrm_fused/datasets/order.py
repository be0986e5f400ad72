"""The order in which an epoch visits the samples of a split."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.datasets.hashing import derive_key, shift_right, split_mix

# A window is made of this many blocks of contiguous rows.
_BLOCKS_PER_WINDOW = 64
_FEISTEL_ROUNDS = 6


class SampleOrder:
    """A permutation of ``samples`` rows for every epoch, computed where it is asked for: it has no state and takes no memory.

    With a window of at least ``samples`` rows, all rows are permuted. With a smaller one, blocks of contiguous rows are
    permuted over the split and rows within windows of 64 blocks, so that only a window of the files is read at a time.
    A window of 0 keeps the order of the files.
    """

    def __init__(self, samples: int, window_rows: int, seed: int, device: torch.device | str = "cpu") -> None:
        self._samples = samples
        self._device = device
        self._seed = seed
        self._block = max(1, window_rows // _BLOCKS_PER_WINDOW)
        # Whole blocks, so that a window never splits one.
        self._window = samples if window_rows >= samples else window_rows // self._block * self._block

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return rows at positions [start, stop) of the epoch: int64 [stop - start]."""
        if not 0 <= start <= stop <= self._samples:
            raise IndexError(f"positions [{start}, {stop}) of an epoch of {self._samples} samples")
        if self._window == 0 or start == stop:
            return torch.arange(start, stop, device=self._device)
        windows = range(start // self._window, (stop - 1) // self._window + 1)
        rows = np.concatenate([self._within_window(epoch, window, start, stop) for window in windows])
        if self._window < self._samples:
            rows = self._over_blocks(epoch, rows)
        return torch.from_numpy(rows).to(self._device)

    def _within_window(self, epoch: int, window: int, start: int, stop: int) -> NDArray[np.int64]:
        """Permuted positions of that part of [start, stop) that lies in the window."""
        first = window * self._window
        size = min(self._window, self._samples - first)
        offsets = np.arange(max(start - first, 0), min(stop - first, size))
        return first + permute(offsets, size, derive_key(self._seed, epoch, window))

    def _over_blocks(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return rows of the positions once whole blocks are permuted; an incomplete block at the end keeps its place.

        The split is turned like a ring, by another amount each epoch, so that its end and the borders of blocks move.
        """
        key = derive_key(self._seed, epoch)
        blocks = self._samples // self._block
        block, within = np.divmod(positions, self._block)
        moved = permute(np.minimum(block, blocks - 1), blocks, key)
        rows = np.where(block < blocks, moved, block) * self._block + within
        return (rows + key % self._samples) % self._samples


def permute(values: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Return a pseudorandom permutation of [0, size), applied to ``values``, which are in that range.

    A Feistel network over pairs from [0, a) x [0, b), where a * b is little more than ``size``; what falls outside of the
    range goes through it again (generalized Feistel cipher and cycle walking of Black, Rogaway: Ciphers with Arbitrary
    Finite Domains, CT-RSA 2002).
    """
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    keys = [derive_key(key, number) for number in range(_FEISTEL_ROUNDS)]
    result = _feistel(values, a, b, keys)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        again = _feistel(result[outside], a, b, keys)
        result[outside] = again
        outside = outside[again >= size]
    return result


def _feistel(values: NDArray[np.int64], a: int, b: int, keys: list[int]) -> NDArray[np.int64]:
    left, right = np.divmod(values, b)
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _below(a, left_key, right)) % a
        right = (right + _below(b, right_key, left)) % b
    return left * b + right


def _below(limit: int, key: int, counter: NDArray[np.int64]) -> NDArray[np.int64]:
    """Pseudorandom numbers in [0, limit), for limits up to 2**31."""
    return (shift_right(split_mix(key, counter), 32) * limit) >> 32
