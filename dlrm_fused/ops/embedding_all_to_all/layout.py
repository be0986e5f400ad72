"""The columns of the output that each rank's lookups produce; also as tensors that kernels read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.lasting import lasting

# Columns of a row that is worth to be looked for among others.
_LEAST_ROW_DIM = 4


@dataclass(frozen=True)
class LookupLayout:
    """The columns that one lookup of one rank produces.

    Attributes:
        columns: first column in the output of each of its features.
        dims: width of each feature.
        row_wise: its results are partial sums: every rank has a lookup with the same columns, and the destination adds them
            in the order of ranks.
    """

    columns: tuple[int, ...]
    dims: tuple[int, ...]
    row_wise: bool = False

    @property
    def width(self) -> int:
        """Columns of its own result."""
        return sum(self.dims)

    def runs(self) -> list[tuple[int, int, int]]:
        """(column in the result, column in the output, width) of the longest stretches that lie side by side in both."""
        merged: list[tuple[int, int, int]] = []
        source = 0
        for column, dim in zip(self.columns, self.dims, strict=True):
            if merged and merged[-1][1] + merged[-1][2] == column:
                begin, first, width = merged.pop()
                merged.append((begin, first, width + dim))
            else:
                merged.append((source, column, dim))
            source += dim
        return merged


@dataclass(frozen=True)
class ExchangeLayout:
    """The lookups of every rank, in order, and the number of columns of the output."""

    lookups: tuple[tuple[LookupLayout, ...], ...]
    columns: int

    def check(self, world_size: int) -> None:
        """Raise UsageError unless every column is produced exactly once, or by all ranks in row-wise lookups."""
        if len(self.lookups) != world_size:
            raise UsageError(f"layout.lookups has {len(self.lookups)} ranks, the process group {world_size}")
        producers = [0] * self.columns
        for rank, lookups in enumerate(self.lookups):
            for number, lookup in enumerate(lookups):
                _check_lookup(lookup, f"layout.lookups[{rank}][{number}]", self.columns)
                for column, dim in zip(lookup.columns, lookup.dims, strict=True):
                    for i in range(column, column + dim):
                        producers[i] += 1 if not lookup.row_wise else world_size**2 + 1
        row_wise = [[lookup for lookup in lookups if lookup.row_wise] for lookups in self.lookups]
        for rank, partial in enumerate(row_wise):
            if partial != row_wise[0]:
                raise UsageError(
                    f"layout.lookups[{rank}]: its row-wise lookups differ from those of rank 0; they must be equal"
                )
        for column, count in enumerate(producers):
            if count not in (1, world_size * (world_size**2 + 1)):
                raise UsageError(
                    f"layout: column {column} of the output is produced {count % (world_size**2 + 1)} times, not once"
                )

    @property
    def row_wise_columns(self) -> int:
        """Columns that arrive as partial sums."""
        return sum(lookup.width for lookup in self.lookups[0] if lookup.row_wise)

    def width(self, rank: int) -> int:
        """Columns of all results of a rank."""
        return sum(lookup.width for lookup in self.lookups[rank])

    @property
    def row_wise_features(self) -> int:
        """Features that arrive as partial sums."""
        return sum(len(lookup.dims) for lookup in self.lookups[0] if lookup.row_wise)

    def first_row_wise_feature(self, rank: int, lookup: int) -> int:
        """Number of a lookup's first feature among those that arrive as partial sums."""
        return sum(len(other.dims) for other in self.lookups[rank][:lookup] if other.row_wise)

    def destination_columns(self, rank: int, lookup: int) -> tuple[int, ...]:
        """First column of each feature of a lookup where it is received: in the output, or among the partial sums."""
        own = self.lookups[rank][lookup]
        return self.slice_columns(rank, lookup) if own.row_wise else own.columns

    @property
    def row_dim(self) -> int | None:
        """The most columns by which the output divides into rows of one feature each, row-wise ones left out.

        None if that is fewer than 4, for which to look for rows that are equal is not worth its time, or all are row-wise.
        """
        own = [lookup for lookups in self.lookups for lookup in lookups if not lookup.row_wise]
        dim = math.gcd(*(number for lookup in own for number in (*lookup.columns, *lookup.dims, self.columns)))
        return dim if dim >= _LEAST_ROW_DIM else None

    def rows_of_features(self, rank: int) -> list[int]:
        """Return the number of rows of :attr:`row_dim` columns of each feature of a rank's lookups, row-wise ones left out."""
        assert self.row_dim is not None, "the output does not divide into rows"
        return [dim // self.row_dim for lookup in self.lookups[rank] if not lookup.row_wise for dim in lookup.dims]

    def slice_columns(self, rank: int, lookup: int) -> tuple[int, ...]:
        """First column of each feature of a lookup in a slice of a rank's results, which has no gaps: among the partial sums
        for row-wise lookups, and among all other columns for the others."""
        own = self.lookups[rank]
        first = sum(other.width for other in own[:lookup] if other.row_wise == own[lookup].row_wise)
        return tuple(itertools.accumulate(own[lookup].dims[:-1], initial=first))


def _check_lookup(lookup: LookupLayout, name: str, columns: int) -> None:
    if len(lookup.columns) != len(lookup.dims):
        raise UsageError(f"{name}: {len(lookup.columns)} columns but {len(lookup.dims)} dims")
    for column, dim in zip(lookup.columns, lookup.dims, strict=True):
        if dim <= 0 or dim % 4 or column % 4:
            raise UsageError(f"{name}: column={column}, dim={dim}; both must be multiples of 4, and dim positive")
        if column < 0 or column + dim > columns:
            raise UsageError(f"{name}: columns {column} to {column + dim} lie outside the output's {columns}")


@dataclass(frozen=True)
class FeatureTable:
    """Features of one lookup whose dims have the same next power of two.

    Attributes:
        table: int64 [count, 4]: number of the feature in the lookup, first element of its table (where partial sums are added
            up: its column among them), dim, column at the destination.
        vector: elements, 4 or 8, that divide dims, columns and first elements.
        is_exact: all dims equal block_dim.
    """

    table: Tensor
    count: int
    block_dim: int
    vector: int
    is_exact: bool


@lasting
def feature_tables(
    sources: Sequence[int], dims: Sequence[int], columns: Sequence[int], device: torch.device
) -> list[FeatureTable]:
    """Return each feature's source, dim and destination column for a kernel, by block dim."""
    by_block: dict[int, list[tuple[int, int, int, int]]] = {}
    for feature, (source, dim, column) in enumerate(zip(sources, dims, columns, strict=True)):
        by_block.setdefault(1 << (dim - 1).bit_length(), []).append((feature, source, dim, column))
    return [
        FeatureTable(
            table=torch.tensor(rows, dtype=torch.int64, device=device),
            count=len(rows),
            block_dim=block_dim,
            vector=8 if all(value % 8 == 0 for row in rows for value in row[1:]) else 4,
            is_exact=all(dim == block_dim for _, _, dim, _ in rows),
        )
        for block_dim, rows in sorted(by_block.items())
    ]
