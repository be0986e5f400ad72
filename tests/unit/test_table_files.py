"""Files of tables as they come: every row is read once with the right values, or one line says why not and what helps."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.preparation.table import text_files
from dlrm_fused.datasets.preparation.table.files import TableFile, find_files, open_file, read_blocks
from dlrm_fused.datasets.table_format import PLAIN, TableFormat
from dlrm_fused.datasets.transformation import TRANSFORMATION, Transformation
from dlrm_fused.errors import DataError
from tests.unit.tables import prepare, random_table, read_prepared, write_table
from tests.unit.test_prepare_table_errors import assert_fits


def rows(files: Sequence[TableFile], columns: Sequence[str]) -> list[tuple[Any, ...]]:
    """The rows of files, as plain values."""
    return [tuple(row.values()) for block in read_blocks(files, columns) for row in block.columns.to_pylist()]


@dataclass(frozen=True)
class Read:
    """
    Attributes:
        name: of the file.
        content: all of it.
        wanted: the rows of columns a and b; or what the error says, with … for any text.
    """

    name: str
    content: bytes
    wanted: list[tuple[str | None, str | None]] | str
    table_format: TableFormat = field(default_factory=TableFormat)


TWO = [("1", "x"), ("2", "y")]
LATIN = "a,b\n1,Müller\n".encode("latin-1")
TEXTS = {
    "a comma": Read("t.csv", b"a,b\n1,x\n2,y\n", TWO),
    "no line end at the end": Read("t.csv", b"a,b\n1,x\n2,y", TWO),
    "line ends of Windows": Read("t.csv", b"a,b\r\n1,x\r\n2,y\r\n", TWO),
    "line ends of old Macs": Read("t.csv", b"a,b\r1,x\r2,y\r", TWO),
    "empty lines": Read("t.csv", b"a,b\n\n1,x\n\n2,y\n\n", TWO),
    "a byte order mark": Read("t.csv", b"\xef\xbb\xbfa,b\n1,x\n2,y\n", TWO),
    "a capital suffix": Read("T.CSV", b"a,b\n1,x\n2,y\n", TWO),
    "a missing field": Read("t.csv", b'a,b\n,x\n2,""\n', [(None, "x"), ("2", None)]),
    "gzip": Read("t.csv.gz", gzip.compress(b"a,b\n1,x\n2,y\n"), TWO),
    "gzip, in capitals": Read("T.CSV.GZ", gzip.compress(b"a,b\n1,x\n2,y\n"), TWO),
    "gzip in two parts": Read("t.csv.gz", gzip.compress(b"a,b\n1,x\n") + gzip.compress(b"2,y\n"), TWO),
    "quotes": Read("t.csv", b'"a","b"\n"1","x, ""x"""\n', [("1", 'x, "x"')]),
    "line breaks in quotes": Read("t.csv", b'a,b\n1,"x\ny"\n2,"\r\n"\n', [("1", "x\ny"), ("2", "\r\n")]),
    "a last value with a line break": Read("t.csv", b'a,b\n1,"x\n,y"\n', [("1", "x\n,y")]),
    "a quote inside of a field": Read("t.csv", b'a,b\n1,5" disk\n2,y\n', [("1", '5" disk'), ("2", "y")]),
    "tabs": Read("t.tsv", b"a\tb\n1\tx\n2\ty\n", TWO),
    "a file of RecBole": Read(
        "t.inter", b"a:token\tb:float\n1\tx\n", [("1", "x")], TableFormat(renamed={"a:token": "a", "b:float": "b"})
    ),
    "semicolons": Read("t.csv", b"a;b\n1;x,y\n", [("1", "x,y")], TableFormat(delimiter=";")),
    "a suffix of no format, with a delimiter": Read("part-00000", b"a|b\n1|x\n2|y\n", TWO, TableFormat(delimiter="|")),
    "a suffix of text, gzipped": Read("t.dat.gz", gzip.compress(b"a|b\n1|x\n2|y\n"), TWO, TableFormat(delimiter="|")),
    "Latin-1": Read("t.csv", LATIN, [("1", "Müller")], TableFormat(encoding="latin-1")),
    "UTF-16": Read("t.csv", "a,b\n1,Müller\n".encode("utf-16"), [("1", "Müller")], TableFormat(encoding="utf-16")),
    "UTF-16, gzipped": Read(
        "t.csv.gz", gzip.compress("a,b\n1,x\n2,y\n".encode("utf-16")), TWO, TableFormat(encoding="utf-16")
    ),
    "UTF-16 with a mark, of a name that has none": Read(
        "t.csv", b"\xff\xfe" + "a,b\n1,x\n2,y\n".encode("utf-16-le"), TWO, TableFormat(encoding="utf-16-le")
    ),
    "a Chinese encoding": Read("t.csv", "a,b\n1,红\n".encode("gb18030"), [("1", "红")], TableFormat(encoding="gb18030")),
    "backslashes before quotes": Read("t.csv", b'a,b\n1,"x; \\"y\\" z"\n', [("1", 'x; "y" z')], TableFormat(escape="\\")),
    "quotes that mean nothing": Read("t.csv", b'a,b\n1,"x\n2,"y\n', [("1", '"x'), ("2", '"y')], TableFormat(quote="")),
    "another quote": Read("t.csv", b"a,b\n1,'x,y'\n", [("1", "x,y")], TableFormat(quote="'")),
    "blanks around fields": Read("t.csv", b"a, b\n1, x\n 2 , \n", [("1", "x"), ("2", None)], TableFormat(trim=True)),
    "no header": Read("t.csv", b"1,x\n2,y\n", TWO, TableFormat(column_names=("a", "b"))),
    "other names": Read("t.csv", b"user id,a=b\n1,x\n2,y\n", TWO, TableFormat(renamed={"user id": "a", "a=b": "b"})),
    "names in exchange": Read("t.csv", b"b,a\n1,x\n2,y\n", TWO, TableFormat(renamed={"a": "b", "b": "a"})),
    # Files that are refused.
    "Latin-1 without a word": Read("t.csv", LATIN, "--input t.csv: is not text in UTF-8; give its encoding, …"),
    "Latin-1 in the header": Read(
        "t.csv", "a,Größe\n1,x\n".encode("latin-1"), "--input t.csv: is not text in UTF-8; give its encoding, …"
    ),
    "another encoding than given": Read(
        "t.csv", b"a,b\n1,\x81\n", "--input t.csv: is not text in cp1252; give its encoding, …", TableFormat(encoding="cp1252")
    ),
    "UTF-16 without a mark": Read(
        "t.csv", "a,b\n1,x\n".encode("utf-16-le"), "--input t.csv: looks like UTF-16; give --encoding utf-16-le"
    ),
    "UTF-32": Read("t.csv", "a,b\n1,x\n".encode("utf-32"), "--input t.csv: begins with the mark of UTF-32; give …"),
    "UTF-16 without a word": Read(
        "t.csv", "a,b\n1,x\n".encode("utf-16"), "--input t.csv: begins with the mark of UTF-16; give --encoding utf-16"
    ),
    "a field more": Read("t.csv", b"a,b\n1,x,y\n", "--input t.csv: cannot be read (CSV parse error: Row #2: Expected 2 …"),
    "a header of one name": Read(
        "t.csv", b"a;b\n1;x,y\n", "--input t.csv: its first line has one column only, others have more; give --delimiter, …"
    ),
    "fewer names than columns": Read(
        "t.csv",
        b"1,x\n",
        "--input t.csv: its first line has not the 1 columns that --column-names names; name each",
        TableFormat(column_names=("a",)),
    ),
    "a quote that is never closed": Read(
        "t.csv",
        b'a,b\n1,"x\n2,y\n3,z\n',
        "--input t.csv: the quote before 'x' is never closed, so that all lines after it are one value; mend the file, or give "
        "--quote '' if quotes mean nothing in it",
    ),
    "a suffix of no format": Read("t.dat", b"a|b\n1|x\n", "--input t.dat: unknown format; …; or give --delimiter, …"),
    "two columns of a name": Read(
        "t.csv", b"1,1\n1,2\n", "--input t.csv: two columns are named 1; rename one; if it has no header, …"
    ),
    "two columns without names": Read(
        "t.csv", b"a,,\n1,2,3\n", "--input t.csv: two columns are named ''; give them names in the file; if it has no header, …"
    ),
    "two columns renamed alike": Read(
        "t.csv", b"a,b\n1,2\n", "--input t.csv: two columns are named b; rename one; …", TableFormat(renamed={"a": "b"})
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS.values(), ids=TEXTS.keys())
def test_text_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Read) -> None:
    monkeypatch.chdir(tmp_path)
    Path(case.name).write_bytes(case.content)
    if isinstance(case.wanted, str):
        with pytest.raises(DataError) as refused:
            rows([open_file(Path(case.name), case.table_format)], ["a"] if case.table_format.column_names else ["a", "b"])
        assert_fits(str(refused.value), case.wanted)
    else:
        assert rows([open_file(Path(case.name), case.table_format)], ["a", "b"]) == case.wanted


