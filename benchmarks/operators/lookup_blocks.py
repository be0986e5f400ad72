"""Blocks of the fused lookup that are worth a measurement; see tune.py. One rank will do: then stores stay in the GPU.

Indices are uniform over tables much larger than the L2 cache.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.operators.embedding_lookups import JAGGED_MEAN, TUNED_SIZES, Cell
from benchmarks.operators.tune import Tunable, fastest_blocks
from dlrm_fused.ops.common.gpus import GPUS
from dlrm_fused.ops.embedding_all_to_all import tuning
from dlrm_fused.ops.embedding_all_to_all.tuning import ALL, Blocks, LookupShape

# The table is that of this GPU.
_GPU = GPUS["NVIDIA H200"]
_GRID = _GPU.multiprocessors * 32
_OTHER_GRIDS = (_GPU.multiprocessors * 8, _GPU.multiprocessors * 16, _GPU.multiprocessors * 64, ALL)


def choices(cell: Cell, ranks: int) -> list[Blocks]:
    """Today's, then all others.

    A thread loads 1 to 8 times 16 bytes of each of its rows, 16 times in all at most. The rows that a warp loads at once are of
    as many bags, or of one.
    """
    pooling = JAGGED_MEAN if isinstance(cell.pooling, str) else cell.pooling
    row_bytes = cell.dim * cell.torch_dtype.itemsize
    rows_of_warp = max(1, 32 * 16 // row_bytes)
    shape = LookupShape(cell.dim, cell.torch_dtype, float(pooling), cell.tables * cell.bags)
    found = [tuning.choose_blocks(shape, _GPU)]
    for warps, loads, rows, split in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16), sorted({1, rows_of_warp})):
        blocks = Blocks(32 * warps * 16 * loads // (row_bytes * split), rows, warps, _GRID, split)
        useful = rows * split <= pooling and (rows * split > 1 or pooling < 8)
        if blocks.bags >= 1 and loads * rows <= 16 and useful and blocks.can_be_compiled:
            found.append(blocks)
    return found


def refined(fastest: Sequence[Blocks]) -> list[Blocks]:
    """The fastest with other numbers of programs."""
    return [replace(blocks, programs=programs) for blocks in fastest[:3] for programs in _OTHER_GRIDS]


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """The fastest of each shape as rows of ``lookup_blocks`` in ops/common/recorded, with programs of a multiprocessor."""
    found: dict[tuple[str, int, int], list[list[int | None]]] = {}
    sizes = {shape: name for name, shape in TUNED_SIZES.items()}
    for cell in cells:
        bags, rows, warps, programs, split = fastest_blocks(cell)
        own = None if programs == ALL else programs // _GPU.multiprocessors
        element = Cell(*(cell[key] for key in _FIELDS)).torch_dtype.itemsize
        size = sizes.get((cell["tables"], cell["bags"]), "")
        found.setdefault((size, element, cell["dim"]), []).append([bags, rows, warps, own, split])
    return "\n".join(f"{json.dumps([*kind, blocks])}," for kind, blocks in found.items())


_FIELDS = ("tables", "bags", "pooling", "dim", "dtype", "indices")
TUNABLE = Tunable(
    choices=choices,
    override=tuning.override,
    table=table,
    cells="lookups",
    contestants={"forward": "fused"},
    unlike=("lookup",),
    refined=refined,
)
