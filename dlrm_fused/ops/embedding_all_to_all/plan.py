"""Which rows and columns go to which rank, at which byte, for given batch sizes; also as tensors that kernels read."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all.layout import ExchangeLayout, LookupLayout
from dlrm_fused.symmetric import SymmetricMemory

_ALIGNMENT = 4096  # bytes: what a ready word can express


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a local tensor that belong at one place in a peer's memory."""

    peer: int
    source_row: int
    source_column: int
    offset: int  # bytes into the peer's memory
    stride: int  # elements between rows there
    width: int
    rows: int
    item_size: int  # bytes of an element there


# Columns of a program's tile.
TILE_COLUMNS = 512
# Bags of a feature, in the bytes that tell which partial sums are not empty, are rounded up to it.
PRESENCE_UNIT = 16


def tile_table(tiles: Sequence[Tile], device: torch.device) -> Tensor:
    """The tiles as the kernel wants them: int64 [n, 7], none wider than a tile, fields in their order."""
    narrow = [
        replace(
            tile,
            source_column=tile.source_column + begin_column,
            offset=tile.offset + begin_column * tile.item_size,
            width=min(TILE_COLUMNS, tile.width - begin_column),
        )
        for tile in tiles
        for begin_column in range(0, tile.width if tile.rows else 0, TILE_COLUMNS)
    ]
    rows = [astuple(tile)[:7] for tile in narrow]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 7).to(device, non_blocking=True)


