"""Arrow arrays and their types: what all columns of a table have in common."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc


def is_text(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_string(data_type) or types.is_large_string(data_type) or types.is_string_view(data_type))


def is_list(data_type: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_list(data_type) or types.is_large_list(data_type) or types.is_fixed_size_list(data_type))


def decoded(array: pa.Array) -> pa.Array:
    """Return the values of a dictionary; other arrays as they are."""
    if not pa.types.is_dictionary(array.type):
        return array
    values = as_text(array.dictionary) if is_text(array.type.value_type) else array.dictionary
    return values.take(array.indices)  # dictionary_decode has no views of texts, which polars writes


def as_text(array: pa.Array) -> pa.Array:
    return array if array.type == pa.string() else pc.cast(array, pa.string())


def null_where(mask: pa.Array, array: pa.Array) -> pa.Array:
    return pc.if_else(mask, pa.scalar(None, array.type), array)


def trimmed(array: pa.Array) -> pa.Array:
    """Texts without blanks around them, and without those of blanks only; other arrays as they are."""
    if not is_text(array.type):
        return array
    texts = pc.utf8_trim_whitespace(as_text(array))
    return null_where(pc.equal(texts, ""), texts)


def whole_numbers(array: pa.Array) -> pa.Array:
    """Return numbers, or texts of digits, as int64. Arrow would read hexadecimal ones, too, and large ones as negative numbers.

    Raises:
        pa.ArrowInvalid: if a value is none, or beyond int64.
    """
    if is_text(array.type) and pc.any(pc.match_substring_regex(array, "[xX]")).as_py():
        raise pa.ArrowInvalid("not a number of decimal digits")
    return pc.cast(array, pa.int64())


def without_nan(array: pa.Array) -> pa.Array:
    """Null in place of NaN: whole numbers with missing ones are floats, as pandas writes them."""
    return null_where(pc.is_nan(array), array) if pa.types.is_floating(array.type) else array


def first_failing(array: pa.Array, convert: Callable[[pa.Array], pa.Array]) -> int:
    """Position of the first value for which ``convert`` raises ValueError, as Arrow does; there is one."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(array.slice(low, middle - low))
        except ValueError:
            high = middle
        else:
            low = middle
    return low


def shown(value: object) -> str:
    """Return a value as messages show it."""
    return "a missing value" if value is None else (repr(value) if isinstance(value, str) else str(value))[:60]
