"""Number formats and the file of an exported model's embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dlrm_fused.inference.export.loader import Table

TABLE_DTYPES = ("fp32", "fp16", "int8")

_LARGEST = 127  # the largest int8; -128 is left out, so that both signs have one scale


def convert(weight: NDArray[np.float32], dtype: str) -> Table:
    """Return a table [rows, dim] in one of :data:`TABLE_DTYPES`.

    In int8, a row is rounded to multiples of its largest absolute value / 127, its scale.
    """
    if dtype == "fp32":
        return Table(weight)
    if dtype == "fp16":
        return Table(weight.astype(np.float16))
    scales = np.abs(weight).max(axis=1) / np.float32(_LARGEST)
    divisors = np.where(scales > 0, scales, np.float32(1))
    return Table(np.rint(weight / divisors[:, None]).astype(np.int8), scales)


def write_tables(path: Path, tables: Mapping[str, Table]) -> None:
    """Write the tables, by name, to a safetensors file, as :mod:`dlrm_fused.inference.export.loader` describes it."""
    arrays = {}
    for name, table in tables.items():
        arrays[f"{name}.rows"] = table.rows
        if table.scales is not None:
            arrays[f"{name}.scales"] = table.scales
    save_file(arrays, path)
