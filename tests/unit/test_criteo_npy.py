"""Reading Criteo days as TorchRec's and MLPerf's scripts write them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_fused.config import Config, DataSource, Split
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.criteo_npy import CriteoNpyDataset
from dlrm_fused.errors import ConfigError, DataError

ROWS = [10 + i for i in range(26)]
HOTNESS = [1 + i % 4 for i in range(26)]


def write_day(folder: Path, number: int, samples: int, sparse_dtype: str = "int64") -> dict[str, np.ndarray]:
    """A random day with single ids, some of them beyond the rows of their tables."""
    generator = np.random.default_rng(number)
    arrays = {
        "dense": generator.standard_normal((samples, 13), dtype=np.float32),
        "sparse": generator.integers(0, 1000, (samples, 26)).astype(sparse_dtype),
        "labels": generator.integers(0, 2, (samples, 1), dtype=np.int32),
    }
    for name, array in arrays.items():
        np.save(folder / f"day_{number}_{name}.npy", array)
    return arrays


def write_multi_hot(folder: Path, number: int, samples: int, save: Callable[..., None] = np.savez) -> list[np.ndarray]:
    generator = np.random.default_rng(100 + number)
    columns = [
        generator.integers(0, rows, (samples, hotness), dtype=np.int32) for rows, hotness in zip(ROWS, HOTNESS, strict=True)
    ]
    save(folder / f"day_{number}_sparse_multi_hot.npz", **{str(i): column for i, column in enumerate(columns)})
    return columns


def test_the_last_day_is_halved_into_validation_and_test(tmp_path: Path) -> None:
    days = [write_day(tmp_path, number, samples) for number, samples in enumerate([7, 5, 9])]
    dataset = CriteoNpyDataset(tmp_path, ROWS)
    assert [dataset.samples(split) for split in Split] == [12, 4, 5]
    train = np.concatenate([days[0]["dense"], days[1]["dense"]])
    assert np.array_equal(dataset.read(Split.train, torch.arange(12)).dense, train)
    assert np.array_equal(dataset.read(Split.validation, torch.arange(4)).dense, days[2]["dense"][:4])
    assert np.array_equal(dataset.read(Split.test, torch.arange(5)).dense, days[2]["dense"][4:])


def test_a_single_day_is_divided_by_position(tmp_path: Path) -> None:
    day = write_day(tmp_path, 0, 20)
    dataset = CriteoNpyDataset(tmp_path, ROWS)
    assert [dataset.samples(split) for split in Split] == [16, 2, 2]
    assert np.array_equal(dataset.read(Split.validation, torch.arange(2)).dense, day["dense"][16:18])
    assert np.array_equal(dataset.read(Split.test, torch.arange(2)).dense, day["dense"][18:])


@pytest.mark.parametrize("sparse_dtype", ["int32", "int64"])
def test_rows_of_several_days_come_in_the_order_asked_for(tmp_path: Path, sparse_dtype: str) -> None:
    days = [write_day(tmp_path, number, samples, sparse_dtype) for number, samples in enumerate([7, 5, 9])]
    rows = torch.tensor([11, 0, 7, 6, 3, 3])
    samples = CriteoNpyDataset(tmp_path, ROWS).read(Split.train, rows)
    both = {name: np.concatenate([days[0][name], days[1][name]])[rows] for name in days[0]}
    assert np.array_equal(samples.dense, both["dense"])
    assert np.array_equal(samples.labels, both["labels"][:, 0])
    assert np.array_equal(samples.sparse.values().view(26, 6), (both["sparse"] % ROWS).T)
    assert samples.sparse.lengths().tolist() == [1] * 26 * 6


class LocalFiles:
    """As much of iopath's path manager, which TorchRec opens files with, as a local path needs."""

    open = staticmethod(open)


def test_tensors_equal_those_of_torchrecs_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    criteo = pytest.importorskip("torchrec.datasets.criteo")
    monkeypatch.setattr(criteo, "_get_path_manager", lambda key: LocalFiles(), raising=False)
    for number, samples in enumerate([16, 16, 8]):
        write_day(tmp_path, number, samples)
    paths = [[str(tmp_path / f"day_{day}_{part}.npy") for day in (0, 1)] for part in ("dense", "sparse", "labels")]
    theirs = list(criteo.InMemoryBinaryCriteoIterDataPipe("train", *paths, batch_size=8, rank=0, world_size=1, hashes=ROWS))
    dataset = CriteoNpyDataset(tmp_path, ROWS)
    assert len(theirs) == 4
    for number, batch in enumerate(theirs):
        ours = dataset.read(Split.train, torch.arange(number * 8, number * 8 + 8))
        assert torch.equal(ours.dense, batch.dense_features)
        assert torch.equal(ours.labels, batch.labels.float())
        assert torch.equal(ours.sparse.values().long(), batch.sparse_features.values().long())
        assert torch.equal(ours.sparse.lengths(), batch.sparse_features.lengths())
        assert ours.sparse.keys() == batch.sparse_features.keys()


