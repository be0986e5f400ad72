"""Preparing tables of one's own: what ids, numbers and splits rows get, in every format, however the table is cut."""

from __future__ import annotations

import filecmp
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dlrm_fused.config import load_config
from dlrm_fused.datasets.preparation import cli, value_counts
from dlrm_fused.datasets.preparation.table import files, splits
from dlrm_fused.datasets.preparation.table.learning import quantiles
from dlrm_fused.datasets.preparation.table.splits import RowSample, sample_bits
from dlrm_fused.datasets.preparation.table.survey import Moments
from dlrm_fused.datasets.preparation.value_counts import ValueCounter
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.datasets.transformation import FIRST_KEPT, MISSING, UNSEEN
from dlrm_fused.errors import DataError
from tests.unit.tables import COLUMNS, ROWS, ids_of_values, prepare, random_table, read_prepared, write_table

TEXT_LISTS = ("--separated", "tags=|")


@pytest.fixture
def table() -> pa.Table:
    return random_table()


@pytest.fixture
def source(tmp_path: Path, table: pa.Table) -> Path:
    return write_table(table, tmp_path / "table.parquet")


def with_split(table: pa.Table) -> tuple[pa.Table, np.ndarray]:
    """The table with a column ``fold`` of splits, and the position of each row's split."""
    split = np.random.default_rng(7).choice(3, ROWS, p=[0.7, 0.2, 0.1])
    return table.append_column("fold", pa.array([SPLITS[s] for s in split])), split


def expected_ids(values: list[Any], train: list[Any], min_frequency: int) -> list[list[int]]:
    """The ids of rows, whose values are lists, from the definition."""
    counts = Counter(value for row in train for value in row if value is not None)
    kept = sorted((v for v, n in counts.items() if n >= min_frequency), key=lambda v: (-counts[v], v))
    ids = {None: MISSING, **{value: FIRST_KEPT + i for i, value in enumerate(kept)}}
    return [[ids.get(value, UNSEEN) for value in row] for row in values]


def same_files(left: Path, right: Path) -> bool:
    names = [str(path.relative_to(left)) for path in left.rglob("*.npy")]
    assert names
    assert {*names} == {str(path.relative_to(right)) for path in right.rglob("*.npy")}
    return filecmp.cmpfiles(left, right, names, shallow=False)[1:] == ([], [])


@pytest.mark.parametrize("min_frequency", [1, 3, 9])
@pytest.mark.parametrize("name", ["user", "color", "tags"])
def test_frequent_values_of_training_rows_are_numbered_from_the_most_frequent_on(
    tmp_path: Path, table: pa.Table, name: str, min_frequency: int
) -> None:
    table, split = with_split(table)
    source = write_table(table, tmp_path / "table.parquet")
    options = ["--split-by-column", "fold", "--min-frequency", str(min_frequency), "--sparse", name]
    prepared = prepare(source, tmp_path / "out", *options)
    rows = [value if isinstance(value, list) else [value] for value in table[name].to_pylist()]
    train = [row for row, s in zip(rows, split, strict=True) if s == 0]
    for number, of_split in enumerate(SPLITS):
        wanted = expected_ids([row for row, s in zip(rows, split, strict=True) if s == number], train, min_frequency)
        assert prepared.ids(of_split, name) == wanted
    (feature,) = prepared.info.schema.sparse_features
    counts = Counter(value for row in train for value in row if value is not None)
    assert feature.rows == FIRST_KEPT + sum(count >= min_frequency for count in counts.values())
    assert feature.jagged == (name == "tags")
    assert feature.pooling_factor == round(float(np.mean([len(row) for row in rows])), 4)


def test_rows_keep_their_order_and_labels(tmp_path: Path, table: pa.Table) -> None:
    table, split = with_split(table)
    prepared = prepare(write_table(table, tmp_path / "table.parquet"), tmp_path / "out", "--split-by-column", "fold")
    for number, of_split in enumerate(SPLITS):
        labels = table["clicked"].to_numpy()[split == number]
        np.testing.assert_array_equal(prepared.splits[of_split]["labels"], labels)


