"""Storing tiles of a local tensor into peers' memory, as one epoch of a channel; with the dtype changed on the way.

Between hosts that put slices: a gradient is packed into them, what has arrived is spread from them, in tiles, too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES, to_wire
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.embedding_all_to_all.host_slices import TILE_COLUMNS
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.symmetric.device import begin, finish, next_epoch, peer_pointer, wait_until_ready
from dlrm_fused.symmetric.device_puts import open_slice, put_slice, release_slice, wait_for_slice
from dlrm_fused.symmetric.launches import ceil_div
from dlrm_fused.symmetric.puts import Puts

_ROWS = 8  # of a program's tile
# Enough stores in flight for the links of one GPU; more programs only take multiprocessors from others.
_PROGRAMS_OF_MULTIPROCESSOR, _PUTTING_PROGRAMS_OF_MULTIPROCESSOR = 4, 2
_FIELDS = tl.constexpr(7)


@triton.jit
def store_tile(
    source, source_stride, fields, block, destination, may_store,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store ROWS rows of a tile, the block-th, at ``destination``, where the tile begins."""
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    width = tl.multiple_of(tl.load(fields + 5), 4)
    inside = (row < tl.load(fields + 6))[:, None] & (column < width)[None, :] & may_store
    first = tl.multiple_of(tl.load(fields + 2), 4)
    source_row = (tl.load(fields + 1) + row)[:, None]
    at_source = source + source_row * tl.multiple_of(source_stride, 4) + (first + column)[None, :]
    values = tl.load(at_source, mask=inside, other=0.0)
    stride = tl.multiple_of(tl.load(fields + 4), 4)
    places = destination + row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(places, to_wire(values.to(tl.float32), destination.dtype.element_ty), mask=inside)


