"""Writing a prepared set: array files that grow by appending, and a folder that is complete or recognizably is not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.datasets.schema import INTERACTIONS, SCHEMA_FILE
from dlrm_fused.datasets.transformation import TRANSFORMATION
from dlrm_fused.errors import DataError

SPLITS = ("train", "validation", "test")
HEADER_BYTES = 128
SCRATCH = "scratch"
PROPOSED_CONFIG = "config.yaml"
# All that a preparation may have written into its folder.
_FILES = (SCHEMA_FILE, SCHEMA_FILE + ".partial", CHECKSUMS_FILE, PROPOSED_CONFIG)
_FOLDERS = (SCRATCH, INTERACTIONS, TRANSFORMATION, *SPLITS)


def claim_output(folder: Path, overwrite: bool) -> None:
    """Make ``folder`` ready for a new set; what an interrupted preparation left there is removed.

    Raises:
        DataError: if it holds a complete set or other files, and ``overwrite`` is false; or if it is not a folder.
    """
    _check_output(folder, overwrite)
    # The schema goes first: without it the set is incomplete.
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for name in _FOLDERS:
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in SPLITS:
        (folder / name).mkdir(parents=True)


@contextmanager
def new_output(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside ``folder`` to write a set into; it takes that name at the end, and is removed if something fails.

    So a set that is there already stays whole until the new one is.

    Raises:
        DataError: as :func:`claim_output`.
    """
    _check_output(folder, overwrite)
    partial, replaced = (folder.with_name(f"{folder.name}.{suffix}") for suffix in ("partial", "replaced"))
    for leftover in (partial, replaced):
        _check_output(leftover, overwrite=True)
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _check_output(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--output {folder}: is a file, not a folder")
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if not overwrite and SCHEMA_FILE in present:
        raise DataError(f"--output {folder}: holds a prepared set already; pass --overwrite to replace it")
    others = present - {*_FILES, *_FOLDERS}
    if others:
        raise DataError(f"--output {folder}: holds other files, such as {min(others)}; choose an empty or new folder")


class NpyAppender:
    """A ``.npy`` file of ``[rows, *row_shape]`` whose number of rows is known only at the end.

    The header has a fixed size, and is written when the file is closed.
    """

    def __init__(self, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> None:
        self.path = path
        self.dtype = np.dtype(dtype)
        self.row_shape = row_shape
        self.rows = 0
        self._file = path.open("w+b")
        self._file.write(bytes(HEADER_BYTES))

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64))

    def append(self, array: NDArray[Any]) -> None:
        """Add rows ``[n, *row_shape]``; they are converted to the file's dtype."""
        array = np.ascontiguousarray(array, self.dtype)
        if array.shape[1:] != self.row_shape:
            raise ValueError(f"{self.path}: rows of shape {self.row_shape}, got {array.shape[1:]}")
        self._file.write(array.data)
        self.rows += len(array)

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.seek(0)
        self._file.write(_header(self.dtype, (self.rows, *self.row_shape)))
        self._file.close()

    def __enter__(self) -> NpyAppender:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Header of the npy format, version 1.0, of HEADER_BYTES bytes."""
    magic = np.lib.format.magic(1, 0)
    length = HEADER_BYTES - len(magic) - 2
    text = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return magic + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def write_array(path: Path, array: NDArray[Any], dtype: DTypeLike) -> None:
    """Write one whole array."""
    with NpyAppender(path, dtype, array.shape[1:]) as file:
        file.append(array)
