"""Histories of users: which interactions came before each, and how they lie on disk.

An interaction belongs to the history of another one of its user only if it is strictly earlier. Of those with equal times,
none is in the history of the others, so the label of one never reaches the input of another. Among them the order on disk
is that of their items: it must depend neither on labels nor on the order of a file, which might tell them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.writer import InteractionFiles, id_columns
from dlrm_fused.datasets.schema import SparseFeature

Int = NDArray[np.int64]
GAP_ROWS = 32


@dataclass(frozen=True)
class Histories:
    """The histories of n interactions.

    Attributes:
        order: [n] the interaction at each position on disk: user after user, in order of time.
        windows: [n, 3] of each interaction, first, stop and candidate: the positions [first, stop) are its history, the
            position ``candidate`` is its own.
        earlier: [n] of each interaction, how many its user has before it, also those that no window reaches.
        gap: [n] of each interaction, the time since the last one of its user, in buckets: 0 for none before, b for
            [2^(b-1), 2^b) seconds.
    """

    order: Int
    windows: Int
    earlier: Int
    gap: Int


def find_histories(users: Int, items: Int, times: Int, length: int, units_per_second: int = 1) -> Histories:
    """Return the up to ``length`` last interactions before each of n.

    Args:
        users, items, times: [n] each.
        units_per_second: of times.
    """
    order = np.lexsort((items, times, users))
    users, times = users[order], times[order]
    position = np.arange(len(order))
    new_user = np.concatenate([[True], users[1:] != users[:-1]])
    new_time = new_user | np.concatenate([[True], times[1:] != times[:-1]])
    user_start = np.maximum.accumulate(np.where(new_user, position, 0))
    stop = np.maximum.accumulate(np.where(new_time, position, 0))
    windows = np.stack([np.maximum(user_start, stop - length), stop, position], axis=1)
    seconds = times // units_per_second
    seconds = np.where(stop > user_start, seconds - seconds[stop - 1], 0)
    gap = np.minimum(np.frexp(seconds.astype(np.float64))[1], GAP_ROWS - 1)  # frexp: 2^(e-1) <= seconds < 2^e

    own = np.empty_like(order)
    own[order] = position
    return Histories(order, windows[own], (stop - user_start)[own], gap[own].astype(np.int64))


def count_earlier(keys: Int, times: Int) -> Int:
    """Return, for each of n interactions, how many of the same key ([n]) have an earlier time ([n]): [n]."""
    return find_histories(keys, np.zeros_like(keys), times, 0).earlier


def write_interactions(
    output: Path, tokens: pl.DataFrame, times: Int, rows: Mapping[str, int], history_only: str, windows: Int, length: int
) -> tuple[SparseFeature, ...]:
    """Write the folder ``interactions``, and return the token features.

    Args:
        tokens: a column of ids, or of lists of them, for each feature, in the order of :attr:`Histories.order`.
        times: [n] of each interaction, in seconds since 1970, in the same order.
        rows: of each feature's table.
        history_only: the feature that tells what happened.
        windows: [b, 3], of the samples over which the sizes of bags are averaged.
        length: of a history, at most.
    """
    single, jagged = id_columns(tokens)
    features = []
    for name in tokens.columns:
        ids = jagged[name][1] if name in jagged else None
        pooling = _mean_bag(windows, length, ids, name == history_only)
        features.append(SparseFeature(name, rows[name], pooling, ids is not None, name == history_only))
    with ExitStack() as stack:
        InteractionFiles(output, features, stack).append(single, jagged, times)
    return tuple(features)


def _mean_bag(windows: Int, length: int, ids: Int | None, history_only: bool) -> float:
    """Average number of ids in the bags of a token feature, over all ``length + 1`` tokens of the samples with these windows.

    Args:
        windows: [b, 3].
        ids: [n] how many each interaction has, by its position on disk; None for one each.
    """
    first, stop, candidate = windows.T
    before = np.arange(candidate.max() + 2) if ids is None else np.concatenate([[0], np.cumsum(ids)])
    total = (before[stop] - before[first]).sum()
    if not history_only:
        total += (before[candidate + 1] - before[candidate]).sum()
    return round(float(total) / (len(windows) * (length + 1)), 4)
