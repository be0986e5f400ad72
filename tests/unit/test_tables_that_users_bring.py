"""Tables as users bring them: columns that look alike and are not, files that are not what their names say."""

from __future__ import annotations

import bz2
import gzip
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest

from dlrm_fused.datasets.parquet_files import open_files
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.inference.export.loader import InputError, rows_of
from tests.unit.tables import read_prepared
from tests.unit.test_column_types import apply, prepare

CSV = "label,u,d\n1,a,1\n0,b,2\n"


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The error of preparing the tables of a folder."""
    command = ["table", "--label", "label", "--sparse", "u", "--output", str(folder / "set"), *options]
    assert cli.main(command) == 1
    return next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("b.csv.gz", CSV.encode(), "is not compressed, or not as its name says; take .gz or .zst off its name"),
        ("b.csv.zst", CSV.encode(), "is not compressed, or not as its name says; take .gz or .zst off its name"),
        ("b.csv.gz", gzip.compress(CSV.encode() * 99)[:40], "cannot be read (Truncated compressed stream)"),
        ("b.csv", gzip.compress(CSV.encode()), "is no text but what .gz files hold; end its name with .gz"),
        ("b.csv", b"PAR1....", "is no text but what .parquet files hold; end its name with .parquet"),
        ("b.csv", bz2.compress(CSV.encode()), "is no text but what .bz2 files hold; unpack it, or write it in another format"),
        ("b.csv", lzma.compress(CSV.encode()), "is no text but what .xz files hold; unpack it, or write it in another format"),
        ("b.csv", b"PK\x03\x04....", "is no text but what .zip files hold; unpack it, or write it in another format"),
        ("b.csv", b"ARROW1\0....", "is no text but what .arrow files hold; end its name with .arrow"),
    ],
    ids=[
        "text as gzip",
        "text as zstd",
        "half of a gzip",
        "gzip as text",
        "Parquet as text",
        "bzip2",
        "xz",
        "zip",
        "Arrow",
    ],  # gzip writes the time
)
def test_a_file_that_is_not_what_its_name_says_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, said: str
) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / name).write_bytes(content)
    error = refused(tmp_path, capsys, "--input", str(tmp_path / "a.csv"), str(tmp_path / name))
    assert f"--input {tmp_path / name}: {said}" in error


def test_numbers_that_look_like_dates_are_refused_beside_dates_of_another_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read as seconds of 1970, the newest rows would be the oldest."""
    days = range(1, 29)
    for name, times in (("a", [f"2024-05-{day:02}" for day in days]), ("b", [f"202406{day:02}" for day in days])):
        rows = [f"{day % 2},u{day % 3},{time}" for day, time in zip(days, times, strict=True)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["label,u,t", *rows]))
    error = refused(tmp_path, capsys, "--input", str(tmp_path / "*.csv"), "--split-by-time", "t")
    assert "--split-by-time t: '20240601' in " in error
    assert "b.csv, row 1; allowed: seconds since 1970; all numbers of the column look like dates" in error


def test_seconds_beside_dates_of_another_file_are_read(tmp_path: Path) -> None:
    for name, times in (("a", ["2024-05-01", "2024-05-02"] * 4), ("b", [1717200000 + row for row in range(8)])):
        rows = [f"{at % 2},u{at % 3},{time}" for at, time in enumerate(times)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["label,u,t", *rows]))
    command = ["table", "--input", str(tmp_path / "*.csv"), "--label", "label", "--sparse", "u", "--split-by-time", "t"]
    assert cli.main([*command, "--held-out", "0.25", "--output", str(tmp_path / "set")]) == 0


@pytest.mark.parametrize(("values", "said"), [(["7.0", "8.0"], "'7.0'"), (["True", "False"], "'True'")])
def test_a_spelling_that_other_files_do_not_have_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: list[str], said: str
) -> None:
    prepare(tmp_path, {"u": pa.array(values), "v": pa.array(["7.0", "x"])}, "--sparse", "u,v", suffix=".csv")
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: --sparse")]
    assert warning.startswith(
        f"warning: --sparse u: all values are spelled like {said}; as a number or truth of Parquet or JSON"
    )


@pytest.mark.parametrize("text", ["['a', 'b']", "{a,b}", "[1,\n 2]"])
def test_lists_that_are_texts_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    for texts, is_told in (([text, text], True), ([text, "b"], False)):
        prepare(tmp_path, {"u": pa.array(texts)}, "--sparse", "u", "--overwrite", suffix=".csv")
        assert (f"--sparse u: each text such as {text!r} is one value" in capsys.readouterr().err) is is_told