class BatchPlan:
    """What depends on the batch sizes: where everything lies, and the tables that tell kernels so.

    Attributes:
        batch_sizes: bags of each rank.
        starts: first bag of each rank in the global batch, and the end.
        fingerprint: equal on ranks that agree on the batch sizes.
        is_staged: everything is received in another dtype than the output's, hence not in the output itself.
    """

    def __init__(
        self,
        layout: ExchangeLayout,
        rank: int,
        batch_sizes: tuple[int, ...],
        output_dtype: torch.dtype,
        forward_wire: torch.dtype,
        backward_wire: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layout, self._rank, self._device = layout, rank, device
        self._own = layout.lookups[rank]
        self.batch_sizes = batch_sizes
        self.starts = (0, *itertools.accumulate(batch_sizes))
        self.local_batch = batch_sizes[rank]
        self.global_batch = self.starts[-1]
        # 30 bits, so that a kernel's argument has the same type for all batches.
        self.fingerprint = zlib.crc32(repr(batch_sizes).encode()) >> 2
        self._forward_dtype, self._backward_dtype = forward_wire, backward_wire
        self._wire, self._gradient_wire = forward_wire.itemsize, backward_wire.itemsize
        self._output_item = output_dtype.itemsize
        self.is_staged = forward_wire != output_dtype

    @cached_property
    def rotation(self) -> tuple[int, ...]:
        """Destinations in the order in which this rank serves them: the next rank first, itself last."""
        world = len(self.batch_sizes)
        return tuple((self._rank + 1 + i) % world for i in range(world))

    def output_size(self, rank: int) -> int:
        """Bytes of a rank's output."""
        return self.batch_sizes[rank] * self._layout.columns * self._output_item

    def partial_sums_offset(self, rank: int) -> int:
        """Byte in a rank's staging memory where the partial sums of rank 0 begin."""
        return _aligned(self.batch_sizes[rank] * self._layout.columns * self._wire) if self.is_staged else 0

    def staging_size(self, rank: int) -> int:
        """Bytes that a rank needs for what does not travel straight into the output."""
        presence = len(self.batch_sizes) * self._layout.row_wise_features * self.presence_stride(rank)
        return self.presence_offset(rank) + presence

    def presence_offset(self, rank: int) -> int:
        """Byte in a rank's staging memory where it is told which partial sums are not empty."""
        partial_sums = len(self.batch_sizes) * self.batch_sizes[rank] * self._layout.row_wise_columns * self._wire
        return self.partial_sums_offset(rank) + _aligned(partial_sums)

    def presence_stride(self, rank: int) -> int:
        """Bytes between the features there: one for each bag, rounded up."""
        return -(-self.batch_sizes[rank] // PRESENCE_UNIT) * PRESENCE_UNIT

    def gradients_size(self, rank: int) -> int:
        """Bytes of the gradients of all lookups of a rank."""
        return sum(_aligned(self.global_batch * lookup.width * self._gradient_wire) for lookup in self._layout.lookups[rank])

    def gradients_offset(self, rank: int, lookup: int) -> int:
        """Byte where the gradients [global batch, width] of a rank's lookup begin."""
        before = self._layout.lookups[rank][:lookup]
        return sum(_aligned(self.global_batch * other.width * self._gradient_wire) for other in before)

    def destination(self, lookup: int, peer: int) -> tuple[int, int]:
        """Where a peer receives a lookup of this rank: byte offset of its first row, elements between rows.

        In the output, to whose offset it is relative, or in the staging memory; see :meth:`goes_to_staging`.
        """
        if not self._own[lookup].row_wise:
            return 0, self._layout.columns
        stride = self._layout.row_wise_columns
        return self.partial_sums_offset(peer) + self._rank * self.batch_sizes[peer] * stride * self._wire, stride

    def goes_to_staging(self, lookup: int) -> bool:
        """Whether a lookup of this rank is received in staging memory, not in the output itself."""
        return self.is_staged or self._own[lookup].row_wise

    def pooled_tiles(self, lookup: int) -> list[Tile]:
        """What of a lookup's result [global batch, width] goes where."""
        runs = LookupLayout(self._layout.destination_columns(self._rank, lookup), self._own[lookup].dims).runs()
        tiles = []
        for peer in self.rotation:
            offset, stride = self.destination(lookup, peer)
            for source, column, width in runs:
                place = offset + column * self._wire
                tiles.append(Tile(peer, self.starts[peer], source, place, stride, width, self.batch_sizes[peer], self._wire))
        return tiles

    @cached_property
    def pooled_tables(self) -> list[Tensor]:
        """:meth:`pooled_tiles` of each lookup of this rank, for the kernel."""
        return [tile_table(self.pooled_tiles(lookup), self._device) for lookup in range(len(self._own))]

    @cached_property
    def bag_tables(self) -> list[Tensor]:
        """What the lookup kernel needs to know of the ranks, for each lookup of this rank.

        int64 [3 * ranks + 1]: the first bag of each rank and the end, the byte where each rank receives the lookup, and the
        byte where it is told which partial sums are not empty.
        """
        peers, features = range(len(self.batch_sizes)), self._layout.row_wise_features
        tables = []
        for lookup in range(len(self._own)):
            first = self._rank * features + self._layout.first_row_wise_feature(self._rank, lookup)
            bases = [self.destination(lookup, peer)[0] for peer in peers]
            presence = [self.presence_offset(peer) + first * self.presence_stride(peer) for peer in peers]
            tables.append(torch.tensor([*self.starts, *bases, *presence]).to(self._device, non_blocking=True))
        return tables

    @cached_property
    def gradient_table(self) -> Tensor:
        """:meth:`gradient_tiles` for the kernel."""
        return tile_table(self.gradient_tiles(), self._device)

    @cached_property
    def empty_table(self) -> Tensor:
        """No tile."""
        return tile_table([], self._device)

    def gradient_tiles(self) -> list[Tile]:
        """What of the output's gradient [local batch, columns] goes where."""
        tiles = []
        for peer in self.rotation:
            for number, lookup in enumerate(self._layout.lookups[peer]):
                begin = self.gradients_offset(peer, number) + self.starts[self._rank] * lookup.width * self._gradient_wire
                for source, column, width in lookup.runs():
                    place = begin + source * self._gradient_wire
                    tiles.append(Tile(peer, 0, column, place, lookup.width, width, self.local_batch, self._gradient_wire))
        return tiles

    def partial_sums_view(self, staging: SymmetricMemory) -> Tensor:
        """[ranks, local batch, row-wise columns] as received by this rank, in the wire's dtype."""
        shape = (len(self.batch_sizes), self.local_batch, self._layout.row_wise_columns)
        return _view(staging, self.partial_sums_offset(self._rank), shape, self._forward_dtype)

    def presence_view(self, staging: SymmetricMemory) -> Tensor:
        """uint8 [ranks, row-wise features, bags, rounded up] as received by this rank: 1 where a partial sum was sent."""
        shape = (len(self.batch_sizes), self._layout.row_wise_features, self.presence_stride(self._rank))
        return _view(staging, self.presence_offset(self._rank), shape, torch.uint8)

    def staged_view(self, staging: SymmetricMemory) -> Tensor:
        """[local batch, columns] as received by this rank, in the wire's dtype; nothing in the row-wise columns."""
        return _view(staging, 0, (self.local_batch, self._layout.columns), self._forward_dtype)

    def gradients_view(self, gradients: SymmetricMemory, lookup: int) -> Tensor:
        """[global batch, width] of a lookup of this rank, in the wire's dtype."""
        shape = (self.global_batch, self._own[lookup].width)
        return _view(gradients, self.gradients_offset(self._rank, lookup), shape, self._backward_dtype)

    def row_wise_runs(self) -> list[tuple[int, int, int]]:
        """(column among the partial sums, column in the output, width)."""
        own = [lookup for lookup in self._own if lookup.row_wise]
        columns = tuple(column for lookup in own for column in lookup.columns)
        return LookupLayout(columns, tuple(dim for lookup in own for dim in lookup.dims)).runs()

    def direct_runs(self) -> list[tuple[int, int]]:
        """(column, width) of what is no partial sum, for the conversion from the wire's dtype."""
        covered = sorted((column, width) for _, column, width in self.row_wise_runs())
        runs, begin = [], 0
        for column, width in [*covered, (self._layout.columns, 0)]:
            if column > begin:
                runs.append((begin, column - begin))
            begin = column + width
        return runs


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(memory: SymmetricMemory, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = math.prod(shape) * dtype.itemsize
    return memory.local[offset : offset + size].view(dtype).view(shape)
