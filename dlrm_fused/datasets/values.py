"""Values of rows as Python and NumPy have them: which of them are numbers, whole numbers or texts, and which are missing.

``preparation/table/columns.py`` reads Arrow columns by the same rules; a test holds the two against each other, type by type.
This module needs NumPy alone, since exported models carry it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property

import numpy as np

WHOLE_NUMBERS = range(-(2**63), 2**64)  # signed and unsigned ones of 64 bits
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
TRUTHS = {"true": 1, "false": 0}  # in any case of letters
_WHOLE = re.compile("-?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|nan|inf(?:inity)?)", re.IGNORECASE)
_PANDAS_MISSING = ("NAType", "NaTType")


@dataclass(frozen=True)
class NullMarkers:
    r"""Values that stand for missing ones, such as ``\N``: a text by its letters, a number by its value."""

    markers: tuple[str, ...] = ()

    @cached_property
    def texts(self) -> frozenset[str]:
        return frozenset(self.markers)

    @cached_property
    def numbers(self) -> frozenset[float]:
        return frozenset(float(marker) for marker in self.markers if is_number(marker))

    @cached_property
    def wholes(self) -> frozenset[int]:
        wholes = (int(marker) for marker in self.markers if _WHOLE.fullmatch(marker))
        return frozenset(whole for whole in wholes if whole in WHOLE_NUMBERS)


NONE = NullMarkers()


def is_number(text: str) -> bool:
    """Return whether a text is a number as Arrow reads it, NaN and infinity included."""
    return bool(_NUMBER.fullmatch(text))


def number_of(value: object, nulls: NullMarkers = NONE) -> float:
    """Return the value of a dense column; NaN for a missing one.

    Raises:
        ValueError: if it is no number.
    """
    value = plain(value)
    if isinstance(value, str):
        text = value.strip()
        if not text or text in nulls.texts:
            return math.nan
        if text.lower() in TRUTHS:
            return float(TRUTHS[text.lower()])
        if not is_number(text):
            raise ValueError(value)
        value = float(text)
    if value is None:
        return math.nan
    if not isinstance(value, int | float | Decimal):
        raise ValueError(value)
    try:
        number = float(value)
    except OverflowError:
        return math.inf
    return math.nan if number in nulls.numbers else number


def whole_of(value: object, nulls: NullMarkers = NONE) -> int | None:
    """Return the value of a sparse column of whole numbers; None for a missing one.

    Raises:
        ValueError: if it is no whole number of 64 bits, signed or unsigned.
    """
    value = plain(value)
    if isinstance(value, str):
        text = value.strip()
        if not text or text in nulls.texts:
            return None
        value = TRUTHS.get(text.lower(), text)
        if isinstance(value, str) and _WHOLE.fullmatch(value):
            value = int(value)
    if value is None:
        return None
    if not isinstance(value, int | float | Decimal) or (isinstance(value, float | Decimal) and not math.isfinite(value)):
        raise ValueError(value)
    # Beyond 2^63, a float tells no number of 64 bits from the next ones.
    limits = WHOLE_NUMBERS if not isinstance(value, float) else range(-(2**63), 2**63)
    if not limits.start <= value < limits.stop or value != int(value):  # int() of a large decimal could take hours
        raise ValueError(value)
    whole = int(value)
    return None if whole in nulls.wholes else whole


def text_of(value: object, nulls: NullMarkers = NONE) -> str | None:
    """Return the value of a sparse column of texts, None for a missing one. Numbers and truths are the texts that Arrow makes.

    Raises:
        ValueError: if it is neither a text nor a number that has one text.
    """
    value = plain(value)
    if isinstance(value, bytes):
        value = value.decode()
    elif isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, int | float):
        value = str(whole_of(value))
    elif isinstance(value, Decimal):
        value = format(value, "f")
    if value is None or value == "" or value in nulls.texts:
        return None
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def plain(value: object) -> object:
    """Return a scalar of NumPy as one of Python; None for what is missing."""
    if type(value) in (int, str, bool):
        return value
    if isinstance(value, np.datetime64):
        value = value.astype("datetime64[us]")  # of nanoseconds, Python has a number
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value).__name__ in _PANDAS_MISSING:
        return None
    return None if isinstance(value, float | Decimal) and math.isnan(value) else value
