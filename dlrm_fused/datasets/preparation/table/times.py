"""Columns of times: numbers of seconds and other units since 1970, ISO 8601, and formats of one's own."""

from __future__ import annotations

import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dlrm_fused.datasets.preparation.table.arrow import (
    decoded,
    first_failing,
    is_text,
    null_where,
    trimmed,
    whole_numbers,
    without_nan,
)
from dlrm_fused.datasets.preparation.table.files import Block
from dlrm_fused.datasets.table_format import MICROSECONDS, UNITS, fewest_digits, latest_time, parse_time
from dlrm_fused.datasets.transformation import Int

_FARTHEST = 2**60  # microseconds: beyond every time that is accepted
_PER_UNIT = dict(zip(UNITS, (1e6, 1e3, 1.0, 1e-3), strict=True))
_HAS_ZONE = r"[T ]\d{2}.*(Z|[+-]\d{2}(:?\d{2})?)$"
_ALLOWED = "seconds since 1970, or times such as 2024-05-31T12:00:00"
# Dates that are written as whole numbers, and the ranges of their parts.
_DATES = (
    *("%Y", "%Y%m", "%y%m%d", "%Y%m%d", "%y%m%d%H", "%Y%m%d%H", "%y%m%d%H%M"),
    *("%Y%m%d%H%M", "%y%m%d%H%M%S", "%Y%m%d%H%M%S", "%Y%m%d%H%M%S%f"),
)
_RANGES = {"Y": (1900, 2099), "y": (1, 99), "m": (1, 12), "d": (1, 31), "H": (0, 23), "M": (0, 59), "S": (0, 59), "f": (0, 999)}


def read_times(block: Block, name: str, option: str, time_format: str) -> Int:
    """Times of n rows: [n], microseconds since 1970. Without a zone they are UTC.

    Args:
        option: names where the column comes from in messages.
        time_format: as in :class:`TableFormat`.

    Raises:
        DataError: if one is missing, not a time, or in the future.
    """
    array = decoded(block.columns[name])
    if not _can_hold_times(array.type):
        block.refuse(name, option, 0, f"{_ALLOWED}; the column is of type {array.type}")
    try:
        times = _microseconds(array, time_format)
    except ValueError:
        row = first_failing(array, lambda part: _microseconds(part, time_format))
        allowed = f"what --time-format {time_format} says" if time_format else f"{_ALLOWED}; --time-format tells another format"
        block.refuse(name, option, row, f"{allowed}{_remedy(array[row].as_py())}")
    if times.null_count:
        missing = int(np.flatnonzero(times.is_null().to_numpy(zero_copy_only=False))[0])
        block.refuse(name, option, missing, "a time in every row; leave such rows out")
    microseconds = times.to_numpy()
    future = np.flatnonzero(microseconds > latest_time())
    if future.size:
        row = int(future[0])
        block.refuse(name, option, row, f"times up to now, numbers in seconds since 1970{_remedy(array[row].as_py())}")
    return microseconds


class TimeSurvey:
    """Reads the times of a column, and keeps the first and the last one, and how they were read.

    Attributes:
        first: the first time so far, microseconds since 1970.
    """

    def __init__(self, name: str, option: str, time_format: str) -> None:
        self._name, self._option, self._time_format = name, option, time_format
        self._example: Block | None = None
        self._numbers: Block | None = None  # the first with numbers; other files may have ISO 8601
        self._dates: tuple[str, ...] = () if time_format else _DATES  # formats that all numbers so far fit
        self.first, self._last = _FARTHEST, -_FARTHEST

    def read(self, block: Block) -> Int:
        """Return the times of the rows that come next: [n], microseconds since 1970."""
        times = read_times(block, self._name, self._option, self._time_format)
        self._example = self._example or block
        numbers = _numbers(decoded(block.columns[self._name])) if self._dates else None
        if numbers is not None:
            self._numbers = self._numbers or block
            self._dates = tuple(date for date in self._dates if _fits(numbers, date))
        self.first, self._last = min(self.first, int(times.min())), max(self._last, int(times.max()))
        return times

    def finish(self) -> str:
        """Return the first and the last time, and how they were read, for people.

        Raises:
            DataError: if all are numbers that look like dates, such as 20240531.
        """
        assert self._example is not None  # there are rows: without any, reading has failed before
        if self._numbers is not None and self._dates:
            looks = "the whole column looks" if self._numbers is self._example else "all numbers of the column look"
            self._numbers.refuse(
                self._name,
                self._option,
                0,
                f"seconds since 1970; {looks} like dates: give --time-format '{self._dates[0]}', or --time-format s if they "
                "are seconds",
            )
        first, last = (np.datetime64(microseconds, "us").item() for microseconds in (self.first, self._last))
        return f"{first.isoformat()} to {last.isoformat()} UTC, read as {self._read_as(self._example)}"

    def _read_as(self, block: Block) -> str:
        array = decoded(block.columns[self._name])
        if _is_typed(array.type):
            return str(array.type)
        if self._time_format in UNITS or (not self._time_format and _numbers(array) is not None):
            return f"{self._time_format or 's'} since 1970"
        return self._time_format or "ISO 8601"