def test_multi_hot_ids_are_mapped_where_they_lie(tmp_path: Path) -> None:
    for number, samples in enumerate([7, 6]):
        write_day(tmp_path, number, samples)
    columns = [write_multi_hot(tmp_path, 0, 7), write_multi_hot(tmp_path, 1, 6)]
    dataset = CriteoNpyDataset(tmp_path, ROWS)
    assert [feature.pooling_factor for feature in dataset.schema.sparse_features] == HOTNESS
    rows = torch.tensor([6, 0, 2])
    samples = dataset.read(Split.train, rows)
    for feature, column in zip(dataset.schema.sparse_features, columns[0], strict=True):
        assert samples.sparse[feature.name].values().tolist() == column[rows].flatten().tolist()
        assert samples.sparse[feature.name].lengths().tolist() == [column.shape[1]] * 3


def test_the_cap_on_rows_applies(tmp_path: Path) -> None:
    day = write_day(tmp_path, 0, 20)
    config = Config()
    config.data.source, config.data.path = DataSource.criteo_npy, str(tmp_path)
    config.embedding.rows, config.embedding.max_rows = ROWS, 12
    dataset = open_dataset(config, torch.device("cpu"))
    capped = [min(rows, 12) for rows in ROWS]
    assert [feature.rows for feature in dataset.schema.sparse_features] == capped
    ids = dataset.read(Split.train, torch.arange(16)).sparse.values().view(26, 16)
    assert np.array_equal(ids, (day["sparse"][:16] % capped).T)


def test_tables_for_another_number_of_features_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"embedding.rows=\[5, 5\]: allowed: 26 numbers"):
        CriteoNpyDataset(tmp_path, [5, 5])


def test_a_folder_without_days_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.path=.*: no day_<i>_dense.npy in it"):
        CriteoNpyDataset(tmp_path, ROWS)


@pytest.mark.parametrize("part", ["sparse", "labels"])
def test_a_missing_file_is_named(tmp_path: Path, part: str) -> None:
    write_day(tmp_path, 0, 20)
    (tmp_path / f"day_0_{part}.npy").unlink()
    with pytest.raises(DataError, match=rf"day_0_{part}.npy: missing"):
        CriteoNpyDataset(tmp_path, ROWS)


def test_a_missing_day_is_named(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 20)
    write_day(tmp_path, 2, 20)
    with pytest.raises(DataError, match=r"day_1_dense.npy: missing, though day_2 is there"):
        CriteoNpyDataset(tmp_path, ROWS)


@pytest.mark.parametrize("part", ["sparse", "labels"])
def test_files_of_a_day_must_agree_on_their_rows(tmp_path: Path, part: str) -> None:
    write_day(tmp_path, 0, 20)
    path = tmp_path / f"day_0_{part}.npy"
    np.save(path, np.load(path)[:19])
    with pytest.raises(DataError, match=rf"day_0_{part}.npy: holds .* of shape \[19, .*, expected .* of shape \[20[,\]]"):
        CriteoNpyDataset(tmp_path, ROWS)


def test_days_must_agree_on_their_hotness(tmp_path: Path) -> None:
    for number in range(2):
        write_day(tmp_path, number, 20)
    write_multi_hot(tmp_path, 1, 20)
    with pytest.raises(DataError, match=r"day_1: \[1, 2, .*day_0 has \[1, 1, "):
        CriteoNpyDataset(tmp_path, ROWS)


def test_a_compressed_multi_hot_file_says_how_to_write_it(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 20)
    write_multi_hot(tmp_path, 0, 20, save=np.savez_compressed)
    with pytest.raises(DataError, match=r"multi_hot.npz, member 0: compressed.*np.savez, not np.savez_compressed"):
        CriteoNpyDataset(tmp_path, ROWS)


def test_a_truncated_multi_hot_file_is_named(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 20)
    write_multi_hot(tmp_path, 0, 20)
    path = tmp_path / "day_0_sparse_multi_hot.npz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"day_0_sparse_multi_hot.npz: damaged or truncated"):
        CriteoNpyDataset(tmp_path, ROWS)


def test_a_multi_hot_file_without_a_feature_is_named(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 20)
    np.savez(tmp_path / "day_0_sparse_multi_hot.npz", **{"0": np.zeros((20, 3), np.int32)})
    with pytest.raises(DataError, match=r"member 1: missing; expected members 0 to 25"):
        CriteoNpyDataset(tmp_path, ROWS)


def test_a_label_of_kaggles_unlabelled_test_set_is_refused(tmp_path: Path) -> None:
    day = write_day(tmp_path, 0, 20)
    np.save(tmp_path / "day_0_labels.npy", np.full_like(day["labels"], -1))
    with pytest.raises(DataError, match=r"day_0_labels.npy, split train: a label is -1, allowed: 0 and 1"):
        CriteoNpyDataset(tmp_path, ROWS).read(Split.train, torch.arange(4))


def test_a_day_too_small_to_divide_is_refused(tmp_path: Path) -> None:
    write_day(tmp_path, 0, 1)
    with pytest.raises(DataError, match=r"day_0_dense.npy: too few rows, split train has no samples"):
        CriteoNpyDataset(tmp_path, ROWS)
