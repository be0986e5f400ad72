"""Columns of every type that tables have: prepared, applied again, and sent to an exported model, a value has one id.

The three read values by one transformation, but from files, from Arrow columns and from Python; so each case goes all ways.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from dlrm_fused.datasets.preparation import cli, value_counts
from dlrm_fused.datasets.preparation.table.columns import WIDE
from dlrm_fused.datasets.transformation import MISSING
from dlrm_fused.inference.export.loader import InputError, Inputs, Model, Rows, read_rows, rows_of
from dlrm_fused.inference.http.limits import Limits
from dlrm_fused.inference.http.requests import parse
from tests.unit.tables import PreparedTable, ids_of_values, read_prepared

TOP = 2**64 - 1


def array(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, kind)


def dictionary(values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    return pa.array(values, kind).dictionary_encode()


def decimals(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    return pa.array([None if value is None else Decimal(value) for value in values], kind)


# A column, and the plain values that it holds: None for a missing one.
Case = tuple[pa.Array, list[Any]]
WHOLE: dict[str, Case] = {
    "int8": (array([-128, 127, None], pa.int8()), [-128, 127, None]),
    "int16": (array([-5, 5, None], pa.int16()), [-5, 5, None]),
    "int32": (array([0, -(2**31), 7], pa.int32()), [0, -(2**31), 7]),
    "int64": (array([-(2**63), 2**63 - 1, None], pa.int64()), [-(2**63), 2**63 - 1, None]),
    "uint8": (array([0, 255, None], pa.uint8()), [0, 255, None]),
    "uint16": (array([0, 65_535, 3], pa.uint16()), [0, 65_535, 3]),
    "uint32": (array([0, 2**32 - 1, None], pa.uint32()), [0, 2**32 - 1, None]),
    "uint64": (array([5, 2**63 - 1, None], pa.uint64()), [5, 2**63 - 1, None]),
    "uint64 beyond int64": (array([5, 2**63, TOP, None], pa.uint64()), [5, 2**63, TOP, None]),
    "bool": (array([True, False, None]), [1, 0, None]),
    "float16": (array([1.0, -2.0, None], pa.float16()), [1, -2, None]),
    "float32": (array([1.0, float("nan"), 3.0], pa.float32()), [1, None, 3]),
    "float64, as pandas writes whole numbers with missing ones": (array([2.0**53, np.nan, -4.0]), [2**53, None, -4]),
    "decimal128": (decimals([3, -7, None], pa.decimal128(10, 0)), [3, -7, None]),
    "decimal128 with places": (decimals(["3.00", "-7.00", None], pa.decimal128(12, 2)), [3, -7, None]),
    "decimal128 beyond int64, as Spark reads uint64": (decimals([1, TOP, None], pa.decimal128(20, 0)), [1, TOP, None]),
    "decimal256": (decimals([1, 2**63, None], pa.decimal256(40, 0)), [1, 2**63, None]),
    "dictionary of int64": (dictionary([7, 8, 7, None]), [7, 8, 7, None]),
    "dictionary of uint64": (dictionary([7, TOP, None], pa.uint64()), [7, TOP, None]),
    "dictionary of float64": (dictionary([7.0, 8.0, None]), [7, 8, None]),
    "dictionary of decimals": (decimals([7, 8, None], pa.decimal128(9, 1)).dictionary_encode(), [7, 8, None]),
    "list of int64": (array([[1, 2], [], None, [None, 2]]), [[1, 2], [], [None], [None, 2]]),
    "list of uint64": (array([[1, TOP], [TOP]], pa.list_(pa.uint64())), [[1, TOP], [TOP]]),
    "large list of bool": (array([[True], [False, None]], pa.large_list(pa.bool_())), [[1], [0, None]]),
    "fixed-size list of int32": (array([[1, 2], [2, 3]], pa.list_(pa.int32(), 2)), [[1, 2], [2, 3]]),
    "list of decimals": (array([[Decimal(4)], [Decimal(5)]], pa.list_(pa.decimal128(5, 0))), [[4], [5]]),
}
TEXT: dict[str, Case] = {
    "string": (array(["a", "", None, "b"]), ["a", None, None, "b"]),
    "large string": (array(["a", "b", None], pa.large_string()), ["a", "b", None]),
    "string view": (array(["a", "a text beyond 12 bytes", None], pa.string_view()), ["a", "a text beyond 12 bytes", None]),
    "dictionary of string": (dictionary(["a", "b", "a", None]), ["a", "b", "a", None]),
    "dictionary of large string": (dictionary(["a", "b", None], pa.large_string()), ["a", "b", None]),
    "texts of numbers": (array(["007", "7", "7.0", None]), ["007", "7", "7.0", None]),
    "texts with blanks, in other scripts": (array([" a", "a", "日本", "é", "e\u0301"]), [" a", "a", "日本", "é", "e\u0301"]),
    "list of string": (array([["a", None], [], None, ["b"]]), [["a", None], [], [None], ["b"]]),
    "large list of large string": (array([["a"], ["b", "a"]], pa.large_list(pa.large_string())), [["a"], ["b", "a"]]),
    "list of dictionary": (
        pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), dictionary(["a", "b", "a"])),
        [["a", "b"], ["a"]],
    ),
}
NUMBERS: dict[str, Case] = {
    "int16": (array([1, -2, None], pa.int16()), [1, -2, None]),
    "uint64": (array([1, TOP, None], pa.uint64()), [1, float(TOP), None]),
    "bool": (array([True, False, None]), [1, 0, None]),
    "float16": (array([0.5, -2.0, None], pa.float16()), [0.5, -2, None]),
    "float32": (array([0.5, float("nan"), 3.0], pa.float32()), [0.5, None, 3]),
    "decimal128": (decimals(["1.25", "-2.50", None], pa.decimal128(10, 2)), [1.25, -2.5, None]),
    "decimal256": (decimals(["1.25", "-2.50", None], pa.decimal256(60, 2)), [1.25, -2.5, None]),
    "dictionary of float64": (dictionary([0.5, 1.5, None]), [0.5, 1.5, None]),
    "dictionary of int8": (dictionary([5, 1, None], pa.int8()), [5, 1, None]),
}


@dataclass(frozen=True)
class Prepared:
    """A prepared table, and what an exported model makes of rows.

    Attributes:
        source: the rows of all splits, without the label.
    """

    table: PreparedTable
    rows: Rows
    source: pa.Table

    def sent(self, rows: Any) -> Inputs:
        """The inputs that the exported model makes of a table."""
        return self.rows.encode(rows_of(rows))

    def ids(self) -> list[int]:
        """The ids of the only sparse feature, row after row."""
        return flat(self.table.all_ids(self.table.info.schema.sparse_features[0].name))

    def dense(self) -> list[float]:
        """The inputs of the only dense feature."""
        return np.concatenate([arrays["dense"][:, 0] for arrays in self.table.splits.values()]).tolist()


def prepare(folder: Path, columns: dict[str, pa.Array], *options: str, suffix: str = ".parquet") -> Prepared:
    """Three splits with each of the rows twice; the label changes from row to row."""
    source = pa.concat_tables([pa.table(columns)] * 6)
    folds = [split for split in ("train", "validation", "test") for _ in range(len(source) // 3)]
    table = source.append_column("label", pa.array(np.arange(len(source)) % 2)).append_column("fold", pa.array(folds))
    path = folder / f"t{suffix}"
    if suffix == ".csv":
        pa.csv.write_csv(table, path, pa.csv.WriteOptions(quoting_style="needed"))
    else:
        pa.parquet.write_table(table, path)
    chosen = ["--label", "label", "--min-frequency", "1", "--split-by-column", "fold", *options]
    assert cli.main(["table", "--input", str(path), "--output", str(folder / "set"), *chosen]) == 0
    prepared = read_prepared(folder / "set")
    return Prepared(prepared, read_rows(folder / "set", manifest(prepared)), source)


def apply(folder: Path, table: pa.Table, suffix: str = ".parquet") -> PreparedTable:
    """Other rows as a test split, by the transformation of the set in the folder."""
    table, path = table.append_column("label", pa.array(np.arange(len(table)) % 2)), folder / f"u{suffix}"
    if suffix == ".csv":
        pa.csv.write_csv(table, path, pa.csv.WriteOptions(quoting_style="needed"))
    else:
        pa.parquet.write_table(table, path)
    command = ["apply", "--input", str(path), "--transformation", str(folder / "set"), "--overwrite"]
    assert cli.main([*command, "--output", str(folder / "applied")]) == 0
    arrays = {file.stem: np.load(file) for file in (folder / "applied/test").glob("*.npy")}
    prepared = read_prepared(folder / "set")
    return PreparedTable(folder / "applied", prepared.info, prepared.transformation, {"test": arrays})


def manifest(prepared: PreparedTable) -> dict[str, Any]:
    """The manifest that an export of a model would have for the features."""
    sparse = [
        {"name": each.name, "rows": each.rows, "ids": each.rows, "jagged": each.jagged, "history_only": False}
        for each in prepared.info.schema.sparse_features
    ]
    dense = prepared.info.schema.dense_features
    return {"dense_features": dense, "sparse_features": sparse, "token_features": [], "history_length": 0}


def flat(rows: Sequence[Any]) -> list[Any]:
    return [value for row in rows for value in (row if isinstance(row, list) else [row])]


@pytest.mark.parametrize("hashed", [[], ["--hash-buckets", "x=1000"]])
@pytest.mark.parametrize("name", [*WHOLE, *TEXT])
def test_a_value_has_one_id_however_it_arrives(tmp_path: Path, name: str, hashed: list[str]) -> None:
    column, plain = {**WHOLE, **TEXT}[name]
    prepared = prepare(tmp_path, {"x": column}, "--sparse", "x", *hashed)
    values, ids = plain * 6, prepared.ids()
    assert [each == MISSING for each in ids] == [value is None for value in flat(values)]
    assert len(set(zip(ids, flat(values), strict=True))) == len(set(ids)) == len(set(flat(values)))  # one for each value
    (encoding,) = prepared.table.transformation.sparse
    assert ids_of_values(encoding, flat(values)) == ids
    of_json = json.loads(json.dumps(prepared.source.to_pylist(), default=int))  # of decimals
    for sent in (prepared.source, {"x": values}, [{"x": value} for value in values], of_json):
        (bags,) = prepared.sent(sent).bags
        assert bags.ids.tolist() == ids
        assert bags.lengths.tolist() == [len(value) if isinstance(value, list) else 1 for value in values]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_one_input_however_it_arrives(tmp_path: Path, name: str) -> None:
    column, plain = NUMBERS[name]
    prepared = prepare(tmp_path, {"x": column, "id": pa.array(range(len(column)))}, "--dense", "x", "--sparse", "id")
    values = [np.nan if value is None else value for value in plain * 6]
    (feature,) = prepared.table.transformation.dense
    assert prepared.dense() == feature.apply(np.array(values)).tolist()
    for sent in (prepared.source, {"x": plain * 6, "id": prepared.source["id"].to_pylist()}):
        assert prepared.sent(sent).dense[:, 0].tolist() == prepared.dense()


def test_files_of_another_type_that_hold_the_same_values_are_applied_alike(tmp_path: Path) -> None:
    column, _ = WHOLE["uint64 beyond int64"]
    prepared = prepare(tmp_path, {"x": column}, "--sparse", "x")
    values = prepared.source["x"].to_pylist()
    as_decimals = pa.table({"x": decimals(values, pa.decimal128(20, 0))})
    assert flat(apply(tmp_path, as_decimals).ids("test", "x")) == prepared.ids()
    assert flat(apply(tmp_path, as_decimals, ".csv").ids("test", "x")) == prepared.ids()


def test_whole_numbers_are_texts_of_a_text_column(tmp_path: Path) -> None:
    """A CSV has nothing but texts; rows that come later may be typed."""
    prepared = prepare(tmp_path, {"x": array([7, 123_456_789_012, TOP, None], pa.uint64())}, "--sparse", "x", suffix=".csv")
    assert len(set(prepared.ids())) == 4
    assert prepared.sent(prepared.source).bags[0].ids.tolist() == prepared.ids()
    assert flat(apply(tmp_path, prepared.source).ids("test", "x")) == prepared.ids()
    # As pandas reads whole numbers with missing ones; only those that a float holds.
    of_pandas = pa.table({"x": array([7.0, 123_456_789_012.0, np.nan])})
    expected = [prepared.ids()[at] for at in (0, 1, 3)]
    assert flat(apply(tmp_path, of_pandas).ids("test", "x")) == expected
    assert prepared.sent(of_pandas).bags[0].ids.tolist() == expected


def test_data_frames_and_arrays_are_tables_too(tmp_path: Path) -> None:
    prepared = prepare(tmp_path, {"x": WHOLE["uint64"][0], "y": TEXT["string"][0][1:]}, "--sparse", "x,y")
    expected = [bags.ids.tolist() for bags in prepared.sent(prepared.source).bags]
    frame = polars.DataFrame(prepared.source.to_pydict(), schema={"x": polars.UInt64, "y": polars.String})
    arrays = {name: np.array(prepared.source[name].to_pylist(), object) for name in ("x", "y")}
    for sent in (frame, arrays, [*prepared.source.to_pylist()], prepared.source.combine_chunks().to_batches()[0]):
        assert [bags.ids.tolist() for bags in prepared.sent(sent).bags] == expected
    known = pa.table({"x": [5, 2**63 - 1], "y": ["b", "b"]})
    typed = {"x": np.array([5, 2**63 - 1], np.uint64), "y": np.array(["b", "b"])}
    for one, other in zip(prepared.sent(typed).bags, prepared.sent(known).bags, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
    with pytest.raises(InputError, match=r"columns of different lengths: \{'x': 1, 'y': 2\}"):
        prepared.sent({"x": [1], "y": ["a", "b"]})


def test_the_service_takes_what_preparing_takes(tmp_path: Path) -> None:
    columns = {"flag": WHOLE["bool"][0], "hash": array([1, TOP, 2**63], pa.uint64()), "shop": array(["a", None, "b"])}
    prepared = prepare(tmp_path, {**columns, "x": NUMBERS["bool"][0]}, "--sparse", "flag,hash,shop", "--dense", "x")
    model = Model({}, lambda *_: None, (), prepared.rows)  # type: ignore[arg-type,return-value]
    body = json.dumps({"rows": prepared.source.to_pylist()})
    assert '{"flag": true, "hash": 1, "shop": "a", "x": true}, {"flag": false, "hash": 18446744073709551615' in body
    inputs = parse(body.encode(), model, Limits())
    for number, name in enumerate(("flag", "hash", "shop")):
        assert inputs.bags[number].ids.tolist() == flat(prepared.table.all_ids(name))
    assert inputs.dense[:, 0].tolist() == prepared.dense()


REFUSED: dict[str, tuple[str, pa.Array, str]] = {
    "a timestamp as id": ("--sparse", array([1, 2], pa.timestamp("us")), "timestamp[us] in t.parquet; allowed: text, whole"),
    "a date as id": ("--sparse", array([1, 2], pa.date32()), "date32[day] in t.parquet; allowed: text, whole numbers"),
    "a time of day as id": ("--sparse", array([1, 2], pa.time32("ms")), "time32[ms] in t.parquet; allowed: text, whole"),
    "a struct as id": ("--sparse", array([{"a": 1}, {"a": 2}]), "struct<a: int64> in t.parquet; allowed: text, whole"),
    "lists of lists": ("--sparse", array([[[1]], [[2]]]), "list<element: list<element: int64>> in t.parquet; allowed"),
    "a fraction as id": ("--sparse", array([1.0, 0.5]), "0.5 in t.parquet, row 2; allowed: whole numbers of 64 bits"),
    "a decimal fraction as id": (
        "--sparse",
        decimals(["1.0", "0.5"], pa.decimal128(9, 1)),
        "0.5 in t.parquet, row 2; allowed: whole numbers of 64 bits",
    ),
    "a float beyond int64 as id": ("--sparse", array([1.0, 2.0**63]), "9.223372036854776e+18 in t.parquet, row 2; allowed"),
    "a number beyond 64 bits as id": (
        "--sparse",
        decimals([1, 2**64], pa.decimal128(30, 0)),
        "18446744073709551616 in t.parquet, row 2; allowed: whole numbers of 64 bits",
    ),
    "numbers below 0 and beyond int64 in one column": (
        "--sparse",
        decimals([-1, 2**63], pa.decimal128(30, 0)),
        "has values below 0 and others beyond 9223372036854775807; allowed: whole numbers of 64 bits, all signed or all",
    ),
    "a timestamp as number": ("--dense", array([1, 2], pa.timestamp("us")), "timestamp[us] in t.parquet; allowed: a column of"),
    "text as number": ("--dense", array(["1", "2"]), "text in t.parquet; allowed: a column of numbers"),
    "lists of numbers": ("--dense", array([[1.0], [2.0]]), "a list in t.parquet; allowed: a column of numbers"),
    "infinity": ("--dense", array([1.0, np.inf]), "inf in t.parquet, row 2; allowed: finite numbers of float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_feature_can_be_is_refused_in_one_line(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    option, column, reason = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    table = pa.concat_tables([pa.table({"x": column, "id": [1, 2], "label": [0, 1]})] * 30)
    pa.parquet.write_table(table, "t.parquet")
    options = [option, "x", *(["--sparse", "id"] if option == "--dense" else [])]
    assert cli.main(["table", "--input", "t.parquet", "--output", "set", "--label", "label", *options]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert reason in line
    assert not (tmp_path / "set").exists()


def test_values_beyond_int64_are_counted_with_the_others_and_beyond_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_counts, "ENTRIES_IN_MEMORY", 4)
    counter = value_counts.ValueCounter(tmp_path / "x")
    counter.add(pa.array([3, -1, 5, 6, 7, 8]), np.array([2, 1, 1, 1, 1, 1]))
    counter.add(decimals([3, TOP, 2**63, 5], WIDE), np.array([1, 4, 1, 1]))
    counter.add(pa.array([3, 9]), np.array([1, 1]))
    found = counter.frequent(2).to_pydict()
    assert list(map(int, found["value"])) == [3, TOP, 5]
    assert found["count"] == [4, 4, 2]
