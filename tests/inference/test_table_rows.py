"""A model that was trained on a table of one's own takes rows of such a table, and gives them the ids of training."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dlrm_fused.config import load_config
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.schema import PreparedInfo
from dlrm_fused.datasets.transformation import Transformation
from dlrm_fused.errors import ConfigError, DataError
from dlrm_fused.inference.export.loader import InputError, Model, TableRows, load, read_rows, rows_of
from tests.distributed.launch import start_training
from tests.inference.exporting import export, predictions_of_eval
from tests.unit.tables import ids_of_values, random_table, write_table

COLUMNS = ["--label", "clicked", "--dense", "price:log,age:quantile", "--sparse", "user,color,tags"]
HISTORY = ["--history", "user", "time", "color,tags", "--history-length", "4"]
SMALL = ["model.bottom_mlp=[16,16]", "model.top_mlp=[16,1]", "embedding.dim=16", "training.max_steps=10"]


def table(rows: int, seed: int) -> pa.Table:
    """Few users and no equal times, so that histories have one order."""
    columns = random_table(rows, seed)
    columns = columns.set_column(3, "user", pa.array([each and each % 7 for each in columns["user"].to_pylist()]))
    times = np.random.default_rng(seed).permutation(rows) * 37 + 1_700_000_000
    return columns.set_column(columns.column_names.index("time"), "time", pa.array(times))


def run_of(folder: Path, *options: str, rows: pa.Table | None = None) -> Path:
    """Prepare a table, and train by the proposed config."""
    source = write_table(table(600, seed=1) if rows is None else rows, folder / "table.parquet")
    command = ["table", "--input", str(source), "--output", str(folder / "set"), *COLUMNS, *options]
    assert cli.main(command) == 0
    return train(folder)


def train(folder: Path, *overrides: str) -> Path:
    """Train by the config that was proposed for ``folder/set``; returns the run."""
    settings = ["name=run", f"output_dir={folder}", "runtime.device=cpu", *SMALL, *overrides]
    config = load_config(folder / "set/config.yaml", settings)
    start_training(config, ranks=1).wait()
    return config.run_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("table"), "--hash-buckets", "color=50", "--min-frequency", "2")


@pytest.fixture(scope="module")
def model(run: Path) -> Model:
    export(run, run.parent / "model")
    return load(run.parent / "model")


def test_a_full_disk_is_told_in_one_line(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path, **_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    for copy in ("copyfile", "copy2"):
        monkeypatch.setattr(shutil, copy, full)
    with pytest.raises(ConfigError, match=r"^--output .*model: cannot be written: No space left on device$"):
        export(run, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def history_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("histories"), *HISTORY)


@pytest.fixture(scope="module")
def history_model(history_run: Path) -> Model:
    export(history_run, history_run.parent / "model")
    return load(history_run.parent / "model")


def expected(run: Path, new: pa.Table, folder: Path, *overrides: str) -> np.ndarray:
    """What eval.py predicts for rows that data/prepare.py apply has transformed."""
    source = write_table(new, folder / "new.parquet")
    command = ["apply", "--transformation", str(run.parent / "set"), "--input", str(source), "--output", str(folder / "new")]
    assert cli.main(command) == 0
    return predictions_of_eval(run, f"data.path={folder / 'new'}", *overrides)


def test_rows_of_the_table_are_predicted_as_apply_and_eval_predict_them(run: Path, model: Model, tmp_path: Path) -> None:
    new = table(500, seed=2)
    rows = new.drop_columns(["clicked", "time"])
    np.testing.assert_allclose(model.predict(rows), expected(run, new, tmp_path), rtol=0, atol=1e-6)
    # Through JSON as well.
    sent = json.loads(json.dumps(rows.to_pylist()))
    assert model.predict(sent).tolist() == model.predict(rows).tolist()


def as_parquet(prepared: Path, output: Path) -> Path:
    """A prepared set as Parquet files."""
    command = ["parquet", "--input", str(prepared), "--output", str(output), "--row-group-rows", "100"]
    assert cli.main(command) == 0
    return output


@pytest.mark.parametrize("cap", [[], ["embedding.max_rows=7"]])
def test_a_run_on_parquet_files_of_ids_takes_rows_of_the_table_too(run: Path, tmp_path: Path, cap: list[str]) -> None:
    parquet = as_parquet(run.parent / "set", tmp_path / "parquet")
    (tmp_path / "set").symlink_to(run.parent / "set")
    of_parquet = train(tmp_path, "data.source=parquet", f"data.path={parquet}", *cap)
    export(of_parquet, tmp_path / "model")
    new = table(500, seed=2)
    predictions = load(tmp_path / "model").predict(new.drop_columns(["clicked", "time"]))
    of_eval = expected(of_parquet, new, tmp_path, "data.source=prepared")
    np.testing.assert_allclose(predictions, of_eval, rtol=0, atol=1e-6)


def test_a_transformation_of_another_set_is_refused(run: Path, tmp_path: Path) -> None:
    parquet = as_parquet(run.parent / "set", tmp_path / "parquet")
    path = parquet / "transformation/transformation.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "sparse": content["sparse"][::-1]}))
    with pytest.raises(
        DataError, match="makes the features price, age, tags, color, user, but the data set beside it has price"
    ):
        export(run, tmp_path / "model", "fp32", "data.source=parquet", f"data.path={parquet}")
    assert not (tmp_path / "model").exists()


def with_histories(new: pa.Table) -> list[dict[str, Any]]:
    rows = new.to_pylist()
    kept = ("color", "tags", "time", "clicked")
    for row in rows:
        earlier = [r for r in rows if row["user"] is not None and r["user"] == row["user"] and r["time"] < row["time"]]
        row["history"] = [{name: r[name] for name in kept} for r in sorted(earlier, key=lambda r: r["time"])]
    return [{name: value for name, value in row.items() if name != "clicked"} for row in rows]


def test_histories_are_encoded_as_in_training(history_run: Path, history_model: Model, tmp_path: Path) -> None:
    new = table(300, seed=3)
    rows = with_histories(new)
    assert max(len(row["history"]) for row in rows) > history_model.info["history_length"]
    predictions = history_model.predict(rows)
    np.testing.assert_allclose(predictions, expected(history_run, new, tmp_path), rtol=0, atol=1e-6)
    for row in rows:
        row["time"] = datetime.fromtimestamp(row["time"], UTC).isoformat()
    assert history_model.predict(rows).tolist() == predictions.tolist()


def test_past_rows_of_equal_times_may_come_in_any_order(tmp_path: Path) -> None:
    """Their order is that of the set, which depends on items alone; of one item and time it is that of the table."""

    def with_ties(rows: int, seed: int) -> pa.Table:
        times = pa.array([time - time % 2000 for time in table(rows, seed)["time"].to_pylist()])
        return table(rows, seed).set_column(6, "time", times)

    run = run_of(tmp_path, *HISTORY, rows=with_ties(600, seed=1))
    export(run, tmp_path / "model")
    model, new = load(tmp_path / "model"), with_ties(300, seed=3)
    rows = with_histories(new)
    assert any(len({past["time"] for past in row["history"][-4:]}) < len(row["history"][-4:]) for row in rows)
    wanted = expected(run, new, tmp_path)
    np.testing.assert_allclose(model.predict(rows), wanted, rtol=0, atol=1e-6)
    for row in rows:
        row["history"].sort(key=lambda past: str(past["color"]))
        row["history"].sort(key=lambda past: past["time"])
    np.testing.assert_allclose(model.predict(rows), wanted, rtol=0, atol=1e-6)


def test_parts_of_seconds_order_histories(tmp_path: Path) -> None:
    """Rows of one second are not simultaneous."""

    def in_milliseconds(rows: int, seed: int) -> pa.Table:
        times = pa.array([1_700_000_000_000 + (time - 1_700_000_000) * 5 for time in table(rows, seed)["time"].to_pylist()])
        return table(rows, seed).set_column(6, "time", times)

    run = run_of(tmp_path, *HISTORY, "--time-format", "ms", rows=in_milliseconds(600, seed=1))
    export(run, tmp_path / "model")
    model, new = load(tmp_path / "model"), in_milliseconds(300, seed=3)
    rows = with_histories(new)
    assert any(past["time"] // 1000 == row["time"] // 1000 for row in rows for past in row["history"])
    np.testing.assert_allclose(model.predict(rows), expected(run, new, tmp_path), rtol=0, atol=1e-6)


def test_hstu_reads_the_times_of_rows_of_the_table(history_run: Path, tmp_path: Path) -> None:
    (tmp_path / "set").symlink_to(history_run.parent / "set")
    run = train(tmp_path, "model.kind=hstu", "model.d_model=16", "model.layers=1")
    export(run, tmp_path / "model")
    model, new = load(tmp_path / "model"), table(300, seed=3)
    rows = with_histories(new)
    np.testing.assert_allclose(model.predict(rows), expected(run, new, tmp_path), rtol=0, atol=1e-6)
    assert model.info["reads_times"]
    with pytest.raises(InputError, match=r"row 0, history\[0\], feature time: 1700000100; allowed: times in ascending order"):
        model.predict([{**NOW, "history": [{**PAST, "time": 1_700_000_100}]}])
    with pytest.raises(InputError, match=r"row 0, feature time: 1e\+30; allowed: times up to now"):
        model.predict([{**NOW, "time": 1e30}])
    with pytest.raises(InputError, match="row 0: feature time is missing"):
        model.predict([{name: value for name, value in NOW.items() if name != "time"}])


def test_times_are_read_as_those_of_the_table(history_model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table with times in milliseconds gives the predictions of the one with seconds."""

    def in_milliseconds(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "time": row["time"] * 1000}

    rows = with_histories(table(300, seed=3))
    times = pa.array([time * 1000 for time in table(600, seed=1)["time"].to_pylist()])
    source = write_table(table(600, seed=1).set_column(6, "time", times), tmp_path / "table.parquet")
    command = ["table", "--input", str(source), "--output", str(tmp_path / "set"), *COLUMNS, *HISTORY, "--time-format", "ms"]
    assert cli.main(command) == 0
    model = replace(history_model, rows=read_rows(tmp_path / "set", history_model.info))
    changed = [{**in_milliseconds(row), "history": [in_milliseconds(past) for past in row["history"]]} for row in rows]
    assert model.predict(changed).tolist() == history_model.predict(rows).tolist()
    with pytest.raises(InputError, match=r"row 0, feature time: 'soon'; allowed: times up to now as --time-format ms"):
        model.predict([{**changed[0], "time": "soon"}])
    for time in (rows[0]["time"], changed[0]["time"] * 1000):
        with pytest.raises(
            InputError, match=f"row 0, feature time: {time}; allowed: times up to now as --time-format ms of the"
        ):
            model.predict([{**changed[0], "time": time, "history": []}])
    earlier = {**changed[0], "time": changed[0]["time"] - 10**12, "history": []}
    command = ["apply", "--transformation", str(tmp_path / "set"), "--output", str(tmp_path / "new"), "--input"]
    assert cli.main([*command, str(write_table(table(300, seed=3), tmp_path / "new.parquet"))]) == 1
    assert "allowed: times in ms; --time-format tells another unit" in capsys.readouterr().err
    assert cli.main([*command, str(tmp_path / "new.parquet"), "--time-format", "s"]) == 0
    assert 0 < model.predict([earlier])[0] < 1


