"""Choices that were measured, in one JSON file for each GPU in the folder ``recorded``.

Nothing there is needed for a right result: for other shapes there are rules, and ``auto`` measures for itself. Each table names
the commit, the command and the raw results that it is from. All schedules were measured on one host with NVLink.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

# Rows, columns and K of one rank; of an AllGather or a ReduceScatter, rows of all ranks.
Shape = tuple[int, int, int]

_FOLDER = Path(__file__).with_name("recorded")
# The GPU on which tiles of products and blocks of lookups were measured. Tiles hold for others with as many multiprocessors of
# its kind.
MEASURED_ON = "NVIDIA H200"


def recorded_schedules(gpu: str, operator: str, ranks: int, dtype: torch.dtype) -> dict[Shape, str]:
    """Return the fastest schedule of an operator by shape; empty where nothing is recorded.

    Args:
        gpu: its name, as ``torch.cuda.get_device_name`` returns it.
        operator: ``all_gather_gemm``, ``gemm_reduce_scatter``, ``gemm_all_to_all`` or ``gemv_all_reduce``.
    """
    return {
        (rows, columns, depth): name
        for table in _record(gpu).get("schedules", [])
        if (table["operator"], table["ranks"]) == (operator, ranks) and str(dtype).removeprefix("torch.") in table["dtypes"]
        for rows, columns, depth, name in table["fastest"]
    }


@functools.cache
def recorded_tiles() -> dict[tuple[int, int, int, int], tuple[int, ...]]:
    """Return the fastest tiles of a product, by rows, columns, K and bytes of an element of x: fields of ``Tiles``."""
    fastest = _record(MEASURED_ON)["gemm_tiles"]["fastest"]
    return {(rows, columns, depth, size): tuple(tiles) for rows, columns, depth, size, tiles in fastest}


def recorded_lookup_blocks() -> list[Any]:
    """Return [size, bytes of an element, block dim, fields of ``Blocks`` by length] of each measured kind of lookup."""
    return _record(MEASURED_ON)["lookup_blocks"]["fastest"]


def _record(gpu: str) -> dict[str, Any]:
    path = _FOLDER / f"{gpu.lower().replace(' ', '_')}.json"
    return json.loads(path.read_text()) if path.is_file() else {}