def test_a_block_whose_lists_are_all_missing_or_empty(tmp_path: Path, table: pa.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK_ROWS", 10)
    lists = [None] * 10 + [[]] * 10 + table["tags"].to_pylist()[20:]
    changed = table.set_column(5, "tags", pa.array(lists, pa.list_(pa.string())))
    changed = changed.append_column("fold", pa.array(["train"] * 300 + ["validation"] * 50 + ["test"] * 50))
    source = write_table(changed, tmp_path / "table.parquet")
    prepared = prepare(source, tmp_path / "out", "--split-by-column", "fold")
    assert prepared.ids("train", "tags")[:20] == [[MISSING]] * 10 + [[]] * 10


def test_hashed_values_need_no_vocabulary(tmp_path: Path, source: Path) -> None:
    prepared = prepare(source, tmp_path / "out", "--hash-buckets", "user=15,tags=7")
    rows = {feature.name: feature.rows for feature in prepared.info.schema.sparse_features}
    assert (rows["user"], rows["tags"]) == (15, 7)
    assert {i for row in prepared.all_ids("user") for i in row} <= set(range(15))
    assert {i for row in prepared.all_ids("tags") for i in row} <= set(range(7))


def test_dense_features_are_scaled_by_statistics_of_training_rows(tmp_path: Path, table: pa.Table) -> None:
    table, split = with_split(table)
    source = write_table(table, tmp_path / "table.parquet")
    options = ["--split-by-column", "fold", "--dense", "price:log,age:quantile"]
    prepared = prepare(source, tmp_path / "out", *options)
    scaled = {number: prepared.splits[name]["dense"] for number, name in enumerate(SPLITS)}
    price, age = (np.array(table[name].to_pylist(), float) for name in ("price", "age"))
    known = np.log1p(price[(split == 0) & ~np.isnan(price)])
    for number, dense in scaled.items():
        of_split = price[split == number]
        wanted = np.where(np.isnan(of_split), 0, (np.log1p(of_split) - known.mean()) / known.std())
        np.testing.assert_allclose(dense[:, 0], wanted, atol=1e-6)
        assert (dense[np.isnan(age[split == number]), 1] == 0).all()
    train, ages = scaled[0][:, 1], age[split == 0]
    below = np.array([((ages < a).sum() + (ages == a).sum() / 2) / (~np.isnan(ages)).sum() for a in ages])
    np.testing.assert_allclose(train[~np.isnan(ages)], (2 * below - 1)[~np.isnan(ages)], atol=1e-6)


def test_standardized_training_rows_have_mean_0_and_deviation_1(tmp_path: Path, source: Path) -> None:
    prepared = prepare(source, tmp_path / "out", "--dense", "age")
    age = prepared.splits["train"]["dense"][:, 0].astype(float)
    known = age[age != 0]
    assert known.mean() == pytest.approx(0, abs=1e-6)
    assert known.std() == pytest.approx(1, abs=1e-6)


def test_a_table_without_dense_columns_has_a_constant(tmp_path: Path, source: Path) -> None:
    prepared = prepare(source, tmp_path / "out", "--dense", "")
    assert prepared.info.schema.dense_features == ("constant",)
    assert (prepared.splits["test"]["dense"] == 1).all()


@pytest.mark.parametrize("name", ["t.arrow", "t.ipc", "t.csv", "t.tsv", "t.csv.gz", "t.tsv.zst"])
def test_all_formats_give_the_same_set(tmp_path: Path, table: pa.Table, name: str) -> None:
    """Text files cannot tell an empty list from a missing one, nor a text with a whole number from a number."""
    is_text = name.split(".")[1] in ("csv", "tsv")
    if is_text:
        lists = [tags or [None] for tags in table["tags"].to_pylist()]
        table = table.set_column(5, "tags", pa.array(lists, pa.list_(pa.string())))
        table = table.set_column(3, "user", table["user"].cast(pa.string()))
    options = ["--hash-buckets", "user=20"]
    one = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "one", *options)
    prepare(write_table(table, tmp_path / name), tmp_path / "other", *options, *(TEXT_LISTS if is_text else ()))
    assert one.info.samples["train"] > 250
    assert same_files(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_the_kinds_of_text_are_one(tmp_path: Path, table: pa.Table, source: Path, kind: pa.DataType) -> None:
    prepare(source, tmp_path / "one")
    changed = table.set_column(4, "color", table["color"].cast(kind))
    prepare(write_table(changed, tmp_path / "other.parquet"), tmp_path / "other")
    assert same_files(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("kind", [pa.large_list(pa.large_string()), pa.list_(pa.dictionary(pa.int8(), pa.string()))])
def test_the_kinds_of_lists_are_one(tmp_path: Path, table: pa.Table, source: Path, kind: pa.DataType) -> None:
    prepare(source, tmp_path / "one")
    changed = table.set_column(5, "tags", pa.array(table["tags"].to_pylist(), kind))
    prepare(write_table(changed, tmp_path / "other.ipc"), tmp_path / "other")
    assert same_files(tmp_path / "one", tmp_path / "other")


def test_whole_numbers_that_pandas_made_floating_are_whole_numbers(tmp_path: Path, table: pa.Table) -> None:
    small = pa.array([None if u is None else u // 10**15 for u in table["user"].to_pylist()], pa.int64())
    one = write_table(table.set_column(3, "user", small), tmp_path / "one.parquet")
    other = write_table(table.set_column(3, "user", small.cast(pa.float64()).fill_null(np.nan)), tmp_path / "other.parquet")
    prepare(one, tmp_path / "one")
    prepare(other, tmp_path / "other")
    assert same_files(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("separator", [",", "; "])
def test_text_is_cut_at_any_separator(tmp_path: Path, table: pa.Table, separator: str) -> None:
    lists = [tags or [None] for tags in table["tags"].to_pylist()]
    joined = pa.array([separator.join(tag or "" for tag in tags) for tags in lists])
    one = write_table(table.set_column(5, "tags", pa.array(lists, pa.list_(pa.string()))), tmp_path / "one.parquet")
    other = write_table(table.set_column(5, "tags", joined), tmp_path / "other.parquet")
    prepare(one, tmp_path / "one")
    prepare(other, tmp_path / "other", "--separated", f"tags={separator}")
    assert same_files(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("workers", ["1", "3"])
def test_the_set_does_not_depend_on_how_the_table_is_cut(
    tmp_path: Path, table: pa.Table, source: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    options = ["--dense", "age:quantile"]  # sums of numbers are rounded in the order of blocks, quantiles are not
    prepare(source, tmp_path / "one", *options)
    monkeypatch.setattr(files, "BLOCK_ROWS", 33)
    monkeypatch.setattr(value_counts, "ENTRIES_IN_MEMORY", 20)
    parts = [write_table(table.slice(at, 90), tmp_path / f"part{at:03}.parquet") for at in range(0, ROWS, 90)]
    prepare(parts, tmp_path / "other", *options, "--workers", workers)
    assert same_files(tmp_path / "one", tmp_path / "other")
    prepare(tmp_path / "part*.parquet", tmp_path / "third", *options)
    assert same_files(tmp_path / "one", tmp_path / "third")


def test_a_random_split_is_decided_by_the_seed(tmp_path: Path, source: Path) -> None:
    prepare(source, tmp_path / "one")
    prepare(source, tmp_path / "again")
    assert same_files(tmp_path / "one", tmp_path / "again")
    other = prepare(source, tmp_path / "other", "--seed", "2", "--held-out", "0.5")
    assert not same_files(tmp_path / "one", tmp_path / "other")
    assert 150 < other.info.samples["train"] < 250
    assert sum(other.info.samples.values()) == ROWS


@pytest.mark.parametrize("as_text", [False, True])
def test_a_split_by_time_holds_out_the_newest_rows_in_whatever_order_they_are(
    tmp_path: Path, table: pa.Table, as_text: bool
) -> None:
    if as_text:
        table = table.set_column(6, "time", table["time"].cast(pa.string()))
    prepared = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "out", "--split-by-time", "time")
    assert prepared.info.samples == {"train": 320, "validation": 40, "test": 40}
    times = np.array(table["time"].cast(pa.timestamp("s")).cast(pa.int64()).to_pylist())
    in_order = np.sort(times)
    for name, start, stop in (("train", 0, 320), ("validation", 320, 360), ("test", 360, 400)):
        newest = (times >= in_order[start]) & (times <= in_order[stop - 1])
        np.testing.assert_array_equal(prepared.splits[name]["labels"], table["clicked"].to_numpy()[newest])
        np.testing.assert_array_equal(np.load(tmp_path / "out" / name / "times.npy"), times[newest] * 1_000_000)
        assert prepared.info.schema.has_times


def test_a_set_that_is_split_otherwise_has_no_times(tmp_path: Path, source: Path) -> None:
    prepared = prepare(source, tmp_path / "out")
    assert not prepared.info.schema.has_times
    assert not (tmp_path / "out/train/times.npy").exists()
    schema = json.loads((tmp_path / "out/dataset.json").read_text())["schema"]
    assert not {"has_times", "has_token_times"} & schema.keys(), "as earlier releases wrote it"


def test_rows_of_one_time_are_not_split(tmp_path: Path, table: pa.Table) -> None:
    days = pa.array(np.arange(ROWS) // 130 * 86_400 + 1_700_000_000)
    source = write_table(table.set_column(6, "time", days), tmp_path / "t.parquet")
    prepared = prepare(source, tmp_path / "out", "--split-by-time", "time", "--held-out", "0.5")
    assert prepared.info.samples == {"train": 130, "validation": 130, "test": 140}


def test_applied_to_the_same_rows_a_transformation_gives_the_same_bits(tmp_path: Path, source: Path) -> None:
    prepare(source, tmp_path / "one", "--hash-buckets", "color=5", "--dense", "price:quantile,age:log")
    options = ["--transformation", str(tmp_path / "one")]
    prepare(source, tmp_path / "other", *options, "--held-out", "0.2", command="apply")
    assert same_files(tmp_path / "one", tmp_path / "other")
    again = ["--transformation", str(tmp_path / "other")]
    prepare(source, tmp_path / "third", *again, "--held-out", "0.2", command="apply")
    assert same_files(tmp_path / "one", tmp_path / "third")


def test_new_rows_have_the_ids_of_old_ones_and_are_for_the_test(tmp_path: Path, table: pa.Table, source: Path) -> None:
    old = prepare(source, tmp_path / "old")
    new_table = random_table(150, seed=5)
    new_source = write_table(new_table, tmp_path / "new.arrow")
    new = prepare(new_source, tmp_path / "new", "--transformation", str(tmp_path / "old"), command="apply")
    assert new.info.samples == {"test": 150}
    assert new.info.schema.dense_features == old.info.schema.dense_features
    for encoding in old.transformation.sparse:
        values = new_table[encoding.column.name].to_pylist()
        if not encoding.column.is_list:
            values = [[value] for value in values]
        one_by_one = [ids_of_values(encoding, [None] if row is None else row) for row in values]
        assert new.ids("test", encoding.column.name) == one_by_one
    for number, feature in enumerate(old.transformation.dense):
        column = np.array(new_table[feature.name].to_pylist(), np.float64)
        one_by_one = np.concatenate([feature.apply(column[row : row + 1]) for row in range(150)])
        np.testing.assert_array_equal(new.splits["test"]["dense"][:, number], one_by_one)


def test_a_text_file_can_follow_whole_numbers_and_lists_of_parquet(tmp_path: Path, table: pa.Table) -> None:
    options = ["--transformation", str(tmp_path / "old"), "--held-out", "0.2"]
    plain = table.drop_columns(["tags"])
    source = write_table(plain, tmp_path / "table.parquet")
    prepare(source, tmp_path / "old", "--sparse", "user,color")
    text = write_table(table, tmp_path / "table.csv")
    prepare(text, tmp_path / "new", *options, command="apply")
    assert same_files(tmp_path / "old", tmp_path / "new")


def test_the_reader_of_a_set_with_one_split_refuses_the_others(tmp_path: Path, source: Path) -> None:
    torch = pytest.importorskip("torch")
    from dlrm_fused.config import Split
    from dlrm_fused.datasets.prepared import PreparedDataset

    prepare(source, tmp_path / "old")
    new = prepare(source, tmp_path / "new", "--transformation", str(tmp_path / "old"), command="apply")
    dataset = PreparedDataset(tmp_path / "new")
    assert dataset.samples(Split.test) == ROWS
    samples = dataset.read(Split.test, torch.arange(ROWS))
    assert samples.sparse["tags"].values().tolist() == new.splits["test"]["tags.values"].tolist()
    with pytest.raises(DataError, match=r"new: holds no split train, only test; name another split, or prepare a set"):
        dataset.samples(Split.train)


# What is found, and what is left when something fails


def test_describing_a_table_prints_findings_and_a_config_and_writes_nothing(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["table", "--input", str(source), "--output", str(tmp_path / "mine"), *COLUMNS]
    assert cli.main([*arguments, "--describe", "--hash-buckets", "user=30"]) == 0
    described, config = capsys.readouterr().out.split("Proposed config:\n\n")
    table = random_table()
    positives = sum(table["clicked"].to_pylist())
    assert f"{ROWS} rows: " in described
    assert f"label clicked: 1 in {positives} rows, {positives / ROWS:.2%}" in described
    assert "sparse user: integer, 40 different, " in described
    assert ", hashed into 30 rows" in described
    assert "sparse tags: list of text, 4 different, " in described
    assert ", 0 to 4 values a row, " in described
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.parquet"]
    assert cli.main([*arguments, "--hash-buckets", "user=30"]) == 0
    assert config.strip() == (tmp_path / "mine/config.yaml").read_text().strip()


@pytest.mark.parametrize("name", ["null", "20240531", "1e5", "true", "mine"])
def test_the_proposed_run_has_the_name_of_the_set_whatever_yaml_takes_it_for(tmp_path: Path, source: Path, name: str) -> None:
    assert cli.main(["table", "--input", str(source), "--output", str(tmp_path / name), *COLUMNS]) == 0
    assert load_config(tmp_path / name / "config.yaml", []).name == name


def test_describing_a_table_that_cannot_be_prepared_tells_why(
    tmp_path: Path, table: pa.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = table.set_column(1, "price", pa.nulls(ROWS, pa.float64()))
    source = write_table(empty, tmp_path / "table.parquet")
    assert cli.main(["table", "--input", str(source), "--output", str(tmp_path / "out"), *COLUMNS, "--describe"]) == 0
    printed = capsys.readouterr().out
    assert "dense price: no value, 100.00% missing" in printed
    assert "It cannot be prepared like this: --dense price: all values are missing in 3" in printed


def test_a_set_is_replaced_only_when_told_and_stays_whole_until_then(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(source, tmp_path / "out")
    command = ["table", "--input", str(source), "--output", str(tmp_path / "out"), *COLUMNS]
    assert cli.main(command) == 1
    assert "holds a prepared set already; pass --overwrite to replace it" in capsys.readouterr().err
    assert cli.main([*command, "--overwrite", "--min-frequency", "10000"]) == 1
    assert read_prepared(tmp_path / "out").info.origin["min_frequency"] == 3
    prepare(source, tmp_path / "out", "--overwrite", "--min-frequency", "5")
    assert read_prepared(tmp_path / "out").info.origin["min_frequency"] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "table.parquet"]


def test_an_interrupted_preparation_leaves_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PreparedInfo, "save", interrupt)
        assert cli.main(["table", "--input", str(source), "--output", str(tmp_path / "out"), *COLUMNS]) == 1
    assert "interrupted" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.parquet"]


def test_what_a_killed_preparation_left_is_replaced(tmp_path: Path, source: Path) -> None:
    prepare(source, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.partial")
    (tmp_path / "out.partial/dataset.json").unlink()
    (tmp_path / "out.partial/scratch").mkdir()
    prepare(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "table.parquet"]


def test_a_folder_of_somebody_else_is_not_taken_for_a_leftover(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.tex").write_text("years of work")
    assert cli.main(["table", "--input", str(source), "--output", str(tmp_path / "out"), *COLUMNS]) == 1
    assert "out.partial: holds other files, such as thesis.tex; choose an empty or new folder" in capsys.readouterr().err
    assert (tmp_path / "out.partial/thesis.tex").read_text() == "years of work"


# What the preparation is made of


@pytest.mark.parametrize("limit", [10**6, 40])
@pytest.mark.parametrize("as_text", [False, True])
def test_counts_that_do_not_fit_in_memory_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, as_text: bool
) -> None:
    monkeypatch.setattr(value_counts, "ENTRIES_IN_MEMORY", limit)
    values = np.random.default_rng(0).zipf(1.3, 3000) % 500
    texts = [f"value {value}" for value in values] if as_text else values.tolist()
    counter = ValueCounter(tmp_path / "counts")
    for start in range(0, 3000, 100):
        distinct, counts = zip(*Counter(texts[start : start + 100]).items(), strict=True)
        counter.add(pa.array([*distinct, distinct[0]][:-1]), np.array(counts))
    kept = counter.frequent(4)
    wanted = sorted(((v, n) for v, n in Counter(texts).items() if n >= 4), key=lambda pair: (-pair[1], pair[0]))
    assert list(zip(kept["value"].to_pylist(), kept["count"].to_pylist(), strict=True)) == wanted
    assert counter.distinct == len(set(texts))
    assert list(tmp_path.iterdir()) == []


def test_a_sample_of_rows_is_uniform_and_does_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "SAMPLE_ROWS", 500)
    samples = []
    for block in (10_000, 77):
        sample = RowSample()
        for first in range(0, 10_000, block):
            rows = np.arange(first, min(first + block, 10_000))
            sample.add(sample_bits(first, len(rows)), rows)
        samples.append(np.sort(sample.values()))
    np.testing.assert_array_equal(*samples)
    assert len(samples[0]) == 500
    assert abs(samples[0].mean() - 5000) < 500


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = 1e9 + np.random.default_rng(0).standard_normal(1000)
    moments = Moments()
    for part in np.split(values, [0, 1, 100, 950]):
        moments.add(Moments.of(part))
    assert moments.mean == pytest.approx(values.mean(), abs=1e-6)
    assert moments.deviation == pytest.approx(values.std(), rel=1e-6)
    constant = Moments.of(np.full(5, 7.0))
    assert constant.deviation == 1


def test_many_different_values_have_few_quantiles_which_are_close() -> None:
    values = np.random.default_rng(0).lognormal(size=100_000)
    transform = quantiles("x", values)
    assert len(transform.points) <= 256
    ranks = 2 * (values.argsort().argsort() + 0.5) / len(values) - 1
    assert np.abs(transform.apply(values) - ranks).max() < 2 / 256
