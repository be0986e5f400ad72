"""Stores rows of a local tensor into chosen rows of the memory of this host's ranks. A call is one epoch of a channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES, to_wire, within_range
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.symmetric.device import announced_offset, begin, finish, uses_kernels, wait_until_all_ready
from dlrm_fused.symmetric.launches import ceil_div, kinds_of, next_power_of_2

# The tile of a program: bytes of a row at a time, and of all of its rows, whose loads and stores are in flight together.
_ROW_BYTES, _TILE_BYTES = 2048, 16384
# More rows of a tile would not be faster, and few rows would occupy few programs.
_MOST_ROWS = 16
# Enough stores in flight for the links of one GPU, also where other kernels hold some multiprocessors.
_PROGRAMS_OF_MULTIPROCESSOR = 8
_CHANGING = ["items", "rows_per_rank", "destinations_at", "first_destination", "places_at", "receive_offset", "fingerprint"]


@triton.jit(do_not_specialize=_CHANGING)
def scatter_rows_kernel(
    source, source_stride, source_rows, scale, targets, items, width, rows_per_rank, destinations_at, first_destination,
    places_at, addresses, receive_offset, channel, fingerprint,
    REPEATS: tl.constexpr, CHOSEN: tl.constexpr, SCALED: tl.constexpr, TELLS_DESTINATION: tl.constexpr, PLACED: tl.constexpr,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See :func:`scatter_rows`. A program stores rows that follow each other, so that all ranks are stored to at any time, also
    where rows are in the order of their ranks."""
    epoch = begin(channel, receive_offset, fingerprint)
    are_ready = wait_until_all_ready(channel, epoch, fingerprint)
    items_of_program = tl.cdiv(tl.cdiv(items, ROWS), tl.num_programs(0)) * ROWS
    begin_of_program = tl.program_id(0) * items_of_program
    end_of_program = tl.minimum(items, begin_of_program + items_of_program)
    for first in range(begin_of_program, end_of_program, ROWS):
        item = first + tl.arange(0, ROWS)
        target = tl.load(targets + item, mask=(item < end_of_program) & are_ready, other=-1)
        peer = tl.where(target >= 0, target // rows_per_rank, 0)
        # Messages take what goes to other hosts, whose ranks have no address here.
        is_sent = (target >= 0) & (tl.load(addresses + peer) != 0)
        row = (tl.where(is_sent, target, 0) % rows_per_rank).to(tl.int64)
        block = tl.load(addresses + peer) + announced_offset(channel, peer)
        if PLACED:
            row = tl.load((block + places_at).to(tl.pointer_type(tl.int32)) + row, mask=is_sent, other=0).to(tl.int64)
            is_sent &= (row >= 0) & (row < rows_per_rank)
        places = (block + row * (width * (DTYPE.primitive_bitwidth // 8))).to(tl.pointer_type(DTYPE))
        # Rows begin at multiples of 16 bytes, and so the compiler makes wide loads and stores.
        places = tl.multiple_of(places, 16)
        if CHOSEN:
            row_of_source = tl.load(source_rows + item, mask=is_sent, other=0).to(tl.int64)
        else:
            row_of_source = (item // REPEATS).to(tl.int64)
        rows_of_source = tl.multiple_of(source + row_of_source * source_stride, 16)
        factor = tl.full((ROWS,), 1.0, tl.float32)
        if SCALED:
            factor = tl.load(scale + item, mask=is_sent, other=0.0)
        for column in range(0, width, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            inside = is_sent[:, None] & (columns < width)[None, :]
            values = tl.load(rows_of_source[:, None] + columns[None, :], mask=inside, other=0.0)
            if SCALED:
                values = (values.to(tl.float32) * factor[:, None]).to(DTYPE)
            elif source.dtype.element_ty != DTYPE:
                values = to_wire(values.to(tl.float32), DTYPE)
            tl.store(places[:, None] + columns[None, :], values, mask=inside)
        if TELLS_DESTINATION:
            destinations = (block + destinations_at).to(tl.pointer_type(tl.int32))
            tl.store(destinations + row, first_destination + item, mask=is_sent)
    finish(channel, epoch)


def scatter_rows(
    source: Tensor,
    targets: Tensor,
    window: ReceiveWindow,
    *,
    rows_per_rank: int,
    repeats: int = 1,
    source_rows: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    destinations_at: int | None = None,
    destinations_per_rank: int = 0,
    places_at: int | None = None,
    by_rank: ItemsByRank | None = None,
) -> None:
    """Store row i // repeats of ``source``, or source_rows[i], times scale[i], where targets[i] says, for all i. One epoch:
    collective.

    Args:
        source: [m, width], rows contiguous, each a multiple of 16 bytes that begins at one.
        source_rows: int32 or int64, as many as targets; then ``repeats`` is 1.
        targets: int32 [m * repeats]: rank * rows_per_rank + row of the block in which that rank receives, or -1: nowhere. No
            two of all ranks may be equal. Nothing is stored at ranks of other hosts.
        window: in which the ranks receive rows of ``width`` elements.
        dtype: in which they are stored, with rounding; default: the source's.
        scale: fp32 [m * repeats].
        destinations_at: byte of the blocks from where an int32 for each row says what was stored there:
            rank * destinations_per_rank + i.
        places_at: byte of the blocks from where an int32 for each row says to which row of the block it goes instead: the
            receiving rank has written that before this call.
        by_rank: the targets by rank, where the caller knows them, for the CPU.

    Raises:
        CommunicationError: on the CPU, if a peer is lost or makes another call; on GPUs a later call raises it.
    """
    memory, channel, receive_offset, fingerprint = window
    stored, first = dtype or source.dtype, channel.group.rank * destinations_per_rank
    call = _Call(source, source_rows, targets, window, rows_per_rank, repeats, stored, scale, destinations_at, first, places_at)
    if uses_kernels(memory.local.device):
        call.store_by_kernel()
        return
    by_rank = by_rank or ItemsByRank.of(targets, rows_per_rank, channel.group.world_size)
    channel.run_epoch(partial(call.store_at, by_rank), offset=receive_offset, fingerprint=fingerprint)


@dataclass(frozen=True)
class _Call:
    """The arguments of one :func:`scatter_rows`; ``first_destination``: the number of this rank's row 0."""

    source: Tensor
    source_rows: Tensor | None
    targets: Tensor
    window: ReceiveWindow
    rows_per_rank: int
    repeats: int
    dtype: torch.dtype
    scale: Tensor | None
    destinations_at: int | None
    first_destination: int
    places_at: int | None

    def values(self, items: Tensor | slice) -> Tensor:
        """Return the rows that are stored for these items."""
        if self.source_rows is not None:
            items = self.source_rows[items]
        if isinstance(items, slice):
            assert self.repeats == 1, "a slice of the items is one of the rows"
            rows = self.source[items]
        else:
            rows = self.source.index_select(0, items // self.repeats if self.repeats > 1 else items)
        if self.scale is not None:
            return (rows.float() * self.scale[items, None]).to(self.dtype)
        return rows if rows.dtype == self.dtype else within_range(rows, self.dtype).to(self.dtype)

    def places(self, peer: int, offset: int) -> Tensor:
        """Return the rows of the block of a rank of this host."""
        shape, dtype = (self.rows_per_rank, self.source.shape[1]), self.dtype
        return self.window.memory.peer(peer)[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def tell(self, peer: int, offset: int, rows: Tensor | slice, destinations: Tensor) -> None:
        """Say where the rows that were stored come from."""
        if self.destinations_at is not None:
            self.words(peer, offset + self.destinations_at)[rows] = destinations.int()

    def words(self, peer: int, begin: int) -> Tensor:
        """Return the int32 of each row, in the memory of a rank of this host, that begin at this byte."""
        return self.window.memory.peer(peer)[begin : begin + 4 * self.rows_per_rank].view(torch.int32)

    def store_at(self, by_rank: ItemsByRank, peer: int, offset: int) -> None:
        """Store the rows of one rank on the CPU, as the kernel does."""
        items, rows = by_rank.items(peer), by_rank.rows(peer)
        if self.places_at is not None:
            rows = self.words(peer, offset + self.places_at)[rows].long()
        numbers = torch.arange(items.start, items.stop, device="cpu") if isinstance(items, slice) else items
        if isinstance(rows, Tensor):
            self.places(peer, offset).index_copy_(0, rows, self.values(items))
        elif self.source_rows is None and self.dtype == self.source.dtype and self.repeats == 1 and self.scale is None:
            torch.index_select(self.source, 0, numbers, out=self.places(peer, offset)[rows])
        else:
            self.places(peer, offset)[rows] = self.values(items)
        self.tell(peer, offset, rows, self.first_destination + numbers)

    def store_by_kernel(self) -> None:
        source, targets, scale, window = self.source, self.targets, self.scale, self.window
        items, width = targets.numel(), source.shape[1]
        columns = min(next_power_of_2(width), _ROW_BYTES // source.element_size())
        rows = min(_MOST_ROWS, _TILE_BYTES // (columns * source.element_size()))
        most = _PROGRAMS_OF_MULTIPROCESSOR * gpu_of(source.device).multiprocessors
        chosen = self.source_rows
        kinds = kinds_of(source, targets, scale, chosen)
        options = self.repeats, self.destinations_at is None, self.places_at is None, self.dtype
        layout = kinds, source.stride(0), width, options
        window.channel.launches(
            layout, scatter_rows_kernel, (max(1, min(ceil_div(items, rows), most)),),
            source, source.stride(0), targets if chosen is None else chosen, targets if scale is None else scale, targets,
            items, width, self.rows_per_rank, self.destinations_at or 0, self.first_destination, self.places_at or 0,
            window.memory.addresses, window.offset, window.channel.args, window.fingerprint,
            REPEATS=self.repeats, CHOSEN=chosen is not None, SCALED=scale is not None,
            TELLS_DESTINATION=self.destinations_at is not None, PLACED=self.places_at is not None,
            DTYPE=TRITON_DTYPES[self.dtype], ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip


@dataclass(frozen=True)
class ItemsByRank:
    """Items by the rank of their targets.

    Attributes:
        bounds: [ranks + 1], where the items of a rank begin.
        order: int64, the numbers of items; first those without target. None: all, as they are.
        targets: of these items, integers; None: the first is at ``first_rows`` of its rank, and the others follow.
        rows_per_rank: as of :func:`scatter_rows`.
    """

    bounds: Sequence[int]
    order: Tensor | None
    targets: Tensor | None
    rows_per_rank: int
    first_rows: Sequence[int] = ()

    @classmethod
    def of(cls, targets: Tensor, rows_per_rank: int, ranks: int) -> Self:
        """Return the items in the order of their targets: by rank, and by row there."""
        in_order, order = targets.long().sort()
        bounds = torch.searchsorted(in_order, torch.arange(ranks + 1, device=targets.device) * rows_per_rank)
        return cls(bounds.tolist(), order, in_order, rows_per_rank)

    def items(self, rank: int) -> Tensor | slice:
        """Numbers of the items that go to a rank."""
        own = slice(*self.bounds[rank : rank + 2])
        return own if self.order is None else self.order[own]

    def rows(self, rank: int) -> Tensor | slice:
        """Return the rows of that rank to which they go."""
        begin, end = self.bounds[rank : rank + 2]
        if self.targets is None:
            return slice(self.first_rows[rank], self.first_rows[rank] + end - begin)
        return self.targets[begin:end].long() - rank * self.rows_per_rank
