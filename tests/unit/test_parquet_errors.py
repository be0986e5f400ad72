"""Parquet files that cannot be trained on: each is told in one line that names the file and the column, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dlrm_fused.config import Config, DataSource, Split, check_consistency
from dlrm_fused.config.registry import ModelKind
from dlrm_fused.datasets.loader import TrainLoader
from dlrm_fused.datasets.parquet import ParquetDataset
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.errors import ConfigError, DataError, UserError
from tests.unit.prepared_sets import write_prepared_set

GOOD: dict[str, pa.Array] = {
    "label": pa.array([0, 1, 1, 0], pa.int8()),
    "price": pa.array([0.5, 1.0, -2.0, 0.0], pa.float32()),
    "user": pa.array([0, 9, 3, 4], pa.int64()),
    "tags": pa.array([[1, 2], [], [0], [4]], pa.list_(pa.int32())),
}


def write(path: Path, **changed: pa.Array | None) -> Path:
    """A file of the good columns, but some changed, others added or left out; two row groups of two rows."""
    columns = {name: array for name, array in {**GOOD, **changed}.items() if array is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a good set of one file for each split, and of a batch of all its rows."""
    for split in Split:
        write(tmp_path / "set" / split.name / "a.parquet")
    config = Config()
    config.data.source, config.data.path = DataSource.parquet, str(tmp_path / "set")
    config.embedding.rows = [10, 5]
    config.training.global_batch_size = 4
    return config


def train(config: Config, ranks: int = 1) -> None:
    """The first batch."""
    check_consistency(config)
    with TrainLoader(ParquetDataset(config), config, 0, ranks, torch.device("cpu")) as loader:
        next(loader)


def refused(config: Config, ranks: int = 1) -> str:
    """The message, which is one line, its folder left out."""
    with pytest.raises(UserError) as caught:
        train(config, ranks)
    message = str(caught.value).replace(config.data.path, "set")
    assert "\n" not in message
    return message


def test_the_set_is_good_without_changes(config: Config) -> None:
    train(config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label": None}, "set/train/a.parquet: column label, of data.labels, is missing; its columns are price, user, tags"),
        ({"a\nb": GOOD["user"]}, "set/train/a.parquet: column 'a\\nb': allowed: a name that is not empty and has no control"),
        ({"user": None, "tags": None}, "set/train/a.parquet: a column of whole numbers, for a sparse feature, is missing"),
        (
            {"city": pa.array(["a", "b", "c", "d"])},
            "set/train/a.parquet: column city is string, allowed: floating-point numbers (a dense feature), whole numbers or "
            "lists of them (ids of a sparse feature); leave it out, or prepare the files with data/prepare.py table",
        ),
        ({"tags": pa.array([["a"]] * 4)}, "column tags is list<element: string>, allowed: "),
        ({"tags": pa.array([[0.5]] * 4)}, "column tags is list<element: double>, allowed: "),
        ({"user": pa.array([{"id": 1}] * 4)}, "column user is struct<id: int64>, allowed: "),
        ({"time": pa.array([0] * 4, pa.timestamp("s"))}, "column time is timestamp[ms], allowed: "),
        (
            {"label": pa.array([[0], [1], [0], [1]])},
            "column label is list<element: int64>, allowed: numbers or bool, all 0 or 1",
        ),
        ({"label": pa.array(["0", "1", "0", "1"])}, "column label is string, allowed: numbers or bool, all 0 or 1"),
        (
            {"label": pa.array([0, 1, 2, 0])},
            "set/train/a.parquet, row group 1, column label: a label is 2, allowed: 0 and 1; correct the file",
        ),
        ({"label": pa.array([0, 1, 0.5, 0])}, "row group 1, column label: a label is 0.5, allowed: 0 and 1"),
        ({"label": pa.array([0, 1, None, 0])}, "row group 1: column label has nulls (1); fill them, or leave their rows out"),
        ({"label": pa.array([float("nan"), 1, 1, 0])}, "row group 0, column label: a label is nan, allowed: 0 and 1"),
        ({"price": pa.array([0.5, 1, None, None])}, "row group 1: column price has nulls (2); fill them"),
        (
            {"price": pa.array([0.5, 1, float("inf"), 1])},
            "row group 1: dense feature price has a NaN, an infinite value or one beyond float32; correct",
        ),
        (
            {"price": pa.array([0.5, 1, 1e300, 1])},
            "row group 1: dense feature price has a NaN, an infinite value or one beyond float32; correct",
        ),
        (
            {"user": pa.array([0, 10, 3, 4])},
            "row group 0: feature user has the id 10, allowed: 0 to 9; correct the ids, or the rows that are stated for the "
            "table",
        ),
        ({"user": pa.array([0, -1, 3, 4])}, "row group 0: feature user has the id -1, allowed: 0 to 9"),
        ({"user": pa.array([0, 2**63, 3, 4], pa.uint64())}, f"row group 0: feature user has the id {2**63}, allowed: 0 to 9"),
        ({"user": pa.array([0, None, 3, 4])}, "row group 0: column user has nulls (1); fill them"),
        ({"tags": pa.array([[0], None, [1], [2]])}, "row group 0: column tags has nulls (1); fill them"),
        ({"tags": pa.array([[0], [1, None], [1], [2]])}, "row group 0: column tags has nulls (1); fill them"),
        ({"tags": pa.array([[0], [1, 5], [1], [2]])}, "row group 0: feature tags has the id 5, allowed: 0 to 4"),
    ],
)
def test_a_bad_column_is_named(config: Config, changed: dict[str, Any], message: str) -> None:
    for split in Split:
        write(Path(config.data.path) / split.name / "a.parquet", **changed)
    assert message in refused(config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"user": None}, "set/train/b.parquet: column user is missing, which set/train/a.parquet has; correct the file"),
        (
            {"user": pa.array([[1]] * 4)},
            "set/train/b.parquet: column user is list<element: int64>, but int64 in set/train/a.parquet; correct the file",
        ),
        ({"user": pa.array([0, 1, 2, 3], pa.int32())}, "set/train/b.parquet: column user is int32, but int64 in"),
        (
            {"age": pa.array([0.5] * 4)},
            "set/train/b.parquet: columns label, price, user, tags, age, but label, price, user, tags in",
        ),
    ],
)
def test_files_of_different_columns_are_refused(config: Config, changed: dict[str, Any], message: str) -> None:
    write(Path(config.data.path) / "train/b.parquet", **changed)
    assert message in refused(config)


