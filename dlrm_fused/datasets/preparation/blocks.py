"""Reading a text file of any size in blocks of whole lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from dlrm_fused.errors import DataError

BLOCK_BYTES = 8 * 2**20
MAX_LINE_BYTES = 2**20


@dataclass(frozen=True)
class Block:
    """Whole lines of a file.

    Attributes:
        start, stop: position in bytes in the (decompressed) file.
        progress: bytes of the file on disk that are read once this block is.
        data: the bytes, for a compressed file; a plain file is read where the block is used.
    """

    path: Path
    start: int
    stop: int
    progress: int
    data: bytes | None = None

    def read(self) -> bytes:
        if self.data is not None:
            return self.data
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


def check_input(path: Path) -> None:
    """Check that a file is there and not empty.

    Raises:
        DataError: if it is not.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")


def first_line(path: Path) -> bytes:
    """Return the first line of a plain or ``.gz`` file.

    Raises:
        DataError: if the file is missing, empty, damaged, or begins with a line of more than ``MAX_LINE_BYTES``.
    """
    check_input(path)
    block = next(_split_gzip(path, 1) if path.suffix == ".gz" else _split_plain(path, 1), None)
    if block is None:
        raise DataError(f"{path}: the file is empty")
    return block.read()


def split_blocks(path: Path) -> Iterator[Block]:
    """Cut a plain or ``.gz`` file after line ends, into blocks of about ``BLOCK_BYTES``.

    Raises:
        DataError: if the file is missing, empty, damaged, or holds a line of more than ``MAX_LINE_BYTES``.
    """
    check_input(path)
    yield from _split_gzip(path, BLOCK_BYTES) if path.suffix == ".gz" else _split_plain(path, BLOCK_BYTES)


def count_lines(path: Path) -> Iterator[tuple[Block, int]]:
    """Each block of :func:`split_blocks`, and its number of lines; the last line need not end with a line end."""
    for block in split_blocks(path):
        data = block.read()
        yield block, data.count(b"\n") + (not data.endswith(b"\n"))


def cut_blocks(blocks: Iterable[Block], lines: Iterable[int], cuts: Sequence[int]) -> Iterator[tuple[Block, int]]:
    """Cut blocks so that each lies in one part of the file: (block, index of the part).

    Args:
        lines: of each block, from :func:`count_lines`.
        cuts: the number of lines before parts 1, 2, ..., ascending.
    """
    part, first_line = 0, 0
    for block, block_lines in zip(blocks, lines, strict=True):
        while part < len(cuts) and cuts[part] < first_line + block_lines:
            data = block.read()
            lines_before = cuts[part] - first_line
            at = 0
            for _ in range(lines_before):
                at = data.index(b"\n", at) + 1
            if at:
                yield replace(block, stop=block.start + at, data=block.data and data[:at]), part
            block = replace(block, start=block.start + at, data=block.data and data[at:])
            first_line, block_lines, part = first_line + lines_before, block_lines - lines_before, part + 1
        yield block, part
        first_line += block_lines


def _split_plain(path: Path, block_bytes: int) -> Iterator[Block]:
    size = path.stat().st_size
    start = 0
    with path.open("rb") as file:
        while start < size:
            file.seek(min(start + block_bytes, size))
            file.seek(-1, 1)  # a block that ends with a line end already stays as it is
            _rest_of_line(file, path)
            stop = file.tell()
            yield Block(path, start, stop, stop)
            start = stop


def _split_gzip(path: Path, block_bytes: int) -> Iterator[Block]:
    start = 0
    with path.open("rb") as compressed, gzip.open(compressed) as file:
        while True:
            try:
                data = file.read(block_bytes)
                if data:
                    data += _rest_of_line(cast(BinaryIO, file), path) if not data.endswith(b"\n") else b""
            except (EOFError, OSError, zlib.error) as error:
                raise DataError(f"{path}: damaged gzip file ({error}) after {start} decompressed bytes") from None
            if not data:
                return
            stop = start + len(data)
            yield Block(path, start, stop, compressed.tell(), data)
            start = stop


def _rest_of_line(file: BinaryIO, path: Path) -> bytes:
    rest = file.readline(MAX_LINE_BYTES)
    if len(rest) == MAX_LINE_BYTES:
        raise DataError(f"{path}: no line end in {MAX_LINE_BYTES} bytes before byte {file.tell()}; not a text file?")
    return rest
