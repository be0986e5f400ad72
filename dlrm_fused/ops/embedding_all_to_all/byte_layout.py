"""The byte at which each row and column is received on which rank, for given batch sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from dlrm_fused.ops.embedding_all_to_all.layout import ExchangeLayout, LookupLayout
from dlrm_fused.symmetric.device import round_up
from dlrm_fused.symmetric.hosts import Hosts

# Bags of a feature, in the bytes that tell which partial sums are not empty, are rounded up to it.
PRESENCE_UNIT = 16


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
    source_stride: int = 0  # elements between rows of the local tensor, where it is one of several in a buffer


@dataclass(frozen=True)
class ByteLayout:
    """The places of all data, seen from one rank: numbers alone.

    Attributes:
        layout: of the exchange.
        hosts: of the ranks, and which of them this one is.
        batch_sizes: bags of each rank.
        output_item, wire_item, gradient_item: bytes of an element of the output, of results that travel, and of gradients.
        is_staged: everything is received in another dtype than the output's, hence not in the output itself.
    """

    layout: ExchangeLayout
    hosts: Hosts
    batch_sizes: tuple[int, ...]
    output_item: int
    wire_item: int
    gradient_item: int
    is_staged: bool

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First bag of each rank in the global batch, and the end."""
        return (0, *itertools.accumulate(self.batch_sizes))

    @property
    def _own(self) -> tuple[LookupLayout, ...]:
        return self.layout.lookups[self.hosts.rank]

    def output_size(self, rank: int) -> int:
        """Bytes of a rank's output."""
        return self.batch_sizes[rank] * self.layout.columns * self.output_item

    def partial_sums_offset(self, rank: int) -> int:
        """Byte in a rank's staging memory where the partial sums of its first source begin."""
        return round_up(self.batch_sizes[rank] * self.layout.columns * self.wire_item) if self.is_staged else 0

    def sources(self, rank: int) -> int:
        """From how many a rank receives partial sums: the ranks of its host, and every other host as a whole.

        They are added in the order of the hosts' first ranks, and those of its own host in that of the ranks.
        """
        return len(self.hosts.ranks) - 1 + len(self.hosts.ranks[self.hosts.of_rank[rank]])

    def source(self, sender: int, rank: int) -> int:
        """Number of a rank of the same host, or of the sender's host, among a rank's sources: in the order of first ranks."""
        own, theirs = self.hosts.of_rank[rank], self.hosts.of_rank[sender]
        if theirs == own:
            return own + self.hosts.ranks[own].index(sender)
        return theirs if theirs < own else theirs + len(self.hosts.ranks[own]) - 1

    def staging_size(self, rank: int) -> int:
        """Bytes that a rank needs for what does not travel straight into the output."""
        return self.host_parts_offset(rank, None)

    def presence_offset(self, rank: int) -> int:
        """Byte in a rank's staging memory where it is told which partial sums are not empty."""
        return self.partial_sums_offset(rank) + round_up(self.sources(rank) * self._partial_bytes(rank))

    def presence_stride(self, rank: int) -> int:
        """Bytes between the features there: one for each bag, rounded up."""
        return round_up(self.batch_sizes[rank], PRESENCE_UNIT)

    def _partial_bytes(self, rank: int) -> int:
        """Return the bytes of the partial sums that one source has for a rank."""
        return self.batch_sizes[rank] * self.layout.row_wise_columns * self.wire_item

    def _presence_bytes(self, rank: int) -> int:
        """Return the bytes that tell which partial sums are not empty: none on several hosts, where all are sent."""
        return 0 if self.hosts.are_many else self.layout.row_wise_features * self.presence_stride(rank)

    def host_parts_offset(self, server: int, served: int | None) -> int:
        """Byte in a rank's staging memory where its host's parts of the sums for a rank of another host begin, which it adds up
        and sends. None: behind all that it serves."""
        offset = self.presence_offset(server) + round_up(self.sources(server) * self._presence_bytes(server))
        if not self.layout.row_wise_columns:
            return offset
        hosts = _seen_by(self.hosts, server)
        before = itertools.takewhile(lambda rank: rank != served, hosts.served)
        return offset + sum(round_up(len(hosts.local) * self._partial_bytes(rank)) for rank in before)

    def gradients_size(self, rank: int) -> int:
        """Bytes of the gradients of all lookups of a rank."""
        return self.gradients_offset(rank, len(self.layout.lookups[rank]))

    def gradients_offset(self, rank: int, lookup: int) -> int:
        """Byte where the gradients [global batch, width] of a rank's lookup begin."""
        before = self.layout.lookups[rank][:lookup]
        return sum(round_up(self.starts[-1] * other.width * self.gradient_item) for other in before)

    def receivers(self, lookup: int) -> dict[int, int]:
        """By rank, in whose memory this one stores what a lookup has for it; without those to whom that is sent in a slice.

        Partial sums for a rank of another host are added up within this host first, by the rank that talks to it.
        """
        remote = self.hosts.remote if self._own[lookup].row_wise else ()
        counterparts = {rank: self.hosts.counterpart(rank, self.hosts.own) for rank in remote}
        return counterparts | {rank: rank for rank in self.hosts.local_rotation}

    def destination(self, lookup: int, rank: int) -> tuple[int, int]:
        """Return the place of a lookup's results for a rank in its receiver's memory: byte of the first row, and the
        elements between rows.

        In the output, to whose offset it is relative, or in the staging memory; see :meth:`goes_to_staging`.
        """
        if not self._own[lookup].row_wise:
            return 0, self.layout.columns
        if rank in self.hosts.local:
            offset, number = self.partial_sums_offset(rank), self.source(self.hosts.rank, rank)
        else:
            offset = self.host_parts_offset(self.hosts.counterpart(rank, self.hosts.own), rank)
            number = self.hosts.local.index(self.hosts.rank)
        return offset + number * self._partial_bytes(rank), self.layout.row_wise_columns

    def presence_destination(self, rank: int) -> int:
        """Return the byte at which a rank is told which of this rank's partial sums are not empty, on one host."""
        return self.presence_offset(rank) + self.source(self.hosts.rank, rank) * self._presence_bytes(rank)

    def goes_to_staging(self, lookup: int) -> bool:
        """Whether a lookup of this rank is received in staging memory, not in the output itself."""
        return self.is_staged or self._own[lookup].row_wise

    @cached_property
    def pooled_tiles(self) -> list[list[Tile]]:
        """The tiles of each lookup's result [global batch, width], each with the place where it is stored."""
        return [self._tiles_of_lookup(lookup) for lookup in range(len(self._own))]

    def _tiles_of_lookup(self, lookup: int) -> list[Tile]:
        runs = LookupLayout(self.layout.destination_columns(self.hosts.rank, lookup), self._own[lookup].dims).runs()
        tiles, item = [], self.wire_item
        for rank, receiver in self.receivers(lookup).items():
            offset, stride = self.destination(lookup, rank)
            first, rows = self.starts[rank], self.batch_sizes[rank]
            tiles += [
                Tile(receiver, first, source, offset + column * item, stride, width, rows, item)
                for source, column, width in runs
            ]
        return tiles

    @cached_property
    def gradient_tiles(self) -> list[Tile]:
        """The tiles of the output's gradient [local batch, columns], each with the place where it is stored."""
        return [tile for rank in self.hosts.local_rotation for tile in self.tiles_of_gradient(self.hosts.rank, rank)]

    def tiles_of_gradient(self, sender: int, rank: int, *, packed: bool = False, row_wise: bool | None = None) -> list[Tile]:
        """Return the tiles of a sender's gradients that belong to the lookups of a rank.

        Args:
            packed: whether the sender's columns lie side by side, as in a slice; else as in the output.
            row_wise: of row-wise lookups only, or of the others only; None: of all.
        """
        tiles, packed_columns, item = [], 0, self.gradient_item
        for number, lookup in enumerate(self.layout.lookups[rank]):
            if row_wise is not None and lookup.row_wise != row_wise:
                continue
            begin = self.gradients_offset(rank, number) + self.starts[sender] * lookup.width * item
            for source, column, width in [(0, packed_columns, lookup.width)] if packed else lookup.runs():
                place, rows = begin + source * item, self.batch_sizes[sender]
                tiles.append(Tile(rank, 0, column, place, lookup.width, width, rows, item))
            packed_columns += lookup.width
        return tiles

    @cached_property
    def row_wise_runs(self) -> list[tuple[int, int, int]]:
        """(column among the partial sums, column in the output, width)."""
        return runs_of(lookup for lookup in self._own if lookup.row_wise)

    @cached_property
    def direct_runs(self) -> list[tuple[int, int]]:
        """(column, width) of what is no partial sum, for the conversion from the wire's dtype."""
        covered = sorted((column, width) for _, column, width in self.row_wise_runs)
        runs, begin = [], 0
        for column, width in [*covered, (self.layout.columns, 0)]:
            if column > begin:
                runs.append((begin, column - begin))
            begin = column + width
        return runs


@cache  # for the batch sizes of all steps
def _seen_by(hosts: Hosts, rank: int) -> Hosts:
    return replace(hosts, rank=rank)


def runs_of(lookups: Iterable[LookupLayout]) -> list[tuple[int, int, int]]:
    """(column among those of the lookups, column in the output, width), lookups one after the other."""
    own = list(lookups)
    columns = tuple(column for lookup in own for column in lookup.columns)
    return LookupLayout(columns, tuple(dim for lookup in own for dim in lookup.dims)).runs()
