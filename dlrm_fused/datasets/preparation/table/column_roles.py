"""The roles that a user gives the columns of a table, checked against the columns of its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from dlrm_fused.datasets.feature_names import check_names
from dlrm_fused.datasets.preparation.table.arrow import is_list, is_text
from dlrm_fused.datasets.preparation.table.files import TableFile
from dlrm_fused.datasets.transformation import SparseColumn, Values, file_stem
from dlrm_fused.errors import DataError

_LONGEST_STEM = 200  # bytes; the names of files have at most 255
_NUMBERS = "numbers"
_LIST = "a list"
SPARSE = "--sparse"


@dataclass(frozen=True)
class ColumnChoice:
    """Columns by their use.

    Attributes:
        separators: of text columns that hold several values each.
        other: columns that are read beside features and labels, such as a time.
        sample_weight: empty where rows have no weights.
    """

    labels: tuple[str, ...]
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    separators: dict[str, str]
    other: tuple[tuple[str, str], ...] = ()
    sample_weight: str = ""

    def check(self) -> None:
        """
        Raises:
            DataError: if a column has two uses, or a name that a feature cannot have.
        """
        if not self.labels:
            raise DataError("--label: no column given; name at least one column of 0 and 1, such as --label clicked")
        if not self.sparse:
            raise DataError("--sparse: no column given; name at least one column of ids, such as --sparse user,item")
        seen: dict[str, str] = {}
        for use, name in self.uses():
            if name in seen:
                both = f"twice in {use}" if seen[name] == use else f"in both {seen[name]} and {use}"
                raise DataError(f"{use} {name}: is {both}; keep one of them")
            seen[name] = use
            check_names([name], use, "name it otherwise with --rename")
            if len(file_stem(name).encode()) > _LONGEST_STEM:
                raise DataError(f"{use} {name[:40]!r}...: too long for the name of a file; name it otherwise with --rename")
        for name in self.separators.keys() - set(self.sparse):
            raise DataError(f"--separated {name}: is not in --sparse; add it there")
        for option, name in self.other:
            if name in self.labels:
                raise DataError(f"{option} {name}: is {'the' if len(self.labels) == 1 else 'a'} label; choose another column")

    def uses(self) -> list[tuple[str, str]]:
        """Return the columns of labels, features and weights, each with its option."""
        return [
            *(("--label", name) for name in self.labels),
            *(("--dense", name) for name in self.dense),
            *((SPARSE, name) for name in self.sparse),
            *((("--sample-weight", self.sample_weight),) if self.sample_weight else ()),
        ]

    def names(self) -> list[str]:
        """Return all columns to read, each once."""
        return list(dict.fromkeys(name for _, name in (*self.uses(), *self.other)))


def choose_sparse(files: Sequence[TableFile], choice: ColumnChoice) -> tuple[SparseColumn, ...]:
    """Return the sparse columns with the kind of their values, as the files' columns have it.

    Raises:
        DataError: if a column is missing in a file, or of a type that does not fit its use, or differs between files.
    """
    check_types(files, choice)
    return tuple(_sparse_column(files, SPARSE, name, choice.separators.get(name, "")) for name in choice.sparse)


def grouping_column(files: Sequence[TableFile], option: str, name: str) -> SparseColumn:
    """Return the column by whose values rows are grouped.

    Raises:
        DataError: if it holds lists, or is of a type that ids cannot have.
    """
    column = _sparse_column(files, option, name, "")
    if column.is_list:
        raise DataError(f"{option}: {name} holds lists; name a column with one value a row")
    return column


def check_types(files: Sequence[TableFile], choice: ColumnChoice) -> None:
    """
    Raises:
        DataError: if a column is missing in a file, or a label, a dense column or a weight holds no numbers.
    """
    for file in files:
        for option, name in (*choice.uses(), *choice.other):
            if name not in file.schema.names:
                there = ", ".join(file.schema.names[:12])
                raise DataError(f"{option} {name}: no such column in {file.path}; it has {there}{file.hint(name)}")
        for option, name in choice.uses():
            found = _described(file.schema.field(name).type)
            is_number = found in (_NUMBERS, Values.integer.name, None)
            if option != SPARSE and not is_number and not (found == Values.text.name and file.is_written(name)):
                raise DataError(f"{option} {name}: {found} in {file.path}; allowed: a column of numbers")


def check_sparse(files: Sequence[TableFile], columns: Sequence[SparseColumn]) -> None:
    """
    Raises:
        DataError: if a file's column cannot hold what a transformation was made for.
    """
    for file in files:
        for column in columns:
            held = _held(file, SPARSE, column.name, column.separator)
            if held is None:
                continue
            values, is_list = held
            # A whole number can be written as text; a text file has nothing but text.
            fits = values is column.values or values is Values.integer or file.is_written(column.name)
            if is_list != column.is_list or not fits:
                raise DataError(
                    f"--input {file.path}: column {column.name} holds {_phrase(values, is_list)}, where the transformation was "
                    f"made for {_phrase(column.values, column.is_list)}; write the column as it was then"
                )


def _sparse_column(files: Sequence[TableFile], option: str, name: str, separator: str) -> SparseColumn:
    held_by_file = [(held, file.path) for file in files if (held := _held(file, option, name, separator)) is not None]
    if not held_by_file:
        raise DataError(f"{option} {name}: all values are missing; leave the column out")
    first, first_path = held_by_file[0]
    for held, path in held_by_file:
        if held != first:
            raise DataError(
                f"{option} {name}: {_phrase(*first)} in {first_path}, but {_phrase(*held)} in {path}; "
                "write all files with one type"
            )
    return SparseColumn(name, *first, separator)


def _held(file: TableFile, option: str, name: str, separator: str) -> tuple[Values, bool] | None:
    """Return the kind of a column's values, and whether it holds lists; None for a column without type: all are missing."""
    data_type = file.schema.field(name).type
    has_lists = is_list(data_type)
    found = _described(data_type.value_type if has_lists else data_type)
    if found is None:
        return None
    if separator and (has_lists or found != Values.text.name):
        raise DataError(f"--separated {name}: {'lists' if has_lists else found} in {file.path}; allowed: a column of text")
    if found == _NUMBERS:  # perhaps whole ones; reading them tells
        found = Values.integer.name
    if found not in Values.__members__:
        raise DataError(
            f"{option} {name}: {data_type} in {file.path}; allowed: text, whole numbers, and lists of them; cast the column"
        )
    return Values[found], has_lists or bool(separator)


def _described(data_type: pa.DataType) -> str | None:
    """Return a name of :class:`Values`, ``_NUMBERS`` for others; what else it is; None for a type of missing values only."""
    types = pa.types
    if types.is_dictionary(data_type):
        return _described(data_type.value_type)
    if types.is_null(data_type):
        return None
    if types.is_integer(data_type) or types.is_boolean(data_type):
        return Values.integer.name
    if types.is_floating(data_type) or types.is_decimal(data_type):
        return _NUMBERS
    if is_text(data_type):
        return Values.text.name
    return _LIST if is_list(data_type) else str(data_type)


def _phrase(values: Values, is_list: bool) -> str:
    what = "whole numbers" if values is Values.integer else "text"
    return f"lists of {what}" if is_list else what
