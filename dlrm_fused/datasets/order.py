"""The order in which an epoch visits the samples of a split."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_fused.datasets.hashing import derive_key, shift_right, split_mix

# A window is made of this many blocks of contiguous rows.
_BLOCKS_PER_WINDOW = 64
_FEISTEL_ROUNDS = 6


class SampleOrder:
    """A permutation of ``samples`` rows for every epoch, computed where it is asked for: no state, no memory.

    With a window of at least ``samples`` rows, all rows are permuted. With a smaller one, blocks of contiguous rows are
    permuted over the split and rows within windows of 64 blocks, so that at any time only a window of the files is being read.
    A window of 0 keeps the order of the files.

    Args:
        samples: rows of the split.
        window_rows: rows that are shuffled together.
        seed: with the epoch, decides the permutation.
        device: where :meth:`rows` puts its result.
    """

    def __init__(self, samples: int, window_rows: int, seed: int, device: torch.device | str = "cpu") -> None:
        self._samples = samples
        self._seed = seed
        self._device = torch.device(device)
        self._block = max(1, window_rows // _BLOCKS_PER_WINDOW)
        # Whole blocks, so that a window never splits one.
        self._window = samples if window_rows >= samples else window_rows // self._block * self._block

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Rows at positions [start, stop) of the epoch: int64 [stop - start]."""
        if not 0 <= start <= stop <= self._samples:
            raise IndexError(f"positions [{start}, {stop}) of an epoch of {self._samples} samples")
        positions = torch.arange(start, stop, device=self._device)
        if self._window == 0 or start == stop:
            return positions
        windows = range(start // self._window, (stop - 1) // self._window + 1)
        shuffled = torch.cat([self._within_window(epoch, window, start, stop) for window in windows])
        return shuffled if self._window == self._samples else self._over_blocks(epoch, shuffled)

    def _within_window(self, epoch: int, window: int, start: int, stop: int) -> Tensor:
        """Permuted positions of that part of [start, stop) that lies in the window."""
        first = window * self._window
        size = min(self._window, self._samples - first)
        offsets = torch.arange(max(start - first, 0), min(stop - first, size), device=self._device)
        return first + permute(offsets, size, derive_key(self._seed, epoch, window))

    def _over_blocks(self, epoch: int, positions: Tensor) -> Tensor:
        """Rows of the positions once whole blocks are permuted; the incomplete block at the end keeps its place.

        The split is turned like a ring, by another amount each epoch, so that the end and the borders of blocks move.
        """
        key = derive_key(self._seed, epoch)
        blocks = self._samples // self._block
        block = positions // self._block
        moved = permute(block.clamp(max=blocks - 1), blocks, key)
        moved = torch.where(block < blocks, moved, block)
        return (moved * self._block + positions % self._block + key % self._samples) % self._samples


def permute(values: Tensor, size: int, key: int) -> Tensor:
    """A pseudorandom permutation of [0, size), applied to ``values`` (int64, in that range).

    A balanced Feistel network over the next even number of bits (Luby, Rackoff: How to construct pseudorandom permutations,
    SIAM J. Comput. 1988), applied again to what falls outside of the range (cycle walking; Black, Rogaway: Ciphers with
    Arbitrary Finite Domains, CT-RSA 2002). Expected passes: below 4.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [derive_key(key, number) for number in range(_FEISTEL_ROUNDS)]
    result = _feistel(values, half_bits, keys)
    outside = (result >= size).nonzero().view(-1)
    while outside.numel():
        again = _feistel(result[outside], half_bits, keys)
        result[outside] = again
        outside = outside[again >= size]
    return result


def _feistel(values: Tensor, half_bits: int, keys: list[int]) -> Tensor:
    mask = 2**half_bits - 1
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ shift_right(split_mix(key, right), 64 - half_bits)
    return (left << half_bits) | right