WRONG_FORMATS = {
    "--delimiter '::'": (TableFormat(delimiter="::"), "--delimiter '::': allowed: one ASCII character that ends no line"),
    "--delimiter '§'": (TableFormat(delimiter="§"), "--delimiter '§': allowed: one ASCII character that ends no line"),
    "--delimiter '\"'": (TableFormat(delimiter='"'), "--delimiter '\"': is also --quote or --escape; keep one of them"),
    "--escape two": (TableFormat(escape="\\\\"), "--escape …: allowed: one ASCII character that ends no line"),
    "--encoding utf8mb4": (TableFormat(encoding="utf8mb4"), "--encoding utf8mb4: unknown; allowed: names of …"),
    "--encoding base64": (TableFormat(encoding="base64"), "--encoding base64: unknown; allowed: names of …"),
    "--time-format h": (TableFormat(time="h"), "--time-format h: allowed: a unit, s, ms, us, ns, or a format of …"),
    "--time-format %Q": (TableFormat(time="%Q"), "--time-format %Q: allowed: a unit, …"),
}


@pytest.mark.parametrize(("table_format", "message"), WRONG_FORMATS.values(), ids=WRONG_FORMATS.keys())
def test_formats_that_cannot_be_are_refused(table_format: TableFormat, message: str) -> None:
    with pytest.raises(DataError) as refused:
        table_format.check()
    assert_fits(str(refused.value), message)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_no_block_is_cut_at_a_line_break_in_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line_end: str, columns: int
) -> None:
    """With two columns, a row that is cut in two has the wrong number; with one, it is two rows."""
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 200)
    texts = [f"good, \n\n{i}, ''{'again' * (i % 7)}" for i in range(200)]
    lines = [",".join([*[str(i)] * (columns - 1), f'"{text}"']) for i, text in enumerate(texts)]
    path = tmp_path / "t.csv"
    path.write_bytes(line_end.join([",".join(["i", "text"][-columns:]), *lines, ""]).encode())
    assert [row[0] for row in rows([open_file(path)], ["text"])] == texts


