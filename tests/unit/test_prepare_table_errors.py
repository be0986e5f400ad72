"""Tables and options that cannot be used: one line names the option or file, its value and what to do; nothing is written."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.datasets.preparation import cli
from tests.unit.tables import COLUMNS, ROWS, prepare, random_table, write_table

Make = Callable[[Path], None]


def changed(name: str, values: list[Any] | pa.Array, table: pa.Table | None = None) -> pa.Table:
    """The random table with other values of a column."""
    table = random_table() if table is None else table
    return table.set_column(table.schema.get_field_index(name), name, pa.array(values))


def with_value(name: str, row: int, value: Any, kind: pa.DataType | None = None) -> pa.Table:
    """The random table with another value in one row, whose number is counted from 1."""
    values = random_table()[name].to_pylist()
    values[row - 1] = value
    return changed(name, pa.array(values, kind))


def tables(**tables: pa.Table) -> Make:
    """Writes Parquet files."""

    def make(folder: Path) -> None:
        for name, table in tables.items():
            write_table(table, folder / f"{name}.parquet")

    return make


def text(name: str, content: str | bytes) -> Make:
    """Writes a file."""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def cut_off(folder: Path) -> None:
    path = write_table(random_table(), folder / "t.parquet")
    path.write_bytes(path.read_bytes()[:-1000])


def damaged_page(folder: Path) -> None:
    path = write_table(random_table(), folder / "t.parquet")
    data = bytearray(path.read_bytes())
    data[4:2000] = bytes(1996)
    path.write_bytes(data)


def cut_off_arrow(folder: Path) -> None:
    path = folder / "t.arrow"
    pa.feather.write_feather(random_table(), path)
    path.write_bytes(path.read_bytes()[:-500])


def other_output(folder: Path) -> None:
    OK(folder)
    (folder / "out").mkdir()
    (folder / "out/thesis.tex").touch()


def output_file(folder: Path) -> None:
    OK(folder)
    (folder / "out").touch()


def lines(*rows: str, header: str = "clicked,price,age,user,color,tags") -> str:
    return "\n".join([header, *rows, ""])


GOOD = "1,2.5,30,u1,red,a"
CSV = ("--input", "t.csv")
RECENT = 1_700_000_000


@dataclass(frozen=True)
class Wrong:
    """
    Attributes:
        make: writes the input, ``t.parquet`` unless the options name another one.
        message: all of what is said but the word error.
    """

    make: Make
    message: str
    options: tuple[str, ...] = ()


OK = tables(t=random_table())
FILES = {
    "no such file": Wrong(
        OK, "--input u.parquet: no such file; put a pattern such as 'logs/*.parquet' in quotes", ("--input", "u.parquet")
    ),
    "a pattern that finds nothing": Wrong(
        OK, "--input logs/*.csv: no such file; put a pattern such as 'logs/*.parquet' in quotes", ("--input", "logs/*.csv")
    ),
    "a folder": Wrong(
        lambda f: (f / "logs").mkdir(),
        "--input logs: is a folder; name its files, such as 'logs/*.parquet'",
        ("--input", "logs"),
    ),
    "a file twice": Wrong(
        OK,
        "--input t.parquet: given twice, so its rows would count twice; leave out one",
        ("--input", "t.parquet", "*.parquet"),
    ),
    "another format": Wrong(
        text("t.xlsx", "PK"),
        "--input t.xlsx: unknown format; the name must end with .parquet, .pq, .arrow, .feather, .ipc, .csv, .tsv, "
        ".inter, the last 3 also with .gz or .zst; or give --delimiter, if it is text",
        ("--input", "t.xlsx"),
    ),
    "an empty file": Wrong(text("t.parquet", b""), "--input t.parquet: the file is empty; leave it out, or write it again"),
    "files without rows": Wrong(
        tables(t=random_table().slice(0, 0), u=random_table().slice(0, 0)),
        "--input t.parquet: no rows in any of the 2 files; write them again",
        ("--input", "*.parquet"),
    ),
    "Parquet that is cut off": Wrong(cut_off, "--input t.parquet: cannot be read (Parquet magic bytes not found in footer. …"),
    "Parquet with a damaged page": Wrong(
        damaged_page, "--input t.parquet: cannot be read (…); mend the file or write it again"
    ),
    "Arrow IPC that is cut off": Wrong(cut_off_arrow, "--input t.arrow: cannot be read (…", ("--input", "t.arrow")),
    "text called Parquet": Wrong(text("t.parquet", "a,b\n1,2\n"), "--input t.parquet: cannot be read (Parquet magic bytes …"),
    "CSV with a short line": Wrong(
        text("t.csv", lines(GOOD, "1,2.5,30")),
        "--input t.csv: cannot be read (CSV parse error: Row #3: Expected 6 columns, got 3: 1,2.5,30); mend the "
        "file or write it again",
        CSV,
    ),
    "CSV that is not UTF-8": Wrong(
        text("t.csv", lines(GOOD, "1,2.5,30,u1,gr\u00fcn,a").encode("latin-1")),
        "--input t.csv: is not text in UTF-8; give its encoding, such as --encoding latin-1 or --encoding cp1252",
        CSV,
    ),
    "gzip that is cut off": Wrong(
        text("t.csv.gz", gzip.compress(lines(*[GOOD] * 1000).encode())[:-12]),
        "--input t.csv.gz: cannot be read (Truncated compressed stream); mend the file or write it again",
        ("--input", "t.csv.gz"),
    ),
    "two columns of a name": Wrong(
        text("t.csv", lines(GOOD + ",7", header="clicked,price,age,user,color,tags,user")),
        "--input t.csv: two columns are named user; rename one; if it has no header, name all columns with --column-names",
        CSV,
    ),
}
COLUMN_CHOICES = {
    "a missing column": Wrong(
        OK,
        "--sparse shop: no such column in t.parquet; it has clicked, price, age, user, color, tags, time",
        ("--sparse", "user,shop"),
    ),
    "a column that one file lacks": Wrong(
        tables(t=random_table(), u=random_table().drop_columns(["age"])),
        "--dense age: no such column in u.parquet; it has clicked, price, user, color, tags, time",
        ("--input", "*.parquet"),
    ),
    "a missing label": Wrong(
        OK,
        "--label buys: no such column in t.parquet; it has clicked, price, age, user, color, tags, time",
        ("--label", "buys"),
    ),
    "types that differ between files": Wrong(
        tables(t=random_table(), u=changed("user", random_table()["user"].cast(pa.string()))),
        "--sparse user: whole numbers in t.parquet, but text in u.parquet; write all files with one type",
        ("--input", "*.parquet"),
    ),
    "lists in one file only": Wrong(
        tables(t=random_table(), u=changed("color", [["red"]] * ROWS)),
        "--sparse color: text in t.parquet, but lists of text in u.parquet; write all files with one type",
        ("--input", "*.parquet"),
    ),
    "a list in a dense column": Wrong(
        OK, "--dense tags: a list in t.parquet; allowed: a column of numbers", ("--dense", "tags", "--sparse", "user")
    ),
    "a list as label": Wrong(
        OK, "--label tags: a list in t.parquet; allowed: a column of numbers", ("--label", "tags", "--sparse", "user")
    ),
    "text in a dense column": Wrong(
        OK, "--dense color: text in t.parquet; allowed: a column of numbers", ("--dense", "color", "--sparse", "user")
    ),
    "times in a sparse column": Wrong(
        OK,
        "--sparse time: timestamp[ms] in t.parquet; allowed: text, whole numbers, and lists of them; cast the column",
        ("--sparse", "time"),
    ),
    "lists of lists": Wrong(
        tables(t=changed("tags", [[["a"]]] * ROWS)),
        "--sparse tags: list<element: list<element: string>> in t.parquet; allowed: text, whole numbers, and "
        "lists of them; cast the column",
    ),
    "a column both dense and sparse": Wrong(
        OK, "--sparse age: is in both --dense and --sparse; keep one of them", ("--sparse", "user,age")
    ),
    "the label among the features": Wrong(
        OK, "--sparse clicked: is in both --label and --sparse; keep one of them", ("--sparse", "clicked")
    ),
    "a column twice": Wrong(OK, "--sparse user: is twice in --sparse; keep one of them", ("--sparse", "user,color,user")),
    "a dense column twice": Wrong(OK, "--dense age: is twice in --dense; keep one of them", ("--dense", "age,age:log")),
    "no sparse column": Wrong(
        OK, "--sparse: no column given; name at least one column of ids, such as --sparse user,item", ("--sparse", "")
    ),
    "a name that no line can show": Wrong(
        OK,
        "--sparse 'a\\nb': allowed: a name that is not empty and has no control characters; name it otherwise with --rename",
        ("--sparse", "user,a\nb"),
    ),
    "a name that no file can have": Wrong(
        OK,
        f"--sparse {'a' * 40!r}...: too long for the name of a file; name it otherwise with --rename",
        ("--sparse", "user," + "a" * 201),
    ),
    "an unknown kind of dense feature": Wrong(
        OK,
        "--dense age:sqrt: sqrt is unknown; allowed after the colon: standardize, log, quantile; if that is the column's name, "
        "give it another one with --rename 'age:sqrt=age'",
        ("--dense", "age:sqrt"),
    ),
    "a separator for lists": Wrong(
        OK, "--separated tags: lists in t.parquet; allowed: a column of text", ("--separated", "tags=|")
    ),
    "a separator for another column": Wrong(
        OK, "--separated time: is not in --sparse; add it there", ("--separated", "time=|")
    ),
    "a separator without its column": Wrong(
        OK, "--separated tags: allowed: a column, =, and its value; --help shows how", ("--separated", "tags")
    ),
}
VALUES = {
    "a label of 2": Wrong(
        tables(t=with_value("clicked", 17, 2)),
        "--label clicked: 2 in t.parquet, row 17; allowed: 0 and 1; derive such a column, or leave the row out",
    ),
    "a label of 2 in the second file": Wrong(
        tables(t=random_table(), u=with_value("clicked", 80, 2)),
        "--label clicked: 2 in u.parquet, row 80; allowed: 0 and 1; derive such a column, or leave the row out",
        ("--input", "*.parquet"),
    ),
    "a missing label value": Wrong(
        tables(t=with_value("clicked", 9, None)),
        "--label clicked: a missing value in t.parquet, row 9; allowed: 0 and 1; derive such a column, or leave the row out",
    ),
    "a label of text": Wrong(
        text("t.csv", lines(GOOD, GOOD.replace("1,", "yes,", 1))),
        "--label clicked: 'yes' in t.csv, row 2; allowed: 0 and 1; derive such a column, or leave the row out",
        CSV,
    ),
    "labels all the same": Wrong(
        tables(t=changed("clicked", [1] * ROWS)),
        "--label clicked: is 1 in all 3… training rows, so there is nothing to learn; choose another column or other rows",
    ),
    "a text for a number": Wrong(
        text("t.csv", lines(GOOD, GOOD, GOOD.replace("2.5", "cheap"))),
        "--dense price: 'cheap' in t.csv, row 3; allowed: numbers, empty where missing; --null-values says which values stand "
        "for missing ones",
        CSV,
    ),
    "an infinite number": Wrong(
        tables(t=with_value("price", 5, np.inf)),
        "--dense price: inf in t.parquet, row 5; allowed: finite numbers of float32; mend the value or leave it empty",
    ),
    "a number that float32 cannot hold": Wrong(
        tables(t=with_value("price", 6, 1e300)),
        "--dense price: 1e+300 in t.parquet, row 6; allowed: finite numbers of float32; mend the value or leave it empty",
    ),
    "a dense column without values": Wrong(
        tables(t=changed("price", pa.nulls(ROWS, pa.float64()))),
        "--dense price: all values are missing in 3… training rows; leave the column out",
    ),
    "a sparse column without values": Wrong(
        tables(t=changed("color", pa.nulls(ROWS, pa.string()))),
        "--sparse color: all values are missing in 3… training rows; leave the column out",
    ),
    "a sparse column without a type": Wrong(
        tables(t=changed("color", pa.nulls(ROWS))), "--sparse color: all values are missing; leave the column out"
    ),
    "a fraction for an id": Wrong(
        tables(t=changed("user", [1.0] * 29 + [0.5] * (ROWS - 29))),
        "--sparse user: 0.5 in t.parquet, row 30; allowed: whole numbers of 64 bits, as in the rest of the column; write all "
        "values as text, mend this one, or name it in --null-values if it stands for a missing one",
    ),
    "values that are all rare": Wrong(
        tables(t=changed("color", [f"c{i}" for i in range(ROWS)])),
        "--sparse color: none of its 3… values occurs --min-frequency=3 times in training rows; lower that, use --hash-buckets "
        "color=N, or leave the column out",
    ),
    "too few rows": Wrong(
        tables(t=random_table(2)),
        "--input: no row for the … split (…); give more rows, or split them in another way",
    ),
}
NUMBERS_AND_SPLITS = {
    "a frequency of 0": Wrong(OK, "--min-frequency=0: allowed: 1 or more", ("--min-frequency", "0")),
    "all rows held out": Wrong(OK, "--held-out=1.0: allowed: above 0, below 1", ("--held-out", "1")),
    "no workers": Wrong(OK, "--workers=0: allowed: 1 or more", ("--workers", "0")),
    "one hash bucket": Wrong(OK, "--hash-buckets=user=1: allowed: 2 to 2147483647", ("--hash-buckets", "user=1")),
    "hash buckets that are no number": Wrong(
        OK, "--hash-buckets user=many: allowed: a whole number of rows", ("--hash-buckets", "user=many")
    ),
    "a seed below 0": Wrong(OK, "--seed=-1: allowed: 0 to 2147483647", ("--seed", "-1")),
    "a seed of too many digits": Wrong(OK, "--seed=9223372036854775808: allowed: 0 to 2147483647", ("--seed", str(2**63))),
    "a seed that is no number": Wrong(OK, "--seed=one: allowed: 0 to 2147483647", ("--seed", "one")),
    "hash buckets that are no decimal digits": Wrong(
        OK, "--hash-buckets color=²: allowed: a whole number of rows", ("--hash-buckets", "color=²")
    ),
    "two numbers of hash buckets": Wrong(
        OK, "--hash-buckets color=20: color has 10 already; keep one of them", ("--hash-buckets", "color=10,color=20")
    ),
    "two separators": Wrong(
        OK, "--separated color=,: color has | already; keep one of them", ("--separated", "color=|", "color=,")
    ),
    "hash buckets of another column": Wrong(
        OK, "--hash-buckets=age=10: allowed: columns of --sparse; add it there", ("--hash-buckets", "age=10")
    ),
    "two kinds of split": Wrong(
        OK,
        "--split-by-time time: not together with --split-by-column color; keep one of them",
        ("--split-by-time", "time", "--split-by-column", "color"),
    ),
    "a split by the label": Wrong(
        OK, "--split-by-column clicked: is the label; choose another column", ("--split-by-column", "clicked")
    ),
    "an unknown split": Wrong(
        tables(t=random_table().append_column("fold", pa.array(["train"] * 10 + ["dev"] * (ROWS - 10)))),
        "--split-by-column fold: 'dev' in t.parquet, row 11; allowed: train, validation, test; rename the value, or "
        "leave the row out",
        ("--split-by-column", "fold"),
    ),
    "a split by a column of lists": Wrong(
        OK,
        "--split-by-column tags: [… in t.parquet, row …; allowed: train, validation, test; rename the value, or leave the row "
        "out",
        ("--split-by-column", "tags"),
    ),
    "a split by a column without a type": Wrong(
        tables(t=random_table().append_column("fold", pa.nulls(ROWS))),
        "--split-by-column fold: a missing value in t.parquet, row 1; allowed: train, validation, test; rename the value, or "
        "leave the row out",
        ("--split-by-column", "fold"),
    ),
    "a split that no row belongs to": Wrong(
        tables(t=random_table().append_column("fold", pa.array(["train", "test"] * (ROWS // 2)))),
        "--input: no row for the validation split (200 train, 0 validation, 200 test); give more rows, or split "
        "them in another way",
        ("--split-by-column", "fold"),
    ),
    "a time in the future": Wrong(
        tables(t=changed("time", pa.array([RECENT] * (ROWS - 1) + [4_000_000_000]).cast(pa.timestamp("s")))),
        "--split-by-time time: 2096-10-02 07:06:40 in t.parquet, row 400; allowed: times up to now, "
        "numbers in seconds since 1970",
        ("--split-by-time", "time"),
    ),
    "times in milliseconds": Wrong(
        tables(t=changed("time", [RECENT * 1000] * ROWS)),
        "--split-by-time time: 1700000000000 in t.parquet, row 1; allowed: times up to now, numbers in seconds since 1970; try "
        "--time-format ms",
        ("--split-by-time", "time"),
    ),
    "a missing time": Wrong(
        tables(t=with_value("time", 3, None, pa.timestamp("s"))),
        "--split-by-time time: a missing value in t.parquet, row 3; allowed: a time in every row; leave such rows out",
        ("--split-by-time", "time"),
    ),
    "a time that is none": Wrong(
        tables(t=changed("time", ["2024-05-31T12:00:00"] * 6 + ["yesterday"] * (ROWS - 6))),
        "--split-by-time time: 'yesterday' in t.parquet, row 7; allowed: seconds since 1970, or times such as "
        "2024-05-31T12:00:00; --time-format tells another format",
        ("--split-by-time", "time"),
    ),
    "equal times": Wrong(
        tables(t=changed("time", [RECENT] * ROWS)),
        "--input: no row for the train split (0 train, 0 validation, 400 test); give more rows, or split them in another way",
        ("--split-by-time", "time"),
    ),
}
HISTORIES = {
    "a history of an item that is no feature": Wrong(
        OK, "--history: age is not in --sparse; add it there", ("--history", "user", "time", "age")
    ),
    "a history whose user is missing": Wrong(
        OK,
        "--history member: no such column in t.parquet; it has clicked, price, age, user, color, tags, time",
        ("--history", "member", "time", "color"),
    ),
    "a user who is a fraction": Wrong(
        tables(t=changed("age", [7.0] * (ROWS - 1) + [7.5])),
        f"--history age: 7.5 in t.parquet, row {ROWS}; allowed: whole numbers of 64 bits, as in the rest of the column; …",
        ("--history", "age", "time", "color"),
    ),
    "a history of lists": Wrong(
        OK, "--history: tags holds lists; name a column with one value a row", ("--history", "user", "time", "tags")
    ),
    "a history with another split": Wrong(
        tables(t=random_table().append_column("fold", pa.array(["train"] * ROWS))),
        "--history: rows are split by its time, time, and not by fold, since otherwise histories of training rows would tell "
        "labels of the test; leave that option out",
        ("--history", "user", "time", "color", "--split-by-column", "fold"),
    ),
    "a history of no columns": Wrong(
        OK, "--history: no item column given; name a column of --sparse after time", ("--history", "user", "time", ",")
    ),
    "a history of a column twice": Wrong(
        OK, "--history: color is twice among its columns; keep one of them", ("--history", "user", "time", "color,color")
    ),
    "a history of a length beyond 31 bits": Wrong(
        OK,
        "--history-length=2147483648: allowed: 1 to 2147483647",
        ("--history", "user", "time", "color", "--history-length", str(2**31)),
    ),
    "a history of no length": Wrong(
        OK, "--history-length=0: allowed: 1 to 2147483647", ("--history", "user", "time", "color", "--history-length", "0")
    ),
}  # fmt: skip
OUTPUTS = {
    "an output with other files": Wrong(
        other_output, "--output out: holds other files, such as thesis.tex; choose an empty or new folder"
    ),
    "an output that is a file": Wrong(output_file, "--output out: is a file, not a folder"),
}
ALL = {**FILES, **COLUMN_CHOICES, **VALUES, **NUMBERS_AND_SPLITS, **HISTORIES, **OUTPUTS}
APPLIED = {
    "no transformation": Wrong(
        OK,
        "nowhere/transformation/transformation.json: missing; 'data/prepare.py table' writes it beside a set",
        ("--transformation", "nowhere"),
    ),
    "a column that is gone": Wrong(
        tables(t=random_table().drop_columns(["color"])),
        "--sparse color: no such column in t.parquet; it has clicked, price, age, user, tags, time",
    ),
    "text where there were whole numbers": Wrong(
        tables(t=changed("user", random_table()["color"])),
        "--input t.parquet: column user holds text, where the transformation was made for whole numbers; write the "
        "column as it was then",
    ),
    "a list where there were single values": Wrong(
        tables(t=changed("user", [[1]] * ROWS)),
        "--input t.parquet: column user holds lists of whole numbers, where the transformation was made for whole "
        "numbers; write the column as it was then",
    ),
    "text for a whole number in CSV": Wrong(
        text("t.csv", lines(GOOD.replace("u1", "5"), GOOD)),
        "--input t.csv: column tags holds text, where the transformation was made for lists of text; write the "
        "column as it was then",
        CSV,
    ),
    "a wrong label": Wrong(
        tables(t=with_value("clicked", 2, 5)),
        "--label clicked: 5 in t.parquet, row 2; allowed: 0 and 1; derive such a column, or leave the row out",
    ),
}


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(arguments) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return error.removeprefix("error: ")


def assert_fits(message: str, expected: str) -> None:
    """``…`` stands for any text."""
    rest = message
    for part in expected.split("…"):
        assert part in rest, f"\nsaid:     {message}\nexpected: {expected}"
        rest = rest[rest.index(part) + len(part) :]
    assert message.startswith(expected.split("…")[0])
    assert expected.endswith("…") or not rest, message


@pytest.mark.parametrize("wrong", ALL.values(), ids=ALL.keys())
def test_what_is_wrong_is_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: Wrong
) -> None:
    monkeypatch.chdir(tmp_path)
    wrong.make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    message = said(["table", "--input", "t.parquet", "--output", "out", *COLUMNS, *wrong.options], capsys)
    assert_fits(message, wrong.message)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("wrong", APPLIED.values(), ids=APPLIED.keys())
def test_what_a_transformation_cannot_be_applied_to_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: Wrong
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(write_table(random_table(), tmp_path / "old.parquet"), tmp_path / "old")
    wrong.make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command = ["apply", "--input", "t.parquet", "--transformation", "old", "--output", "out", *wrong.options]
    assert_fits(said(command, capsys), wrong.message)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_transformation_of_another_release_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(write_table(random_table(), tmp_path / "t.parquet"), tmp_path / "old")
    path = tmp_path / "old/transformation/transformation.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 9}))
    (tmp_path / "old" / CHECKSUMS_FILE).unlink()
    command = ["apply", "--input", "t.parquet", "--transformation", "old", "--output", "out"]
    assert said(command, capsys).startswith("old/transformation/transformation.json: format version 9, this release reads 1")
    assert not (tmp_path / "out").exists()
