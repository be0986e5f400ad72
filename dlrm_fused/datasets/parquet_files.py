"""Parquet files of samples: what their columns mean, and reading a row group.

The columns of all files are the same, and their types tell what they are: labels, weights and times of samples, which the
config names, dense features of floating-point numbers, sparse ones of whole numbers or lists of them, none of them null
(docs/own_data.md#without-preparing-it). The metadata of the field of a sparse feature may state the ``rows`` of its table and
its ``pooling_factor``, as ``data/prepare.py parquet`` writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm_fused.config import Config
from dlrm_fused.datasets.feature_names import check_names
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature, labels_shape
from dlrm_fused.datasets.storage import check_below, check_finite, check_weights
from dlrm_fused.datasets.transformation import CONSTANT
from dlrm_fused.errors import ConfigError, DataError

# Keys in the metadata of a column. That of weights needs no value.
ROWS, POOLING_FACTOR, IS_WEIGHT = b"rows", b"pooling_factor", b"is_weight"
_REMEDY = "correct the file"


@dataclass(frozen=True)
class RowGroup:
    """One row group of a file, to be read by its footer without parsing it again."""

    path: Path
    footer: pq.FileMetaData
    number: int

    @property
    def rows(self) -> int:
        return int(self.footer.row_group(self.number).num_rows)

    def __str__(self) -> str:
        return f"{self.path}, row group {self.number}"


@dataclass(frozen=True)
class NamedColumns:
    """The columns of files that the config names, and which are no features.

    Attributes:
        labels: one or more.
        weight, time: of samples; empty where they have none.
    """

    labels: tuple[str, ...]
    weight: str
    time: str

    @staticmethod
    def of(config: Config) -> NamedColumns:
        return NamedColumns(tuple(config.data.labels), config.data.sample_weight, config.data.sample_time)


@dataclass(frozen=True)
class DecodedRowGroup:
    """The samples of a row group, checked.

    Attributes:
        labels: [n] float32, 0 or 1; [n, L] of several labels.
        dense: [n, D] float32; ones without a dense feature, D = 1.
        single: [n, S] int32, ids of the sparse features that are not jagged.
        jagged: of each jagged feature, its ids [total] int32, and where each sample's begin, [n + 1].
        weights: [n] float32, 0 or more; None where samples have no weights.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    single: NDArray[np.int32]
    jagged: dict[str, tuple[NDArray[np.int32], NDArray[Any]]]
    weights: NDArray[np.float32] | None


def open_files(folder: Path) -> tuple[list[RowGroup], pa.Schema]:
    """Return the row groups of ``folder/*.parquet`` in the order of the names, and the columns of all files.

    Names that begin with ``_`` or ``.`` are left out, as Spark and Hive do, and files without rows.

    Raises:
        DataError: if there is no such file, or one is damaged or has other columns than the first, or none has rows; or if
            there are files in folders of it, such as the partitions of Spark and Hive.
    """
    paths = _visible(folder.glob("*.parquet"), folder)
    if deeper := _visible(folder.rglob("*/*.parquet"), folder):
        raise DataError(
            f"{deeper[0]}: is in a folder of {folder}, where it would not be read; write all files of the split into {folder} "
            "itself, and a column such as dt=2024-01-01 of the path into them"
        )
    if not paths:
        raise DataError(f"{folder}: no file matches *.parquet; data.path={folder.parent} needs a folder of them for each split")
    groups: list[RowGroup] = []
    first: pa.Schema | None = None
    for path in paths:
        footer, schema = _read_footer(path)
        if footer.num_rows == 0:
            continue  # Spark writes a file for each partition
        if twice := [name for name in schema.names if schema.names.count(name) > 1]:
            raise DataError(f"{path}: several columns are named {twice[0]}; rename them")
        first = schema if first is None else first
        check_same_columns(schema, str(path), first, str(groups[0].path if groups else path))
        numbers = range(footer.num_row_groups)
        groups += [RowGroup(path, footer, number) for number in numbers if footer.row_group(number).num_rows]
    if first is None:
        raise DataError(f"{folder}: its files hold no rows; data.path={folder.parent} needs samples for each split")
    return groups, first


def _visible(paths: Iterable[Path], folder: Path) -> list[Path]:
    """Sorted, without those that a name under ``folder`` hides."""
    return sorted(path for path in paths if not any(part.startswith(("_", ".")) for part in path.relative_to(folder).parts))


def _read_footer(path: Path) -> tuple[pq.FileMetaData, pa.Schema]:
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            return file.metadata, file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise _damaged(str(path), error) from None


def _damaged(where: str, error: Exception) -> DataError:
    return DataError(f"{where}: damaged or truncated ({str(error).splitlines()[0]}); write the file again")