def test_rows_may_hold_values_of_numpy(history_model: Model) -> None:
    """pandas has arrays of the lists of a Parquet file, and NumPy's numbers and times."""
    past = {**PAST, "time": np.datetime64(PAST["time"], "s"), "clicked": np.bool_(True), "tags": np.array(["a"])}
    for time in (np.int64(NOW["time"]), np.float64(NOW["time"]), np.datetime64(NOW["time"] * 10**9, "ns")):
        rows = [{**NOW, "time": time, "history": np.array([past], object)}]
        assert history_model.predict(rows).tolist() == history_model.predict([NOW]).tolist()


def test_histories_tell_the_first_of_several_labels(tmp_path: Path) -> None:
    def labelled(rows: int, seed: int) -> pa.Table:
        return table(rows, seed).append_column("bought", pa.array(np.arange(rows) % 3 // 2))

    run = run_of(tmp_path, "--label", "clicked,bought", *HISTORY, rows=labelled(600, seed=1))
    export(run, tmp_path / "model")
    new = labelled(300, seed=3)
    predictions = load(tmp_path / "model").predict(with_histories(new.drop_columns("bought")))
    assert predictions.shape == (300, 2)
    np.testing.assert_allclose(predictions, expected(run, new, tmp_path), rtol=0, atol=1e-6)


def test_ids_are_those_of_the_transformation(run: Path, model: Model) -> None:
    transformation = Transformation.load(run.parent / "set/transformation")
    encodings = {encoding.column.name: encoding for encoding in transformation.sparse}
    texts = ["red", "", None, "grün", "rare", "a text of more than eight bytes", "nul\0", "日本語", "x" * 1000]
    numbers = [0, 1, -1, 3, 2**63 - 1, -(2**63), None]
    assert isinstance(model.rows, TableRows)
    for name, values in {"color": texts, "tags": texts, "user": numbers}.items():
        assert ids_of(model.rows, name, values) == ids_of_values(encodings[name], values)
    assert ids_of(model.rows, "user", [float(3), "3"]) == ids_of(model.rows, "user", [3, 3])


def ids_of(rows: TableRows, name: str, values: list[Any]) -> list[int]:
    """The ids of values of one column, in rows that have other values alike."""
    sent = [{**ROW, name: [value] if name == "tags" else value} for value in values]
    return rows.encode(sent).bags[list(rows.categories).index(name)].ids.tolist()


ROW = {"price": 1.5, "age": 30, "user": 3, "color": "red", "tags": ["a", None]}


@pytest.mark.parametrize("change", [{}, {"price": None, "color": None}, {"tags": None}, {"tags": []}, {"user": 10**15}])
def test_missing_and_unseen_values_have_predictions(model: Model, change: dict[str, Any]) -> None:
    (probability,) = model.predict([{**ROW, **change}])
    assert 0 < probability < 1


WRONG = [
    ({"price": "cheap"}, "row 0, feature price: 'cheap'; allowed: numbers, or null"),
    ({"price": 1e301}, "row 0, feature price: 1e+301"),
    ({"price": float("inf")}, "row 0, feature price: inf"),
    ({"age": [30]}, r"row 0, feature age: [30]"),
    ({"user": "x3"}, "row 0, feature user: 'x3'; allowed: whole numbers of 64 bits, or null"),
    ({"user": 2**64}, "row 0, feature user: 18446744073709551616"),
    ({"user": 2.0**63}, "row 0, feature user: 9.223372036854776e+18"),
    ({"user": 1.5}, "row 0, feature user: 1.5"),
    ({"color": 7.5}, "row 0, feature color: 7.5; allowed: text, or null"),
    ({"color": ["red"]}, "row 0, feature color: ['red']"),
    ({"tags": "a"}, "row 0, feature tags: 'a'; allowed: a list of text, or null"),
    ({"tags": ["a", ["b"]]}, "row 0, feature tags: ['b']"),
    ({"colour": "red"}, "row 0: unknown feature 'colour'='red'; the model has: age, color, price, tags, user"),
    ({"clicked": 1}, "row 0: unknown feature 'clicked'=1"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_a_wrong_value_is_named_with_its_row_and_feature(model: Model, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        model.predict([{**ROW, **change}])
    assert message in str(raised.value)


def test_a_missing_feature_and_a_row_that_is_none_are_named(model: Model) -> None:
    with pytest.raises(InputError, match="row 1: feature age is missing"):
        model.predict([ROW, {name: value for name, value in ROW.items() if name != "age"}])
    with pytest.raises(InputError, match="row 0: 5; allowed: an object with the features age, color"):
        model.predict([5])


PAST = {"color": "red", "tags": ["a"], "time": 1_700_000_000, "clicked": 1}
NOW = {**ROW, "time": 1_700_000_100, "history": [PAST]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"history": None}, "row 0, feature history: None; allowed: a list of past interactions, oldest first"),
        ({"history": [{**PAST, "clicked": 2}]}, "row 0, history[0], feature clicked: 2"),
        ({"history": [{**PAST, "color": 2.5}]}, "row 0, history[0], feature color: 2.5"),
        ({"time": 1_700_000_100_000}, "row 0, feature time: 1700000100000; allowed: times up to now in seconds since 1970, or"),
        ({"history": [{**PAST, "price": 2}]}, "row 0, history[0]: unknown feature 'price'=2"),
        ({"history": [{**PAST, "time": 1_700_000_100}]}, "row 0, history[0], feature time: 1700000100; allowed: times in asc"),
        ({"history": [PAST, {**PAST, "time": 5}]}, "row 0, history[0], feature time: 1700000000; allowed: times in ascending"),
        ({"time": "yesterday"}, "row 0, feature time: 'yesterday'; allowed: times up to now in seconds since 1970, or texts"),
        ({"time": None}, "row 0, feature time: None"),
    ],
)
def test_a_wrong_history_is_named(history_model: Model, change: dict[str, Any], message: str) -> None:
    assert 0 < history_model.predict([NOW])[0] < 1
    with pytest.raises(InputError) as raised:
        history_model.predict([{**NOW, **change}])
    assert message in str(raised.value)


def test_a_column_named_as_histories_are_is_a_feature_like_others(tmp_path: Path) -> None:
    new = table(600, seed=1).rename_columns({"color": "history"})
    source = write_table(new, tmp_path / "table.parquet")
    columns = ["--label", "clicked", "--dense", "price", "--sparse", "user,history"]
    assert cli.main(["table", "--input", str(source), "--output", str(tmp_path / "set"), *columns]) == 0
    run = train(tmp_path)
    export(run, tmp_path / "model")
    rows = new.select(["price", "user", "history"])
    np.testing.assert_allclose(load(tmp_path / "model").predict(rows), expected(run, new, tmp_path), rtol=0, atol=1e-6)


def test_past_interactions_have_another_name_beside_a_feature_of_that_name(tmp_path: Path) -> None:
    new = table(600, seed=1).rename_columns({"color": "history"})
    source = write_table(new, tmp_path / "table.parquet")
    columns = ["--label", "clicked", "--dense", "price", "--sparse", "user,history,tags"]
    history = ["--history", "user", "time", "history,tags", "--history-length", "4"]
    assert cli.main(["table", "--input", str(source), "--output", str(tmp_path / "set"), *columns, *history]) == 0
    schema = PreparedInfo.load(tmp_path / "set").schema
    described = [{**vars(feature), "ids": feature.rows} for feature in schema.tables]
    sparse = len(schema.sparse_features)
    info = {"sparse_features": described[:sparse], "token_features": described[sparse:], "history_length": 4}
    rows = read_rows(tmp_path / "set", info)
    assert rows.features() == {"price", "user", "history", "tags", "time", "_history"}
    row = {"price": 1.0, "user": 1, "history": "red", "tags": ["a"], "time": 1_700_000_100}
    past = {"history": "blue", "tags": [], "time": 1_700_000_000, "clicked": 1}
    inputs = rows.encode([{**row, "_history": [past]}])
    assert inputs.history_lengths.tolist() == [1]
    assert rows.encode([{**row, "_history": [{**past, "clicked": True}]}]).bags[-2].ids.tolist() == [1]
    (of_numpy,) = rows_of({"time": np.array(["2023-11-14T22:15:00"], "datetime64[ns]"), "_history": [[past]]})
    assert rows.encode([{**row, **of_numpy}]).history_lengths.tolist() == [1]
    names = [feature.name for feature in schema.tables]
    red, blue = rows.encode([{**row, "history": color, "_history": []} for color in ("red", "blue")]).bags[1].ids.tolist()
    assert inputs.bags[names.index("token_history")].ids.tolist() == [blue, red]
    with pytest.raises(InputError, match=r"row 0, _history\[0\]: unknown feature 'price'=2"):
        rows.encode([{**row, "_history": [{**past, "price": 2}]}])
