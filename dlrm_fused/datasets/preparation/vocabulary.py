"""Numbering the ids of a sparse feature that occur often enough: 0, 1, 2, ... instead of 32-bit hashes.

The ids of one feature are counted in sorted runs, as in an external merge sort: when the counts in memory reach a limit
they are written to a file, and at the end the runs are merged one range of ids after the other. So memory is bounded by
the limit and by the vocabulary that is kept, not by the number of rows or of distinct ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.datasets.transformation import FIRST_KEPT, UNSEEN

Ids = NDArray[np.uint32]


@dataclass(frozen=True)
class Counts:
    """Distinct ids in ascending order, how often each occurs, and the row of its first occurrence."""

    ids: Ids
    counts: NDArray[np.uint32]
    first: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


def count_ids(ids: Ids, rows: NDArray[np.int64]) -> Counts:
    """Count ``ids [n]``, which occur in ``rows [n]``, ascending."""
    return _merge([Counts(ids, np.ones(len(ids), np.uint32), rows)])


def _merge(parts: list[Counts]) -> Counts:
    """Sum of counts; in ``parts``, earlier rows must come before later ones for each id."""
    ids = np.concatenate([part.ids for part in parts])
    # Sorting ids and positions as one number is stable, and several times as fast as argsort.
    order = np.sort(ids.astype(np.uint64) << np.uint64(32) | np.arange(len(ids), dtype=np.uint64))
    ids = (order >> np.uint64(32)).astype(np.uint32)
    order &= np.uint64(2**32 - 1)
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])) if len(ids) else np.zeros(0, np.int64)
    counts = np.concatenate([part.counts for part in parts])[order]
    first = np.concatenate([part.first for part in parts])[order[starts]]
    return Counts(ids[starts], np.add.reduceat(counts, starts, dtype=np.uint32) if len(starts) else counts, first)


class IdCounter:
    """Counts the ids of one feature over all rows."""

    def __init__(self, path: Path) -> None:
        self._paths = [path.with_name(f"{path.name}.{kind}") for kind in ("ids", "counts", "first")]
        self._pending: list[Counts] = []
        self._run_ends = [0]

    def add(self, counts: Counts) -> None:
        """Add the counts of the rows that come next."""
        self._pending.append(counts)

    def spill(self) -> None:
        """Move what is in memory to the disk."""
        if not self._pending:
            return
        run = _merge(self._pending)
        self._pending = []
        arrays: tuple[NDArray[Any], ...] = (run.ids, run.counts, run.first)
        for path, array in zip(self._paths, arrays, strict=True):
            with path.open("ab") as file:
                array.tofile(file)
        self._run_ends.append(self._run_ends[-1] + len(run))

    def frequent(self, threshold: int, memory_entries: int) -> Counts:
        """Return the ids that occur at least ``threshold`` times; merges about ``memory_entries`` entries at a time."""
        self.spill()
        total = self._run_ends[-1]
        if total == 0:
            return _merge([Counts(np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.int64))])
        all_ids = np.memmap(self._paths[0], np.uint32, "r")
        runs = [all_ids[a:b] for a, b in zip(self._run_ends, self._run_ends[1:], strict=False)]
        ranges = -(-total // memory_entries)
        # Runs hold ids of the same distribution, so the quantiles of the longest cut all of them into even ranges.
        longest = max(runs, key=len)
        limits = np.unique(longest[np.linspace(0, len(longest) - 1, ranges + 1).astype(np.int64)[1:-1]])
        cuts = [np.concatenate([[0], np.searchsorted(run, limits), [len(run)]]) for run in runs]
        kept = []
        for k in range(len(limits) + 1):
            merged = _merge(
                [self._read(start + cut[k], start + cut[k + 1]) for start, cut in zip(self._run_ends, cuts, strict=False)]
            )
            frequent = merged.counts >= threshold
            kept.append(Counts(merged.ids[frequent], merged.counts[frequent], merged.first[frequent]))
        for path in self._paths:
            path.unlink()
        return Counts(*(np.concatenate([getattr(part, name) for part in kept]) for name in ("ids", "counts", "first")))

    def _read(self, start: int, stop: int) -> Counts:
        def read(path: Path, dtype: type[np.generic]) -> NDArray[Any]:
            return np.fromfile(path, dtype, stop - start, offset=start * np.dtype(dtype).itemsize)

        ids, counts, first = self._paths
        return Counts(read(ids, np.uint32), read(counts, np.uint32), read(first, np.int64))


class Vocabulary:
    """The kept ids of one feature, memory-mapped so that all processes share them."""

    def __init__(self, path: Path) -> None:
        self._ids = np.load(path.with_name(path.name + ".ids.npy"), mmap_mode="r")
        self._numbers = np.load(path.with_name(path.name + ".numbers.npy"), mmap_mode="r")
        self.rows = FIRST_KEPT + len(self._ids)

    @staticmethod
    def write(path: Path, kept: Counts) -> None:
        """Number ids by the row of their first occurrence, and store them under the prefix ``path``."""
        numbers = np.empty(len(kept), np.int32)
        numbers[np.argsort(kept.first, kind="stable")] = np.arange(FIRST_KEPT, FIRST_KEPT + len(kept))
        np.save(path.with_name(path.name + ".ids.npy"), kept.ids)
        np.save(path.with_name(path.name + ".numbers.npy"), numbers)

    def encode(self, ids: Ids) -> NDArray[np.int32]:
        """Return numbers of ``ids [n]``."""
        if not len(self._ids):
            return np.full(len(ids), UNSEEN, np.int32)
        at = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return np.where(self._ids[at] == ids, self._numbers[at], UNSEEN).astype(np.int32)
