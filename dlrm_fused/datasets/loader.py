"""Each rank's batches, assembled ahead of time by threads."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets.batch import Batch, Samples
from dlrm_fused.datasets.dataset import Dataset, Order, ReadsBatches, ReadsRowGroups
from dlrm_fused.datasets.order import SampleOrder
from dlrm_fused.datasets.parallel import map_on_threads
from dlrm_fused.datasets.time_windows import TimeWindows, Window
from dlrm_fused.errors import ConfigError


class _Loader(Iterator[Batch]):
    """The common part of both loaders: threads that end with the context."""

    _batches: Generator[Batch, None, None]

    def __next__(self) -> Batch:
        return next(self._batches)

    def close(self) -> None:
        """End the threads; the loader cannot be used afterwards. An evaluation's end by themselves after its last batch."""
        self._batches.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrainLoader(_Loader):
    """This rank's share of the batches of steps ``start_step``, ``start_step + 1``, ... without end.

    Batch k of an epoch is the same set of samples in the same order whatever the number of ranks: the epoch's order depends on
    ``config.seed`` and the epoch only, a global batch is a slice of it, and rank r takes the r-th contiguous share. So the step
    alone says where to resume. The incomplete last batch of an epoch is dropped, and all ranks begin the next epoch together.
    A share that is smaller than another rank's is padded by a sample of weight 0: gloo's collectives of row-wise plans need
    shares of one size.

    Batches that a data set generates are computed several at once, on the CUDA stream of the call that needs the first of them.
    So all calls of ``next`` must come on one stream.

    Args:
        config: ``training.global_batch_size``, ``seed`` and ``data`` are used.
        device: where batches will be trained on; for CUDA, they come in pinned memory.
        start_step: the first step to load, counted from 0.
        windows: of time, which then take the place of epochs; beyond their last step its batch is repeated.

    Raises:
        ConfigError: if the training split is smaller than one batch.
        DataError: from ``next``, if what a worker read contradicts the schema.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: Config,
        rank: int,
        world_size: int,
        device: torch.device,
        start_step: int = 0,
        windows: TimeWindows | None = None,
    ) -> None:
        samples = dataset.samples(Split.train)
        self._global_batch_size = config.training.global_batch_size
        if self._global_batch_size > samples:
            raise ConfigError(
                f"training.global_batch_size={self._global_batch_size}: allowed: at most {samples}, "
                "the samples of the training split"
            )
        self.batches_per_epoch = samples // self._global_batch_size
        self._windows = windows
        self._order, self._steps_ahead = (windows, 1) if windows else _training_order(dataset, config, world_size)
        self._dataset = dataset
        self._rank = rank
        self._world_size = world_size
        self._generated: deque[Batch] = deque()
        self._batches = _assembled(self._assemble, itertools.count(start_step), dataset, config, device)

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch, or window, of a step and the number of its batch there."""
        return self._windows.position(step) if self._windows else divmod(step, self.batches_per_epoch)

    def _assemble(self, step: int) -> Batch:
        if self._dataset.generator_device is not None and isinstance(self._dataset, ReadsBatches):
            if not self._generated:
                self._generated.extend(self._generate(step, self._dataset))
            return self._generated.popleft()
        if isinstance(self._dataset, ReadsRowGroups) and step % self._steps_ahead == 0:
            self._dataset.read_ahead(Split.train, self._rows(step + self._steps_ahead))
        _, _, share = self._share(step)
        return _as_batch(self._dataset.read(Split.train, self._rows(step)), share, self._global_batch_size, self._world_size)

    def _rows(self, step: int) -> Tensor:
        """Return this rank's rows of the data set; one row if it has no share, since padding is made of samples."""
        epoch, start, share = self._share(step)
        return self._order.rows(epoch, start, start + max(share, 1))

    def _share(self, step: int) -> tuple[int, int, int]:
        """Return the epoch of a step, and where in it this rank's samples begin, and how many they are."""
        epoch, number = self.position(step)
        first = number * self._global_batch_size
        start, stop = rank_share(first, self._global_batch_size, self._rank, self._world_size)
        return epoch, start, stop - start

    def _generate(self, step: int, dataset: ReadsBatches) -> list[Batch]:
        """Return the batches of this step and of some that follow in its epoch."""
        epoch, start, share = self._share(step)
        size, batch = max(share, 1), self._global_batch_size
        count = min(dataset.batches_at_once(size), self.batches_per_epoch - step % self.batches_per_epoch)
        rows = self._order.rows(epoch, start, start + (count - 1) * batch + size).unfold(0, size, batch)
        return [_as_batch(samples, share, batch, self._world_size) for samples in dataset.read_batches(Split.train, rows)]


