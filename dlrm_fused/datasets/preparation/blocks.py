"""Reading a text file of any size in blocks of whole lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from dlrm_fused.errors import DataError

BLOCK_BYTES = 8 * 2**20
MAX_LINE_BYTES = 2**20


@dataclass(frozen=True)
class Block:
    """Whole lines of a file.

    Attributes:
        first: lines of the file before it.
        lines: how many it has; the last one need not end with a line end.
        bytes_on_disk: what was read of the file for it.
    """

    path: Path
    first: int
    lines: int
    bytes_on_disk: int
    data: bytes


def check_input(path: Path) -> None:
    """Check that a file is there and not empty.

    Raises:
        DataError: if it is not.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")


def read_blocks(path: Path, block_bytes: int = 0) -> Iterator[Block]:
    """Cut a plain or ``.gz`` file after line ends, into one or more blocks of about ``block_bytes`` (0: ``BLOCK_BYTES``).

    Raises:
        DataError: if the file is missing, empty, damaged, or holds a line of more than ``MAX_LINE_BYTES``.
    """
    check_input(path)
    first = position = 0
    with path.open("rb") as on_disk:
        file = cast(BinaryIO, gzip.GzipFile(fileobj=on_disk)) if path.suffix == ".gz" else on_disk
        while data := _read_lines(file, block_bytes or BLOCK_BYTES, path):
            lines = data.count(b"\n") + (not data.endswith(b"\n"))
            yield Block(path, first, lines, on_disk.tell() - position, data)
            first, position = first + lines, on_disk.tell()
    if not first:
        raise DataError(f"{path}: the file is empty")


def _read_lines(file: BinaryIO, size: int, path: Path) -> bytes:
    """Read about ``size`` bytes, to the end of a line; empty at the end of the file."""
    try:
        data = file.read(size)
        rest = file.readline(MAX_LINE_BYTES) if data and not data.endswith(b"\n") else b""
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip file ({error}) after {file.tell()} decompressed bytes") from None
    if len(rest) == MAX_LINE_BYTES:
        raise DataError(f"{path}: no line end in {MAX_LINE_BYTES} bytes before byte {file.tell()}; not a text file?")
    return data + rest
