"""Conversion of Arrow columns to NumPy arrays; its errors name the row whose value cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm_fused.datasets.preparation.table.arrow import (
    as_text,
    decoded,
    first_failing,
    is_text,
    null_where,
    shown,
    trimmed,
    whole_numbers,
    without_nan,
)
from dlrm_fused.datasets.preparation.table.files import Block
from dlrm_fused.datasets.storage import ranges
from dlrm_fused.datasets.transformation import Int, SparseColumn, Values, integer_keys, text_keys
from dlrm_fused.datasets.values import LARGEST_FLOAT32, NONE, TRUTHS, WHOLE_NUMBERS, NullMarkers
from dlrm_fused.errors import DataError

NULL_VALUES = "--null-values"
MISSING_VALUE = -1
WIDE = pa.decimal128(20, 0)  # holds whole numbers of 64 bits, signed and unsigned


@dataclass(frozen=True)
class Categories:
    """The values of a sparse column in n rows.

    Attributes:
        distinct: [V] int64, ``WIDE`` if one is beyond that, or string; without nulls.
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
        """Return the id of each value: [total]."""
        return np.append(ids_of_distinct, np.int32(missing))[self.number]  # position -1 is the last


def keys_of(values: pa.Array) -> Int:
    """Keys of int64, ``WIDE`` or string values without nulls: [n]."""
    if pa.types.is_integer(values.type):
        return integer_keys(values.to_numpy())
    if pa.types.is_decimal(values.type):
        return integer_keys(*wide_bits(values))
    return text_keys(*text_buffers(values))


def wide_bits(values: pa.Decimal128Array) -> tuple[Int, NDArray[np.bool_]]:
    """Return the low 64 bits of ``WIDE`` values without nulls, and which of them are beyond int64: [n] each."""
    words = np.frombuffer(values.buffers()[1] or b"", np.int64).reshape(-1, 2)[values.offset : values.offset + len(values)]
    low, high = words.T
    return low.copy(), (high == 0) & (low < 0)


def text_buffers(texts: pa.StringArray) -> tuple[NDArray[np.uint8], Int]:
    """Return the UTF-8 of n texts, one after the other, and where each begins: [bytes], [n + 1]."""
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
        block.refuse(name, "--label", int(wrong[0]), "0 and 1; derive such a column, or leave the row out")
    return numbers.astype(np.uint8)


def read_weights(block: Block, name: str) -> NDArray[np.float32]:
    """Weights of n rows: [n], 0 or more.

    Raises:
        DataError: if one is missing, negative, or not finite as float32.
    """
    numbers = _numbers(block, name, "--sample-weight")
    wrong = np.flatnonzero(~((numbers >= 0) & (numbers <= LARGEST_FLOAT32)))
    if wrong.size:
        block.refuse(name, "--sample-weight", int(wrong[0]), "finite numbers, 0 or more; mend the value or leave the row out")
    return numbers.astype(np.float32)


def read_numbers(block: Block, name: str, nulls: NullMarkers = NONE) -> NDArray[np.float64]:
    """Return values of a dense column in n rows: [n], NaN for a missing one.

    Raises:
        DataError: if one is not a number, infinite, or too large for float32.
    """
    numbers = _numbers(block, name, "--dense", nulls)
    wrong = np.flatnonzero(np.abs(numbers) > LARGEST_FLOAT32)
    if wrong.size:
        block.refuse(name, "--dense", int(wrong[0]), "finite numbers of float32; mend the value or leave it empty")
    return numbers


def read_categories(block: Block, column: SparseColumn, nulls: NullMarkers = NONE, option: str = "--sparse") -> Categories:
    """Return values of a sparse column in n rows. A missing list counts as a list of one missing value; an empty one has none.

    Raises:
        DataError: if a value is not what the column holds.
    """
    array = block.columns[column.name]
    if column.separator:
        array = pc.split_pattern(_without_markers(as_text(array), nulls), column.separator)
    if not column.is_list:
        return Categories(*_distinct(block, column, array, None, nulls, option), None)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
    distinct, number = _distinct(block, column, array.flatten(), lengths, nulls, option)
    if array.null_count:
        is_null = array.is_null().to_numpy(zero_copy_only=False)
        with_missing = np.where(is_null, 1, lengths)
        all_numbers = np.full(with_missing.sum(), MISSING_VALUE, np.int32)
        all_numbers[ranges((with_missing.cumsum() - with_missing)[~is_null], lengths[~is_null])] = number
        lengths, number = with_missing, all_numbers
    return Categories(distinct, number, np.concatenate([[0], lengths.cumsum()]))


