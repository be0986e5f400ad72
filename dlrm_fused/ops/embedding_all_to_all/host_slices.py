"""The slices that travel between ranks of different hosts, for given batch sizes: what is in them, and tables for kernels.

A rank sends to one of another host its results for that one's bags, those of row-wise tables left out, and the gradients of
that one's results; a counterpart also gets the gradients of row-wise tables, for its host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dlrm_fused.lasting import lasting_property
from dlrm_fused.ops.embedding_all_to_all.byte_layout import ByteLayout, Tile, runs_of
from dlrm_fused.symmetric.device import round_up
from dlrm_fused.symmetric.hosts import Hosts

_ALIGNMENT = 16  # bytes that kernels store at a time
# Columns of a program's tile.
TILE_COLUMNS = 512


def tile_table(tiles: Sequence[Tile], device: torch.device) -> Tensor:
    """The tiles as the kernel wants them: int64 [n, 8], none wider than a tile, fields in their order, without the size."""
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
    rows = [(*fields, stride) for *fields, _, stride in map(astuple, narrow)]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 8).to(device, non_blocking=True)


@dataclass(frozen=True)
class SlicesInBuffer:
    """Slices for ranks of other hosts, side by side in one buffer.

    Attributes:
        shapes: by rank, rows and columns.
    """

    shapes: dict[int, tuple[int, int]]
    dtype: torch.dtype

    @cached_property
    def begins(self) -> dict[int, int]:
        """By rank, the byte at which its slice begins."""
        ends = itertools.accumulate((round_up(self._size(rank), _ALIGNMENT) for rank in self.shapes), initial=0)
        return dict(zip(self.shapes, ends, strict=False))

    @cached_property
    def bytes(self) -> int:
        """Bytes of all of them, and of what lies between."""
        return sum(round_up(self._size(rank), _ALIGNMENT) for rank in self.shapes)

    def new_buffer(self, device: torch.device) -> Tensor:
        """Return a uint8 buffer for all of them."""
        return torch.empty(self.bytes, dtype=torch.uint8, device=device)

    def of(self, buffer: Tensor) -> dict[int, Tensor]:
        """By rank, its slice in a buffer."""
        return {
            rank: buffer[begin : begin + self._size(rank)].view(self.dtype).view(self.shapes[rank])
            for rank, begin in self.begins.items()
        }

    def tile(self, rank: int, tile: Tile) -> Tile:
        """Return a tile of a rank's slice as one of the buffer."""
        begin = self.begins[rank] // self.dtype.itemsize
        return replace(tile, source_column=begin + tile.source_column, source_stride=self.shapes[rank][1])

    def _size(self, rank: int) -> int:
        rows, columns = self.shapes[rank]
        return rows * columns * self.dtype.itemsize


