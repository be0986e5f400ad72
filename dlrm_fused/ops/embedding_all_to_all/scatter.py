"""Storing tiles of a local tensor into peers' memory, as one epoch of a channel; with the dtype changed on the way.

Between hosts a gradient is packed into slices, and what has arrived is spread from them, in tiles, too.
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
from dlrm_fused.symmetric.device import begin, finish, next_epoch, peer_pointer, wait_until_ready
from dlrm_fused.symmetric.launches import ceil_div

_ROWS = 8  # of a program's tile
# Enough stores in flight for the links of one GPU; more programs only take multiprocessors from others.
_PROGRAMS_OF_MULTIPROCESSOR = 4
_FIELDS = tl.constexpr(8)


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
    rows_apart = tl.multiple_of(source_stride + tl.load(fields + 7), 4)
    at_source = source + source_row * rows_apart + (first + column)[None, :]
    values = tl.load(at_source, mask=inside, other=0.0)
    stride = tl.multiple_of(tl.load(fields + 4), 4)
    places = destination + row[:, None].to(tl.int64) * stride + column[None, :]
    tl.store(places, to_wire(values.to(tl.float32), destination.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["items", "row_blocks", "offset"])
def store_tiles_kernel(
    source, source_stride, tiles, items, row_blocks, addresses, offset,
    WIRE: tl.constexpr, ALIGNMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See :func:`store_tiles`."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        fields = tiles + (item // row_blocks) * _FIELDS
        destination = peer_pointer(addresses, tl.load(fields), offset + tl.load(fields + 3), WIRE, ALIGNMENT)
        store_tile(source, source_stride, fields, item % row_blocks, destination, True, ROWS, COLUMNS)


def store_tiles(source: Tensor, table: Tensor, most_rows: int, addresses: Tensor, offset: int, wire: torch.dtype) -> None:
    """Store tiles of ``source`` in memory of this host that nobody else uses, outside of an epoch.

    Args:
        source: as :func:`scatter_tiles` takes it; or a buffer, of which the table has the strides.
        table, most_rows, wire: as there.
        addresses: int64, of the memory of each peer that the table names; or a uint8 buffer, in which all of them lie.
        offset: bytes from which those of the tiles count.
    """
    row_blocks = ceil_div(most_rows, _ROWS)
    items = table.shape[0] * row_blocks
    if items:
        store_tiles_kernel[(min(items, _PROGRAMS_OF_MULTIPROCESSOR * gpu_of(source.device).multiprocessors),)](
            source, source.stride(0) if source.dim() == 2 else 0, table, items, row_blocks, addresses, offset,
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
