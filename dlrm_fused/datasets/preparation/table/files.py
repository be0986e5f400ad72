"""The files of a table: which there are, what columns they have, and their rows in blocks."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from dlrm_fused.errors import DataError

BLOCK_ROWS = 2**17
CSV_BLOCK_BYTES = 2**24
PARQUET, IPC, CSV = (".parquet", ".pq"), (".arrow", ".feather", ".ipc"), (".csv", ".tsv")
COMPRESSED = (".gz", ".zst")
ALLOWED = f"{', '.join(PARQUET + IPC + CSV)}, the last two also with {' or '.join(COMPRESSED)}"


@dataclass(frozen=True)
class TableFile:
    """
    Attributes:
        suffix: of the format, without that of a compression.
        schema: the columns of a text file are all texts.
    """

    path: Path
    suffix: str
    schema: pa.Schema

    @property
    def is_text(self) -> bool:
        return self.suffix in CSV


@dataclass(frozen=True)
class Block:
    """Some consecutive rows of a file.

    Attributes:
        first_in_file: number of the first row in its file, from 0.
        first: likewise in the whole table.
        columns: n rows of the columns that are read.
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


def find_files(patterns: Sequence[str]) -> list[Path]:
    """The files that patterns such as ``logs/*.parquet`` name, each pattern's in the order of their names.

    Raises:
        DataError: if a pattern finds no file, or a file is named twice.
    """
    paths: list[Path] = []
    for pattern in patterns:
        found = sorted(glob.glob(pattern, recursive=True)) or ([pattern] if Path(pattern).exists() else [])
        if not found:
            raise DataError(f"--input {pattern}: no such file; put a pattern such as 'logs/*.parquet' in quotes")
        for path in map(Path, found):
            if path.is_dir():
                raise DataError(f"--input {path}: is a folder; name its files, such as '{path}/*.parquet'")
            if path in paths:
                raise DataError(f"--input {path}: given twice, so its rows would count twice; leave out one")
            paths.append(path)
    return paths


def open_file(path: Path) -> TableFile:
    """Read what columns a file has.

    Raises:
        DataError: if it is empty, unreadable or of an unknown format, or has two columns of a name.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED and suffixes[-2:-1] and suffixes[-2] in CSV:
        suffixes.pop()
    if not suffixes or suffixes[-1] not in PARQUET + IPC + CSV:
        raise DataError(f"--input {path}: unknown format; the name must end with {ALLOWED}")
    if path.stat().st_size == 0:
        raise DataError(f"--input {path}: the file is empty; leave it out, or write it again")
    suffix = suffixes[-1]
    with _reported(path):
        schema = _read_schema(path, suffix)
    twice = [name for name in schema.names if schema.names.count(name) > 1]
    if twice:
        raise DataError(f"--input {path}: two columns are named {twice[0]}; rename one")
    return TableFile(path, suffix, schema)


def read_blocks(files: Sequence[TableFile], columns: Sequence[str]) -> Iterator[Block]:
    """The rows of all files in their order, at most ``BLOCK_ROWS`` at a time.

    Raises:
        DataError: if a file cannot be read, or a line of a text file not be parsed; or if there is no row in any file.
    """
    first = 0
    for file in files:
        first_in_file = 0
        with _reported(file.path):
            for batch in _read_batches(file, list(columns)):
                for start in range(0, batch.num_rows, BLOCK_ROWS):
                    block = Block(file.path, first_in_file, first, batch.slice(start, BLOCK_ROWS))
                    yield block
                    first_in_file += len(block)
                    first += len(block)
    if not first:
        raise DataError(f"--input {files[0].path}: no rows in any of the {len(files)} files; write them again")


def _read_schema(path: Path, suffix: str) -> pa.Schema:
    if suffix in PARQUET:
        with pa.parquet.ParquetFile(path) as file:
            return file.schema_arrow
    if suffix in IPC:
        with pa.OSFile(str(path)) as source:
            return _open_ipc(source).schema
    with _open_csv(path, suffix, []) as reader:
        return pa.schema([(name, pa.string()) for name in reader.schema.names])


def _read_batches(file: TableFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if file.suffix in PARQUET:
        # What is buffered ahead would be held until the end of the file.
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
        with _open_csv(file.path, file.suffix, columns) as csv:
            yield from csv


def _open_ipc(source: pa.NativeFile) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """IPC's file format, or its stream format."""
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source)


def _open_csv(path: Path, suffix: str, columns: list[str]) -> pa.csv.CSVStreamingReader:
    """All values as texts, so that one that cannot be used is told with its row; an empty field is null."""
    return pa.csv.open_csv(
        pa.input_stream(str(path)),
        pa.csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES),  # threads do not know the numbers of rows
        pa.csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ","),
        pa.csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()),
            include_columns=columns,
            strings_can_be_null=True,
            null_values=[""],
        ),
    )


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Arrow's errors as one line that names the file."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"--input {path}: cannot be read ({reason[:200]}); mend the file or write it again") from None