@triton.jit
def _store_tiles(
    source, source_stride, tiles, items, row_blocks, addresses, offset, may_store,
    WIRE: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store this program's part of the tiles in memory that may be written at once, from byte ``offset`` on."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        fields = tiles + (item // row_blocks) * _FIELDS
        destination = peer_pointer(addresses, tl.load(fields), offset + tl.load(fields + 3), WIRE, ALIGNMENT)
        store_tile(source, source_stride, fields, item % row_blocks, destination, may_store, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["items", "row_blocks", "offset"])
def store_tiles_kernel(
    source, source_stride, tiles, items, row_blocks, addresses, offset,
    WIRE: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See :func:`store_tiles`."""
    _store_tiles(source, source_stride, tiles, items, row_blocks, addresses, offset, True, WIRE, ALIGNMENT, ROWS, COLUMNS)


def store_tiles(source: Tensor, table: Tensor, most_rows: int, addresses: Tensor, offset: int, wire: torch.dtype) -> None:
    """Store tiles of ``source`` in memory of this host that nobody else uses, outside of an epoch.

    Args:
        source, table, most_rows, wire: as :func:`scatter_tiles` takes them.
        addresses: int64, of the memory of each peer that the table names.
        offset: bytes from which those of the tiles count.
    """
    row_blocks = ceil_div(most_rows, _ROWS)
    items = table.shape[0] * row_blocks
    if items:
        store_tiles_kernel[(min(items, _PROGRAMS_OF_MULTIPROCESSOR * gpu_of(source.device).multiprocessors),)](
            source, source.stride(0), table, items, row_blocks, addresses, offset,
            WIRE=TRITON_DTYPES[wire], ALIGNMENT=4 * wire.itemsize, ROWS=_ROWS, COLUMNS=TILE_COLUMNS, num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["items", "row_blocks", "receive_offset", "fingerprint"])
def scatter_tiles_kernel(
    source, source_stride, tiles, items, row_blocks, addresses, receive_offset, channel, fingerprint,
    RELATIVE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, WIRE: tl.constexpr, ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy tiles of ``source`` to where they belong at the peers. See :func:`scatter_tiles`."""
    if FIRST:
        epoch = begin(channel, receive_offset, fingerprint)
    else:
        epoch = next_epoch(channel)
    known_peer = tl.full((), -1, tl.int64)
    ready_at = tl.full((), -1, tl.int64)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        fields = tiles + (item // row_blocks) * _FIELDS
        peer = tl.load(fields)
        if peer != known_peer:
            ready_at = wait_until_ready(channel, peer, epoch, fingerprint)
            known_peer = peer
        offset = tl.load(fields + 3)
        if RELATIVE:
            offset += ready_at
        destination = peer_pointer(addresses, peer, offset, WIRE, ALIGNMENT)
        store_tile(source, source_stride, fields, item % row_blocks, destination, ready_at >= 0, ROWS, COLUMNS)
    if LAST:
        finish(channel, epoch)


def scatter_tiles(
    source: Tensor,
    table: Tensor,
    most_rows: int,
    window: ReceiveWindow,
    *,
    wire: torch.dtype,
    relative: bool,
    first: bool = True,
    last: bool = True,
) -> None:
    """Store tiles of ``source`` at the peers.

    Args:
        source: fp32, bf16 or fp16, 2-D with unit column stride; rows and columns that start at multiples of 4 elements.
        table: of :func:`~dlrm_fused.ops.embedding_all_to_all.host_slices.tile_table`.
        most_rows: of any tile.
        wire: dtype in which the values are stored.
        relative: whether the tiles' offsets count from where their peer receives.
        first, last: whether this launch begins or ends the epoch; between them others may send more.
    """
    row_blocks = ceil_div(most_rows, _ROWS)
    items = table.shape[0] * row_blocks
    most = _PROGRAMS_OF_MULTIPROCESSOR * gpu_of(source.device).multiprocessors
    scatter_tiles_kernel[(max(1, min(items, most)),)](
        source, source.stride(0), table, items, max(row_blocks, 1), window.memory.addresses, window.offset,
        window.channel.args, window.fingerprint,
        RELATIVE=relative, FIRST=first, LAST=last, WIRE=TRITON_DTYPES[wire], ALIGNMENT=4 * wire.itemsize, ROWS=_ROWS,
        COLUMNS=TILE_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["items", "row_blocks", "fingerprint"])
def put_tiles_kernel(
    source, source_stride, tiles, items, row_blocks, needs, channel, puts, fingerprint,
    WIRE: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write tiles of ``source`` into slices for ranks of other hosts, and put a slice when all its tiles are there.

    Args:
        needs: int64 [2 * world], of each rank's slice the tiles and the bytes.
    """
    known_peer = tl.full((), -1, tl.int64)
    place = tl.full((), -1, tl.int64)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        fields = tiles + (item // row_blocks) * _FIELDS
        peer = tl.load(fields)
        if peer != known_peer:
            place = open_slice(channel, puts, peer)
            known_peer = peer
        destination = tl.multiple_of((place + tl.load(fields + 3)).to(tl.pointer_type(WIRE)), ALIGNMENT)
        store_tile(source, source_stride, fields, item % row_blocks, destination, place >= 0, ROWS, COLUMNS)
        needed, size = tl.load(needs + peer) * row_blocks, tl.load(needs + channel.world + peer)
        put_slice(channel, puts, peer, 1, needed, size, fingerprint)


@triton.jit(do_not_specialize=["sender", "items", "row_blocks", "offset", "fingerprint"])
def spread_tiles_kernel(
    sender, width, tiles, items, row_blocks, addresses, offset, channel, puts, fingerprint,
    WIRE: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Wait for a slice, and store its tiles in the memory of ranks of this host, from byte ``offset`` on.

    Args:
        width: of the slice's rows.
    """
    place = wait_for_slice(channel, puts, sender, fingerprint)
    source = tl.multiple_of(place.to(tl.pointer_type(WIRE)), 16)
    _store_tiles(source, width, tiles, items, row_blocks, addresses, offset, place >= 0, WIRE, ALIGNMENT, ROWS, COLUMNS)
    release_slice(channel, puts, sender, 1, tl.num_programs(0))


def put_gradient(puts: Puts, gradient: Tensor, plan: BatchPlan, window: ReceiveWindow, wire: torch.dtype) -> None:
    """Put what of the output's gradient belongs to ranks of other hosts, in one slice each.

    Args:
        gradient: [local batch, columns] as :func:`~dlrm_fused.ops.embedding_all_to_all.scatter.scatter_tiles` reads it.
    """
    row_blocks = ceil_div(plan.local_batch, _ROWS)
    items = plan.slices.gradient_table.shape[0] * row_blocks
    if items:
        puts.kernel(put_tiles_kernel)[(min(items, _most_programs(gradient.device)),)](
            gradient, gradient.stride(0), plan.slices.gradient_table, items, row_blocks, plan.slices.gradient_needs,
            window.channel.args, puts.args, window.fingerprint,
            WIRE=TRITON_DTYPES[wire], ALIGNMENT=4 * wire.itemsize, ROWS=_ROWS, COLUMNS=TILE_COLUMNS, num_warps=4,
        )  # fmt: skip


def spread_slice(
    puts: Puts, sender: int, width: int, table: Tensor, rows: int, window: ReceiveWindow, wire: torch.dtype
) -> None:
    """Store the next slice of a rank of another host where it belongs; on GPUs the current stream waits for it, not the host.

    Args:
        width: elements of its rows.
        table: of :func:`~dlrm_fused.ops.embedding_all_to_all.host_slices.tile_table`, not empty.
        rows: of the slice.
        window: where its tiles begin to count, at every rank.
    """
    row_blocks = ceil_div(rows, _ROWS)
    items = table.shape[0] * row_blocks
    puts.kernel(spread_tiles_kernel)[(min(items, _most_programs(table.device)),)](
        sender, width, table, items, row_blocks, window.memory.addresses, window.offset,
        window.channel.args, puts.args, window.fingerprint,
        WIRE=TRITON_DTYPES[wire], ALIGNMENT=4 * wire.itemsize, ROWS=_ROWS, COLUMNS=TILE_COLUMNS, num_warps=4,
    )  # fmt: skip


def _most_programs(device: torch.device) -> int:
    return _PUTTING_PROGRAMS_OF_MULTIPROCESSOR * gpu_of(device).multiprocessors
