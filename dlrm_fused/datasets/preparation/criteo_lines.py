"""Parsing lines of the Criteo layout: label, 13 integers, 26 hexadecimal ids; tab-separated, empty where missing."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

DENSE_FEATURES = tuple(f"int_{i}" for i in range(13))
SPARSE_FEATURES = tuple(f"cat_{i}" for i in range(26))
COLUMNS = ("label", *DENSE_FEATURES, *SPARSE_FEATURES)
_SCHEMA = {
    "label": pl.UInt8,
    **dict.fromkeys(DENSE_FEATURES, pl.Int32),
    **dict.fromkeys(SPARSE_FEATURES, pl.String),
}
_BYTES = b"0123456789abcdefABCDEF-\t\n"
_WELL_FORMED = re.compile(rb"[01](?:\t(?:-?\d{1,9})?){13}(?:\t[0-9a-fA-F]{0,8}){26}")
_INTEGER = re.compile(rb"-?\d+")
_HEX = re.compile(rb"[0-9a-fA-F]+")
_INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True)
class Rows:
    """Well-formed lines, n of them, in their order.

    Attributes:
        malformed: (line, reason) of those left out; the first line is 0.
        numbers: ``[n]``, their lines.
        labels: ``[n]`` uint8.
        dense: ``[n, 13]`` int32, 0 where missing.
        ids: a column of n uint32 for each sparse feature, null where missing.
    """

    malformed: list[tuple[int, str]]
    numbers: NDArray[np.int64]
    labels: NDArray[np.uint8]
    dense: NDArray[np.int32]
    ids: pl.DataFrame


def parse_lines(data: bytes) -> Rows:
    """Parse whole lines; whatever is malformed is left out and told."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    if not data.endswith(b"\n"):
        data += b"\n"
    lines = data.count(b"\n")
    table = _parse_well_formed(data, lines)
    malformed: list[tuple[int, str]] = []
    if table is None:
        data, malformed = _leave_out_malformed(data)
        table = _parse_well_formed(data, lines - len(malformed))
        assert table is not None, "malformed_reason() accepted a line that the parser does not"
    return Rows(
        malformed,
        numbers=np.delete(np.arange(lines), [number for number, _ in malformed]),
        labels=table["label"].to_numpy(),
        dense=table.select(DENSE_FEATURES).fill_null(0).to_numpy(order="c"),
        ids=table.select(SPARSE_FEATURES),
    )


def _parse_well_formed(data: bytes, lines: int) -> pl.DataFrame | None:
    """Return the columns of ``data``, or None if any of its lines is malformed."""
    if not lines:
        return pl.DataFrame(schema={**_SCHEMA, **dict.fromkeys(SPARSE_FEATURES, pl.UInt32)})
    # polars fills up short lines, and takes a plus sign or blanks for part of a number.
    if data.translate(None, _BYTES) or data.count(b"\t") != lines * (len(COLUMNS) - 1):
        return None
    try:
        table = pl.read_csv(data, has_header=False, separator="\t", quote_char=None, schema=_SCHEMA)
    except pl.exceptions.PolarsError:
        return None
    ids = table.select(pl.col(SPARSE_FEATURES).str.to_integer(base=16, dtype=pl.UInt32, strict=False))
    well_formed = (
        table.height == lines
        and table["label"].null_count() == 0
        and table["label"].max() in (0, 1)
        and ids.null_count().equals(table.select(SPARSE_FEATURES).null_count())
    )
    return table.with_columns(ids) if well_formed else None


def _leave_out_malformed(data: bytes) -> tuple[bytes, list[tuple[int, str]]]:
    good: list[bytes] = []
    malformed: list[tuple[int, str]] = []
    for number, line in enumerate(data[:-1].split(b"\n")):
        reason = None if _WELL_FORMED.fullmatch(line) else malformed_reason(line)
        if reason is None:
            good.append(line + b"\n")
        else:
            malformed.append((number, reason))
    return b"".join(good), malformed


def malformed_reason(line: bytes) -> str | None:
    """Why a line (without its end) cannot be used; None if it can."""
    if not line:
        return "empty line"
    fields = line.split(b"\t")
    if len(fields) == len(COLUMNS) - 1:
        return f"{len(fields)} columns, expected {len(COLUMNS)}; a test file without labels has {len(fields)}"
    if len(fields) != len(COLUMNS):
        return f"{len(fields)} columns, expected {len(COLUMNS)}"
    if fields[0] not in (b"0", b"1"):
        return f"label is {_shown(fields[0])}, not 0 or 1"
    for name, field in zip(COLUMNS[1:14], fields[1:14], strict=True):
        if field and not _INTEGER.fullmatch(field):
            return f"{name} is {_shown(field)}, not an integer"
        if field and int(field) not in _INT32:
            return f"{name} is {_shown(field)}, out of the range of int32"
    for name, field in zip(COLUMNS[14:], fields[14:], strict=True):
        if field and not _HEX.fullmatch(field):
            return f"{name} is {_shown(field)}, not a hexadecimal id"
        if field and int(field, 16) >= 2**32:
            return f"{name} is {_shown(field)}, an id of more than 32 bits"
    return None


def _shown(field: bytes) -> str:
    return repr(field[:40].decode("utf-8", errors="backslashreplace"))
