"""Writing a prepared set: array files that grow by appending, and a folder that is complete or recognizably is not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import DTypeLike, NDArray

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.datasets.schema import INTERACTIONS, SCHEMA_FILE, DatasetSchema, SparseFeature, labels_shape
from dlrm_fused.datasets.transformation import TRANSFORMATION, file_stem
from dlrm_fused.errors import DataError

SPLITS = ("train", "validation", "test")
HEADER_BYTES = 128
SCRATCH = "scratch"
PROPOSED_CONFIG = "config.yaml"
# All that a preparation may have written into its folder.
_FILES = (SCHEMA_FILE, SCHEMA_FILE + ".partial", CHECKSUMS_FILE, PROPOSED_CONFIG)
_FOLDERS = (SCRATCH, INTERACTIONS, TRANSFORMATION, *SPLITS)


@contextmanager
def new_output(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder beside ``folder`` to write a set into; it takes that name at the end, and is removed if something fails.

    So a set that is there already stays whole until the new one is. The remains of a preparation that was killed are removed.

    Raises:
        DataError: if ``folder`` holds a complete set, and ``overwrite`` is false; or other files; or if it is not a folder.
    """
    _check_output(folder, overwrite)
    folder = folder.resolve()  # a link stays one, and "." has a name
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
        self._path, self._dtype, self._row_shape = path, np.dtype(dtype), row_shape
        self.rows = 0
        self._file = path.open("w+b")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, array: NDArray[Any]) -> None:
        """Add rows ``[n, *row_shape]``; they are converted to the file's dtype."""
        array = np.ascontiguousarray(array, self._dtype)
        if array.shape[1:] != self._row_shape:
            raise ValueError(f"{self._path}: rows of shape {self._row_shape}, got {array.shape[1:]}")
        self._file.write(array.data)
        self.rows += len(array)

    def close(self) -> None:
        if self._file.closed:
            return
        self._file.seek(0)
        self._file.write(_header(self._dtype, (self.rows, *self._row_shape)))
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


class IdFiles:
    """The ids of n rows in the files that :class:`~dlrm_fused.datasets.storage.IdColumns` reads; ``stack`` closes them."""

    def __init__(self, folder: Path, features: Sequence[SparseFeature], stack: ExitStack) -> None:
        stems = {feature.name: file_stem(feature.name) for feature in features if feature.jagged}
        singles = len(features) - len(stems)
        self._single = _open(stack, folder / "single.npy", np.int32, (singles,)) if singles else None
        self._values = {name: _open(stack, folder / f"{stem}.values.npy", np.int32) for name, stem in stems.items()}
        self._offsets = {name: _open(stack, folder / f"{stem}.offsets.npy", np.int64) for name, stem in stems.items()}
        for offsets in self._offsets.values():
            offsets.append(np.zeros(1, np.int64))
        self.rows = 0

    def append(self, single: NDArray[Any], jagged: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]) -> None:
        """Add n rows.

        Args:
            single: [n, S], the ids of features that have one in each row.
            jagged: of each other feature its ids, row after row, and how many each row has: [total], [n].
        """
        self.rows += len(single)
        if self._single is not None:
            self._single.append(single)
        for name, (values, lengths) in jagged.items():
            self._offsets[name].append(self._values[name].rows + np.cumsum(lengths, dtype=np.int64))
            self._values[name].append(values)

    def count(self, name: str) -> int:
        """Return how many ids a jagged feature has in all rows."""
        return self._values[name].rows


class InteractionFiles:
    """The interactions of all splits, as :class:`~dlrm_fused.datasets.prepared.PreparedDataset` reads them; ``stack`` closes
    them."""

    def __init__(self, output: Path, features: Sequence[SparseFeature], stack: ExitStack) -> None:
        folder = output / INTERACTIONS
        folder.mkdir(parents=True)
        self.ids = IdFiles(folder, features, stack)
        self._times = _open(stack, folder / "times.npy", np.int64)

    def append(
        self, single: NDArray[Any], jagged: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], times: NDArray[np.int64]
    ) -> None:
        """Add n interactions: ids as :meth:`IdFiles.append`, times [n] in seconds since 1970."""
        self.ids.append(single, jagged)
        self._times.append(times)


def id_columns(ids: pl.DataFrame) -> tuple[NDArray[Any], dict[str, tuple[NDArray[Any], NDArray[Any]]]]:
    """Return columns of ids and of lists of them as :meth:`IdFiles.append` takes them."""
    lists = [column for column in ids if column.dtype == pl.List]
    jagged = {of.name: (of.explode().drop_nulls().to_numpy(), of.list.len().cast(pl.Int64).to_numpy()) for of in lists}
    single = ids.drop(jagged)
    return single.to_numpy(order="c") if single.width else np.zeros((ids.height, 0), np.int32), jagged


class SplitFiles:
    """The files of a split, as :class:`~dlrm_fused.datasets.prepared.PreparedDataset` reads them; ``stack`` closes them.

    ``folder`` must not exist.
    """

    def __init__(self, folder: Path, schema: DatasetSchema, stack: ExitStack) -> None:
        folder.mkdir()
        self._labels = _open(stack, folder / "labels.npy", np.uint8, labels_shape(schema.labels))
        self._dense = _open(stack, folder / "dense.npy", np.float32, (len(schema.dense_features),))
        self.ids = IdFiles(folder, schema.sparse_features, stack)
        self._weights = _open(stack, folder / "weights.npy", np.float32) if schema.has_weights else None
        self._windows = _open(stack, folder / "history.npy", np.int64, (3,)) if schema.token_features else None
        self._times = _open(stack, folder / "times.npy", np.int64) if schema.has_times else None

    def append(
        self,
        labels: NDArray[Any],
        dense: NDArray[Any],
        single: NDArray[Any],
        jagged: Mapping[str, tuple[NDArray[Any], NDArray[Any]]],
        weights: NDArray[Any] | None = None,
        windows: NDArray[Any] | None = None,
        times: NDArray[Any] | None = None,
    ) -> None:
        """Add n samples: labels [n] or [n, L], dense [n, D], ids as :meth:`IdFiles.append`, weights [n], windows [n, 3], times
        [n] in microseconds since 1970."""
        self._labels.append(labels)
        self._dense.append(dense)
        self.ids.append(single, jagged)
        for file, part in ((self._weights, weights), (self._windows, windows), (self._times, times)):
            if file is not None and part is not None:
                file.append(part)


def _open(stack: ExitStack, path: Path, dtype: DTypeLike, row_shape: tuple[int, ...] = ()) -> NpyAppender:
    return stack.enter_context(NpyAppender(path, dtype, row_shape))