def _is_typed(data_type: pa.DataType) -> bool:
    """Return whether a column says itself that it holds times."""
    return bool(pa.types.is_timestamp(data_type) or pa.types.is_date(data_type))


def _can_hold_times(data_type: pa.DataType) -> bool:
    types = pa.types
    is_number = types.is_integer(data_type) or types.is_floating(data_type) or types.is_decimal(data_type)
    return is_number or is_text(data_type) or _is_typed(data_type) or types.is_null(data_type)


def _microseconds(array: pa.Array, time_format: str) -> pa.Array:
    """Microseconds since 1970 as int64, null where a time is missing.

    Raises:
        ValueError: if something is not a time.
    """
    if _is_typed(array.type):
        return pc.cast(array, pa.timestamp("us", getattr(array.type, "tz", None)), safe=False).cast(pa.int64())
    if time_format and time_format not in UNITS:
        return _by_format(array, time_format)
    numbers = _numbers(array)
    if numbers is not None:
        return _by_unit(numbers, time_format or "s")
    if time_format:
        raise ValueError("not a number")
    return _by_iso(trimmed(array))


def _numbers(array: pa.Array) -> pa.Array | None:
    """Return numbers, or texts of numbers: int64 where all are whole, otherwise float64; None if something else is there."""
    if _is_typed(array.type):
        return None
    values = without_nan(trimmed(array))
    example = values.drop_null()[:1]  # asked first, since casting many texts that are no numbers is slow
    for read in (whole_numbers, lambda numbers: pc.cast(numbers, pa.float64(), safe=False)):
        try:
            read(example)
            return read(values)
        except pa.ArrowInvalid:
            continue
    return None


def _by_unit(numbers: pa.Array, unit: str) -> pa.Array:
    known = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False)
    if unit == "ns" and known.dtype.kind == "i":
        return pa.array(known // 1000, mask=numbers.is_null().to_numpy(zero_copy_only=False))
    limit = _FARTHEST / _PER_UNIT[unit]
    if known.dtype.kind == "i":
        micro = np.clip(known, -int(limit), int(limit)) * int(_PER_UNIT[unit])
    else:
        micro = np.floor(np.clip(np.nan_to_num(known), -limit, limit) * _PER_UNIT[unit]).astype(np.int64)
    return pa.array(micro, mask=numbers.is_null().to_numpy(zero_copy_only=False))


def _by_iso(texts: pa.Array) -> pa.Array:
    has_zone = pc.fill_null(pc.match_substring_regex(texts, _HAS_ZONE), False)
    with_zone = pc.cast(null_where(pc.invert(has_zone), texts), pa.timestamp("ns", "UTC"))
    without = pc.cast(null_where(has_zone, texts), pa.timestamp("ns"))
    return _by_unit(pc.coalesce(with_zone.cast(pa.int64()), without.cast(pa.int64())), "ns")


def _by_format(array: pa.Array, time_format: str) -> pa.Array:
    """Parse each distinct text of the block once, since ``datetime.strptime`` is slow."""
    if is_text(array.type):
        texts = trimmed(array)
    else:
        numbers = _numbers(array)
        if numbers is None or not pa.types.is_integer(numbers.type):
            raise ValueError("not a whole number")
        texts = pc.utf8_lpad(pc.cast(numbers, pa.string()), fewest_digits(time_format), "0")  # numbers have no zeros in front
    encoded = texts.dictionary_encode()
    micro = [parse_time(text, time_format) for text in encoded.dictionary.to_pylist()]
    return pa.array(micro, pa.int64()).take(encoded.indices)


def _fits(numbers: pa.Array, date: str) -> bool:
    """Return whether all numbers look like dates of a format of ``_DATES``."""
    if not pa.types.is_integer(numbers.type):
        return False
    rest = numbers.drop_null().to_numpy()
    for part in reversed(date[1::2]):
        low, high = _RANGES[part]
        base = 10_000 if part == "Y" else 1000 if part == "f" else 100
        field, rest = (rest, rest * 0) if part == date[1] else (rest % base, rest // base)
        if not ((low <= field) & (field <= high)).all():
            return False
    return True


def _remedy(value: object) -> str:
    """Return the option that would read a value, if one would; begins with a semicolon."""
    try:
        number = int(str(value).strip())
    except ValueError:
        return "; is the unit another one?" if isinstance(value, float) else ""
    fitting = [date for date in _DATES if _fits(pa.array([number], pa.int64()), date)] if abs(number) < 2**63 else []
    latest = time.time() * MICROSECONDS
    units = [unit for unit in UNITS if latest / 4 < number * _PER_UNIT[unit] <= latest]
    guesses = [f"--time-format {guess}" for guess in (*units, *(f"'{date}'" for date in fitting))]
    return f"; try {' or '.join(guesses)}" if guesses else "; is the unit another one?"
