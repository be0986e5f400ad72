"""Reading Parquet files as they are: the batches of the prepared set, any position again, and bounded memory."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlrm_fused.config import Config, DataSource, Split
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.dataset import Dataset
from dlrm_fused.datasets.loader import EvaluationLoader, TrainLoader
from dlrm_fused.datasets.parquet import ParquetDataset, RowGroupCache
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.preparation.parquet import write_parquet
from dlrm_fused.datasets.schema import SparseFeature
from tests.unit.prepared_sets import FEATURES, write_prepared_set

CPU = torch.device("cpu")
SAMPLES = {"train": 1000, "validation": 50, "test": 21}


def _config(folder: Path, source: DataSource, global_batch_size: int = 132, window_rows: int = 0) -> Config:
    config = Config()
    config.data.source, config.data.path = source, str(folder)
    config.data.shuffle_window_rows = window_rows
    config.training.global_batch_size = global_batch_size
    return config


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_prepared_set(folder, SAMPLES)
    return folder


@pytest.fixture(scope="module", params=[1, 7, 64, 300])
def parquet(request: pytest.FixtureRequest, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples, in row groups of different sizes."""
    folder = tmp_path_factory.mktemp("parquet")
    write_parquet(prepared, folder, request.param)
    return folder


@pytest.fixture(scope="module")
def small_groups(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small_groups")
    write_parquet(prepared, folder, row_group_rows=20)
    return folder


def _bits(batch: Batch) -> tuple[object, ...]:
    """All that a batch holds; equal if and only if all bits are."""
    sparse = batch.sparse
    tensors = (batch.dense, sparse.values(), sparse.lengths(), batch.labels, batch.weights)
    kept = tuple((tensor.dtype, tensor.shape, tensor.numpy().tobytes()) for tensor in tensors)
    return (*kept, sparse.keys(), sparse.stride(), sparse.length_per_key(), batch.global_size)


def _training(dataset: Dataset, config: Config, steps: int, start: int = 0, rank: int = 0, ranks: int = 1) -> Iterator[object]:
    with TrainLoader(dataset, config, rank, ranks, CPU, start) as loader:
        for _ in range(steps):
            yield _bits(next(loader))


def test_the_schema_is_that_of_the_prepared_set(prepared: Path, small_groups: Path) -> None:
    schemas = [
        open_dataset(_config(folder, source), CPU).schema
        for folder, source in ((prepared, DataSource.prepared), (small_groups, DataSource.parquet))
    ]
    assert schemas[0] == schemas[1]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_unshuffled_batches_of_training_are_those_of_the_prepared_set(prepared: Path, parquet: Path, ranks: int) -> None:
    configs = [_config(prepared, DataSource.prepared), _config(parquet, DataSource.parquet)]
    datasets = [open_dataset(config, CPU) for config in configs]
    for rank in range(ranks):
        expected, found = (
            list(_training(d, c, steps=16, rank=rank, ranks=ranks)) for d, c in zip(datasets, configs, strict=True)
        )
        assert found == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_of_evaluation_are_those_of_the_prepared_set(prepared: Path, parquet: Path, ranks: int) -> None:
    configs = [_config(prepared, DataSource.prepared), _config(parquet, DataSource.parquet, window_rows=1000)]
    datasets = [open_dataset(config, CPU) for config in configs]
    for rank in range(ranks):
        expected, found = (
            [_bits(batch) for batch in EvaluationLoader(d, Split.validation, 8, rank, ranks, CPU, c)]
            for d, c in zip(datasets, configs, strict=True)
        )
        assert found == expected


def test_caps_on_rows_take_the_same_ids_modulo(prepared: Path, small_groups: Path) -> None:
    batches = []
    for folder, source in ((prepared, DataSource.prepared), (small_groups, DataSource.parquet)):
        config = _config(folder, source)
        config.embedding.max_rows = 8
        batches.append(list(_training(open_dataset(config, CPU), config, steps=7)))
    assert batches[0] == batches[1]


@pytest.mark.parametrize("window_rows", [0, 80, 1000])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_resumes_at_every_batch(small_groups: Path, window_rows: int, rank: int) -> None:
    """Over three epochs of 7 batches, each by a reader that has read nothing before."""
    config = _config(small_groups, DataSource.parquet, window_rows=window_rows)
    uninterrupted = list(_training(ParquetDataset(config), config, steps=21, rank=rank, ranks=2))
    for start in range(21):
        resumed = list(_training(ParquetDataset(config), config, min(21 - start, 2), start, rank, ranks=2))
        assert resumed == uninterrupted[start : start + 2]


def test_shuffled_batches_are_the_same_for_any_number_of_ranks(small_groups: Path) -> None:
    config = _config(small_groups, DataSource.parquet, window_rows=1000)
    dataset = ParquetDataset(config)

    def dense(ranks: int) -> torch.Tensor:
        shares = []
        for step in range(9):
            for rank in range(ranks):
                with TrainLoader(dataset, config, rank, ranks, CPU, step) as loader:
                    batch = next(loader)
                    shares.append(batch.dense[batch.weights > 0])
        return torch.cat(shares)

    assert torch.equal(dense(1), dense(2))
    assert torch.equal(dense(1), dense(5))


def test_shuffled_epochs_hold_each_sample_once(small_groups: Path) -> None:
    config = _config(small_groups, DataSource.parquet, global_batch_size=100, window_rows=80)
    dataset = ParquetDataset(config)
    with TrainLoader(dataset, config, 0, 1, CPU) as loader:
        epochs = [torch.cat([next(loader).dense for _ in range(10)]) for _ in range(2)]
    files = dataset.read(Split.train, torch.arange(1000)).dense
    assert not torch.equal(epochs[0], epochs[1])
    for epoch in epochs:
        assert torch.equal(epoch.sort(dim=0).values, files.sort(dim=0).values)


def test_files_of_other_programs_need_no_more_than_the_rows_of_tables(tmp_path: Path) -> None:
    """64-bit ids, large lists, labels as bool, float64: several files, in the order of their names."""
    for split in Split:
        (tmp_path / split.name).mkdir()
        for part in range(2):
            table = pa.table(
                {
                    "label": [True, False],
                    "price": pa.array([0.5 + part, 1.5 + part], pa.float64()),
                    "user": pa.array([part, 3], pa.int64()),
                    "tags": pa.array([[1, 2], []], pa.large_list(pa.uint16())),
                }
            )
            pq.write_table(table, tmp_path / split.name / f"{part}.parquet")
    config = _config(tmp_path, DataSource.parquet)
    config.embedding.rows = [10, 5]
    dataset = open_dataset(config, CPU)
    assert dataset.schema.dense_features == ("price",)
    assert dataset.schema.sparse_features == (SparseFeature("user", 10), SparseFeature("tags", 5, 1.5, jagged=True))
    samples = dataset.read(Split.test, torch.arange(4))
    assert samples.dense.tolist() == [[0.5], [1.5], [1.5], [2.5]]
    assert samples.labels.tolist() == [1, 0, 1, 0]
    assert samples.sparse["user"].values().tolist() == [0, 3, 1, 3]
    assert samples.sparse["tags"].lengths().tolist() == [2, 0, 2, 0]
    assert samples.sparse["tags"].values().tolist() == [1, 2, 1, 2]


@pytest.mark.parametrize("jagged", [False, True])
def test_sets_of_single_or_of_jagged_features_alone_are_read(tmp_path: Path, jagged: bool) -> None:
    features = tuple(feature for feature in FEATURES if feature.jagged == jagged)
    arrays = write_prepared_set(tmp_path / "set", features=features)["test"]
    write_parquet(tmp_path / "set", tmp_path / "parquet")
    samples = ParquetDataset(_config(tmp_path / "parquet", DataSource.parquet)).read(Split.test, torch.tensor([3]))
    assert samples.sparse[features[0].name].values().tolist() == arrays.ids[features[0].name][3].tolist()


def test_row_groups_are_read_once_while_in_use_and_few_are_held() -> None:
    read: list[int] = []
    lock = threading.Lock()

    def content(number: int) -> int:
        with lock:
            read.append(number)
        return 10 * number

    with ThreadPoolExecutor(2) as pool:
        cache = RowGroupCache(content, pool)
        for first in range(0, 100):
            found = cache.request([first, first + 1])
            assert {number: future.result() for number, future in found.items()} == {
                first: 10 * first,
                first + 1: 10 * first + 10,
            }
            assert len(cache) <= 6
    assert sorted(read) == list(range(101))


def test_the_command_writes_a_set_in_the_order_of_its_rows(prepared: Path, tmp_path: Path, capsys) -> None:
    arguments = ["parquet", "--input", str(prepared), "--output", str(tmp_path / "new"), "--row-group-rows", "300"]
    assert cli.main(arguments) == 0
    assert "1,000 train, 50 validation, 21 test samples, 3 sparse features" in capsys.readouterr().out
    file = pq.ParquetFile(tmp_path / "new/train/part-00000.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [300, 300, 300, 100]
    assert file.schema_arrow.names == ["label", "dense_0", "dense_1", "user", "genres", "item"]
