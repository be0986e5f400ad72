"""Each rank's batches: the same samples for any number of ranks, from any step on, and errors that reach the consumer."""

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dlrm_fused.config import Config, DataSource, Split, SyntheticConfig
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.batch import Batch, Samples, sparse_from_features
from dlrm_fused.datasets.loader import EvaluationLoader, TrainLoader, rank_share
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.datasets.synthetic import SyntheticDataset
from dlrm_fused.errors import ConfigError, DataError
from tests.unit.prepared_sets import write_prepared_set

CPU = torch.device("cpu")


class NumberedSamples:
    """Sample i has the dense feature i, so that batches show which samples they hold; some samples cannot be read."""

    schema = DatasetSchema(("number",), (SparseFeature("id", 10),))
    generator_device = None

    def __init__(self, samples: int, unreadable: int | None = None) -> None:
        self._samples = samples
        self._unreadable = unreadable

    def samples(self, split: Split) -> int:
        return self._samples

    def read(self, split: Split, rows: Tensor) -> Samples:
        if self._unreadable in rows.tolist():
            raise DataError(f"sample {self._unreadable} is unreadable")
        ids = sparse_from_features(["id"], [(rows % 10).int().numpy()], [1], rows.numel())
        return Samples(rows.float().unsqueeze(1), ids, torch.zeros(rows.numel()))


def _config(global_batch_size: int = 12, window_rows: int = 1_000_000, workers: int = 2) -> Config:
    config = Config()
    config.training.global_batch_size = global_batch_size
    config.data.shuffle_window_rows = window_rows
    config.data.workers = workers
    return config


def _numbers(batch: Batch) -> list[int]:
    """The samples of a batch, padding left out."""
    return batch.dense[batch.weights > 0, 0].int().tolist()


def _steps(dataset: NumberedSamples, config: Config, world_size: int, steps: int, start_step: int = 0) -> list[list[int]]:
    """The samples of each global batch: the ranks' shares, one after the other."""
    batches: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(world_size):
        with TrainLoader(dataset, config, rank, world_size, CPU, start_step) as loader:
            for batch in batches:
                batch += _numbers(next(loader))
    return batches


@pytest.mark.parametrize("window_rows", [0, 20, 1_000_000])
@pytest.mark.parametrize("world_size", [2, 3, 5, 13])
def test_batches_are_the_same_for_any_number_of_ranks(world_size: int, window_rows: int) -> None:
    dataset, config = NumberedSamples(100), _config(window_rows=window_rows)
    assert _steps(dataset, config, world_size, 20) == _steps(dataset, config, 1, 20)


def test_an_epoch_visits_no_sample_twice_and_the_next_one_in_another_order() -> None:
    config = _config()
    batches = _steps(NumberedSamples(100), config, 1, 16)
    first, second = ([n for batch in batches[start : start + 8] for n in batch] for start in (0, 8))
    assert len(set(first)) == len(set(second)) == 96  # the incomplete ninth batch is dropped
    assert first != second


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("start_step", [1, 7, 8, 19])
def test_a_loader_resumes_at_any_step(start_step: int, workers: int) -> None:
    dataset = NumberedSamples(100)
    uninterrupted = _steps(dataset, _config(), 2, 24)
    assert _steps(dataset, _config(workers=workers), 2, 24 - start_step, start_step) == uninterrupted[start_step:]


def test_a_step_tells_its_epoch_and_batch() -> None:
    with TrainLoader(NumberedSamples(100), _config(), 0, 1, CPU) as loader:
        assert loader.batches_per_epoch == 8
        assert [loader.position(step) for step in (0, 7, 8, 30)] == [(0, 0), (0, 7), (1, 0), (3, 6)]


def test_an_empty_share_holds_one_padding_sample() -> None:
    config = _config(global_batch_size=2)
    sizes = []
    for rank in range(3):
        with TrainLoader(NumberedSamples(10), config, rank, 3, CPU) as loader:
            batch = next(loader)
            sizes.append((batch.weights.tolist(), batch.global_size))
    assert sizes == [([0.0], 2), ([1.0], 2), ([1.0], 2)]


def test_a_batch_larger_than_the_split_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"training.global_batch_size=101: allowed: at most 100"):
        TrainLoader(NumberedSamples(100), _config(global_batch_size=101), 0, 1, CPU)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("global_batch_size", [1, 4, 10, 64])
def test_an_evaluation_holds_every_sample_once_in_as_many_batches_on_every_rank(
    world_size: int, global_batch_size: int
) -> None:
    config, samples = _config(), 25
    counts, global_sizes, seen = [], [], []
    for rank in range(world_size):
        loader = EvaluationLoader(NumberedSamples(samples), Split.test, global_batch_size, rank, world_size, CPU, config)
        batches = list(loader)
        counts.append(len(batches))
        global_sizes.append([batch.global_size for batch in batches])
        assert len(loader) == len(batches)
        assert all(batch.labels.numel() >= 1 for batch in batches)
        seen += [number for batch in batches for number in _numbers(batch)]
    assert sorted(seen) == list(range(samples))
    assert len(set(counts)) == 1
    assert all(sizes == global_sizes[0] for sizes in global_sizes)
    assert sum(global_sizes[0]) == samples


