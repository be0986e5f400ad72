"""The order in which an epoch visits samples that can be read by row group only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.datasets.hashing import derive_key
from dlrm_fused.datasets.order import permute

# A batch has at least so many samples of a lane: with fewer, copying them costs more than reading the files.
_SAMPLES_OF_LANE = 64


class RowGroupOrder:
    """An order of row groups, and of rows within each, for every epoch, computed where it is asked for: it has no state.

    With a window of 0 rows, that of the files. Otherwise row groups are permuted, and rows within each row group. The result
    is cut into lanes of equal length, and every batch takes an equal part of each lane, in the order of the lanes. So a batch
    mixes rows of as many row groups as there are lanes, while a rank, which takes contiguous samples of every batch, needs
    the row groups of its own lanes alone. The number of lanes does not depend on the number of ranks: it is the largest
    power of two for which a row group of each fits into the window.

    Rows that do not fill a batch are left out: another part of the rows in every epoch, if they are permuted.

    Args:
        group_rows: rows of each row group; row groups are numbered as they lie in the files, and their rows in turn.
        window_rows: rows of row groups that are open at the same time, over all ranks; 0 keeps the order of the files.
        largest: rows of the largest row group, where ``group_rows`` are of parts.
    """

    def __init__(
        self, group_rows: Sequence[int], batch_size: int, window_rows: int, seed: int, largest: int | None = None
    ) -> None:
        self._sizes = np.array(group_rows, np.int64)
        self._starts = np.concatenate([[0], self._sizes.cumsum()])
        self._batch = batch_size
        self._shuffled = window_rows > 0
        self._seed = seed
        lanes = self._count_lanes(window_rows, largest or int(self._sizes.max()))
        self._lane_starts = batch_size * np.arange(lanes + 1) // lanes  # in a batch
        self._batches = int(self._starts[-1]) // batch_size
        # The orders of whole epochs and row groups are made once rather than for every batch.
        self._sequence = lru_cache(maxsize=2)(self._make_sequence)
        self._permutation = lru_cache(maxsize=2 * lanes)(self._make_permutation)

    def _count_lanes(self, window_rows: int, largest: int) -> int:
        most = min(window_rows // largest, self._sizes.size, self._batch // _SAMPLES_OF_LANE)
        return 1 << (most.bit_length() - 1) if most else 1

    @property
    def lanes(self) -> int:
        """Parts of the epoch that every batch takes samples from."""
        return self._lane_starts.size - 1

    @property
    def batches_of_half_a_group(self) -> int:
        """Return the number of batches, about, in which a lane gets through half of a row group; at least 1."""
        return max(1, int(self._sizes.mean()) * self.lanes // (2 * self._batch))

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return rows at positions [start, stop) of the epoch, of which batches are slices: int64 [stop - start]."""
        if not 0 <= start <= stop <= self._batches * self._batch:
            raise IndexError(f"positions [{start}, {stop}) of an epoch of {self._batches} batches of {self._batch} samples")
        groups, bounds = self._sequence(epoch)
        places = self._places(np.arange(start, stop))
        slots = np.searchsorted(bounds, places, side="right") - 1
        within = places - bounds[slots]
        if self._shuffled:
            for run in equal_runs(slots):
                within[run] = self._permutation(epoch, int(groups[slots[run.start]]))[within[run]]
        return torch.from_numpy(self._starts[groups[slots]] + within)

    def _places(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of the samples at ``positions`` in the sequence of row groups, which lanes divide among them."""
        batch, sample = np.divmod(positions, self._batch)
        lane = np.searchsorted(self._lane_starts, sample, side="right") - 1
        first, after = self._lane_starts[lane], self._lane_starts[lane + 1]
        return self._batches * first + batch * (after - first) + sample - first

    def _make_sequence(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row groups in the order of the epoch, and where each begins in it."""
        groups = np.arange(self._sizes.size)
        if self._shuffled:
            groups = permute(groups, groups.size, derive_key(self._seed, epoch))
        return groups, np.concatenate([[0], self._sizes[groups].cumsum()[:-1]])

    def _make_permutation(self, epoch: int, group: int) -> NDArray[np.int32]:
        size = int(self._sizes[group])
        return permute(np.arange(size), size, derive_key(self._seed, epoch, group)).astype(np.int32)


def equal_runs(values: NDArray[np.int64]) -> list[slice]:
    """Return the slices of ``values`` ([n], n >= 1) within which consecutive elements are equal."""
    bounds = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), values.size]
    return [slice(first, stop) for first, stop in pairwise(bounds)]
