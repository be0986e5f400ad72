"""Text files of a table: CSV and its dialects."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from dlrm_fused.datasets.table_format import TableFormat
from dlrm_fused.errors import DataError

CSV = (".csv", ".tsv", ".inter")
BLOCK_BYTES = 2**24
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_TABBED = (".tsv", ".inter")
_UTF_32_MARKS = (b"\xff\xfe\0\0", b"\0\0\xfe\xff")
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
# Marks with which other files begin, and their suffixes.
_MARKS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet", b"ARROW1\0": ".arrow"}
_UNREAD_MARKS = {b"BZh91AY&SY": ".bz2", b"\xfd7zXZ\0": ".xz", b"PK\x03\x04": ".zip", b"Obj\x01": ".avro"}


def open_csv(path: Path, suffix: str, table_format: TableFormat, columns: Sequence[str]) -> pa.csv.CSVStreamingReader:
    """Open a file, to read all values as texts, so that one that cannot be used is told with its row. An empty field is null.

    Args:
        columns: those to read, by their names in the file; empty: all.
    """
    return pa.csv.open_csv(
        _decompressed(path),
        pa.csv.ReadOptions(
            use_threads=False,  # threads do not know the numbers of rows
            block_size=BLOCK_BYTES,
            column_names=table_format.column_names or None,
            encoding=table_format.encoding,
        ),
        pa.csv.ParseOptions(
            delimiter=delimiter_of(suffix, table_format),
            quote_char=table_format.quote or False,
            escape_char=table_format.escape or False,
            newlines_in_values=bool(table_format.quote),  # else blocks would be cut at line breaks between quotes
        ),
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()),
            include_columns=columns,
            strings_can_be_null=True,
            null_values=[""],
        ),
    )


def _decompressed(path: Path) -> pa.NativeFile:
    return pa.input_stream(str(path), compression=COMPRESSIONS.get(path.suffix.lower()))


def delimiter_of(suffix: str, table_format: TableFormat) -> str:
    return table_format.delimiter or ("\t" if suffix in _TABBED else ",")


def check_encoding(path: Path, table_format: TableFormat) -> None:
    """
    Raises:
        DataError: if the file says that it is UTF-16, and ``--encoding`` does not; or that it is no text.
    """
    if codecs.lookup(table_format.encoding).name.startswith(("utf-16", "utf-32")):
        return
    with _decompressed(path) as source:
        first = source.read(10)
    if first[:4] in _UTF_32_MARKS:
        raise DataError(f"--input {path}: begins with the mark of UTF-32; give --encoding utf-32")
    if first[:2] in _UTF_16_MARKS:
        raise DataError(f"--input {path}: begins with the mark of UTF-16; give --encoding utf-16")
    if 0 in first[:2] and any(first[:2]):
        raise DataError(f"--input {path}: looks like UTF-16; give --encoding utf-16-{'le' if first[0] else 'be'}")
    for mark, suffix in {**_MARKS, **_UNREAD_MARKS}.items():
        if first.startswith(mark):
            remedy = f"end its name with {suffix}" if mark in _MARKS else "unpack it, or write it in another format"
            raise DataError(f"--input {path}: is no text but what {suffix} files hold; {remedy}")


def check_closed(path: Path, table_format: TableFormat, last_value: str) -> None:
    """
    Args:
        last_value: of the last row and column. The parser takes all lines after a quote that is never closed for one value.

    Raises:
        DataError: if a quote is never closed.
    """
    if "\n" not in last_value:
        return
    end = b""
    with _decompressed(path) as source:
        while part := source.read(BLOCK_BYTES):
            end = (end + part)[-16:]
    if not end.replace(b"\0", b"").rstrip().endswith(table_format.quote.encode()):
        line = last_value.partition("\n")[0][:60]
        raise DataError(
            f"--input {path}: the quote before {line!r} is never closed, so that all lines after it are one value; mend the "
            "file, or give --quote '' if quotes mean nothing in it"
        )


def explained(error: Exception, table_format: TableFormat) -> str:
    """Return the cause of an error of reading text, and what to do; empty where the error says it itself."""
    reason = str(error)
    if isinstance(error, UnicodeError) or "invalid UTF8" in reason:
        given = "UTF-8" if table_format.encoding == "utf-8" else table_format.encoding
        return f"is not text in {given}; give its encoding, such as --encoding latin-1 or --encoding cp1252"
    if "straddling object" in reason:
        return (
            f"a row has more than {BLOCK_BYTES} bytes, perhaps since a quote is never closed; mend the file, or give "
            "--quote '' if quotes mean nothing in it"
        )
    if "Row #1: Expected" in reason and table_format.column_names:
        return f"its first line has not the {len(table_format.column_names)} columns that --column-names names; name each"
    if any(cause in reason for cause in ("incorrect header check", "unknown compression method", "Unknown frame descriptor")):
        return "is not compressed, or not as its name says; take .gz or .zst off its name, or write it again"
    if "Expected 1 columns" in reason:
        return "its first line has one column only, others have more; give --delimiter, or mend the file"
    return ""


def hint(names: Sequence[str], wanted: str, suffix: str, table_format: TableFormat) -> str:
    """Why a text file may lack a column that is wanted, and the option that helps; begins with a semicolon, or is empty."""
    used = delimiter_of(suffix, table_format)
    others = [each for each in (";", "\t", "|", ",", " ") if each != used and each in names[0]] if len(names) == 1 else []
    if others:
        shown = "'\\t'" if others[0] == "\t" else repr(others[0])
        return f"; it looks separated by {shown}: give --delimiter {shown}"
    if any(name != name.strip() for name in names) and wanted in [name.strip() for name in names]:
        return "; there are blanks around its names: give --trim"
    if any(name.strip().lstrip("-").replace(".", "", 1).isdigit() for name in names):
        return "; if it has no header, name its columns with --column-names"
    return ""