def _training_order(dataset: Dataset, config: Config, world_size: int) -> tuple[Order, int]:
    """Return the order of the training split, and how many steps ahead to begin reading, of a set that can."""
    if isinstance(dataset, ReadsRowGroups):
        order = dataset.training_order(config, world_size)
        return order, order.batches_of_half_a_group
    window_rows = config.data.shuffle_window_rows if dataset.generator_device is None else 0
    return SampleOrder(dataset.samples(Split.train), window_rows, config.seed, dataset.generator_device or "cpu"), 0


class EvaluationLoader(_Loader):
    """One pass over a split in the order of its files: every sample exactly once over all ranks, and the same number of
    batches on every rank. A share that is smaller than another rank's is padded by a sample of weight 0.

    Args:
        device: where batches will be evaluated; for CUDA, they come in pinned memory.
        config: ``data.workers`` and ``data.prefetch_batches`` are used.
        max_samples: take only so many samples, the first ones; 0 takes all.
        window: take the samples of this window of the split alone, in order of time.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: Split,
        global_batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        config: Config,
        max_samples: int = 0,
        window: Window | None = None,
    ) -> None:
        samples = window.samples if window else dataset.samples(split)
        self._samples = min(samples, max_samples) if max_samples else samples
        self._global_batch_size = global_batch_size
        self._order: Order = window or SampleOrder(samples, 0, config.seed, dataset.generator_device or "cpu")
        self._dataset = dataset
        self._split = split
        self._rank = rank
        self._world_size = world_size
        self._batches = _assembled(self._assemble, range(len(self)), dataset, config, device)

    def __len__(self) -> int:
        """Return number of batches, the same on every rank."""
        return -(-self._samples // self._global_batch_size)

    def _assemble(self, number: int) -> Batch:
        first = number * self._global_batch_size
        size = min(self._global_batch_size, self._samples - first)
        start, stop = rank_share(first, size, self._rank, self._world_size)
        rows = self._order.rows(0, start, max(stop, start + 1))
        return _as_batch(self._dataset.read(self._split, rows), stop - start, size, self._world_size)


def rank_share(first: int, size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the rank's contiguous share [start, stop) of ``size`` positions from ``first``; shares differ by at most one."""
    return first + size * rank // world_size, first + size * (rank + 1) // world_size


def _as_batch(samples: Samples, share: int, global_size: int, world_size: int) -> Batch:
    """Return the batch of the first ``share`` samples, padded to what the largest share of all ranks has."""
    padded_share, size = -(-global_size // world_size), len(samples.labels)
    if padded_share > size:
        samples = _pad(samples, padded_share - size)
    weights = samples.labels.new_ones(len(samples.labels))
    if share < len(weights):
        weights[share:] = 0
    sample_weights = None if samples.weights is None else samples.weights * weights
    histories, token_count = samples.history_lengths, samples.token_count
    if histories is not None and token_count is None:
        token_count = int(histories.sum()) + len(histories)
    return Batch(
        samples.dense,
        samples.sparse,
        samples.labels,
        weights,
        global_size,
        samples.tokens,
        histories,
        sample_weights,
        token_count,
        samples.token_times,
    )


def _pad(samples: Samples, count: int) -> Samples:
    """Append ``count`` samples without any ids, so that they touch no row of a table."""
    padded: dict[str, Any] = {"sparse": _with_empty_bags(samples.sparse, count)}
    for name in ("dense", "labels", "history_lengths", "weights", "token_times"):
        tensor: Tensor | None = getattr(samples, name)
        if tensor is not None:
            padded[name] = torch.nn.functional.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, count))
    if samples.tokens is not None:
        padded["tokens"] = _with_empty_bags(samples.tokens, count * (samples.tokens.stride() // len(samples.labels)))
    if samples.token_count is not None:
        padded["token_count"] = samples.token_count + count
    return replace(samples, **padded)


def _with_empty_bags(sparse: KeyedJaggedTensor, count: int) -> KeyedJaggedTensor:
    """Append ``count`` empty bags to every key."""
    lengths = torch.nn.functional.pad(sparse.lengths().view(len(sparse.keys()), -1), (0, count))
    return KeyedJaggedTensor(
        keys=sparse.keys(),
        values=sparse.values(),
        lengths=lengths.flatten(),
        stride=sparse.stride() + count,
        length_per_key=sparse.length_per_key_or_none(),
    )


def _assembled(
    assemble: Callable[[int], Batch], numbers: Iterable[int], dataset: Dataset, config: Config, device: torch.device
) -> Generator[Batch, None, None]:
    """Assemble the batches of these numbers ahead of their consumer, in threads unless the data set generates on its device."""

    def assemble_on_host(number: int) -> Batch:
        if device.type != "cuda":
            return assemble(number)
        # Otherwise pinning would make a context on GPU 0 for every rank.
        torch.cuda.set_device(device)
        return assemble(number).pin_memory()

    if dataset.generator_device is None:
        yield from map_on_threads(assemble_on_host, numbers, config.data.workers, config.data.prefetch_batches)
    else:
        yield from map(assemble, numbers)
