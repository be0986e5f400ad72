"""Checksums of files, in blocks: what is read of a file is checked, and no more than that is read to check it.

Blocks are hashed by XXH3 (https://xxhash.com), which runs at the speed of memory. Exported models, which need no library but
torch and NumPy, have the CRC-32 of zlib instead, at a fifth of that speed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_fused.errors import UserError
from dlrm_fused.records import read_record, write_record

CHECKSUMS_FILE = "checksums.json"
BLOCK_BYTES = 1 << 18
XXH3, CRC32 = "xxh3_64", "crc32"
_FORMAT_VERSION = 1
_PIECE_BLOCKS = 8  # one thread checks so many at a time; more would not stay in a cache
PIECE_BYTES = _PIECE_BLOCKS * BLOCK_BYTES
THREADS = 4  # that read a file: few enough that the disk's reading ahead still sees an order


def block_sums(data: NDArray[np.uint8], algorithm: str = XXH3) -> NDArray[np.uint64]:
    """Return the checksum of each block of ``data`` ([bytes]): [blocks] uint64; the last block may be shorter.

    Args:
        algorithm: ``XXH3`` or ``CRC32``.
    """
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, data.size, BLOCK_BYTES))
    return np.fromiter(map(_hash(algorithm), blocks), np.uint64)


def _hash(algorithm: str) -> Callable[[Any], int]:
    if algorithm == CRC32:
        return zlib.crc32
    from xxhash import xxh3_64_intdigest  # which those who read exported models need not have

    return xxh3_64_intdigest


def to_hex(sums: NDArray[np.uint64]) -> str:
    return sums.astype("<u8").tobytes().hex()


def from_hex(text: str) -> NDArray[np.uint64]:
    """Raises ValueError if the text is not that of :func:`to_hex`."""
    if text != text.lower():
        raise ValueError("a checksum has capital letters")
    return np.frombuffer(bytes.fromhex(text), "<u8").astype(np.uint64)


class CheckedBytes:
    """Bytes of a mapped file whose blocks are checked when they are first read. Any thread may check.

    Attributes:
        data: [bytes].
        blocks: their number.

    Args:
        sums: [blocks], of :func:`block_sums` with the same algorithm.

    Raises:
        ValueError: the number of sums is not that of the blocks.
    """

    def __init__(self, data: NDArray[np.uint8], sums: NDArray[np.uint64], algorithm: str = XXH3) -> None:
        if len(sums) != -(-data.size // BLOCK_BYTES):
            raise ValueError(f"{len(sums)} checksums for {data.size} bytes")
        self.data, self.blocks = data, len(sums)
        self._sums, self._algorithm = sums, algorithm
        self._unchecked = np.ones(len(sums), bool)
        self._left = len(sums)
        self._lock = Lock()

    @property
    def all_checked(self) -> bool:
        return not self._left

    def check(self, begin: int, end: int) -> bool:
        """Return whether the blocks of the bytes [begin, end) are as they were written."""
        return begin >= end or self._check_run(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))

    def check_blocks(self, blocks: NDArray[np.int64]) -> bool:
        """Return whether these blocks, given in any order and as often as it comes, are as they were written.

        Several threads check where there are many.
        """
        if self.all_checked:
            return True
        new = np.unique(blocks[self._unchecked[blocks]])
        # Neighbours are checked together, up to a piece.
        pieces = np.split(new, np.flatnonzero((np.diff(new) > 1) | (new[1:] % _PIECE_BLOCKS == 0)) + 1) if new.size else []

        def check(piece: NDArray[np.int64]) -> bool:
            return self._check_run(int(piece[0]), int(piece[-1]) + 1)

        if new.size <= _PIECE_BLOCKS:
            return all(map(check, pieces))
        with ThreadPoolExecutor(THREADS) as pool:  # hashes do not hold Python's lock
            return all(pool.map(check, pieces))

    def _check_run(self, first: int, stop: int) -> bool:
        if not self._unchecked[first:stop].any():
            return True
        data = self.data[first * BLOCK_BYTES : stop * BLOCK_BYTES]
        if (block_sums(data, self._algorithm) != self._sums[first:stop]).any():
            return False
        with self._lock:
            self._left -= int(self._unchecked[first:stop].sum())
            self._unchecked[first:stop] = False
        return True


@dataclass(frozen=True)
class FileSums:
    """Length and checksums of a file.

    Attributes:
        bytes: its length.
        sums: of its blocks, by :func:`to_hex`.
    """

    bytes: int
    sums: str

    @staticmethod
    def of(path: Path, algorithm: str = XXH3) -> FileSums:
        data = map_bytes(path)
        return FileSums(data.size, to_hex(block_sums(data, algorithm)))


@dataclass(frozen=True)
class Checksums:
    """The content of ``checksums.json``: the sums of the other files of a folder.

    Attributes:
        owner: what the files belong to, such as a run and a step. Code that knows the owner compares it.
        files: by their paths within the folder.
        algorithm: ``XXH3`` or ``CRC32``.
        own_sum: CRC-32 of all else here, so that damage of these sums is not taken for damage of the files; set when written.
    """

    owner: dict[str, Any]
    files: dict[str, FileSums]
    algorithm: str = XXH3
    own_sum: int = 0
    format_version: int = field(default=_FORMAT_VERSION)

    @staticmethod
    def of_folder(folder: Path, owner: Mapping[str, Any], algorithm: str = XXH3) -> Checksums:
        """Checksums of all files in the folder and in the folders below it."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != CHECKSUMS_FILE]
        files = {path.relative_to(folder).as_posix(): FileSums.of(path, algorithm) for path in paths}
        return Checksums(dict(owner), files, algorithm)

    def save(self, folder: Path) -> None:
        write_record(folder / CHECKSUMS_FILE, replace(self, own_sum=self._sum()))

    def _sum(self) -> int:
        content = {name: value for name, value in asdict(self).items() if name != "own_sum"}
        return zlib.crc32(json.dumps(content, sort_keys=True).encode())

    @staticmethod
    def load(folder: Path, error: type[UserError], remedy: str) -> Checksums | None:
        """Read the checksums of a folder; None if it has none, as folders of earlier releases do.

        Raises:
            error: the file is damaged.
        """
        path = folder / CHECKSUMS_FILE
        if not path.exists():
            return None
        checksums = read_record(path, Checksums, error, remedy, _FORMAT_VERSION)
        if checksums.algorithm not in (XXH3, CRC32):
            raise error(f"{path}: damaged: algorithm is {checksums.algorithm!r}, expected {XXH3} or {CRC32}; {remedy}")
        if checksums.own_sum != checksums._sum():
            raise error(f"{path}: damaged: its content is not that which was written; {remedy}")
        return checksums

    def checked(self, folder: Path, name: str, error: type[UserError], remedy: str) -> CheckedBytes:
        """Map a file. Its length is checked now, its bytes are checked when they are read.

        Raises:
            error: the file is missing, not among those that were written, or of another length.
        """
        path = folder / name
        known = self.files.get(name)
        if known is None:
            raise error(f"{path}: is not among the files of {folder / CHECKSUMS_FILE}; {remedy}")
        try:
            data = map_bytes(path)
        except OSError as reason:
            raise error(
                f"{path}: {'missing' if isinstance(reason, FileNotFoundError) else reason.strerror}; {remedy}"
            ) from None
        if data.size != known.bytes:
            raise error(f"{path}: damaged: has {data.size} bytes, {CHECKSUMS_FILE} says {known.bytes}; {remedy}")
        try:
            return CheckedBytes(data, from_hex(known.sums), self.algorithm)
        except ValueError as reason:
            raise error(f"{folder / CHECKSUMS_FILE}: damaged: {name}: {reason}; {remedy}") from None

    def check(self, folder: Path, name: str, error: type[UserError], remedy: str) -> None:
        """Read a whole file.

        Raises:
            error: it is not as it was written.
        """
        checked = self.checked(folder, name, error, remedy)
        if not checked.check_blocks(np.arange(checked.blocks)):
            raise error(damaged(folder / name, CHECKSUMS_FILE, remedy))


def damaged(path: Path, record: str, remedy: str) -> str:
    """Return the message about a file whose bytes have other checksums than those in the file ``record``."""
    return f"{path}: damaged: its bytes are not those that were written, whose checksums are in {record}; {remedy}"


def map_bytes(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a file, memory-mapped. Raises OSError."""
    if not os.path.getsize(path):
        return np.zeros(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "r"))
