"""Reading histories: windows into interactions that are stored once; :mod:`dlrm_fused.datasets.schema` describes the files."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.datasets.storage import IdColumns, SetFolder, ranges
from dlrm_fused.errors import DataError


class HistoryWindows:
    """The mapped ``history.npy`` of one split."""

    def __init__(self, folder: SetFolder, samples: int, info: PreparedInfo) -> None:
        self._path = folder.root / folder.name / "history.npy"
        self._windows = folder.map(self._path.name, [samples, 3], ["int64"])
        self._interactions = info.interactions
        self._history_length = info.schema.history_length

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """First, stop and candidate of the samples: [b, 3].

        Raises:
            DataError: if one is out of range, or a history reaches its candidate or what comes after it.
        """
        windows = self._windows.take(rows)
        first, stop, candidate = windows.T
        fits = (first >= 0) & (first <= stop) & (stop <= candidate) & (candidate < self._interactions)
        wrong = np.flatnonzero(~fits | (stop - first > self._history_length))
        if wrong.size:
            row, found = rows[wrong[0]], windows[wrong[0]].tolist()
            raise DataError(
                f"{self._path}: row {row} holds {found}, expected first <= stop <= candidate in [0, {self._interactions}), "
                f"and a history of at most {self._history_length}; prepare the set again"
            )
        return windows


class Interactions:
    """The mapped interactions of all splits.

    Args:
        folder: the one of interactions.

    Raises:
        DataError: if a file is missing, truncated, or of another shape or type.
    """

    def __init__(self, folder: SetFolder, info: PreparedInfo) -> None:
        self._features = info.schema.token_features
        self._tokens = info.schema.history_length + 1
        self._ids = IdColumns(folder, self._features, info.interactions, f"{folder.root / folder.name}")

    def read(self, windows: NDArray[np.int64]) -> tuple[list[NDArray[np.int32]], list[NDArray[np.int64] | int]]:
        """Return each token feature's ids in all tokens of b samples, and how many each of the b * T tokens has.

        Args:
            windows: [b, 3], of :class:`HistoryWindows`.
        """
        first, stop, candidate = windows.T
        occupied = stop - first + 1
        candidates = occupied.cumsum() - 1  # where each sample's last token is
        rows = ranges(first, occupied)
        rows[candidates] = candidate
        bags = ranges(np.arange(len(windows)) * self._tokens, occupied)
        of_history = np.ones(rows.size, bool)
        of_history[candidates] = False

        ids, lengths = self._ids.read(rows)
        for number, feature in enumerate(self._features):
            per_token = np.broadcast_to(lengths[number], rows.size)
            if feature.history_only:
                ids[number] = ids[number][np.repeat(of_history, per_token) if feature.jagged else of_history]
                per_token = per_token * of_history
            of_bag = np.zeros(len(windows) * self._tokens, np.int64)
            of_bag[bags] = per_token
            lengths[number] = of_bag
        return ids, lengths