def test_splits_of_different_columns_are_refused(config: Config) -> None:
    write(Path(config.data.path) / "test/a.parquet", price=None, age=GOOD["price"])
    assert refused(config).startswith("set/test/a.parquet: column price is missing, which set/train/a.parquet has")


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _overwrite_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: _cut(path, 0), "set/train/a.parquet: damaged or truncated ("),
        (lambda path: _cut(path, 100), "set/train/a.parquet: damaged or truncated ("),
        (lambda path: _cut(path, -1), "set/train/a.parquet: damaged or truncated ("),
        (lambda path: path.write_text("label,price\n0,1\n") and None, "set/train/a.parquet: damaged or truncated ("),
        (_overwrite_pages, "set/train/a.parquet, row group 0: damaged or truncated ("),
        (
            lambda path: path.unlink(),
            "set/train: no file matches *.parquet; data.path=set needs a folder of them for each split",
        ),
        (
            lambda path: pq.write_table(pa.table(GOOD).slice(0, 0), path),
            "set/train: its files hold no rows; data.path=set needs samples for each split",
        ),
    ],
)
def test_a_damaged_empty_or_missing_file_is_named(config: Config, spoil: Callable[[Path], None], message: str) -> None:
    spoil(Path(config.data.path) / "train/a.parquet")
    assert message in refused(config)


def test_a_file_cut_off_while_it_is_read_is_named(config: Config) -> None:
    dataset = ParquetDataset(config)
    _cut(Path(config.data.path) / "train/a.parquet", 20)
    with pytest.raises(DataError, match=r"train/a.parquet, row group 0: damaged or truncated"):
        dataset.read(Split.train, torch.arange(4))


def test_a_missing_folder_names_the_setting(config: Config, tmp_path: Path) -> None:
    config.data.path = str(tmp_path / "nowhere")
    assert refused(config) == "data.path=set: no such folder; it needs a folder of Parquet files for each split"