def test_an_evaluation_may_take_the_first_samples_only() -> None:
    loader = EvaluationLoader(NumberedSamples(25), Split.test, 4, 0, 1, CPU, _config(), max_samples=10)
    assert [_numbers(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_error_of_a_worker_reaches_the_consumer_at_its_batch() -> None:
    config = _config(window_rows=0)
    loader = TrainLoader(NumberedSamples(100, unreadable=30), config, 0, 1, CPU)
    assert _numbers(next(loader)) == list(range(12))
    assert _numbers(next(loader)) == list(range(12, 24))
    with pytest.raises(DataError, match="sample 30 is unreadable"):
        next(loader)


def _new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    """Those started since; not their number, since loaders of other tests may end theirs at any time."""
    return set(threading.enumerate()) - before


def test_closing_ends_the_threads() -> None:
    before = _new_threads(set())
    loader = TrainLoader(NumberedSamples(100), _config(), 0, 1, CPU)
    next(loader)
    assert _new_threads(before)
    loader.close()
    assert not _new_threads(before)
    list(EvaluationLoader(NumberedSamples(100), Split.test, 10, 0, 1, CPU, _config()))
    assert not _new_threads(before)


def test_generated_samples_come_without_threads_and_wrap_around(tmp_path: Path) -> None:
    config = _config(global_batch_size=6)
    config.data.source = DataSource.synthetic
    config.data.synthetic.train_samples = 15
    dataset = open_dataset(config, CPU)
    before = _new_threads(set())
    loader = TrainLoader(dataset, config, 0, 1, CPU)
    batches = [next(loader) for _ in range(3)]
    assert not _new_threads(before)
    assert torch.equal(batches[0].dense, batches[2].dense)
    assert not torch.equal(batches[0].dense, batches[1].dense)


@pytest.mark.parametrize(("samples", "start_step"), [(1000, 0), (110, 3)], ids=["one epoch", "several"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_that_are_generated_at_once_are_those_of_their_rows(world_size: int, samples: int, start_step: int) -> None:
    config = _config(global_batch_size=16)
    settings = SyntheticConfig(dense_features=3, tables=2, pooling=[1, 3], rows=[100], train_samples=samples)
    dataset = SyntheticDataset(settings, config.seed, CPU)
    assert dataset.batches_at_once(16) > 1
    for rank in range(world_size):
        loader = TrainLoader(dataset, config, rank, world_size, CPU, start_step)
        for step in range(start_step, start_step + 40):
            first = step % (samples // 16) * 16
            start, stop = rank_share(first, 16, rank, world_size)
            batch, expected = next(loader), dataset.read(Split.train, torch.arange(start, stop))
            share = stop - start
            assert batch.weights.tolist() == [1] * share + [0] * (len(batch.weights) - share)
            assert len(batch.weights) == -(-16 // world_size)
            assert torch.equal(batch.dense[:share], expected.dense)
            assert torch.equal(batch.labels[:share], expected.labels)
            assert torch.equal(batch.sparse.values(), expected.sparse.values())
            lengths = batch.sparse.lengths().view(2, -1)
            assert torch.equal(lengths[:, :share], expected.sparse.lengths().view(2, -1))
            assert not lengths[:, share:].any()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_tokens_are_those_of_the_samples_and_padding_has_none(world_size: int) -> None:
    """Of 8 samples over 5 ranks, two shares are padded; over 3 ranks, one is."""
    config = _config(global_batch_size=8)
    config.data.source = DataSource.synthetic
    config.data.synthetic = SyntheticConfig(tables=1, rows=[50], jagged=True, history_length=4, history_items=20)
    config.data.synthetic.test_samples = 8
    dataset = open_dataset(config, CPU)
    whole = dataset.read(Split.test, torch.arange(8))
    assert whole.tokens is not None
    assert whole.history_lengths is not None
    expected = [bag.tolist() for bag in whole.tokens["token_item"].to_dense()]
    bags: list[list[float]] = []
    times: list[list[int]] = []
    for rank in range(world_size):
        (batch,) = EvaluationLoader(dataset, Split.test, 8, rank, world_size, CPU, config)
        assert batch.tokens is not None
        assert batch.history_lengths is not None
        samples = int(batch.weights.sum())
        assert batch.tokens.stride() == batch.labels.numel() * 5
        assert batch.history_lengths[samples:].tolist() == [0] * (batch.labels.numel() - samples)
        assert batch.token_count == int(batch.history_lengths.sum()) + batch.labels.numel()
        for key in batch.tokens.keys():  # noqa: SIM118 (not a dictionary)
            assert batch.tokens[key].lengths()[samples * 5 :].sum() == 0
        bags += [bag.tolist() for bag in batch.tokens["token_item"].to_dense()][: samples * 5]
        assert batch.token_times is not None
        assert not batch.token_times[samples:].any()
        times += batch.token_times[:samples].tolist()
    assert bags == expected
    assert whole.token_times is not None
    assert times == whole.token_times.tolist()


def test_a_prepared_set_is_loaded(tmp_path: Path) -> None:
    arrays = write_prepared_set(tmp_path / "set")["train"]
    config = _config(global_batch_size=100, window_rows=0)
    config.data.path = str(tmp_path / "set")
    with TrainLoader(open_dataset(config, CPU), config, 1, 2, CPU) as loader:
        batch = next(loader)
    assert torch.equal(batch.dense, torch.from_numpy(arrays.dense[50:]))
    assert torch.equal(batch.weights, torch.ones(50))
    assert batch.global_size == 100
