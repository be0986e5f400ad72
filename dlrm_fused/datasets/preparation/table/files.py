"""The files of a table: which there are, what columns they have, and their rows in blocks."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from dlrm_fused.datasets.preparation.table.arrow import shown, trimmed
from dlrm_fused.datasets.preparation.table.text_files import (
    COMPRESSIONS,
    CSV,
    check_closed,
    check_encoding,
    explained,
    hint,
    open_csv,
)
from dlrm_fused.datasets.table_format import PLAIN, TableFormat
from dlrm_fused.errors import DataError

BLOCK_ROWS = 2**17
PARQUET, IPC = (".parquet", ".pq"), (".arrow", ".feather", ".ipc")
ALLOWED = f"{', '.join(PARQUET + IPC + CSV)}, the last {len(CSV)} also with {' or '.join(COMPRESSIONS)}"
HIDDEN = ("_", ".")  # how names of files begin that hold no rows, such as _SUCCESS
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class TableFile:
    """
    Attributes:
        suffix: of the format, without that of a compression.
        schema: the columns by their new names, with those of the path; all of a text file are texts.
        names: those that columns have in the file, by their new names.
        partitions: columns of the path, such as dt=2024-01-01, with the value that all rows have; None is a missing one.
    """

    path: Path
    suffix: str
    schema: pa.Schema
    names: Mapping[str, str]
    table_format: TableFormat
    partitions: Mapping[str, str | None]

    @property
    def is_text(self) -> bool:
        return self.suffix not in PARQUET + IPC

    def is_written(self, column: str) -> bool:
        """Return whether the values of a column are texts for want of a type, so that numbers may be meant."""
        return self.is_text or column in self.partitions

    def hint(self, wanted: str) -> str:
        """Why a column may be missing; begins with a semicolon, or is empty."""
        names = list(self.names)
        similar = [name for name in names if name.partition(":")[0] == wanted or name.strip().lower() == wanted.lower()]
        found = hint(names, wanted, self.suffix, self.table_format) if self.is_text else ""
        return found or (f"; --rename '{similar[0]}={wanted}' gives it that name" if similar else "")


@dataclass(frozen=True)
class Block:
    """Some consecutive rows of a file.

    Attributes:
        first_in_file: number of the first row in its file, from 0.
        first: likewise in the whole table.
    """

    path: Path
    first_in_file: int
    first: int
    columns: pa.RecordBatch

    def __len__(self) -> int:
        return self.columns.num_rows

    def where(self, row: int) -> str:
        """Names a row of this block in messages."""
        return f"{self.path}, row {self.first_in_file + row + 1}"

    def refuse(self, column: str, option: str, row: int, allowed: str) -> NoReturn:
        """Raise DataError of a value, where ``option`` names its column."""
        value = shown(self.columns[column][row].as_py())
        raise DataError(f"{option} {column}: {value} in {self.where(row)}; allowed: {allowed}") from None


def find_files(patterns: Sequence[str], option: str = "--input") -> list[Path]:
    """Return the files that patterns such as ``logs/*.parquet`` name, each pattern's in the order of their names.

    Names that begin with ``_`` or ``.`` are left out, as Spark and Hive do, unless they are given as they are and have a known
    suffix.

    Raises:
        DataError: if a pattern finds no file, or a file is named twice.
    """
    paths: dict[Path, Path] = {}  # by where they are, whatever names they go by
    for pattern in patterns:
        pattern = os.path.expanduser(pattern)  # the shell does so without quotes alone
        found = sorted(glob.glob(pattern, recursive=True)) or ([pattern] if Path(pattern).exists() else [])
        if not found:
            raise DataError(f"{option} {pattern}: no such file; put a pattern such as 'logs/*.parquet' in quotes")
        for path in map(Path, found):
            if _is_hidden(path, pattern) or ("**" in pattern and path.is_dir()):
                continue
            if path.is_dir():
                raise DataError(f"{option} {path}: is a folder; name its files, such as '{path}/*.parquet'")
            if path.resolve() in paths:
                raise DataError(f"{option} {path}: given twice, so its rows would count twice; leave out one")
            paths[path.resolve()] = path
    if not paths:
        raise DataError(f"{option} {patterns[0]}: finds only names that begin with _ or ., which are left out; name others")
    return list(paths.values())


def _is_hidden(path: Path, pattern: str) -> bool:
    if str(path) == str(Path(pattern)):
        return path.name.startswith(HIDDEN) and _suffix(path, PLAIN) is None
    given = Path(pattern).parts
    # A folder such as _day=1 is a column, as Spark has it.
    return any(part.startswith(HIDDEN) and "=" not in part and part not in given for part in path.parts)


def open_file(path: Path, table_format: TableFormat = PLAIN) -> TableFile:
    """Read what columns a file has.

    Raises:
        DataError: if it is empty, unreadable or of an unknown format, or has two columns of a name.
    """
    suffix = _suffix(path, table_format)
    if suffix is None:
        raise DataError(f"--input {path}: unknown format; the name must end with {ALLOWED}; or give --delimiter, if it is text")
    is_text = suffix not in PARQUET + IPC
    table_format = table_format if is_text else TableFormat(trim=table_format.trim, renamed=table_format.renamed)
    with _reported(path, table_format):
        if path.stat().st_size == 0:
            raise DataError(f"--input {path}: the file is empty; leave it out, or write it again")
        if is_text:
            check_encoding(path, table_format)
        schema = _read_schema(path, suffix, table_format)
    in_file = schema.names
    names = [_new_name(name, table_format) for name in in_file]
    partitions = {
        new: value
        for name, value in partitions_of(path).items()
        if name not in in_file and ((new := _new_name(name, table_format)) != name or name not in names)
    }
    fields = [pa.field(name, _as_text(kind)) for name, kind in zip(names, schema.types, strict=True)]
    schema = pa.schema([*fields, *(pa.field(name, pa.string()) for name in partitions)])
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        remedy = "rename one" if twice[0] else "give them names in the file"
        if is_text and not table_format.column_names:
            remedy += "; if it has no header, name all columns with --column-names"
        raise DataError(f"--input {path}: two columns are named {twice[0] or repr('')}; {remedy}")
    return TableFile(path, suffix, schema, dict(zip(names, in_file, strict=True)), table_format, partitions)


def read_blocks(files: Sequence[TableFile], columns: Sequence[str]) -> Iterator[Block]:
    """The rows of all files in their order, at most ``BLOCK_ROWS`` at a time.

    Raises:
        DataError: if a file cannot be read, or a line of a text file not be parsed; or if there is no row in any file.
    """
    first = 0
    for file in files:
        first_in_file = 0
        with _reported(file.path, file.table_format):
            for batch in _read_batches(file, columns):
                for start in range(0, batch.num_rows, BLOCK_ROWS):
                    block = Block(file.path, first_in_file, first, batch.slice(start, BLOCK_ROWS))
                    yield block
                    first_in_file += len(block)
                    first += len(block)
    if not first:
        raise DataError(f"--input {files[0].path}: no rows in any of the {len(files)} files; write them again")


def _suffix(path: Path, table_format: TableFormat) -> str | None:
    """Return the suffix that tells the format; None if none does. With a delimiter, whatever is not known is text."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    suffix = "".join(suffixes[-2:-1] if is_compressed else suffixes[-1:])
    if suffix in CSV or (suffix in PARQUET + IPC and not is_compressed):
        return suffix
    return suffix if table_format.delimiter else None


def partitions_of(path: Path) -> dict[str, str | None]:
    """Columns that the folders of a path tell, as Hive and Spark write them."""
    pairs = [unquote(part).partition("=") for part in path.parts[:-1]]
    return {name: None if value == _NULL_PARTITION else value for name, equals, value in pairs if equals and name}


def _new_name(name: str, table_format: TableFormat) -> str:
    name = name.removeprefix("\ufeff").removeprefix("ï»¿")  # of encodings that do not take the byte order mark for one
    name = name.strip() if table_format.trim else name
    return table_format.renamed.get(name, name)


def _as_text(data_type: pa.DataType) -> pa.DataType:
    """Return the type as which a column is read: bytes count as the text that they are in UTF-8."""
    types = pa.types
    if types.is_large_binary(data_type):
        return pa.large_string()
    if types.is_binary(data_type) or types.is_fixed_size_binary(data_type) or data_type == pa.binary_view():
        return pa.string()
    is_list, is_large_list = types.is_list(data_type), types.is_large_list(data_type)
    if is_list or is_large_list or types.is_dictionary(data_type):
        values = _as_text(data_type.value_type)
        if values != data_type.value_type:
            return pa.list_(values) if is_list else pa.large_list(values) if is_large_list else values
    return data_type


def _read_schema(path: Path, suffix: str, table_format: TableFormat) -> pa.Schema:
    if suffix in PARQUET:
        with pa.parquet.ParquetFile(path) as file:
            return file.schema_arrow
    if suffix in IPC:
        with pa.OSFile(str(path)) as source:
            return _open_ipc(source).schema
    with open_csv(path, suffix, table_format, []) as reader:
        return pa.schema([(name, pa.string()) for name in reader.schema.names])


def _read_batches(file: TableFile, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows with ``columns`` as the file's schema has them."""
    in_file = [file.names[name] for name in columns if name in file.names] or list(file.names.values())[:1]
    for batch in _read_as_written(file, in_file):
        arrays = [
            pa.repeat(pa.scalar(file.partitions[name], pa.string()), batch.num_rows)
            if name in file.partitions
            else _converted(batch.column(file.names[name]), name, file)
            for name in columns
        ]
        yield pa.RecordBatch.from_arrays(arrays, names=list(columns))


def _read_as_written(file: TableFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows with ``columns``, which go by their names in the file, and perhaps others."""
    if file.suffix in PARQUET:
        # Without this, pyarrow holds data that it has buffered ahead until the end of the file.
        with pa.parquet.ParquetFile(file.path, pre_buffer=False) as parquet:
            yield from parquet.iter_batches(BLOCK_ROWS, columns=columns)
    elif file.suffix in IPC:
        with pa.OSFile(str(file.path)) as source:
            reader = _open_ipc(source)
            if isinstance(reader, pa.RecordBatchFileReader):
                yield from (reader.get_batch(i).select(columns) for i in range(reader.num_record_batches))
            else:
                yield from (batch.select(columns) for batch in reader)
    else:
        last_column = list(file.names.values())[-1]
        last_value = ""
        with open_csv(file.path, file.suffix, file.table_format, list(dict.fromkeys([*columns, last_column]))) as csv:
            for batch in csv:
                yield batch
                last_value = batch.column(last_column)[-1].as_py() or "" if batch.num_rows else last_value
        check_closed(file.path, file.table_format, last_value)


def _converted(array: pa.Array, column: str, file: TableFile) -> pa.Array:
    """Return values with bytes as text, and without the blanks around them that are to be left out."""
    wanted = _as_text(array.type)
    if wanted != array.type:
        try:
            array = pc.cast(array, wanted)
        except pa.ArrowInvalid:
            raise DataError(
                f"--input {file.path}: column {column} holds bytes that are not text in UTF-8; write them as text, or leave "
                "the column out"
            ) from None
    return trimmed(array) if file.table_format.trim else array


def _open_ipc(source: pa.NativeFile) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """IPC's file format, or its stream format."""
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source)


@contextmanager
def _reported(path: Path, table_format: TableFormat) -> Iterator[None]:
    """Arrow's errors as one line that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeError) as error:
        reason = " ".join(str(error).split())[:200]
        cause = explained(error, table_format) or f"cannot be read ({reason}); mend the file or write it again"
        raise DataError(f"--input {path}: {cause}") from None
