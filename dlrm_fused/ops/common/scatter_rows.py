"""Stores rows of a local tensor into chosen rows of other ranks' memory. A call is one epoch of a channel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.symmetric.device import announced_offset, begin, finish, uses_kernels, wait_until_all_ready

# Of a program's tile: bytes of a row at a time, and rows, whose loads and stores are in flight together.
_ROW_BYTES, _ROWS = 2048, 8
# Enough stores in flight for the links of one GPU, also where other kernels hold some multiprocessors.
_PROGRAMS = 528
_CHANGING = ["items", "rows_per_rank", "destinations_at", "first_destination", "receive_offset", "fingerprint"]


@triton.jit(do_not_specialize=_CHANGING)
def scatter_rows_kernel(
    source, source_stride, scale, targets, items, width, rows_per_rank, destinations_at, first_destination, addresses,
    receive_offset, channel, fingerprint,
    REPEATS: tl.constexpr, SCALED: tl.constexpr, TELLS_DESTINATION: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See :func:`scatter_rows`. Program p stores rows p * ROWS ..., then those ROWS * programs further on."""
    epoch = begin(channel, receive_offset, fingerprint)
    are_ready = wait_until_all_ready(channel, epoch, fingerprint)
    for first in range(tl.program_id(0) * ROWS, items, tl.num_programs(0) * ROWS):
        item = first + tl.arange(0, ROWS)
        target = tl.load(targets + item, mask=(item < items) & are_ready, other=-1)
        is_sent = target >= 0
        peer = tl.where(is_sent, target // rows_per_rank, 0)
        row = (tl.where(is_sent, target, 0) % rows_per_rank).to(tl.int64)
        block = tl.load(addresses + peer) + announced_offset(channel, peer)
        places = (block + row * (width * (DTYPE.primitive_bitwidth // 8))).to(tl.pointer_type(DTYPE))
        # Rows begin at multiples of 16 bytes, and so the compiler makes wide loads and stores.
        places = tl.multiple_of(places, 16)
        rows_of_source = tl.multiple_of(source + (item // REPEATS).to(tl.int64) * source_stride, 16)
        factor = tl.full((ROWS,), 1.0, tl.float32)
        if SCALED:
            factor = tl.load(scale + item, mask=is_sent, other=0.0)
        for column in range(0, width, COLUMNS):
            columns = column + tl.arange(0, COLUMNS)
            inside = is_sent[:, None] & (columns < width)[None, :]
            values = tl.load(rows_of_source[:, None] + columns[None, :], mask=inside, other=0.0)
            if SCALED:
                values = (values.to(tl.float32) * factor[:, None]).to(DTYPE)
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
    scale: Tensor | None = None,
    destinations_at: int | None = None,
    first_destination: int = 0,
) -> None:
    """Store row i // repeats of ``source``, times scale[i], where targets[i] says, for all i. One epoch: collective.

    Args:
        source: [m, width], rows contiguous, each a multiple of 16 bytes that begins at one.
        targets: int32 [m * repeats]: rank * rows_per_rank + row of the block in which that rank receives, or -1: nowhere. No
            two of all ranks may be equal.
        window: in which the ranks receive rows of ``width`` elements of the source's dtype.
        scale: fp32 [m * repeats].
        destinations_at: byte of the blocks from where an int32 for each row says what was stored there: first_destination + i.

    Raises:
        CommunicationError: on the CPU, if a peer is lost or makes another call; on GPUs a later call raises it.
    """
    memory, channel, receive_offset, fingerprint = window
    items, width = targets.numel(), source.shape[1]

    def store(peer: int, offset: int) -> None:
        """What the kernel does for one rank, on the CPU."""
        sent = torch.nonzero((targets >= 0) & (targets // rows_per_rank == peer)).flatten()
        rows, values = targets[sent].long() % rows_per_rank, source[sent // repeats]
        if scale is not None:
            values = (values.float() * scale[sent, None]).to(source.dtype)
        block, size = memory.peer(peer)[offset:], rows_per_rank * width * source.element_size()
        block[:size].view(source.dtype).view(rows_per_rank, width)[rows] = values
        if destinations_at is not None:
            destinations = block[destinations_at : destinations_at + 4 * rows_per_rank].view(torch.int32)
            destinations[rows] = (first_destination + sent).int()

    if not uses_kernels(memory.local.device):
        channel.run_epoch(store, offset=receive_offset, fingerprint=fingerprint)
        return
    scatter_rows_kernel[(max(1, min(triton.cdiv(items, _ROWS), _PROGRAMS)),)](
        source, source.stride(0), targets if scale is None else scale, targets, items, width, rows_per_rank,
        destinations_at or 0, first_destination, memory.addresses, receive_offset, channel.args, fingerprint,
        REPEATS=repeats, SCALED=scale is not None, TELLS_DESTINATION=destinations_at is not None,
        DTYPE=TRITON_DTYPES[source.dtype], ROWS=_ROWS,
        COLUMNS=min(triton.next_power_of_2(width), _ROW_BYTES // source.element_size()), num_warps=8,
    )  # fmt: skip
