"""The cells of the embedding benchmark: shapes, and the lookups that are drawn for them.

A cell is one embedding stage of a model on all ranks. Table-wise, a rank holds its own tables and looks up the bags of all
ranks in them; row-wise, every rank holds ``rows`` rows of each table, and looks up what of each bag falls among them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROWS = 1_000_000
_LARGEST_TABLES = 60e9  # bytes of the tables of a rank
JAGGED_MEAN = 20
_ZIPF_EXPONENT = 1.05
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}

TABLES, BAGS, DIMS = (8, 16, 64), (512, 2048, 8192), (32, 64, 128, 256)
POOLINGS: tuple[int | str, ...] = (1, 8, 32, 100, "jagged")
DISTRIBUTIONS = ("uniform", "zipf")
# Tables and bags of the shapes for which blocks are tuned.
TUNED_SIZES = {"small": (8, 2048), "large": (16, 8192)}


@dataclass(frozen=True)
class Cell:
    """One shape.

    Attributes:
        tables: of each rank (table-wise), or of all ranks together (row-wise).
        bags: that a rank pools for each table: the global batch.
        pooling: rows in each bag, or ``jagged``: uniformly 0 to 40.
        dim: elements of a row.
        dtype: of the tables, ``fp32`` or ``fp16`` (FBGEMM trains no bf16 tables); pooled embeddings are fp32.
        indices: ``uniform``, or ``zipf`` with exponent 1.05 and the frequent rows scattered over the table.
        row_wise: else table-wise.
        largest_rows: rows of each table on a rank, unless that makes more than 60 GB.
    """

    tables: int
    bags: int
    pooling: int | str
    dim: int
    dtype: str
    indices: str
    row_wise: bool = False
    largest_rows: int = ROWS

    @property
    def name(self) -> str:
        pooling = self.pooling if self.pooling == "jagged" else f"pool{self.pooling}"
        kind = "row-wise " if self.row_wise else ""
        return f"{kind}{self.tables}x{self.bags} {pooling} dim{self.dim} {self.dtype} {self.indices}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def rows(self) -> int:
        """Return the rows of each table on a rank."""
        return self.with_tables_of(_LARGEST_TABLES).largest_rows

    def with_tables_of(self, bytes_: float) -> Cell:
        """The cell, with tables of at most so many bytes on a rank."""
        rows = int(bytes_ / (self.tables * self.dim * self.torch_dtype.itemsize))
        return replace(self, largest_rows=min(self.largest_rows, rows))

    @property
    def width(self) -> int:
        """Columns of a rank's pooled embeddings."""
        return self.tables * self.dim

    def columns(self, world_size: int) -> int:
        """Columns of the output."""
        return self.width if self.row_wise else self.width * world_size

    def forward_bytes(self, lookups: float, distinct_rows: float) -> float:
        """Bytes that a rank's memory must at least carry in the forward pass.

        Every distinct row and every index is read once; what a rank receives (or adds up, row-wise) is written once: as much
        as its pooled embeddings.
        """
        index_bytes = 8 * (lookups + self.tables * self.bags + 1)
        return distinct_rows * self.dim * self.torch_dtype.itemsize + index_bytes + 4 * self.bags * self.width

    def backward_bytes(self, lookups: float, distinct_rows: float) -> float:
        """Return the bytes of the backward pass: gradients and indices once, distinct rows and momentum read and written."""
        index_bytes = 8 * (lookups + self.tables * self.bags + 1)
        row_bytes = 2 * (self.dim * self.torch_dtype.itemsize + 4)
        return distinct_rows * row_bytes + index_bytes + 4 * self.bags * self.width

    def link_bytes(self, world_size: int) -> float:
        """Bytes that a rank sends to its peers in one direction, forward or backward, as fp32."""
        return 4 * self.bags * self.width * (world_size - 1) / world_size


