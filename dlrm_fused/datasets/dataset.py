"""The interface between readers and loaders."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.datasets.row_group_order import RowGroupOrder
from dlrm_fused.datasets.schema import DatasetSchema


class Dataset(Protocol):
    """Samples of three splits, read by position, in any order, from any thread."""

    @property
    def schema(self) -> DatasetSchema:
        """The features; ids that :meth:`read` returns are in [0, rows) of their feature."""
        ...

    @property
    def generator_device(self) -> torch.device | None:
        """None for a set that is read into host memory; otherwise the device on which samples are computed.

        A loader of the latter calls :meth:`read` with rows on that device, on the thread and CUDA stream of its consumer, and
        does not shuffle; for training, :meth:`ReadsBatches.read_batches` where there is that.
        """
        ...

    def samples(self, split: Split) -> int:
        """Return number of samples of a split.

        Raises:
            DataError: if the data set has no such split.
        """
        ...

    def read(self, split: Split, rows: Tensor) -> Samples:
        """Return the samples at positions ``rows`` ([b] int64, b >= 1, each in [0, samples(split))).

        Raises:
            DataError: if the stored data contradict the schema.
        """
        ...


class Order(Protocol):
    """The order in which epochs visit the samples of a split."""

    def rows(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return rows at positions [start, stop) of the epoch: int64 [stop - start]."""
        ...


@runtime_checkable
class ReadsRowGroups(Protocol):
    """A :class:`Dataset` that reads many samples in order to have one, and so says in which order to train on them."""

    def training_order(self, config: Config, world_size: int) -> RowGroupOrder:
        """Return the order of the training split, which is the same for any number of ranks.

        Raises:
            DataError: if there are more ranks than row groups.
        """
        ...

    def read_ahead(self, split: Split, rows: Tensor) -> None:
        """Begin to read what :meth:`Dataset.read` of ``rows`` needs; does not wait."""
        ...


@runtime_checkable
class KnowsTimes(Protocol):
    """A :class:`Dataset` that knows when its samples happened."""

    def times(self, split: Split) -> NDArray[np.int64]:
        """Return when each sample of a split happened: int64 [samples], microseconds since 1970.

        Raises:
            DataError: if that is not known, or the split is not there.
        """
        ...

    def window_order(self, config: Config, first: int, samples: int) -> Order:
        """Return the order in which to train on so many samples of the training split, from number ``first`` in order of time
        on; positions count from that."""
        ...


@runtime_checkable
class ReadsBatches(Protocol):
    """A :class:`Dataset` that computes several small batches at once in hardly more time than one."""

    def batches_at_once(self, batch_size: int) -> int:
        """Return how many batches of ``batch_size`` samples one call of :meth:`read_batches` should ask for."""
        ...

    def read_batches(self, split: Split, rows: Tensor) -> list[Samples]:
        """Return the results of :meth:`Dataset.read` for each of ``rows``, [batches, b]."""
        ...
