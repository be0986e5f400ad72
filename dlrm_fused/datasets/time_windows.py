"""The training split cut into windows of time: hours, days, weeks or months, by UTC.

Training goes through them in order, each once. Before a window is trained on, the model is evaluated on it: on what is still to
come, as a service is, which serves today with what it has learnt until yesterday. Steps never mix windows.

Source: *prequential* evaluation, first test and then train, of windows in place of samples: Gama, Sebastião and Rodrigues,
"On evaluating stream learning algorithms", Machine Learning 90, 2013.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.config import Config, Split, Windows
from dlrm_fused.datasets.dataset import Dataset, KnowsTimes, Order
from dlrm_fused.errors import ConfigError, DataError

_UNITS = {Windows.hour: "h", Windows.day: "D", Windows.week: "D", Windows.month: "M"}
# Weeks begin on Mondays, and 1970-01-01, day 0, was a Thursday.
_DAYS_OF_WEEK, _WEEKDAY_OF_DAY_0 = 7, 3


class Window:
    """The samples of one window, in the order of their times.

    Attributes:
        name: when it begins, such as ``1997-10`` or ``1997-10-06T14``.
        first: the number of the first one, in order of time.
        samples: how many there are.
    """

    def __init__(self, name: str, first: int, samples: int, by_time: NDArray[np.int64] | None) -> None:
        self.name, self.first, self.samples, self._by_time = name, first, samples, by_time

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the rows of the split at positions [start, stop) of the window: int64 [stop - start]; epochs do not differ."""
        return self.rows_at(torch.arange(start, stop))

    def rows_at(self, positions: Tensor) -> Tensor:
        """Return the rows of the split at these positions of the window, int64 [n]."""
        positions = positions + self.first
        return positions if self._by_time is None else torch.from_numpy(self._by_time[positions.numpy()])


class TimeWindows:
    """All windows of a training split that have samples, and the steps of each.

    A window has as many steps as whole batches; which samples of it are left over, its order decides. One that is smaller than
    a batch has none, and is evaluated on.

    Args:
        times: int64 [samples], microseconds since 1970, of each row.
        length: of the windows.
        batch: samples of a step, over all ranks.
        order_of: gives the order of training on a window, from its first sample and their number, as
            :meth:`~dlrm_fused.datasets.dataset.KnowsTimes.window_order` does.

    Attributes:
        windows: in order of time.
        steps: of all windows.
    """

    def __init__(self, times: NDArray[np.int64], length: Windows, batch: int, order_of: Callable[[int, int], Order]) -> None:
        by_time = np.argsort(times, kind="stable") if (times[1:] < times[:-1]).any() else None
        begins = _periods(times.min(), times.max(), length)
        firsts = np.searchsorted(times, begins.astype("datetime64[us]").astype(np.int64), sorter=by_time)
        bounds = itertools.pairwise([*firsts.tolist(), len(times)])
        self.windows = [
            Window(str(begin), first, end - first, by_time)
            for begin, (first, end) in zip(begins, bounds, strict=True)
            if end > first
        ]
        # A loader is in one window, or between two.
        self._order = functools.lru_cache(maxsize=2)(
            lambda number: order_of(self.windows[number].first, self.windows[number].samples)
        )
        self._ends = np.cumsum([window.samples // batch for window in self.windows])
        self._begins = np.append(0, self._ends[:-1])
        self.steps = int(self._ends[-1])

    def position(self, step: int) -> tuple[int, int]:
        """Return the window of a step, counted from 0, and the number of its batch there.

        Loaders read ahead of the last step; they get its batch.
        """
        step = min(step, self.steps - 1)
        window = int(np.searchsorted(self._ends, step, side="right"))
        return window, step - int(self._begins[window])

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the rows of the split at positions [start, stop) of a window's order; ``epoch`` is the window's number."""
        return self.windows[epoch].rows_at(self._order(epoch).rows(epoch, start, stop))

    def due(self, steps: int) -> list[Window]:
        """Return the windows to evaluate on when so many steps are made: the one that the next step begins, and smaller ones
        before it; none in the midst of a window."""
        first, end = (int(np.searchsorted(self._begins, steps, side=side)) for side in ("left", "right"))
        return self.windows[first:end]


def _periods(earliest: np.int64, latest: np.int64, length: Windows) -> NDArray[Any]:
    """Return when all hours, days, weeks or months from that of one time to that of another begin: datetime64."""
    unit = _UNITS[length]
    first, last = (np.datetime64(int(time), "us").astype(f"datetime64[{unit}]") for time in (earliest, latest))
    if length is not Windows.week:
        return np.arange(first, last + 1)
    return np.arange(first - (first.astype(np.int64) + _WEEKDAY_OF_DAY_0) % _DAYS_OF_WEEK, last + 1, _DAYS_OF_WEEK)


def time_windows(config: Config, dataset: Dataset) -> TimeWindows | None:
    """Return the windows of ``data.windows``; None if it asks for none.

    Raises:
        DataError: if the set has no times, or another split has samples of before the end of training.
        ConfigError: if no window has a whole batch, or the run has more steps than all windows.
    """
    if config.data.windows is Windows.none:
        return None
    assert isinstance(dataset, KnowsTimes), "the config is checked"
    times, batch = dataset.times(Split.train), config.training.global_batch_size
    _check_order(dataset, times)
    windows = TimeWindows(times, config.data.windows, batch, functools.partial(dataset.window_order, config))
    all_windows = f"the {len(windows.windows)} windows of data.windows={config.data.windows}"
    if not windows.steps:
        most = max(window.samples for window in windows.windows)
        raise ConfigError(f"training.global_batch_size={batch}: allowed: at most {most}, the most samples of {all_windows}")
    steps = config.training.max_steps
    if steps > windows.steps:
        raise ConfigError(f"training.max_steps={steps}: allowed: at most {windows.steps}, the steps of {all_windows}")
    return windows


def _check_order(dataset: KnowsTimes, of_training: NDArray[np.int64]) -> None:
    latest = of_training.max()
    for split in (Split.validation, Split.test):
        earliest = dataset.times(split).min()
        if earliest < latest:
            raise DataError(
                f"data.windows: split {split.name} begins at {_shown(earliest)}, and training ends at {_shown(latest)}: the "
                "model would be tested on a past whose future it has seen; split the data by time, as --split-by-time of "
                "data/prepare.py does"
            )


def _shown(time: np.int64) -> str:
    return str(np.datetime64(int(time), "us").astype("datetime64[s]"))