def check_same_columns(schema: pa.Schema, path: str, expected: pa.Schema, expected_path: str) -> None:
    """Raise DataError unless both have the same columns, of the same types and in the same order."""
    for name in expected.names:
        if name not in schema.names:
            raise DataError(f"{path}: column {name} is missing, which {expected_path} has; {_REMEDY}")
        found, wanted = schema.field(name).type, expected.field(name).type
        if found != wanted:
            raise DataError(f"{path}: column {name} is {found}, but {wanted} in {expected_path}; {_REMEDY}")
    if schema.names != expected.names:
        raise DataError(
            f"{path}: columns {', '.join(schema.names)}, but {', '.join(expected.names)} in {expected_path}; {_REMEDY}"
        )


def schema_of(
    columns: pa.Schema, groups: Sequence[RowGroup], named: NamedColumns, embedding_rows: Sequence[int]
) -> DatasetSchema:
    """Return the features that the columns of the row groups are.

    Args:
        embedding_rows: of the tables of sparse features, unless the files state those of all.

    Raises:
        ConfigError: if the rows of tables are not known.
        DataError: if a column has a type or a name that no feature has, or is said to hold weights by its file alone; or if
            there is no label or sparse feature, or its metadata state no numbers.
    """
    path = groups[0].path
    check_names(columns.names, f"{path}: column", "rename it")
    dense, sparse, jagged = [], [], set()
    for field in columns:
        kind = field.type
        if field.name == named.time:
            if not _is_time(kind):
                raise DataError(f"{path}: column {field.name} is {kind}, allowed: timestamps or dates; {_REMEDY}")
        elif field.name in (*named.labels, named.weight):
            if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
                allowed = "numbers, 0 or more" if field.name == named.weight else "numbers or bool, all 0 or 1"
                raise DataError(f"{path}: column {field.name} is {kind}, allowed: {allowed}; {_REMEDY}")
        elif pa.types.is_floating(kind):
            dense.append(field.name)
        elif pa.types.is_integer(kind):
            sparse.append(field.name)
        elif (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type):
            sparse.append(field.name)
            jagged.add(field.name)
        else:
            raise DataError(
                f"{path}: column {field.name} is {kind}, allowed: floating-point numbers (a dense feature), whole numbers or "
                "lists of them (ids of a sparse feature); leave it out, or prepare the files with data/prepare.py table"
                + f"; if it says when samples happened, set data.sample_time={field.name}"
                * _is_time(kind)
            )
    _check_there(columns, path, named, bool(sparse))
    rows = [int(stated) for name in sparse if (stated := _stated(columns, name, ROWS))]
    rows = rows if len(rows) == len(sparse) else list(embedding_rows)
    if len(rows) != len(sparse):
        raise ConfigError(
            f"embedding.rows={rows}: allowed: {len(sparse)} numbers, one for each of {', '.join(sparse)}, since {path} does "
            "not state the rows of their tables"
        )
    features = (
        SparseFeature(name, count, _pooling_factor(columns, groups[0].footer, name) if name in jagged else 1.0, name in jagged)
        for name, count in zip(sparse, rows, strict=True)
    )
    return DatasetSchema(tuple(dense) or (CONSTANT,), tuple(features), labels=named.labels, has_weights=bool(named.weight))


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _check_there(columns: pa.Schema, path: Path, named: NamedColumns, has_sparse: bool) -> None:
    keys = {**dict.fromkeys(named.labels, "labels"), **({named.weight: "sample_weight"} if named.weight else {})}
    for name, there in {
        **{f"column {name}, of data.{key}, is": name in columns.names for name, key in keys.items()},
        "a column of whole numbers, for a sparse feature, is": has_sparse,
    }.items():
        if not there:
            raise DataError(f"{path}: {name} missing; its columns are {', '.join(columns.names)}")
    for field in columns:
        if IS_WEIGHT in (field.metadata or {}) and field.name != named.weight:
            raise DataError(f"{path}: column {field.name} holds weights of samples; set data.sample_weight={field.name}")


def _stated(columns: pa.Schema, feature: str, key: bytes) -> float | None:
    """Return a number in the metadata of a field."""
    text = (columns.field(feature).metadata or {}).get(key)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        raise DataError(
            f"column {feature}: its metadata state {key.decode()}={text.decode(errors='replace')}, expected a number; {_REMEDY}"
        ) from None
    if key == ROWS and (number < 1 or number % 1):
        raise DataError(f"column {feature}: its metadata state {number:g} rows, expected a whole number, 1 or more; {_REMEDY}")
    return number


def dense_columns(schema: DatasetSchema, columns: Collection[str], named: NamedColumns) -> tuple[str, ...]:
    """Return the dense features that files with these columns have; none where the only one is the constant.

    Labels, weights, times or ids may have the constant's name.
    """
    others = {*named.labels, named.weight, named.time, *(feature.name for feature in schema.sparse_features)}
    return tuple(name for name in schema.dense_features if name in columns and name not in others)


