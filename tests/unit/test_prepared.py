"""Reading prepared sets, and refusing damaged ones with the file or feature at fault."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.prepared import PreparedDataset
from dlrm_fused.errors import ConfigError, DataError
from tests.unit.prepared_sets import FEATURES, SplitArrays, write_prepared_set


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "set"


def _config(folder: Path) -> Config:
    config = Config()
    config.data.path = str(folder)
    return config


def _expected_ids(arrays: SplitArrays, feature: str, rows: torch.Tensor) -> list[list[int]]:
    return [arrays.ids[feature][row].tolist() for row in rows]


@pytest.mark.parametrize("split", list(Split))
def test_rows_are_read_in_the_order_asked_for(folder: Path, split: Split) -> None:
    arrays = write_prepared_set(folder)[split.name]
    dataset = PreparedDataset(folder)
    rows = torch.randperm(dataset.samples(split))[:15]
    samples = dataset.read(split, torch.cat([rows, rows[:2]]))
    rows = torch.cat([rows, rows[:2]])
    assert torch.equal(samples.dense, torch.from_numpy(arrays.dense)[rows])
    assert torch.equal(samples.labels, torch.from_numpy(arrays.labels)[rows].float())
    assert samples.sparse.keys() == ["user", "genres", "item"]
    for feature in FEATURES:
        ids = [list(map(int, sample)) for sample in samples.sparse[feature.name].to_dense()]
        assert ids == _expected_ids(arrays, feature.name, rows)


@pytest.mark.parametrize("jagged", [False, True])
def test_sets_of_single_or_of_jagged_features_alone_are_read(folder: Path, jagged: bool) -> None:
    features = tuple(feature for feature in FEATURES if feature.jagged == jagged)
    arrays = write_prepared_set(folder, features=features)["test"]
    samples = PreparedDataset(folder).read(Split.test, torch.tensor([3]))
    assert samples.sparse[features[0].name].values().tolist() == arrays.ids[features[0].name][3].tolist()


def test_a_cap_on_rows_takes_ids_modulo(folder: Path) -> None:
    arrays = write_prepared_set(folder)["train"]
    config = _config(folder)
    config.embedding.max_rows = 8
    dataset = open_dataset(config, torch.device("cpu"))
    assert [feature.rows for feature in dataset.schema.sparse_features] == [8, 7, 8]
    samples = dataset.read(Split.train, torch.arange(100))
    assert samples.sparse["user"].values().tolist() == [int(ids[0]) % 8 for ids in arrays.ids["user"]]
    assert samples.sparse["genres"].values().tolist() == np.concatenate(arrays.ids["genres"]).tolist()
    assert samples.sparse.values().dtype == torch.int32


def test_rows_of_tables_may_be_set(folder: Path) -> None:
    write_prepared_set(folder)
    config = _config(folder)
    config.embedding.rows = [10, 70, 30]
    dataset = open_dataset(config, torch.device("cpu"))
    assert [feature.rows for feature in dataset.schema.sparse_features] == [10, 70, 30]
    assert dataset.read(Split.train, torch.arange(100)).sparse["user"].values().max() < 10


def test_rows_for_another_number_of_features_are_refused(folder: Path) -> None:
    write_prepared_set(folder)
    config = _config(folder)
    config.embedding.rows = [10, 20]
    with pytest.raises(ConfigError, match=r"embedding.rows=\[10, 20\]: allowed: 3 numbers"):
        open_dataset(config, torch.device("cpu"))


def test_a_missing_folder_names_the_setting(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data.path=.*set: no such folder; prepare a data set with data/prepare.py"):
        open_dataset(_config(folder), torch.device("cpu"))


def test_a_folder_without_a_complete_set_is_refused(folder: Path) -> None:
    write_prepared_set(folder)
    (folder / "dataset.json").unlink()
    with pytest.raises(DataError, match=r"dataset.json is missing"):
        PreparedDataset(folder)


FILES = ["labels.npy", "dense.npy", "single.npy", "genres.values.npy", "genres.offsets.npy"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_when_the_set_is_opened(folder: Path, name: str) -> None:
    write_prepared_set(folder)
    (folder / "test" / name).unlink()
    with pytest.raises(DataError, match=rf"test/{name}: missing"):
        PreparedDataset(folder)


def test_a_file_is_open_once(folder: Path) -> None:
    """A process may open 1,024 files as a rule, and a set may have hundreds of features."""
    write_prepared_set(folder)
    before = set(os.listdir("/proc/self/fd"))
    dataset = PreparedDataset(folder)
    opened = [os.readlink(f"/proc/self/fd/{number}") for number in set(os.listdir("/proc/self/fd")) - before]
    of_set = [path for path in opened if path.startswith(str(folder))]
    assert len(of_set) == len(set(of_set)) > len(FILES)
    del dataset


@pytest.mark.parametrize("size", [0, 20, -1])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_when_the_set_is_opened(folder: Path, name: str, size: int) -> None:
    write_prepared_set(folder)
    path = folder / "train" / name
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=rf"train/{name}: damaged or truncated"):
        PreparedDataset(folder)


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("labels.npy", np.zeros(99, np.uint8), r"uint8 of shape \[99\], expected uint8 of shape \[100\]"),
        ("labels.npy", np.zeros(100, np.float32), r"float32 of shape \[100\], expected uint8"),
        ("dense.npy", np.zeros((100, 3), np.float32), r"float32 of shape \[100, 3\], expected float32 of shape \[100, 2\]"),
        ("single.npy", np.zeros((100, 2, 1), np.int32), r"int32 of shape \[100, 2, 1\]"),
        ("single.npy", np.zeros((100, 2), np.int32, order="F"), "column-major"),
        ("genres.values.npy", np.zeros(3, np.int32), r"genres.offsets.npy: runs from 0 to \d+, expected 0 to 3"),
        ("genres.offsets.npy", np.zeros(101, np.int64), r"genres.offsets.npy: runs from 0 to 0"),
    ],
)
def test_an_array_that_contradicts_the_schema_is_named(folder: Path, name: str, array: np.ndarray, expected: str) -> None:
    write_prepared_set(folder)
    np.save(folder / "train" / name, array)
    with pytest.raises(DataError, match=expected):
        PreparedDataset(folder)


def test_a_split_without_samples_is_refused(folder: Path) -> None:
    write_prepared_set(folder)
    content = json.loads((folder / "dataset.json").read_text())
    content["samples"]["validation"] = 0
    (folder / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"dataset.json: split validation has 0 samples, expected 1 or more"):
        PreparedDataset(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("single.npy", 50, r"split test: feature user has the id 50, allowed: 0 to 49"),
        ("single.npy", -3, r"split test: feature user has the id -3, allowed: 0 to 49"),
        ("genres.values.npy", 7, r"split test: feature genres has the id 7, allowed: 0 to 6"),
        ("labels.npy", 2, r"split test: a label is 2, allowed: 0 and 1"),
        ("dense.npy", np.nan, r"split test: dense feature dense_0 has a NaN, an infinite value or one beyond float32"),
        ("dense.npy", -np.inf, r"split test: dense feature dense_0 has a NaN, an infinite value or one beyond float32"),
    ],
)
def test_a_value_out_of_range_names_the_feature_when_read(folder: Path, name: str, value: float, message: str) -> None:
    write_prepared_set(folder)
    path = folder / "test" / name
    array = np.load(path)
    array.reshape(-1)[0] = value
    np.save(path, array)
    with pytest.raises(DataError, match=message):
        PreparedDataset(folder).read(Split.test, torch.arange(21))


def test_offsets_that_decrease_are_refused(folder: Path) -> None:
    write_prepared_set(folder)
    path = folder / "train" / "genres.offsets.npy"
    offsets = np.load(path)
    offsets[5] = offsets[-1]
    np.save(path, offsets)
    with pytest.raises(DataError, match=r"genres.offsets.npy: offsets decrease"):
        PreparedDataset(folder).read(Split.train, torch.arange(100))
