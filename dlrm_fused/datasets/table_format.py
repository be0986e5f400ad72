"""The format of a table's files, where they do not state it themselves."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from dlrm_fused.datasets.values import is_number, plain
from dlrm_fused.errors import DataError

UNITS = ("s", "ms", "us", "ns")
MICROSECONDS = 1_000_000  # of a second
_LONGEST_NUMBER = 300  # digits, and the largest power of ten: in microseconds, too, a float64 then has it
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class TableFormat:
    """The format of files; the first five settings are for text files, but for ``trim`` in the columns of others.

    Attributes:
        delimiter: between the fields of a line; empty: a tab in .tsv and .inter files, otherwise a comma.
        quote: encloses fields; empty: nothing does.
        escape: takes the meaning from the character after it; empty: nothing does, and quotes are doubled.
        trim: whether blanks around names and fields are left out, in other files around names and texts.
        column_names: of files without a header; empty: the first line is the header.
        renamed: new names of columns, by their names in the files.
        time: of the column of times: a unit of ``UNITS`` since 1970, or a format as ``datetime.strptime`` takes it. Empty:
            seconds since 1970, or ISO 8601. Columns of timestamps and dates are read as they are.
    """

    delimiter: str = ""
    encoding: str = "utf-8"
    quote: str = '"'
    escape: str = ""
    trim: bool = False
    column_names: tuple[str, ...] = ()
    renamed: dict[str, str] = field(default_factory=dict)
    time: str = ""

    def check(self) -> None:
        """
        Raises:
            DataError: if a character, the encoding or the format of times is not possible.
        """
        for option, character in (("delimiter", self.delimiter), ("quote", self.quote), ("escape", self.escape)):
            if len(character.encode()) > 1 or character in ("\n", "\r"):
                raise DataError(f"--{option} {character!r}: allowed: one ASCII character that ends no line")
        if self.delimiter and self.delimiter in (self.quote, self.escape):
            raise DataError(f"--delimiter {self.delimiter!r}: is also --quote or --escape; keep one of them")
        try:
            "a".encode(self.encoding)
        except (LookupError, ValueError):
            raise DataError(
                f"--encoding {self.encoding}: unknown; allowed: names of Python's text encodings, such as utf-8, utf-16, "
                "latin-1, cp1252, gb18030"
            ) from None
        if self.time and self.time not in UNITS:
            _check_time(self.time)

    def microseconds(self, value: object) -> int:
        """Return microseconds since 1970, rounded down, of one time, as a column of such values is read.

        Raises:
            ValueError: if it is not a time.
        """
        value = plain(value)
        if isinstance(value, date):
            return _microseconds(value if isinstance(value, datetime) else datetime(value.year, value.month, value.day))
        number = _number(value)
        if self.time and self.time not in UNITS:
            text = value.strip() if isinstance(value, str) else str(number).zfill(fewest_digits(self.time))
            return parse_time(text, self.time)
        if number is not None:
            in_a_unit = Fraction(MICROSECONDS, 1000 ** UNITS.index(self.time or "s"))
            # Columns with numbers that are not whole are read as float64.
            return math.floor(number * in_a_unit if number.denominator == 1 else float(number) * float(in_a_unit))
        if self.time or not isinstance(value, str):
            raise ValueError(f"{value!r} is not a number of {self.time or 's'}")
        return _microseconds(datetime.fromisoformat(value.strip()))

    def is_of_another_unit(self, microseconds: int, first: int | None) -> bool:
        """Return whether a time that was read as of this format lies in the future, or would lie among a table's times in a
        coarser unit alone, as seconds do where the table has milliseconds. Times that count from another moment than 1970, such
        as the first visit, tell no unit.

        Args:
            first: microseconds since 1970 of the table's first time; None if it is not known.
        """
        latest = latest_time()
        if first is None or microseconds >= first or first * 1000 <= latest or self.time not in UNITS:
            return microseconds > latest
        return any(first <= microseconds * 1000**steps <= latest for steps in range(1, UNITS.index(self.time) + 1))

    def saved(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, for JSON."""
        default = TableFormat()
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    @staticmethod
    def of(saved: Mapping[str, Any]) -> TableFormat:
        """Read what :meth:`saved` gave.

        Raises:
            ValueError: if there is an unknown entry.
        """
        unknown = saved.keys() - {each.name for each in fields(TableFormat)}
        if unknown:
            raise ValueError(f"unknown format of files: {', '.join(sorted(unknown))}")
        names = {"column_names": tuple(saved["column_names"])} if "column_names" in saved else {}
        return TableFormat(**{**saved, **names})


PLAIN = TableFormat()


def latest_time() -> int:
    """Return the microseconds since 1970 beyond which a time is refused: a day from now, since clocks differ."""
    return int((time.time() + _DAY_SECONDS) * MICROSECONDS)


def parse_time(text: str, time_format: str) -> int:
    """Microseconds since 1970 of a time in a format of ``datetime.strptime``. Without a zone it is UTC.

    Raises:
        ValueError: if it has another format; for one of digits alone, also if digits are missing: strptime would guess which.
    """
    fewest = fewest_digits(time_format)
    if fewest and not fewest <= len(text) <= fewest + (5 if time_format.endswith("%f") else 0):
        raise ValueError(f"{text!r} is not as long as {time_format}")
    return _microseconds(datetime.strptime(text, time_format))


def fewest_digits(time_format: str) -> int:
    """Return the fewest digits that a format of digits alone takes; 0 for other formats."""
    directives = re.findall("%([YymdHMSf])", time_format)
    if len(time_format) != 2 * len(directives) or "f" in directives[:-1]:
        return 0
    return sum({"Y": 4, "f": 1}.get(directive, 2) for directive in directives)


def _microseconds(when: datetime) -> int:
    """Microseconds since 1970; a time without a zone is UTC."""
    return ((when if when.tzinfo else when.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)


def _number(value: object) -> Fraction | None:
    """Return a finite number, or the text of one; None for anything else, and for a power of ten that is no time's."""
    try:
        if isinstance(value, str):  # Fraction would take 1/2 and 1_000, too
            value = Decimal(value.strip()) if len(value) <= _LONGEST_NUMBER and is_number(value.strip()) else None
        if isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) > _LONGEST_NUMBER:
            return None  # its power of ten would take all memory, and hours
        if isinstance(value, bool) or not isinstance(value, Real | Decimal):
            return None
        return Fraction(value if isinstance(value, Rational | Decimal) else float(value))
    except (ValueError, ArithmeticError):
        return None


def _check_time(time_format: str) -> None:
    try:
        datetime.strptime(datetime(2001, 2, 3, 4, 5, 6).strftime(time_format), time_format)
    except (ValueError, re.error):
        is_format = False
    else:
        is_format = "%" in time_format
    if not is_format:
        raise DataError(
            f"--time-format {time_format}: allowed: a unit, {', '.join(UNITS)}, or a format of Python's strptime without %Z, "
            "such as '%Y%m%d', '%d/%m/%Y %H:%M', '%d/%m/%Y %H:%M %z' or '%Y-%m-%d %H:%M:%S UTC'"
        )