def _pooling_factor(columns: pa.Schema, footer: pq.FileMetaData, feature: str) -> float:
    """Ids of a sample on average, as the files state them, or else of the first file; there an empty list counts as one."""
    stated = _stated(columns, feature, POOLING_FACTOR)
    if stated is not None:
        return stated
    parts = [footer.row_group(number) for number in range(footer.num_row_groups)]
    chunks = [part.column(number) for part in parts for number in range(part.num_columns)]
    return sum(of.num_values for of in chunks if of.path_in_schema.split(".")[0] == feature) / footer.num_rows


def read_times(groups: Sequence[RowGroup], column: str) -> NDArray[np.int64]:
    """Read a column of timestamps or dates: int64 [rows of all groups], microseconds since 1970; without a zone they are UTC.

    Raises:
        DataError: if a file is damaged, or a time is missing or not within 292,000 years of 1970.
    """
    return np.concatenate([_microseconds(group, column) for group in groups])


def _microseconds(group: RowGroup, column: str) -> NDArray[np.int64]:
    times = _array(_read(group, [column]), column, group)
    to = pc.CastOptions(pa.timestamp("us", getattr(times.type, "tz", None)), allow_time_truncate=True)
    try:
        return np.asarray(pc.cast(times, options=to).cast(pa.int64()).to_numpy())
    except pa.ArrowInvalid as error:
        raise DataError(f"{group}: column {column}: {error}; {_REMEDY}") from None


def decode(group: RowGroup, schema: DatasetSchema, named: NamedColumns, table_rows: Sequence[int]) -> DecodedRowGroup:
    """Read a row group on the calling thread.

    Args:
        schema: of the files; ids must be in [0, ``rows``) of their feature.
        table_rows: of each sparse feature; ids are taken modulo them.

    Raises:
        DataError: if the file is damaged, or holds a null, a label other than 0 and 1, a dense value or weight that cannot be,
            or an id out of range; names the file, the row group and the column.
    """
    table = _read(group)
    dense = np.ones((table.num_rows, len(schema.dense_features)), np.float32)  # ones without a dense feature
    for number, name in enumerate(dense_columns(schema, table.column_names, named)):
        dense[:, number] = _floats(table, name, group)
    check_finite(dense, schema.dense_features, str(group), _REMEDY)
    single = np.empty((table.num_rows, sum(not feature.jagged for feature in schema.sparse_features)), np.int32)
    jagged = {}
    into = iter(single.T)
    for feature, rows in zip(schema.sparse_features, table_rows, strict=True):
        array = _array(table, feature.name, group)
        if feature.jagged:
            offsets = array.offsets.to_numpy()
            ids = _values(_without_nulls(array.values, feature.name, group))[offsets[0] : offsets[-1]]
            jagged[feature.name] = (_ids_of_table(ids, feature, rows, group), offsets - offsets[0])
        else:
            next(into)[:] = _ids_of_table(_values(array), feature, rows, group)
    labels = np.stack([_label(table, name, group) for name in schema.labels], axis=1)
    weights = None
    if schema.has_weights:
        weights = _floats(table, named.weight, group)
        check_weights(weights, f"{group}, column {named.weight}", _REMEDY)
    return DecodedRowGroup(labels.reshape(-1, *labels_shape(schema.labels)), dense, single, jagged, weights)


def _read(group: RowGroup, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a row group; by default all."""
    try:
        # The footer is at hand, so that opening the file reads nothing.
        with pq.ParquetFile(group.path, metadata=group.footer, memory_map=True) as file:
            return file.read_row_group(group.number, columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(str(group), error) from None


def _array(table: pa.Table, name: str, group: RowGroup) -> pa.Array:
    column = table.column(name)
    return _without_nulls(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks(), name, group)


def _without_nulls(array: pa.Array, name: str, group: RowGroup) -> pa.Array:
    if array.null_count:
        raise DataError(f"{group}: column {name} has nulls ({array.null_count}); fill them, or leave their rows out")
    return array


def _values(array: pa.Array) -> NDArray[Any]:
    """Return a view of the memory that Arrow has decoded into; bool has another format there."""
    return np.asarray(array.to_numpy(zero_copy_only=not pa.types.is_boolean(array.type)))


def _ids_of_table(ids: NDArray[Any], feature: SparseFeature, table_rows: int, group: RowGroup) -> NDArray[np.int32]:
    check_below(ids, feature.rows, feature.name, str(group), "correct the ids, or the rows that are stated for the table")
    ids = ids.astype(np.int32, copy=False)
    return ids % np.int32(table_rows) if table_rows < feature.rows else ids


def _floats(table: pa.Table, name: str, group: RowGroup) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # becomes infinite, which is told
        return _values(_array(table, name, group)).astype(np.float32)


def _label(table: pa.Table, name: str, group: RowGroup) -> NDArray[np.float32]:
    labels = _floats(table, name, group)
    wrong = labels[(labels != 0) & (labels != 1)]
    if wrong.size:
        raise DataError(f"{group}, column {name}: a label is {wrong[0]:g}, allowed: 0 and 1; {_REMEDY}")
    return labels
