"""From Arrow columns to NumPy arrays, with an error that names the row where a value cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.table.files import Block
from dlrm_fused.datasets.storage import ranges
from dlrm_fused.datasets.transformation import Int, SparseColumn, Values, integer_keys, text_keys
from dlrm_fused.errors import DataError

MISSING_VALUE = -1
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Categories:
    """The values of a sparse column in n rows.

    Attributes:
        distinct: [V] int64 or string, without nulls.
        number: [total] which of them each value is, row after row; ``MISSING_VALUE`` for a missing one.
        offsets: [n + 1] where each row begins in ``number``; None where each row has exactly one.
    """

    distinct: pa.Array
    number: NDArray[np.int32]
    offsets: Int | None

    def keys(self) -> Int:
        """Keys of the distinct values: [V]."""
        return keys_of(self.distinct)

    def take(self, ids_of_distinct: NDArray[np.int32], missing: int) -> NDArray[np.int32]:
        """The id of each value: [total]."""
        return np.append(ids_of_distinct, np.int32(missing))[self.number]  # position -1 is the last


def keys_of(values: pa.Array) -> Int:
    """Keys of int64 or string values without nulls: [n]."""
    if pa.types.is_integer(values.type):
        return integer_keys(values.to_numpy())
    return text_keys(*text_buffers(values))


def text_buffers(texts: pa.StringArray) -> tuple[NDArray[np.uint8], Int]:
    """The UTF-8 of n texts, one after the other, and where each begins: [bytes], [n + 1]."""
    if not len(texts):
        return np.zeros(0, np.uint8), np.zeros(1, np.int64)
    _, offset_buffer, data = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    used = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data else np.zeros(0, np.uint8)
    return used, offsets - offsets[0]


def read_labels(block: Block, name: str) -> NDArray[np.uint8]:
    """Labels of n rows: [n], 0 or 1.

    Raises:
        DataError: if one is missing or something else.
    """
    numbers = _numbers(block, name, "--label")
    wrong = np.flatnonzero((numbers != 0) & (numbers != 1))
    if wrong.size:
        _refuse(block, name, "--label", int(wrong[0]), "0 and 1; derive such a column, or leave the row out")
    return numbers.astype(np.uint8)


def read_weights(block: Block, name: str) -> NDArray[np.float32]:
    """Weights of n rows: [n], 0 or more.

    Raises:
        DataError: if one is missing, negative, or not finite as float32.
    """
    numbers = _numbers(block, name, "--sample-weight")
    wrong = np.flatnonzero(~((numbers >= 0) & (numbers <= _MAX_FLOAT32)))
    if wrong.size:
        _refuse(block, name, "--sample-weight", int(wrong[0]), "finite numbers, 0 or more; mend the value or leave the row out")
    return numbers.astype(np.float32)


def read_numbers(block: Block, name: str) -> NDArray[np.float64]:
    """Values of a dense column in n rows: [n], NaN for a missing one.

    Raises:
        DataError: if one is not a number, infinite, or too large for float32.
    """
    numbers = _numbers(block, name, "--dense")
    wrong = np.flatnonzero(np.abs(numbers) > _MAX_FLOAT32)
    if wrong.size:
        _refuse(block, name, "--dense", int(wrong[0]), "finite numbers of float32; mend the value or leave it empty")
    return numbers


def read_categories(block: Block, column: SparseColumn) -> Categories:
    """Values of a sparse column in n rows. A missing list counts as a list of one missing value; an empty one has none.

    Raises:
        DataError: if a value is not what the column holds.
    """
    array = block.columns[column.name]
    if column.separator:
        array = pc.split_pattern(_as_text(array), column.separator)
    if not column.is_list:
        return Categories(*_distinct(block, column, array, None), None)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
    distinct, number = _distinct(block, column, array.flatten(), lengths)
    if array.null_count:
        is_null = array.is_null().to_numpy(zero_copy_only=False)
        with_missing = np.where(is_null, 1, lengths)
        all_numbers = np.full(with_missing.sum(), MISSING_VALUE, np.int32)
        all_numbers[ranges((with_missing.cumsum() - with_missing)[~is_null], lengths[~is_null])] = number
        lengths, number = with_missing, all_numbers
    return Categories(distinct, number, np.concatenate([[0], lengths.cumsum()]))


def read_texts(block: Block, name: str) -> pa.StringArray:
    """Values of a column in n rows as texts: [n]."""
    return _as_text(block.columns[name])


def _numbers(block: Block, name: str, option: str) -> NDArray[np.float64]:
    array = block.columns[name]
    try:
        numbers = pc.cast(_trimmed(array), pa.float64(), safe=False)
    except pa.ArrowInvalid:
        _refuse(block, name, option, _first_not(array, pa.float64()), "numbers, empty where missing")
    return pc.fill_null(numbers, np.nan).to_numpy(zero_copy_only=False)


def _distinct(block: Block, column: SparseColumn, array: pa.Array, lengths: Int | None) -> tuple[pa.Array, NDArray[np.int32]]:
    """Distinct values, and which of them each value is."""
    if column.values is Values.integer:
        array = _as_integers(block, column, array, lengths)
    else:
        array = _as_text(array)
        empty = pc.equal(array, "")
        if pc.any(empty).as_py():
            array = pc.if_else(empty, pa.scalar(None, pa.string()), array)
    encoded = array.dictionary_encode()
    number = encoded.indices
    if number.null_count:
        number = pc.fill_null(number, MISSING_VALUE)
    return encoded.dictionary, number.to_numpy()


def _as_integers(block: Block, column: SparseColumn, array: pa.Array, lengths: Int | None) -> pa.Array:
    if pa.types.is_floating(array.type):  # whole numbers with missing ones, as pandas writes them
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    try:
        return pc.cast(_trimmed(array), pa.int64())
    except pa.ArrowInvalid:
        at = _first_not(array, pa.int64())
        row = at if lengths is None else int(np.searchsorted(lengths.cumsum(), at, side="right"))
        shown = _shown(array[at].as_py())
        raise DataError(
            f"--sparse {column.name}: {shown} in {block.where(row)}; allowed: whole numbers of 64 bits, as in the rest of the "
            "column; write all values as text, or mend this one"
        ) from None


def _as_text(array: pa.Array) -> pa.Array:
    return array if array.type == pa.string() else pc.cast(array, pa.string())


def _trimmed(array: pa.Array) -> pa.Array:
    """Texts without blanks around them, and without those of blanks only; other arrays as they are."""
    if not _is_text(array.type):
        return array
    trimmed = pc.utf8_trim_whitespace(_as_text(array))
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)


def _is_text(data_type: pa.DataType) -> bool:
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type) or pa.types.is_string_view(data_type)


def _first_not(array: pa.Array, wanted: pa.DataType) -> int:
    """Position of the first value that cannot become of type ``wanted``; there is one."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            pc.cast(_trimmed(array.slice(low, middle - low)), wanted)
        except pa.ArrowInvalid:
            high = middle
        else:
            low = middle
    return low


def _refuse(block: Block, name: str, option: str, row: int, allowed: str) -> Any:
    raise DataError(
        f"{option} {name}: {_shown(block.columns[name][row].as_py())} in {block.where(row)}; allowed: {allowed}"
    ) from None


def _shown(value: object) -> str:
    if value is None:
        return "a missing value"
    return repr(value)[:60] if isinstance(value, str) else str(value)[:60]
