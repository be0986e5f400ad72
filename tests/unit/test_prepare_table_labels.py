"""Several labels and weights of rows, from a table to samples: each row keeps its own, whatever the format and the split."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import pytest
import torch

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.config import Config, DataSource, Split, load_config
from dlrm_fused.datasets import Dataset, open_dataset
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.preparation.parquet import SAMPLE_WEIGHT
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.schema import LABEL, PreparedInfo
from dlrm_fused.errors import ConfigError, DataError
from tests.unit.several_labels import LABELS, TWO_LABELS, two_labels
from tests.unit.tables import prepare, random_table, write_table

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(two_labels(), tmp_path_factory.mktemp("table") / "t.parquet")


@pytest.fixture(scope="module")
def prepared(source: Path) -> Path:
    folder = source.parent / "set"
    prepare(source, folder, *TWO_LABELS)
    return folder


def open_set(folder: Path, source: DataSource = DataSource.prepared, **data: Any) -> Dataset:
    config = Config()
    config.data.source, config.data.path = source, str(folder)
    for name, value in data.items():
        setattr(config.data, name, value)
    return open_dataset(config, CPU)


def rows_of(dataset: Dataset) -> dict[str, list[Any]]:
    """Labels and weights of the samples of all splits."""
    samples = [dataset.read(split, torch.arange(dataset.samples(split))) for split in Split]
    assert all(each.weights is not None for each in samples)
    return {
        "labels": torch.cat([each.labels for each in samples]).tolist(),
        "weights": torch.cat([each.weights for each in samples]).tolist(),
        "ids": torch.cat([each.sparse["user"].values() for each in samples]).tolist(),
    }


def test_samples_have_the_labels_and_the_weight_of_their_row(tmp_path: Path) -> None:
    table = two_labels().append_column("part", pa.array([SPLITS[i % 3] for i in range(400)]))
    prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "set", *TWO_LABELS, "--split-by-column", "part")
    dataset = open_set(tmp_path / "set")
    assert (dataset.schema.labels, dataset.schema.has_weights) == (LABELS, True)
    for split in Split:
        own = table.filter(pc.equal(table["part"], split.name))
        samples = dataset.read(split, torch.arange(len(own)))
        assert samples.labels.dtype == samples.weights.dtype == torch.float32
        assert samples.labels[:, 0].tolist() == own["clicked"].to_pylist()
        assert samples.labels[:, 1].tolist() == own["bought"].to_pylist()
        assert samples.weights.tolist() == own["w"].to_pylist()


def test_text_files_give_the_same_set(source: Path, prepared: Path, tmp_path: Path) -> None:
    text = write_table(two_labels(), tmp_path / "t.csv")
    prepare(text, tmp_path / "set", *TWO_LABELS, "--separated", "tags=|")
    for split in SPLITS:
        for name in ("labels", "weights"):
            expected = np.load(prepared / split / f"{name}.npy")
            np.testing.assert_array_equal(np.load(tmp_path / "set" / split / f"{name}.npy"), expected)


def test_apply_reads_the_same_labels_and_weights(source: Path, prepared: Path, tmp_path: Path) -> None:
    applied = prepare(source, tmp_path / "new", "--transformation", str(prepared), "--held-out", "0.2", command="apply")
    assert applied.info.schema.labels == LABELS
    assert rows_of(open_set(tmp_path / "new")) == rows_of(open_set(prepared))


@pytest.mark.parametrize("group_rows", [7, 1000])
def test_as_parquet_files_the_samples_are_the_same(prepared: Path, tmp_path: Path, group_rows: int) -> None:
    command = ["parquet", "--input", str(prepared), "--output", str(tmp_path / "files"), "--row-group-rows", str(group_rows)]
    assert cli.main(command) == 0
    dataset = open_set(tmp_path / "files", DataSource.parquet, labels=list(LABELS), sample_weight=SAMPLE_WEIGHT)
    assert (dataset.schema.labels, dataset.schema.has_weights) == (LABELS, True)
    assert rows_of(dataset) == rows_of(open_set(prepared))


def test_a_label_that_has_the_name_of_the_column_of_weights_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"bought": SAMPLE_WEIGHT}
    source = write_table(two_labels().rename_columns(names), tmp_path / "t.parquet")
    prepare(source, tmp_path / "set", "--label", f"clicked,{SAMPLE_WEIGHT}", "--sample-weight", "w")
    assert cli.main(["parquet", "--input", str(tmp_path / "set"), "--output", str(tmp_path / "files")]) == 1
    assert f"two columns would be named {SAMPLE_WEIGHT}; rename" in capsys.readouterr().err
    assert not (tmp_path / "files").exists()


def test_of_one_label_the_files_are_those_of_earlier_releases(tmp_path: Path) -> None:
    prepared = prepare(write_table(random_table(), tmp_path / "t.parquet"), tmp_path / "set")
    written = json.loads((tmp_path / "set/dataset.json").read_text())
    assert written["format_version"] == 2
    assert set(written["schema"]) == {"dense_features", "sparse_features", "token_features", "history_length"}
    assert json.loads((tmp_path / "set/transformation/transformation.json").read_text())["label"] == "clicked"
    assert prepared.splits["train"]["labels"].ndim == 1
    assert "weights" not in prepared.splits["train"]
    samples = open_set(tmp_path / "set").read(Split.train, torch.arange(5))
    assert samples.labels.shape == (5,)
    assert samples.weights is None
    assert prepared.info.schema.labels == (LABEL,)


@pytest.mark.parametrize("options", [("--label", "clicked,bought"), ("--sample-weight", "w")])
def test_there_may_be_several_labels_without_weights_and_weights_with_one_label(
    source: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    schema = prepare(source, tmp_path / "set", *options).info.schema
    several = options[0] == "--label"
    assert (schema.labels, schema.has_weights) == (LABELS if several else (LABEL,), not several)
    samples = open_set(tmp_path / "set").read(Split.train, torch.arange(5))
    assert samples.labels.shape == ((5, 2) if several else (5,))
    assert (samples.weights is None) == several


def test_histories_tell_the_first_label(source: Path, tmp_path: Path) -> None:
    history = ("--history", "user", "time", "color")
    for name, options in {"both": TWO_LABELS, "first": (), "swapped": ("--label", "bought,clicked")}.items():
        prepare(source, tmp_path / name, *options, *history)
    both, first, swapped = (np.load(tmp_path / name / "interactions/single.npy") for name in ("both", "first", "swapped"))
    np.testing.assert_array_equal(both, first)
    assert not np.array_equal(both, swapped)


def test_a_description_tells_of_each_label_and_of_the_weights(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["--dense", "price,age", "--sparse", "user,color,tags"]
    command = ["table", "--input", str(source), "--output", str(source.parent / "none"), "--describe", *TWO_LABELS, *columns]
    assert cli.main(command) == 0
    said, table = capsys.readouterr().out, two_labels()
    for label in LABELS:
        assert f"label {label}: 1 in {pc.sum(table[label]).as_py()} rows" in said
    assert f"sample weight w: {pc.mean(table['w']).as_py():g} on average" in said


def changed(name: str, row: int, value: Any, kind: pa.DataType | None = None) -> pa.Table:
    """The table with another value in one row, counted from 1."""
    table = two_labels()
    values = table[name].to_pylist()
    values[row - 1] = value
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values, kind))


def constant(name: str, value: float | str) -> pa.Table:
    table = two_labels()
    return table.set_column(table.schema.get_field_index(name), name, pa.array([value] * len(table)))


WRONG = [
    (two_labels(), ("--label", "clicked,sold"), "--label sold: no such column in "),
    (two_labels(), ("--label", "clicked,clicked"), "--label clicked: is twice in --label; keep one of them"),
    (two_labels(), ("--label", "clicked,user"), "--sparse user: is in both --label and --sparse; keep one of them"),
    (two_labels(), ("--label", ","), "--label: no column given; name at least one column of 0 and 1"),
    (constant("bought", "no"), (), "--label bought: text in "),
    (changed("bought", 9, 2, pa.int8()), (), "--label bought: 2 in .*row 9; allowed: 0 and 1"),
    (constant("bought", 0), (), "--label bought: is 0 in all 320 training rows, so there is nothing to learn"),
    (two_labels(), ("--sample-weight", "v"), "--sample-weight v: no such column in "),
    (two_labels(), ("--sample-weight", "age"), "--sample-weight age: is in both --dense and --sample-weight"),
    (constant("w", "much"), (), "--sample-weight w: text in "),
    (changed("w", 5, -0.5), (), "--sample-weight w: -0.5 in .*row 5; allowed: finite numbers, 0 or more"),
    (changed("w", 6, float("nan")), (), "--sample-weight w: nan in .*row 6; allowed: finite numbers, 0 or more"),
    (changed("w", 7, None), (), "--sample-weight w: a missing value in .*row 7; allowed: finite numbers, 0 or more"),
    (changed("w", 8, float("inf")), (), "--sample-weight w: inf in .*row 8; allowed: finite numbers, 0 or more"),
    (changed("w", 8, 1e39), (), r"--sample-weight w: 1e\+39 in .*row 8; allowed: finite numbers, 0 or more"),
    (constant("w", 0), (), "--sample-weight w: is 0 in all train rows, so that none counts"),
]


@pytest.mark.parametrize(("table", "options", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_what_is_wrong_is_told_in_one_line_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: pa.Table, options: tuple[str, ...], message: str
) -> None:
    source = write_table(table, tmp_path / "t.parquet")
    columns = [*TWO_LABELS, "--dense", "price,age", "--sparse", "user,color,tags", *options]
    assert cli.main(["table", "--input", str(source), "--output", str(tmp_path / "set"), *columns]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert re.search(message, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_weights_of_a_damaged_set_are_told(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "set", *TWO_LABELS)
    (tmp_path / "set" / CHECKSUMS_FILE).unlink()
    path = tmp_path / "set/train/weights.npy"
    np.save(path, np.full_like(np.load(path), np.nan))
    with pytest.raises(DataError, match=r"split train: the weight of a sample is nan, allowed: finite numbers, 0 or more"):
        open_set(tmp_path / "set").read(Split.train, torch.arange(3))
    path.unlink()
    with pytest.raises(DataError, match=r"weights.npy: missing"):
        open_set(tmp_path / "set")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "column label, of data.labels, is missing; its columns are clicked, bought, "),
        ({"labels": ["clicked", "sold"]}, "column sold, of data.labels, is missing"),
        ({"labels": list(LABELS)}, "column sample_weight holds weights of samples; set data.sample_weight=sample_weight"),
        ({"labels": ["clicked"], "sample_weight": "v"}, "column v, of data.sample_weight, is missing"),
        ({"labels": ["clicked"], "sample_weight": "tags"}, "column tags is list.*, allowed: numbers, 0 or more"),
    ],
)
def test_columns_of_parquet_files_that_do_not_fit_the_config_are_told(
    prepared: Path, tmp_path: Path, data: dict[str, Any], message: str
) -> None:
    assert cli.main(["parquet", "--input", str(prepared), "--output", str(tmp_path / "files")]) == 0
    with pytest.raises(DataError, match=message):
        open_set(tmp_path / "files", DataSource.parquet, **data)


def test_a_weight_below_0_in_a_parquet_file_is_told_with_its_row_group(prepared: Path, tmp_path: Path) -> None:
    assert cli.main(["parquet", "--input", str(prepared), "--output", str(tmp_path / "files")]) == 0
    path = tmp_path / "files/train/part-00000.parquet"
    table = pa.parquet.read_table(path)
    weights = pa.array([-1.0, *[1.0] * (len(table) - 1)], pa.float32())
    pa.parquet.write_table(table.set_column(table.schema.get_field_index(SAMPLE_WEIGHT), SAMPLE_WEIGHT, weights), path)
    dataset = open_set(tmp_path / "files", DataSource.parquet, labels=list(LABELS), sample_weight=SAMPLE_WEIGHT)
    with pytest.raises(DataError, match=r"row group 0, column sample_weight: the weight of a sample is -1, allowed: finite"):
        dataset.read(Split.train, torch.arange(3))


@pytest.mark.parametrize("setting", ["data.labels=[clicked,bought]", "data.sample_weight=w"])
def test_a_prepared_set_states_its_labels_and_weights_itself(prepared: Path, setting: str) -> None:
    with pytest.raises(
        ConfigError, match=r"allowed: with data.source=parquet alone; other data state their labels, weights and times"
    ):
        load_config(prepared / "config.yaml", [setting])


def test_the_labels_of_a_set_have_different_names(prepared: Path, tmp_path: Path) -> None:
    content = json.loads((prepared / "dataset.json").read_text())
    content["schema"]["labels"] = ["clicked", "clicked"]
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"labels are clicked, clicked, expected one or more different names"):
        PreparedInfo.load(tmp_path)