@dataclass(frozen=True)
class HostSlices:
    """The slices that one rank sends and receives.

    Attributes:
        places: of all data.
        forward_wire, backward_wire: the dtypes of results, and of gradients, that travel.
        device: of the tables.
    """

    places: ByteLayout
    forward_wire: torch.dtype
    backward_wire: torch.dtype
    device: torch.device

    @property
    def _hosts(self) -> Hosts:
        return self.places.hosts

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """By rank, columns of its lookups that are not row-wise: of the slices that it sends of its results."""
        return tuple(sum(lookup.width for lookup in lookups if not lookup.row_wise) for lookups in self.places.layout.lookups)

    @property
    def width(self) -> int:
        """Columns of the slices that this rank sends of its results."""
        return self.widths[self._hosts.rank]

    @cached_property
    def runs(self) -> list[list[tuple[int, int, int]]]:
        """By rank, (column in the slice, column in the output, width) of a slice of its results."""
        lookups = self.places.layout.lookups
        return [runs_of(lookup for lookup in of_rank if not lookup.row_wise) for of_rank in lookups]

    @cached_property
    def gradient_runs(self) -> dict[int, list[tuple[int, int, int]]]:
        """By rank of another host, (column in the slice, column in the output, width) of the gradients that it is sent."""
        row_wise, counterparts = self.places.row_wise_runs, self._hosts.counterparts()
        return {
            rank: self.runs[rank]
            + [(self.widths[rank] + source, column, width) for source, column, width in row_wise if rank in counterparts]
            for rank in self._hosts.remote
        }

    def gradient_width(self, sender: int, rank: int) -> int:
        """Columns of the gradients that a sender has for a rank of another host."""
        is_counterpart = self._hosts.counterpart(sender, self._hosts.of_rank[rank]) == rank
        return self.widths[rank] + (self.places.layout.row_wise_columns if is_counterpart else 0)

    @lasting_property
    def receivers(self) -> Tensor:
        """The receivers of slices that are not empty, which all lie in one buffer."""
        rows = [[rank, 0, 0] for rank in self._hosts.remote if self.places.batch_sizes[rank]]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 3).to(self.device, non_blocking=True)

    @lasting_property
    def bags(self) -> Tensor:
        """As :attr:`~dlrm_fused.ops.embedding_all_to_all.plan.BatchPlan.bag_tables`, where the kernel writes slices."""
        begins = [self.results.begins.get(rank, 0) for rank in range(len(self.widths))]
        return torch.tensor([*self.places.starts, *begins]).to(self.device, non_blocking=True)

    @cached_property
    def results(self) -> SlicesInBuffer:
        """The slices [bags, width] that this rank sends of its results."""
        shapes = {rank: (self.places.batch_sizes[rank], self.width) for rank in self._hosts.remote}
        return SlicesInBuffer(shapes, self.forward_wire)

    @cached_property
    def gradients(self) -> SlicesInBuffer:
        """The slices [bags, width] that this rank sends of its output's gradient."""
        own = self._hosts.rank
        widths = {rank: self.gradient_width(own, rank) for rank in self._hosts.remote}
        shapes = {rank: (self.places.batch_sizes[own], width) for rank, width in widths.items()}
        return SlicesInBuffer(shapes, self.backward_wire)

    @cached_property
    def received_results(self) -> SlicesInBuffer:
        """The slices [bags, width] of results that this rank receives."""
        own = self._hosts.rank
        shapes = {sender: (self.places.batch_sizes[own], self.widths[sender]) for sender in self._hosts.remote}
        return SlicesInBuffer(shapes, self.forward_wire)

    @lasting_property
    def pooled_spread_table(self) -> Tensor:
        """The places in this rank's output of all results that it receives."""
        own, columns, item = self._hosts.rank, self.places.layout.columns, self.places.wire_item
        tiles = [
            self.received_results.tile(sender, Tile(own, 0, source, column * item, columns, width, rows, item))
            for sender, (rows, _) in self.received_results.shapes.items()
            for source, column, width in self.runs[sender]
        ]
        return tile_table(tiles, self.device)

    @cached_property
    def spread_tiles(self) -> dict[int, list[Tile]]:
        """By rank of another host, the tiles of its slice of gradients, each with the place where it is stored.

        They are this rank's own columns, and, from a counterpart, those of row-wise tables at all ranks of this host.
        """
        return {sender: self._spread_tiles(sender) for sender in self._hosts.remote}

    def _spread_tiles(self, sender: int) -> list[Tile]:
        tiles = self.places.tiles_of_gradient(sender, self._hosts.rank, packed=True, row_wise=False)
        for rank in self._hosts.local_rotation if sender in self._hosts.served else ():
            row_wise = self.places.tiles_of_gradient(sender, rank, packed=True, row_wise=True)
            tiles += [replace(tile, source_column=tile.source_column + self.width) for tile in row_wise]
        return tiles

    @cached_property
    def gradient_begins(self) -> dict[int, int]:
        """By rank of another host whose slice of gradients lies among this rank's as it comes: the byte at which it begins."""
        own = self._hosts.rank
        widths = {sender: self.gradient_width(sender, own) for sender in self._hosts.remote}
        return {
            sender: tiles[0].offset
            for sender, tiles in self.spread_tiles.items()
            if len(tiles) == 1 and tiles[0].peer == own and tiles[0].stride == tiles[0].width == widths[sender]
        }

    @cached_property
    def received_gradients(self) -> SlicesInBuffer:
        """The slices [bags, width] of gradients that this rank receives, and that do not lie where they belong as they come."""
        own = self._hosts.rank
        shapes = {
            sender: (self.places.batch_sizes[sender], self.gradient_width(sender, own))
            for sender in self._hosts.remote
            if sender not in self.gradient_begins
        }
        return SlicesInBuffer(shapes, self.backward_wire)

    @lasting_property
    def spread_table(self) -> Tensor:
        """The places of :attr:`received_gradients`: :attr:`spread_tiles` for the kernel."""
        received = self.received_gradients
        return tile_table(
            [received.tile(sender, tile) for sender in received.shapes for tile in self.spread_tiles[sender]], self.device
        )

    @lasting_property
    def gradient_buffer_table(self) -> Tensor:
        """The places of the output's gradient in a buffer of all slices."""
        item, rows = self.places.gradient_item, self.places.batch_sizes[self._hosts.rank]
        tiles = [
            Tile(0, 0, column, begin + source * item, self.gradients.shapes[rank][1], width, rows, item)
            for rank, begin in self.gradients.begins.items()
            for source, column, width in self.gradient_runs[rank]
        ]
        return tile_table(tiles, self.device)

    @lasting_property
    def remote_places(self) -> Tensor:
        """int64, for each row of a feature of the ranks of other hosts and each local bag: its number where the output is seen
        as rows of :attr:`ExchangeLayout.row_dim` columns."""
        layout = self.places.layout
        dim = layout.row_dim
        assert dim is not None, "the output does not divide into rows"
        own = [lookup for rank in self._hosts.remote for lookup in layout.lookups[rank] if not lookup.row_wise]
        features = [feature for lookup in own for feature in zip(lookup.columns, lookup.dims, strict=True)]
        rows = torch.tensor([row for column, width in features for row in range(column // dim, (column + width) // dim)])
        bags = torch.arange(self.places.batch_sizes[self._hosts.rank])
        return (bags * (layout.columns // dim) + rows.long()[:, None]).flatten()