def test_a_row_larger_than_a_block_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 200)
    path = tmp_path / "t.csv"
    path.write_text('a,b\n1,"x\n' + "2,y\n" * 300)
    with pytest.raises(DataError, match=r"a row has more than 200 bytes, perhaps since a quote is never closed"):
        rows([open_file(path)], ["a"])


HINTS = {
    "another delimiter": (
        b'"user";"liked"\n1;0\n',
        "it has user;\"liked\"; it looks separated by ';': give --delimiter ';'",
    ),
    "tabs": (b"user\tliked\n1\t0\n", "it looks separated by '\\t': give --delimiter '\\t'"),
    "blanks": (b"liked, user\n1, 0\n", "there are blanks around its names: give --trim"),
    "no header": (b"1,17\n0,12\n", "it has 1, 17; if it has no header, name its columns with --column-names"),
    "no header, with texts": (b"1,u7\n0,u8\n", "it has 1, u7; if it has no header, name its columns with --column-names"),
    "types in names": (b"user:token,liked:float\n1,0\n", "--rename 'user:token=user' gives it that name"),
    "capitals": (b"User,Liked\n1,0\n", "--rename 'User=user' gives it that name"),
}


@pytest.mark.parametrize(("content", "hint"), HINTS.values(), ids=HINTS.keys())
def test_a_column_that_is_missing_comes_with_a_guess(tmp_path: Path, content: bytes, hint: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    file = open_file(tmp_path / "t.csv")
    there = ", ".join(file.schema.names)
    assert f"it has {there}{file.hint('user')}".endswith(hint)


class TestNames:
    @staticmethod
    def touch(folder: Path, *names: str) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()

    @pytest.mark.parametrize("patterns", [["out/*"], ["out/_SUCCESS", "out/a.parquet", "out/b.parquet"], ["out/**"], ["**"]])
    def test_hidden_files_are_left_out(self, tmp_path, monkeypatch, patterns):
        monkeypatch.chdir(tmp_path)
        self.touch(tmp_path / "out", "a.parquet", "b.parquet", "_SUCCESS", ".a.parquet.crc", "_metadata")
        if "**" in patterns[0]:
            self.touch(tmp_path / "out", "_temporary/0/c.parquet")
        assert find_files(patterns) == [Path("out/a.parquet"), Path("out/b.parquet")]

    def test_a_name_that_is_given_may_begin_so(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        self.touch(tmp_path, "_logs/_a.csv")
        assert find_files(["_logs/_a.csv"]) == [Path("_logs/_a.csv")]
        with pytest.raises(DataError, match=r"--input _logs/\*: finds only names that begin with _ or ., which are left out"):
            find_files(["_logs/*"])

    def test_a_file_is_one_by_whatever_name(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        self.touch(tmp_path, "a.csv")
        Path("b.csv").symlink_to("a.csv")
        for other in (tmp_path / "a.csv", "b.csv", "./a.csv"):
            with pytest.raises(DataError, match=r"given twice, so its rows would count twice"):
                find_files(["a.csv", str(other)])

    def test_patterns_begin_at_the_home_of_the_user(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        self.touch(tmp_path, "a.csv")
        assert find_files(["~/*.csv"]) == [tmp_path / "a.csv"]

    def test_columns_of_the_path(self, tmp_path):
        for day in ("2024-01-01", "__HIVE_DEFAULT_PARTITION__", "a%20b"):
            folder = tmp_path / f"dt={day}" / "hour=07"
            folder.mkdir(parents=True)
            pa.parquet.write_table(pa.table({"item": [1, 2]}), folder / "part.parquet")
        files = [open_file(path) for path in find_files([f"{tmp_path}/*/*/*.parquet"])]
        days = ["2024-01-01", None, "a b"]
        assert rows(files, ["dt", "item", "hour"]) == [(day, item, "07") for day in days for item in (1, 2)]
        assert rows(files, ["hour"]) == [("07",)] * 6  # of the path alone

    def test_a_column_of_the_file_comes_before_one_of_the_path(self, tmp_path):
        (tmp_path / "dt=1").mkdir()
        (tmp_path / "dt=1/t.csv").write_text("dt,a\n2,3\n")
        assert rows([open_file(tmp_path / "dt=1/t.csv")], ["dt", "a"]) == [("2", "3")]

    @pytest.mark.parametrize("header", ["a", "dt,a"])
    def test_they_are_renamed_as_others(self, tmp_path: Path, header: str) -> None:
        """The file's own column goes before that of the path, under the new name too."""
        (tmp_path / "dt=1").mkdir()
        (tmp_path / "dt=1/t.csv").write_text(f"{header}\n{header.replace('dt', '2').replace('a', '3')}\n")
        file = open_file(tmp_path / "dt=1/t.csv", TableFormat(renamed={"dt": "day"}))
        assert rows([file], ["day", "a"]) == [("2" if "dt" in header else "1", "3")]

    def test_a_new_name_that_the_file_has_already_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "dt=1").mkdir()
        (tmp_path / "dt=1/t.csv").write_text("a\n3\n")
        with pytest.raises(DataError, match=r"t.csv: two columns are named a; rename one"):
            open_file(tmp_path / "dt=1/t.csv", TableFormat(renamed={"dt": "a"}))

    def test_the_command_knows_a_renamed_one(self, tmp_path: Path) -> None:
        (tmp_path / "_dt=1").mkdir()  # no hidden folder, since it is a column
        (tmp_path / "_dt=1/t.csv").write_text("clicked,user\n" + "1,a\n0,b\n" * 20)
        command = ["table", "--input", str(tmp_path / "*/t.csv"), "--label", "clicked", "--sparse", "user,day"]
        assert cli.main([*command, "--rename", "_dt=day", "--output", str(tmp_path / "set")]) == 0


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int8(), pa.binary()), pa.binary_view(), pa.list_(pa.binary())]
)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_bytes_are_text(tmp_path: Path, kind: pa.DataType, suffix: str) -> None:
    values = [["grün".encode(), None]] if pa.types.is_list(kind) else ["grün".encode(), None]
    path = write_table(pa.table({"raw": pa.array(values, kind)}), tmp_path / f"t{suffix}")
    wanted = [(["grün", None],)] if pa.types.is_list(kind) else [("grün",), (None,)]
    file = open_file(path)
    assert rows([file], ["raw"]) == wanted
    assert str(file.schema.field("raw").type).replace("large_", "") in ("string", "list<element: string>", "list<item: string>")


