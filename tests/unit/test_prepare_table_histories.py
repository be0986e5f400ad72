"""Histories of a table's rows: the earlier rows of the same user and no others, whatever the order of the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.preparation.table.columns import keys_of
from dlrm_fused.datasets.preparation.writer import SPLITS
from dlrm_fused.datasets.transformation import file_stem
from tests.unit.tables import ROWS, PreparedTable, prepare, random_table, write_table

LENGTH = 4
HISTORY = ("--history", "user", "time", "color,tags", "--history-length", str(LENGTH))


def with_row_numbers(table: pa.Table) -> pa.Table:
    """A column that tells rows apart, as a dense feature, which keeps it through the preparation."""
    return table.append_column("row", pa.array(np.arange(len(table), dtype=np.float64)))


@pytest.fixture
def table() -> pa.Table:
    return with_row_numbers(random_table())


def prepared_rows(prepared: PreparedTable) -> dict[str, np.ndarray]:
    """Which rows of the table each split holds."""
    (row,) = prepared.transformation.dense
    numbers = {split: arrays["dense"][:, 0] * row.deviation + row.mean for split, arrays in prepared.splits.items()}
    return {split: np.rint(values).astype(int) for split, values in numbers.items()}


def tokens(prepared: PreparedTable) -> dict[str, list[list[int]]]:
    """The ids of each token feature in each interaction."""
    folder = prepared.folder / "interactions"
    single = np.load(folder / "single.npy")
    features = prepared.info.schema.token_features
    ids = {f.name: single[:, [i]].tolist() for i, f in enumerate(f for f in features if not f.jagged)}
    for feature in features:
        if feature.jagged:
            values, offsets = (np.load(folder / f"{file_stem(feature.name)}.{part}.npy") for part in ("values", "offsets"))
            ids[feature.name] = [part.tolist() for part in np.split(values, offsets[1:-1])]
    return ids


def test_a_history_has_the_last_earlier_rows_of_the_user_in_order_of_time(tmp_path: Path, table: pa.Table) -> None:
    prepared = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "out", "--dense", "row", *HISTORY)
    schema = prepared.info.schema
    assert schema.history_length == LENGTH
    assert [(f.name, f.jagged, f.history_only) for f in schema.token_features] == [
        ("token_color", False, False),
        ("token_tags", True, False),
        ("token_label", False, True),
        ("token_gap", False, False),
    ]
    assert schema.has_token_times
    rows, of_token = prepared_rows(prepared), tokens(prepared)
    time_of_token = np.load(tmp_path / "out/interactions/times.npy")
    assert (prepared.info.interactions, time_of_token.dtype) == (ROWS, np.int64)
    users, times = table["user"].to_pylist(), table["time"].cast(pa.timestamp("s")).cast(pa.int64()).to_pylist()
    labels = table["clicked"].to_pylist()
    items = [0 if color is None else keys_of(pa.array([color]))[0] for color in table["color"].to_pylist()]
    ids: dict[str, dict[int, list[int]]] = {"color": {}, "tags": {}}
    for split in SPLITS:
        for name, of_row in ids.items():
            of_row.update(zip(rows[split], prepared.ids(split, name), strict=True))
    for split in SPLITS:
        for row, (first, stop, candidate) in zip(rows[split], prepared.splits[split]["history"], strict=True):
            earlier = [r for r in range(ROWS) if users[r] is not None and users[r] == users[row] and times[r] < times[row]]
            last = sorted(earlier, key=lambda r: (times[r], items[r]))[-LENGTH:]
            assert stop - first == len(last)
            assert of_token["token_color"][candidate] == ids["color"][row]
            assert of_token["token_tags"][candidate] == ids["tags"][row]
            assert time_of_token[candidate] == times[row]
            assert time_of_token[first:stop].tolist() == [times[r] for r in last]
            gap = times[row] - max((times[r] for r in earlier), default=times[row])
            assert of_token["token_gap"][candidate] == [int(gap).bit_length()]
            assert of_token["token_label"][first:stop] == [[labels[r]] for r in last]
            assert of_token["token_color"][first:stop] == [ids["color"][r] for r in last]
            assert of_token["token_tags"][first:stop] == [ids["tags"][r] for r in last]


def test_what_comes_later_changes_no_history(tmp_path: Path, table: pa.Table) -> None:
    """The labels of all rows from the last tenth of the time on are turned round."""
    times = table["time"].cast(pa.int64()).to_numpy()
    late = times >= np.sort(times)[9 * ROWS // 10]
    labels = pa.array(np.where(late, 1 - table["clicked"].to_numpy(), table["clicked"].to_numpy()))
    one = prepare(write_table(table, tmp_path / "one.parquet"), tmp_path / "one", *HISTORY)
    changed = table.set_column(0, "clicked", labels)
    other = prepare(write_table(changed, tmp_path / "other.parquet"), tmp_path / "other", *HISTORY)
    left, right = tokens(one), tokens(other)
    assert left != right
    for split in ("train", "validation"):
        np.testing.assert_array_equal(one.splits[split]["history"], other.splits[split]["history"])
        for first, stop, candidate in one.splits[split]["history"]:
            for name in left:
                assert left[name][first:stop] == right[name][first:stop]
                if name != "token_label":
                    assert left[name][candidate] == right[name][candidate]


def test_histories_do_not_depend_on_the_order_of_rows(tmp_path: Path, table: pa.Table) -> None:
    """Times differ here, so that the order of rows is the only one that could matter."""
    different = table.set_column(6, "time", pa.array(1_700_000_000 + np.random.default_rng(1).permutation(ROWS) * 60))
    order = np.random.default_rng(2).permutation(ROWS)
    sets = []
    for name, rows in (("one", different), ("other", different.take(order))):
        prepared = prepare(write_table(rows, tmp_path / f"{name}.parquet"), tmp_path / name, "--dense", "row", *HISTORY)
        of_token = tokens(prepared)
        sets.append(
            {
                row: [{n: of_token[n][p] for n in of_token} for p in range(first, stop)]
                for split in SPLITS
                for row, (first, stop, _) in zip(prepared_rows(prepared)[split], prepared.splits[split]["history"], strict=True)
            }
        )
    with_user = np.flatnonzero([user is not None for user in different["user"].to_pylist()])
    numbers = different.take(order)["row"].to_numpy().astype(int)
    assert sorted(numbers) == list(range(ROWS))
    assert {r: sets[0][r] for r in with_user} == {r: sets[1][r] for r in with_user}


def test_new_rows_have_histories_of_new_rows(tmp_path: Path, table: pa.Table) -> None:
    one = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "one", *HISTORY)
    options = ["--transformation", str(tmp_path / "one")]
    new = prepare(tmp_path / "t.parquet", tmp_path / "new", *options, command="apply")
    assert new.info.samples == {"test": ROWS}
    assert new.info.schema.history_length == LENGTH
    assert tokens(new) == tokens(one)
    again = prepare(tmp_path / "t.parquet", tmp_path / "again", *options, "--held-out", "0.2", command="apply")
    assert again.info.samples == one.info.samples
    np.testing.assert_array_equal(again.splits["train"]["history"], one.splits["train"]["history"])


def test_the_reader_takes_the_histories(tmp_path: Path, table: pa.Table) -> None:
    torch = pytest.importorskip("torch")
    from dlrm_fused.config import Split
    from dlrm_fused.datasets.prepared import PreparedDataset

    prepared = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "out", *HISTORY)
    samples = PreparedDataset(tmp_path / "out").read(Split.train, torch.arange(prepared.info.samples["train"]))
    assert samples.tokens is not None
    assert samples.tokens.keys() == ["token_color", "token_tags", "token_label", "token_gap"]
    assert samples.history_lengths is not None
    assert samples.history_lengths.max() == LENGTH
    assert samples.token_times is not None
    assert (samples.token_times.diff() > 0).sum(1).max() == LENGTH


def test_columns_may_have_the_names_of_what_histories_are_found_by(tmp_path: Path, table: pa.Table) -> None:
    usual = prepare(write_table(table, tmp_path / "one.parquet"), tmp_path / "one", *HISTORY)
    names = {"color": "users", "tags": "history/items"}
    path = tmp_path / "other.parquet"
    pa.parquet.write_table(table.rename_columns(names | {n: n for n in table.column_names if n not in names}), path)
    history = ("--history", "user", "time", ",".join(names.values()), "--history-length", str(LENGTH))
    other = prepare(path, tmp_path / "other", "--sparse", f"user,{','.join(names.values())}", *history)
    for split in SPLITS:
        np.testing.assert_array_equal(usual.splits[split]["history"], other.splits[split]["history"])
    assert list(tokens(other)) == ["token_users", "token_label", "token_gap", "token_history/items"]
    assert list(tokens(other).values()) == list(tokens(usual).values())


@pytest.mark.parametrize("name", ["gap", "label"])
def test_a_column_whose_token_would_be_one_of_all_histories_is_refused(
    name: str, tmp_path: Path, table: pa.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_table(table.append_column(name, table["color"]), tmp_path / "t.parquet")
    columns = ("--label", "clicked", "--sparse", f"user,{name}", "--history", "user", "time", name, "--history-length", "3")
    assert cli.main(["table", "--input", str(path), "--output", str(tmp_path / "out"), *columns]) == 1
    assert (
        f"--history: {name} would be token_{name}, a token feature of all histories; rename the column"
        in capsys.readouterr().err
    )


def test_a_feature_that_is_no_token_may_be_named_label(tmp_path: Path, table: pa.Table) -> None:
    usual = prepare(write_table(table, tmp_path / "one.parquet"), tmp_path / "one", *HISTORY)
    path = write_table(table.append_column("label", table["color"]), tmp_path / "t.parquet")
    other = prepare(path, tmp_path / "out", "--sparse", "user,color,tags,label", *HISTORY)
    assert tokens(other) == tokens(usual)
    assert [feature.name for feature in other.info.schema.sparse_features] == ["user", "color", "tags", "label"]


def test_the_config_that_is_described_is_the_one_that_is_written(
    tmp_path: Path, table: pa.Table, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = prepare(write_table(table, tmp_path / "t.parquet"), tmp_path / "out", "--dense", "row", *HISTORY)
    columns = ("--label", "clicked", "--sparse", "user,color,tags", "--dense", "row", *HISTORY)
    arguments = ["table", "--input", str(tmp_path / "t.parquet"), "--output", str(tmp_path / "out"), *columns]
    capsys.readouterr()
    assert cli.main([*arguments, "--describe"]) == 0
    _, described = capsys.readouterr().out.split("Proposed config:\n\n")
    assert described.strip() == (prepared.folder / "config.yaml").read_text().strip()
