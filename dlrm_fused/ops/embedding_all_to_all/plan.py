"""The byte at which each row and column is received on which rank, for given batch sizes; also as tensors for kernels."""

from __future__ import annotations

import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dlrm_fused.lasting import lasting_property
from dlrm_fused.ops.embedding_all_to_all.layout import ExchangeLayout, LookupLayout
from dlrm_fused.symmetric import SymmetricMemory
from dlrm_fused.symmetric.hosts import Hosts

_ALIGNMENT = 4096  # bytes: what a ready word can express
_SLICE_ALIGNMENT = 16  # bytes that kernels store at a time


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _kept(method: _Method) -> _Method:
    """Compute what a method of a plan returns only once for the same arguments; a plan serves many batches."""

    @functools.wraps(method)
    def of_plan(plan: BatchPlan, *args: int) -> Any:
        key = method.__name__, args
        if key not in plan.results:
            plan.results[key] = method(plan, *args)
        return plan.results[key]

    return cast(_Method, of_plan)


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
    """The places of all data for given batch sizes, and the tables that tell kernels so.

    Attributes:
        batch_sizes: bags of each rank.
        starts: first bag of each rank in the global batch, and the end.
        fingerprint: equal on ranks that agree on the batch sizes.
        is_staged: everything is received in another dtype than the output's, hence not in the output itself.
        results: of methods, by name and arguments.
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
        hosts: Hosts | None = None,
    ) -> None:
        """Args:
        hosts: of the ranks; None for one host.
        """
        self._layout, self._rank, self._device = layout, rank, device
        self.hosts = hosts or Hosts((tuple(range(len(batch_sizes))),), rank)
        self._own = layout.lookups[rank]
        self.batch_sizes = batch_sizes
        self.starts = (0, *itertools.accumulate(batch_sizes))
        self.local_batch = batch_sizes[rank]
        self.global_batch = self.starts[-1]
        # 30 bits, so that a kernel's argument has the same type for all batches.
        self.fingerprint = zlib.crc32(repr(batch_sizes).encode()) >> 2
        self._forward_dtype, self._backward_dtype = forward_wire, backward_wire
        self._wire, self._gradient_wire = forward_wire.itemsize, backward_wire.itemsize
        self._output_dtype = output_dtype
        self.is_staged = forward_wire != output_dtype
        self.results: dict[object, object] = {}

    def bags_of(self, rank: int) -> slice:
        """A rank's bags in the global batch."""
        return slice(self.starts[rank], self.starts[rank + 1])

    def output_size(self, rank: int) -> int:
        """Bytes of a rank's output."""
        return self.batch_sizes[rank] * self._layout.columns * self._output_dtype.itemsize

    def partial_sums_offset(self, rank: int) -> int:
        """Byte in a rank's staging memory where the partial sums of its first source begin."""
        return _aligned(self.batch_sizes[rank] * self._layout.columns * self._wire) if self.is_staged else 0

    def sources(self, rank: int) -> int:
        """From how many a rank receives partial sums: the ranks of its host, and every other host as a whole.

        They are added in the order of the hosts' first ranks, and those of its own host in that of the ranks.
        """
        return len(self.hosts.ranks) - 1 + len(self.hosts.ranks[self.hosts.of_rank[rank]])

    def _source(self, sender: int, rank: int) -> int:
        """Number of a rank of the same host, or of the sender's host, among a rank's sources: in the order of first ranks."""
        own, theirs = self.hosts.of_rank[rank], self.hosts.of_rank[sender]
        if theirs == own:
            return own + self.hosts.ranks[own].index(sender)
        return theirs if theirs < own else theirs + len(self.hosts.ranks[own]) - 1

    def staging_size(self, rank: int) -> int:
        """Bytes that a rank needs for what does not travel straight into the output."""
        return self._host_parts_offset(rank, None)

    def presence_offset(self, rank: int) -> int:
        """Byte in a rank's staging memory where it is told which partial sums are not empty."""
        return self.partial_sums_offset(rank) + _aligned(self.sources(rank) * self._partial_bytes(rank))

    def presence_stride(self, rank: int) -> int:
        """Bytes between the features there: one for each bag, rounded up."""
        return -(-self.batch_sizes[rank] // PRESENCE_UNIT) * PRESENCE_UNIT

    def _partial_bytes(self, rank: int) -> int:
        """Return the bytes of the partial sums that one source has for a rank."""
        return self.batch_sizes[rank] * self._layout.row_wise_columns * self._wire

    def _presence_bytes(self, rank: int) -> int:
        """Return the bytes that tell which partial sums are not empty: none on several hosts, where all are sent."""
        return 0 if self.hosts.are_many else self._layout.row_wise_features * self.presence_stride(rank)

    def _host_parts_offset(self, server: int, served: int | None) -> int:
        """Byte in a rank's staging memory where its host's parts of the sums for a rank of another host begin, which it adds up
        and sends. None: behind all that it serves."""
        offset = self.presence_offset(server) + _aligned(self.sources(server) * self._presence_bytes(server))
        if not self._layout.row_wise_columns:
            return offset
        hosts = replace(self.hosts, rank=server)
        for rank in hosts.served:
            if rank == served:
                break
            offset += _aligned(len(hosts.local) * self._partial_bytes(rank))
        return offset

    def gradients_size(self, rank: int) -> int:
        """Bytes of the gradients of all lookups of a rank."""
        return sum(_aligned(self.global_batch * lookup.width * self._gradient_wire) for lookup in self._layout.lookups[rank])

    def gradients_offset(self, rank: int, lookup: int) -> int:
        """Byte where the gradients [global batch, width] of a rank's lookup begin."""
        before = self._layout.lookups[rank][:lookup]
        return sum(_aligned(self.global_batch * other.width * self._gradient_wire) for other in before)

    def receiver(self, lookup: int, rank: int) -> int | None:
        """In whose memory this rank stores what a lookup has for a rank; None if that is sent in a slice.

        Partial sums for a rank of another host are added up within this host first, by the rank that talks to it.
        """
        if rank in self.hosts.local:
            return rank
        return self.hosts.counterpart(rank, self.hosts.own) if self._own[lookup].row_wise else None

    def destination(self, lookup: int, rank: int) -> tuple[int, int]:
        """Return the place of a lookup's results for a rank in the :meth:`receiver`'s memory: byte of the first row, and the
        elements between rows.

        In the output, to whose offset it is relative, or in the staging memory; see :meth:`goes_to_staging`.
        """
        if not self._own[lookup].row_wise:
            return 0, self._layout.columns
        if rank in self.hosts.local:
            offset, number = self.partial_sums_offset(rank), self._source(self._rank, rank)
        else:
            offset = self._host_parts_offset(self.hosts.counterpart(rank, self.hosts.own), rank)
            number = self.hosts.local.index(self._rank)
        return offset + number * self._partial_bytes(rank), self._layout.row_wise_columns

    def presence_destination(self, rank: int) -> int:
        """Return the byte at which a rank is told which of this rank's partial sums are not empty, on one host."""
        return self.presence_offset(rank) + self._source(self._rank, rank) * self._presence_bytes(rank)

    def goes_to_staging(self, lookup: int) -> bool:
        """Whether a lookup of this rank is received in staging memory, not in the output itself."""
        return self.is_staged or self._own[lookup].row_wise

    @_kept
    def pooled_tiles(self, lookup: int) -> list[Tile]:
        """Return the tiles of a lookup's result [global batch, width], each with the place where it is stored."""
        runs = LookupLayout(self._layout.destination_columns(self._rank, lookup), self._own[lookup].dims).runs()
        tiles = []
        for rank in (*self.hosts.remote, *self.hosts.local_rotation):
            receiver = self.receiver(lookup, rank)
            if receiver is None:
                continue
            offset, stride = self.destination(lookup, rank)
            for source, column, width in runs:
                place = offset + column * self._wire
                tiles.append(
                    Tile(receiver, self.starts[rank], source, place, stride, width, self.batch_sizes[rank], self._wire)
                )
        return tiles

    @lasting_property
    def pooled_tables(self) -> list[Tensor]:
        """:meth:`pooled_tiles` of each lookup of this rank, for the kernel."""
        return [tile_table(self.pooled_tiles(lookup), self._device) for lookup in range(len(self._own))]

    @lasting_property
    def bag_tables(self) -> list[Tensor]:
        """Return for each lookup of this rank the facts about ranks that the lookup kernel needs.

        int64 [2 * ranks + 1]: the first bag of each rank and the end, and the byte where each rank receives the lookup. On one
        host [3 * ranks + 1]: also the byte where it is told which partial sums are not empty.
        """
        peers = range(len(self.batch_sizes))
        told = () if self.hosts.are_many else peers
        tables = []
        for lookup in range(len(self._own)):
            first = self._layout.first_row_wise_feature(self._rank, lookup)
            bases = [self.destination(lookup, peer)[0] for peer in peers]
            presence = [self.presence_destination(peer) + first * self.presence_stride(peer) for peer in told]
            tables.append(torch.tensor([*self.starts, *bases, *presence]).to(self._device, non_blocking=True))
        return tables

    @lasting_property
    def receiver_tables(self) -> list[Tensor]:
        """To whom the lookup kernel stores, for each lookup of this rank.

        int64 [n, 3]: whose bags, at which rank, and that rank's number within the host.
        """
        tables = []
        for lookup in range(len(self._own)):
            receivers = {rank: self.receiver(lookup, rank) for rank in (*self.hosts.remote, *self.hosts.local_rotation)}
            rows = [[rank, at, self.hosts.local.index(at)] for rank, at in receivers.items() if at is not None]
            tables.append(torch.tensor(rows).to(self._device, non_blocking=True))
        return tables

    @lasting_property
    def slice_receivers(self) -> Tensor:
        """The receivers of slices that are not empty, which all lie in one buffer: the only one of its table of addresses."""
        rows = [[rank, 0, 0] for rank in self.hosts.remote if self.batch_sizes[rank]]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), 3).to(self._device, non_blocking=True)

    @lasting_property
    def slice_bags(self) -> Tensor:
        """As :attr:`bag_tables`, where the kernel writes slices."""
        begins = [self.slice_begins.get(rank, 0) for rank in range(len(self.batch_sizes))]
        return torch.tensor([*self.starts, *begins]).to(self._device, non_blocking=True)

    @lasting_property
    def slice_begins(self) -> dict[int, int]:
        """By rank of another host, the byte at which its slice begins in a buffer of all slices that this rank sends."""
        width, begins, end = self.slice_width(self._rank) * self._wire, dict[int, int](), 0
        for rank in self.hosts.remote:
            begins[rank] = end
            end += -(-self.batch_sizes[rank] * width // _SLICE_ALIGNMENT) * _SLICE_ALIGNMENT
        return begins

    def slices_of(self, buffer: Tensor) -> dict[int, Tensor]:
        """By rank of another host, its slice [bags, width] in a uint8 buffer."""
        width = self.slice_width(self._rank)
        sizes = {rank: self.batch_sizes[rank] * width * self._wire for rank in self.hosts.remote}
        return {
            rank: buffer[begin : begin + sizes[rank]].view(self._forward_dtype).view(-1, max(width, 1))
            for rank, begin in self.slice_begins.items()
        }

    @property
    def slices_size(self) -> int:
        """Bytes of all slices that this rank sends."""
        width = self.slice_width(self._rank) * self._wire
        return sum(self.batch_sizes[rank] * width + _SLICE_ALIGNMENT for rank in self.hosts.remote)

    @lasting_property
    def gradient_table(self) -> Tensor:
        """:meth:`gradient_tiles` for the kernel."""
        return tile_table(self.gradient_tiles(), self._device)

    @_kept
    def gradient_tiles(self) -> list[Tile]:
        """Return the tiles of the output's gradient [local batch, columns], each with the place where it is stored."""
        return [tile for rank in self.hosts.local_rotation for tile in self._gradient_tiles(self._rank, rank)]

    @_kept
    def spread_tiles(self, sender: int) -> list[Tile]:
        """Return the tiles of a slice of gradients from another host, each with the place where it is stored.

        They are this rank's own columns, and, from a counterpart, those of row-wise tables at all ranks of this host.
        """
        own = self._gradient_tiles(sender, self._rank, packed=True, row_wise=False)
        if sender not in self.hosts.served:
            return own
        return own + [
            replace(tile, source_column=tile.source_column + self.slice_width(self._rank))
            for rank in self.hosts.local_rotation
            for tile in self._gradient_tiles(sender, rank, packed=True, row_wise=True)
        ]

    @lasting_property
    def pooled_spread_tables(self) -> dict[int, Tensor]:
        """By rank of another host whose slice is not empty: what of it goes where in this rank's output, for the kernel."""
        columns, wire = self._layout.columns, self._wire
        tables = {
            sender: tile_table(
                [
                    Tile(self._rank, 0, source, column * wire, columns, width, self.local_batch, wire)
                    for source, column, width in self.slice_runs(sender)
                ],
                self._device,
            )
            for sender in self.hosts.remote
        }
        return {sender: table for sender, table in tables.items() if len(table)}

    @lasting_property
    def spread_tables(self) -> dict[int, Tensor]:
        """By rank of another host whose slice of gradients is not empty: :meth:`spread_tiles` for the kernel."""
        tables = {sender: tile_table(self.spread_tiles(sender), self._device) for sender in self.hosts.remote}
        return {sender: table for sender, table in tables.items() if len(table)}

    @lasting_property
    def gradient_slice_table(self) -> Tensor:
        """The places of the output's gradient in the slices for other hosts, for the kernel."""
        return self._gradient_slice_table.to(self._device, non_blocking=True)

    @lasting_property
    def gradient_slice_needs(self) -> Tensor:
        """int64 [2, ranks]: tiles of the slice of gradients for each rank, and its bytes."""
        ranks, wire = range(len(self.batch_sizes)), self._gradient_wire
        tiles = torch.bincount(self._gradient_slice_table[:, 0], minlength=len(ranks)).tolist()
        sizes = [self.local_batch * self.gradient_slice_width(self._rank, rank) * wire for rank in ranks]
        return torch.tensor([tiles, sizes], dtype=torch.int64).to(self._device, non_blocking=True)

    @lasting_property
    def _gradient_slice_table(self) -> Tensor:
        rows, wire = self.local_batch, self._gradient_wire
        tiles = [
            Tile(rank, 0, column, source * wire, self.gradient_slice_width(self._rank, rank), width, rows, wire)
            for rank in self.hosts.remote
            for source, column, width in self.gradient_slice_runs(rank)
        ]
        return tile_table(tiles, torch.device("cpu"))

    def largest_slices(self) -> tuple[int, int]:
        """Bytes of the largest slice of results, and of gradients, between any two ranks."""
        batch, ranks = max(self.batch_sizes), range(len(self.batch_sizes))
        gradients = max(self.gradient_slice_width(sender, rank) for sender in ranks for rank in ranks)
        return batch * max(map(self.slice_width, ranks)) * self._wire, batch * gradients * self._gradient_wire

    def _gradient_tiles(self, sender: int, rank: int, *, packed: bool = False, row_wise: bool | None = None) -> list[Tile]:
        """Return the tiles of a sender's gradients that belong to the lookups of a rank.

        Args:
            packed: whether the sender's columns lie side by side, as in a slice; else as in the output.
            row_wise: of row-wise lookups only, or of the others only; None: of all.
        """
        tiles, packed_columns = [], 0
        for number, lookup in enumerate(self._layout.lookups[rank]):
            if row_wise is not None and lookup.row_wise != row_wise:
                continue
            begin = self.gradients_offset(rank, number) + self.starts[sender] * lookup.width * self._gradient_wire
            for source, column, width in [(0, packed_columns, lookup.width)] if packed else lookup.runs():
                place = begin + source * self._gradient_wire
                rows = self.batch_sizes[sender]
                tiles.append(Tile(rank, 0, column, place, lookup.width, width, rows, self._gradient_wire))
            packed_columns += lookup.width
        return tiles

    @_kept
    def slice_width(self, rank: int) -> int:
        """Columns of a rank's lookups that are not row-wise: of the slices that it sends of its results."""
        return sum(lookup.width for lookup in self._layout.lookups[rank] if not lookup.row_wise)

    @_kept
    def slice_runs(self, rank: int) -> list[tuple[int, int, int]]:
        """(column in the slice, column in the output, width) of a slice of a rank's results."""
        own = [lookup for lookup in self._layout.lookups[rank] if not lookup.row_wise]
        columns = tuple(column for lookup in own for column in lookup.columns)
        return LookupLayout(columns, tuple(dim for lookup in own for dim in lookup.dims)).runs()

    @lasting_property
    def remote_places(self) -> Tensor:
        """int64, for each feature of the ranks of other hosts and each local bag: its row where the output is seen as rows of
        :attr:`ExchangeLayout.row_dim` columns."""
        dim = self._layout.row_dim
        assert dim is not None, "features have several widths"
        own = [lookup for rank in self.hosts.remote for lookup in self._layout.lookups[rank] if not lookup.row_wise]
        columns = torch.tensor([column // dim for lookup in own for column in lookup.columns], dtype=torch.int64)
        return (torch.arange(self.local_batch) * (self._layout.columns // dim) + columns[:, None]).flatten()

    @_kept
    def gradient_slice_runs(self, rank: int) -> list[tuple[int, int, int]]:
        """(column in the slice, column in the output, width) of the gradients that this rank sends to one of another host."""
        runs = self.slice_runs(rank)
        if rank in self.hosts.counterparts():
            first = self.slice_width(rank)
            runs = [*runs, *((first + source, column, width) for source, column, width in self.row_wise_runs())]
        return runs

    @_kept
    def gradient_slice_width(self, sender: int, rank: int) -> int:
        """Columns of the gradients that a sender has for a rank of another host."""
        is_counterpart = self.hosts.counterpart(sender, self.hosts.of_rank[rank]) == rank
        return self.slice_width(rank) + (self._layout.row_wise_columns if is_counterpart else 0)

    def host_parts_view(self, staging: SymmetricMemory, rank: int) -> Tensor:
        """[ranks of this host, bags of a rank of another one, row-wise columns]: partial sums that this rank adds up for it."""
        shape = (len(self.hosts.local), self.batch_sizes[rank], self._layout.row_wise_columns)
        return _view(staging, self._host_parts_offset(self._rank, rank), shape, self._forward_dtype)

    def host_sum_view(self, staging: SymmetricMemory, sender: int) -> Tensor:
        """[local batch, row-wise columns]: where the sum of the sender's host is received, from this rank's counterpart."""
        return self.partial_sums_view(staging)[self._source(sender, self._rank)]

    def partial_sums_view(self, staging: SymmetricMemory) -> Tensor:
        """[sources, local batch, row-wise columns] as received by this rank, in the wire's dtype."""
        shape = (self.sources(self._rank), self.local_batch, self._layout.row_wise_columns)
        return _view(staging, self.partial_sums_offset(self._rank), shape, self._forward_dtype)

    def presence_view(self, staging: SymmetricMemory) -> Tensor:
        """uint8 [sources, row-wise features, bags, rounded up] as received by this rank: 1 where a partial sum was sent."""
        shape = (self.sources(self._rank), self._layout.row_wise_features, self.presence_stride(self._rank))
        return _view(staging, self.presence_offset(self._rank), shape, torch.uint8)

    def output_view(self, outputs: SymmetricMemory, offset: int) -> Tensor:
        """[local batch, columns] of the output's dtype, from byte ``offset`` on."""
        return _view(outputs, offset, (self.local_batch, self._layout.columns), self._output_dtype)

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