def test_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = write_table(pa.table({"raw": [b"\xff\xfe"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t.parquet: column raw holds bytes that are not text in UTF-8; write them as text"):
        rows([open_file(path)], ["raw"])


WRONG_OPTIONS = {
    "no input": ([], "--input: no file given; name files, or those of each split with --train, --validation and --test"),
    "both": (["--input", "t.csv", "--test", "t.csv"], "--input t.csv: not together with --test; keep one of them"),
    "a split without files": (
        ["--train", "t.csv", "--test", "u.csv"],
        "--train, --test: without --validation; give files for each split, or all of them as --input",
    ),
    "a file for two splits": (
        ["--train", "t.csv", "--validation", "u.csv", "--test", "t.csv"],
        "--test t.csv: is in --train, too; leave it out of one of them",
    ),
    "another split": (
        ["--train", "t.csv", "--validation", "u.csv", "--test", "v.csv", "--held-out", "0.3"],
        "--train, --validation, --test: files are split already; leave out --held-out, --split-by-time and "
        "--split-by-column",
    ),
    "histories": (
        ["--train", "t.csv", "--validation", "u.csv", "--test", "v.csv", "--history", "user", "time", "user"],
        "--history: rows are split by its time, time, and not by files; name all files in --input",
    ),
    "a name that no file has": (
        ["--input", "t.csv", "--rename", "member=user2"],
        "--rename member=user2: no such column in t.csv; leave it out",
    ),
    "a rename of nothing": (
        ["--input", "t.csv", "--rename", "user"],
        "--rename user: allowed: the name in the file, =, and the new name",
    ),
}  # fmt: skip


class TestCommand:
    """The options, as the command takes them; ``apply`` reads other files as those were read."""

    CSV = "liked; user id; item\n" + "".join(f"{i % 2}; Müller {i % 7}; {i % 5}\n" for i in range(60))
    OPTIONS = ("--delimiter", ";", "--encoding", "latin-1", "--trim", "--rename", "user id=user")
    COLUMNS = ("--label", "liked", "--sparse", "user,item", "--dense", "")

    def test_apply_reads_as_table_has_read(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_bytes(self.CSV.encode("latin-1"))
        first = prepare(tmp_path / "t.csv", tmp_path / "set", *self.COLUMNS, *self.OPTIONS)
        again = prepare(
            tmp_path / "t.csv",
            tmp_path / "again",
            "--transformation",
            str(tmp_path / "set"),
            "--held-out",
            "0.2",
            command="apply",
        )
        assert first.all_ids("user") == again.all_ids("user")
        assert {len({row[0] for row in first.all_ids(name)}) for name in ("user", "item")} == {7, 5}
        kept = TableFormat(delimiter=";", encoding="latin-1", trim=True, renamed={"user id": "user"})
        assert again.transformation.table_format == first.transformation.table_format == kept

    def test_apply_takes_files_that_are_written_otherwise(self, tmp_path: Path) -> None:
        (tmp_path / "t.csv").write_bytes(self.CSV.encode("latin-1"))
        first = prepare(tmp_path / "t.csv", tmp_path / "set", *self.COLUMNS, *self.OPTIONS)
        other = ["\t".join(line.split("; ")[:3]) for line in self.CSV.splitlines()[1:]]
        (tmp_path / "o.tsv").write_text("\n".join(other) + "\n")
        options = ("--transformation", str(tmp_path / "set"), "--held-out", "0.2", "--no-trim", "--encoding", "utf-8")
        names = ("--delimiter", "\\t", "--column-names", "liked,user,item")
        again = prepare(tmp_path / "o.tsv", tmp_path / "again", *options, *names, command="apply")
        assert first.all_ids("user") == again.all_ids("user")

    def test_a_plain_table_has_no_format_in_its_transformation(self, tmp_path: Path) -> None:
        prepare(write_table(random_table(), tmp_path / "t.parquet"), tmp_path / "set")
        assert "table_format" not in (tmp_path / "set" / TRANSFORMATION / "transformation.json").read_text()
        assert Transformation.load(tmp_path / "set" / TRANSFORMATION).table_format == PLAIN

    def test_files_of_each_split(self, tmp_path: Path) -> None:
        table = random_table()
        parts = {"train": (0, 300), "validation": (300, 60), "test": (360, 40)}
        arguments = ["table", "--output", str(tmp_path / "set"), "--label", "clicked", "--sparse", "user"]
        for split, (start, rows_of_split) in parts.items():
            part = write_table(table.slice(start, rows_of_split), tmp_path / f"{split}.parquet")
            arguments += [f"--{split}", str(part)]
        assert cli.main(arguments) == 0
        written = read_prepared(tmp_path / "set")
        assert written.info.samples == {split: count for split, (_, count) in parts.items()}
        for split, (start, count) in parts.items():
            assert (written.splits[split]["labels"] == table["clicked"].to_numpy()[start : start + count]).all()
        command = ["apply", "--transformation", str(tmp_path / "set"), "--output", str(tmp_path / "new")]
        assert cli.main([*command, "--validation", str(tmp_path / "test.parquet")]) == 0
        labels = read_prepared(tmp_path / "new").splits["validation"]["labels"]
        assert (labels == written.splits["test"]["labels"]).all()

    @pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS.values(), ids=WRONG_OPTIONS.keys())
    def test_options_that_contradict_are_told(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        options: list[str],
        message: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("t.csv", "u.csv", "v.csv"):
            Path(name).write_text("clicked,user,time\n1,2,3\n")
        assert cli.main(["table", "--output", "out", "--label", "clicked", "--sparse", "user", *options]) == 1
        assert capsys.readouterr().err == f"error: {message}\n"
        assert not Path("out").exists()


@pytest.mark.parametrize(
    ("content", "options", "is_told"),
    [
        (b'label,name\n1,"say \\"yes\\""\n0,x\n', [], True),
        (b'label,name\n1,"say \\"yes\\""\n0,x\n', ["--escape", "\\"], False),
        (b'label,name\n1,"say ""yes"""\n0,x\n', [], False),
    ],
)
def test_quotes_behind_backslashes_are_told_where_no_option_reads_them(
    tmp_path: Path, content: bytes, options: list[str], is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    command = ["table", "--input", str(tmp_path / "t.csv"), "--output", str(tmp_path / "set"), "--describe"]
    assert cli.main([*command, "--label", "label", "--sparse", "name", "--held-out", "0.4", *options]) == 0
    assert ("give --escape '\\'" in capsys.readouterr().out) is is_told
