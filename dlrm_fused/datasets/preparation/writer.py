"""Writing a prepared set: array files that grow by appending, and a folder that is complete or recognizably is not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dlrm_fused.datasets.schema import INTERACTIONS, SCHEMA_FILE
from dlrm_fused.errors import DataError

SPLITS = ("train", "validation", "test")
HEADER_BYTES = 128
SCRATCH = "scratch"


def claim_output(folder: Path, overwrite: bool) -> None:
    """Make ``folder`` ready for a new set; what an interrupted preparation left there is removed.

    Raises:
        DataError: if it holds a complete set or other files, and ``overwrite`` is false; or if it is not a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--output {folder}: is a file, not a folder")
    folders = (SCRATCH, INTERACTIONS, *SPLITS)
    ours = {SCHEMA_FILE, SCHEMA_FILE + ".partial", *folders}
    present = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if not overwrite and SCHEMA_FILE in present:
        raise DataError(f"--output {folder}: holds a prepared set already; pass --overwrite to replace it")
    if present - ours:
        other = min(present - ours)
        raise DataError(f"--output {folder}: holds other files, such as {other}; choose an empty or new folder")
    (folder / SCHEMA_FILE).unlink(missing_ok=True)  # first: without it the set is incomplete
    (folder / (SCHEMA_FILE + ".partial")).unlink(missing_ok=True)
    for name in folders:
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    for name in SPLITS:
        (folder / name).mkdir(parents=True)


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