def _numbers(block: Block, name: str, option: str, nulls: NullMarkers = NONE) -> NDArray[np.float64]:
    array = decoded(block.columns[name])
    try:
        numbers = _parsed(array, nulls, _float)
    except pa.ArrowInvalid:
        at = first_failing(array, lambda part: _parsed(part, nulls, _float))
        allowed = {
            "--label": "0 and 1; derive such a column, or leave the row out",
            "--dense": f"numbers, empty where missing; {NULL_VALUES} says which values stand for missing ones",
        }
        block.refuse(name, option, at, allowed.get(option, "numbers"))
    found = pc.fill_null(numbers, np.nan).to_numpy(zero_copy_only=False)
    return np.where(np.isin(found, list(nulls.numbers)), np.nan, found) if nulls.numbers else found


def _distinct(
    block: Block, column: SparseColumn, array: pa.Array, lengths: Int | None, nulls: NullMarkers, option: str
) -> tuple[pa.Array, NDArray[np.int32]]:
    """Distinct values, and which of them each value is."""
    convert = partial(_wholes if column.values is Values.integer else _texts, nulls=nulls)
    array = without_nan(decoded(array))
    try:
        encoded = convert(array).dictionary_encode()
    except pa.ArrowInvalid:
        at = first_failing(array, convert)
        row = at if lengths is None else int(np.searchsorted(lengths.cumsum(), at, side="right"))
        raise DataError(
            f"{option} {column.name}: {shown(array[at].as_py())} in {block.where(row)}; allowed: whole numbers of 64 bits"
            f"{', as in the rest of the column' if column.values is Values.integer else ' or text'}; write all values as text, "
            f"mend this one, or name it in {NULL_VALUES} if it stands for a missing one"
        ) from None
    number = encoded.indices
    if number.null_count:
        number = pc.fill_null(number, MISSING_VALUE)
    return encoded.dictionary, number.to_numpy()


def _texts(array: pa.Array, nulls: NullMarkers) -> pa.Array:
    """Return values of a sparse column of texts; null for a missing one."""
    texts = _without_markers(as_text(pc.cast(array, pa.int64()) if pa.types.is_floating(array.type) else array), nulls)
    empty = pc.equal(texts, "")
    return null_where(empty, texts) if pc.any(empty).as_py() else texts


def _wholes(array: pa.Array, nulls: NullMarkers) -> pa.Array:
    """Return values of a sparse column of whole numbers, int64 or ``WIDE`` where one is beyond that; null for a missing one."""
    wholes = _parsed(array, nulls, _whole)
    markers = [marker for marker in nulls.wholes if wholes.type == WIDE or marker < 2**63]
    if not markers:
        return wholes
    return null_where(pc.is_in(wholes, pa.array(map(Decimal, markers), WIDE).cast(wholes.type)), wholes)


def _float(array: pa.Array) -> pa.Array:
    return pc.cast(array, pa.float64(), safe=False)


def _whole(array: pa.Array) -> pa.Array:
    try:
        return whole_numbers(array)
    except pa.ArrowInvalid:
        if pa.types.is_floating(array.type):  # beyond int64, one tells no whole number from the next ones
            raise
        if is_text(array.type) and not pc.all(pc.match_substring_regex(array, "^-?[0-9]+$")).as_py():
            raise
        wide = pc.cast(array, WIDE)
        limits = {at: int(value or 0) for at, value in pc.min_max(wide).as_py().items()}
        if limits["min"] not in WHOLE_NUMBERS or limits["max"] not in WHOLE_NUMBERS:
            raise
        return wide


def _parsed(array: pa.Array, nulls: NullMarkers, parse: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Return numbers of a column that holds them, or their texts; truths are 1 and 0.

    Raises:
        pa.ArrowInvalid: if a value is none.
    """
    if not is_text(array.type):
        return parse(array)
    texts = _without_markers(trimmed(array), nulls)
    try:
        return parse(texts)
    except pa.ArrowInvalid:
        lower = pc.utf8_lower(texts)
        for truth, number in TRUTHS.items():
            texts = pc.if_else(pc.equal(lower, truth), str(number), texts)
        return parse(texts)


def _without_markers(texts: pa.Array, nulls: NullMarkers) -> pa.Array:
    """Null in place of the texts that stand for a missing value."""
    return null_where(pc.is_in(texts, pa.array(nulls.markers, texts.type)), texts) if nulls.markers else texts