def test_a_folder_without_splits_is_refused(config: Config, tmp_path: Path) -> None:
    config.data.path = str(tmp_path / "empty")
    Path(config.data.path).mkdir()
    assert refused(config) == (
        "data.path=set: none of the folders train, validation, test; put the Parquet files of each split there"
    )


def test_a_split_that_is_missing_is_named_when_it_is_asked_for(config: Config) -> None:
    (Path(config.data.path) / "test/a.parquet").unlink()
    (Path(config.data.path) / "test").rmdir()
    with pytest.raises(DataError, match=r"holds no split test, only train, validation; put Parquet files into test/"):
        ParquetDataset(config).samples(Split.test)


def test_fewer_row_groups_than_ranks_are_refused(config: Config) -> None:
    train(config, ranks=2)
    assert refused(config, ranks=3) == (
        "set/train: fewer row groups (2) than ranks (3); write the files with smaller row groups"
    )


@pytest.mark.parametrize("rows", [[], [10], [10, 5, 3]])
def test_the_rows_of_tables_are_asked_for_where_files_do_not_state_them(config: Config, rows: list[int]) -> None:
    config.embedding.rows = rows
    assert refused(config) == (
        f"embedding.rows={rows}: allowed: 2 numbers, one for each of user, tags, since set/train/a.parquet does not state the "
        "rows of their tables"
    )


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"rows": "many"}, "column tags: its metadata state rows=many, expected a number; correct the file"),
        ({"rows": "0"}, "column tags: its metadata state 0 rows, expected a whole number, 1 or more; correct the file"),
        ({"pooling_factor": "x"}, "column tags: its metadata state pooling_factor=x, expected a number; correct the file"),
    ],
)
def test_metadata_that_state_no_number_are_refused(config: Config, stated: dict[str, str], message: str) -> None:
    table = pa.table(GOOD)
    table = table.cast(table.schema.set(3, table.schema.field("tags").with_metadata(stated)))
    for split in Split:
        pq.write_table(table, Path(config.data.path) / split.name / "a.parquet")
    assert refused(config) == message


def test_histories_cannot_come_from_parquet_files(config: Config) -> None:
    config.model.kind = ModelKind.transformer
    assert refused(config) == "data.source=parquet: allowed: prepared, synthetic with model.kind=transformer"


def test_a_folder_must_be_given() -> None:
    config = Config()
    config.data.source = DataSource.parquet
    with pytest.raises(ConfigError, match=r"data.path='': allowed: the data set's folder, for data.source=parquet"):
        check_consistency(config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "nowhere", "--output", "new"], "nowhere: no prepared data set (dataset.json is missing)"),
        (["--input", "set", "--output", "set"], "--output set: is not empty; choose an empty or new folder"),
    ],
)
def test_what_cannot_be_written_as_parquet_is_told(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_prepared_set(Path("set"))
    assert cli.main(["parquet", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not Path("new").exists()


def test_a_failure_leaves_no_half_written_files(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_prepared_set(Path("set"))
    _cut(Path("set/test/labels.npy"), 20)
    assert cli.main(["parquet", "--input", "set", "--output", "new"]) == 1
    assert "set/test/labels.npy: damaged or truncated" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


@pytest.mark.parametrize("name", ["_b.parquet", ".b.parquet", "_temporary/0/b.parquet", ".tmp/b.parquet"])
def test_hidden_files_are_not_read(config: Config, name: str) -> None:
    write(Path(config.data.path) / "train" / name, user=pa.array([99] * 4))
    train(config)


@pytest.mark.parametrize("name", ["0.parquet", "b.parquet"])
def test_files_without_rows_are_left_out(config: Config, name: str) -> None:
    """Spark writes some, and pandas such without types."""
    write(Path(config.data.path) / "train" / name, **dict.fromkeys(GOOD, pa.nulls(0)))
    train(config)


@pytest.mark.parametrize("folder", ["dt=2024-01-01", "dt=2024-01-01/hour=7", "more"])
def test_files_in_folders_of_a_split_are_told(config: Config, folder: str) -> None:
    """They would not be read, nor the columns of their path."""
    write(Path(config.data.path) / "train" / folder / "b.parquet")
    assert refused(config) == (
        f"set/train/{folder}/b.parquet: is in a folder of set/train, where it would not be read; write all files of the split "
        "into set/train itself, and a column such as dt=2024-01-01 of the path into them"
    )