def full_cells() -> list[Cell]:
    """All 45 combinations of tables, bags and pooling; dim, dtype and distribution vary so that every pair of values occurs.

    Three more are common shapes of models.
    """
    cells = []
    shapes = itertools.product(enumerate(TABLES), enumerate(BAGS), enumerate(POOLINGS))
    for (t, tables), (b, bags), (p, pooling) in shapes:
        dim, rest = divmod((5 * t + 13 * b + 9 * p) % 16, 4)
        cells.append(Cell(tables, bags, pooling, DIMS[dim], ("fp32", "fp16")[rest // 2], DISTRIBUTIONS[rest % 2]))
    cells += [
        Cell(16, 2048, 32, 128, "fp16", "uniform"),
        Cell(8, 8192, 32, 128, "fp32", "uniform"),
        Cell(64, 2048, 1, 128, "fp32", "zipf"),
    ]
    return cells


def small_cells() -> list[Cell]:
    """A few of all, with tables that fit on a GPU twice."""
    chosen = full_cells()[::6]
    return [cell.with_tables_of(_LARGEST_TABLES / 3) for cell in [*chosen, *row_wise_cells(chosen)]]


def tiny_cells() -> list[Cell]:
    """For a test on the CPU."""
    return [
        Cell(2, 24, 3, 8, "fp32", "uniform", largest_rows=500),
        Cell(2, 24, "jagged", 16, "fp32", "zipf", largest_rows=500),
    ]


def tuned_cells() -> list[Cell]:
    """The shapes of the lookup's table of blocks."""
    shapes = itertools.product(("fp32", "fp16"), TUNED_SIZES.values(), DIMS, (1, 8, 32, 100))
    return [Cell(tables, bags, pooling, dim, dtype, "uniform") for dtype, (tables, bags), dim, pooling in shapes]


def row_wise_cells(cells: list[Cell]) -> list[Cell]:
    """Every third cell (every cell of a short list), row-wise."""
    chosen = cells if len(cells) < 12 else cells[::3]
    return [Cell(c.tables, c.bags, c.pooling, c.dim, c.dtype, c.indices, True, c.largest_rows) for c in chosen]


@dataclass(frozen=True)
class Lookup:
    """A batch that a rank looks up.

    Attributes:
        indices: int64 [N].
        offsets: int64 [tables * bags + 1]: bag b of table t is ``indices[offsets[t * bags + b] : offsets[t * bags + b + 1]]``.
    """

    indices: Tensor
    offsets: Tensor


class LookupDrawer:
    """Draws lookups for a cell. Row-wise, ranks with the same seed draw the same bags, and keep the rows that are theirs."""

    def __init__(self, cell: Cell, rank: int, world_size: int, device: torch.device, seed: int = 0) -> None:
        self._cell, self._rank, self._device = cell, rank, device
        self._table_rows = cell.rows * (world_size if cell.row_wise else 1)
        self._generator = torch.Generator(device).manual_seed(seed if cell.row_wise else seed * world_size + rank)
        if cell.indices == "zipf":
            ranks = torch.arange(1, self._table_rows + 1, dtype=torch.float64, device=device)
            frequencies = ranks.pow_(-_ZIPF_EXPONENT).cumsum(0)
            self._cumulative = frequencies / frequencies[-1]
            self._scattered = torch.randperm(self._table_rows, generator=self._generator, device=device)

    def draw(self) -> Lookup:
        """The next one."""
        cell, device = self._cell, self._device
        bags = cell.tables * cell.bags
        if cell.pooling == "jagged":
            lengths = torch.randint(0, 2 * JAGGED_MEAN + 1, (bags,), generator=self._generator, device=device)
        else:
            lengths = torch.full((bags,), int(cell.pooling), device=device)
        bag_of = torch.repeat_interleave(torch.arange(bags, device=device), lengths)
        indices = self._draw_rows(bag_of // cell.bags)
        if cell.row_wise:
            first = self._rank * cell.rows
            own = (indices >= first) & (indices < first + cell.rows)
            lengths = torch.bincount(bag_of[own], minlength=bags)
            indices = indices[own] - first
        offsets = torch.zeros(bags + 1, dtype=torch.int64, device=device)
        torch.cumsum(lengths, 0, out=offsets[1:])
        return Lookup(indices, offsets)

    def _draw_rows(self, tables: Tensor) -> Tensor:
        """One row for each lookup, given its table."""
        if self._cell.indices == "uniform":
            return torch.randint(0, self._table_rows, tables.shape, generator=self._generator, device=self._device)
        points = torch.rand(tables.shape, dtype=torch.float64, generator=self._generator, device=self._device)
        by_frequency = torch.searchsorted(self._cumulative, points).clamp_(max=self._table_rows - 1)
        # Each table's scattering is this one, turned by another amount.
        return (self._scattered[by_frequency] + tables * 7919) % self._table_rows


def table_rows(cell: Cell, lookup: Lookup) -> Tensor:
    """Distinct rows of a lookup, int64, sorted; those of all tables counted on: row r of table t is t * cell.rows + r."""
    by_table = lookup.offsets[:: cell.bags]
    tables = torch.repeat_interleave(torch.arange(cell.tables, device=by_table.device), by_table.diff())
    return torch.unique(lookup.indices + tables * cell.rows)