def test_a_tab_between_values_is_written_as_one_between_fields(tmp_path: Path) -> None:
    values = pa.array(["a\tb", "b", "a"])
    prepared = prepare(tmp_path, {"u": values}, "--sparse", "u", "--separated", r"u=\t")
    assert [len(row) for row in prepared.table.ids("train", "u")[:3]] == [2, 1, 1]


def test_a_column_of_unseen_values_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same values as numbers are other texts."""
    folder = prepare(
        tmp_path, {"u": pa.array(["7.0", "8.0"]), "v": pa.array(["x", "y"])}, "--sparse", "u,v"
    ).table.folder.parent
    capsys.readouterr()
    apply(folder, pa.table({"u": [7.0, 8.0, None], "v": ["x", "z", "y"]}))
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warning.startswith("warning: --sparse u: 2 of 2 values do not occur in the table of the transformation, or rarely;")


@pytest.mark.parametrize("text", ["0x1F", "0XFFFFFFFFFFFFFFFF"])
def test_hexadecimal_texts_are_no_whole_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Arrow reads them, large ones as negative numbers; the service refuses them."""
    prepared = prepare(tmp_path, {"u": pa.array([7, 8, 9])}, "--sparse", "u")
    with pytest.raises(AssertionError):  # the command fails
        apply(prepared.table.folder.parent, pa.table({"u": ["7", text]}), ".csv")
    assert f"--sparse u: {text!r} in " in capsys.readouterr().err


def test_two_columns_of_one_name_in_a_folder_of_parquet_are_told(tmp_path: Path) -> None:
    column = pa.array([1, 0])
    pa.parquet.write_table(pa.Table.from_arrays([column] * 3, ["label", "u", "u"]), tmp_path / "a.parquet")
    with pytest.raises(Exception, match=r"a\.parquet: several columns are named u; rename them"):
        open_files(tmp_path)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"u": "abc", "v": "xyz"}, r"column u: 'abc'; allowed: arrays or lists; a single row stands in a list: \[row\]"),
        ({"u": 3.5}, "column u: 3.5; allowed: arrays or lists"),
        (iter([{"u": 3.5}]), "list_iterator object .*; allowed: a list of dicts, an Arrow table, a data frame, or a dict of"),
        (None, "None; allowed: a list of dicts"),
        (pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["u", "u"]), "two columns are named u"),
    ],
)
def test_what_is_no_table_is_refused(table: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        rows_of(table)


def test_columns_may_be_arrays_of_arrow_and_numpy() -> None:
    times = np.array(["2024-05-01T00:00:00.000000001"], "datetime64[ns]")
    (row,) = rows_of({"u": pa.array([3.5]), "v": np.array([1]), "w": [None], "t": times})
    assert (row["u"], row["v"], row["w"]) == (3.5, 1, None)


def test_categories_are_read_as_polars_writes_them(tmp_path: Path) -> None:
    """Its dictionaries hold views of texts."""
    users = pl.Series(["a", "b", None, "a"] * 30)
    rows = {"label": [0, 1] * 60, "u": users.cast(pl.Enum(["b", "a"])), "many": pl.Series([["x"], []] * 60)}
    pl.DataFrame(rows).with_columns(pl.col("many").cast(pl.List(pl.Categorical))).write_ipc(tmp_path / "t.arrow")
    command = ["table", "--input", str(tmp_path / "t.arrow"), "--label", "label", "--sparse", "u,many"]
    assert cli.main([*command, "--output", str(tmp_path / "set")]) == 0
    prepared = read_prepared(tmp_path / "set")
    assert np.bincount(np.concatenate(prepared.all_ids("u"))).tolist() == [30, 0, 60, 30]
    assert np.concatenate(prepared.all_ids("many")).tolist() == [2] * 60


def test_a_byte_order_mark_is_no_part_of_a_name_in_latin_1(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + CSV.encode() + b"1,c\xe9,1\n" * 8)
    command = ["table", "--input", str(tmp_path / "a.csv"), "--label", "label", "--sparse", "u", "--encoding", "latin-1"]
    assert cli.main([*command, "--held-out", "0.4", "--output", str(tmp_path / "set")]) == 0
