"""The places of tokens' rows in the memory of their experts' ranks.

A token has up to k experts; each such (token, expert) is a *slot*, number ``token * k + j``. Rank r has experts ``r * L`` to
``(r + 1) * L``, L = experts / ranks. It receives the rows of its experts one expert after the other, each padded to whole
tiles of ``tile_rows``; within an expert, the rows of rank r + 1 come first, then those of r + 2, and so on to its own, in
the order of their slots. So the tiles whose results have to travel come first, and every rank knows every row's place from the
counts of all ranks alone.

All of this is inside a host; ranks of other hosts have no slots here. :mod:`~dlrm_fused.ops.moe.between_hosts` has the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.gemm_all_to_all.kernel import TILES_OF_PROGRAM, Groups, store_order
from dlrm_fused.symmetric.device import begin, finish, peer_pointer, uses_kernels, wait_until_all_ready
from dlrm_fused.symmetric.launches import ceil_div, kinds_of, launch_again, layout_of, next_power_of_2

# Slots that a program compares with each other; a chunk is as many whole tokens as fit.
_LANES = 128
# Chunks and experts that a program adds up at a time.
_SCAN_CHUNKS, _SCAN_EXPERTS = 256, 16
_SLOTS_OF_PROGRAM = tl.constexpr(1024)
# Pads that a program makes at a time.
_PAD_ROWS, _PAD_COLUMNS = tl.constexpr(16), tl.constexpr(512)


def max_rows_of_rank(ranks: int, experts: int, top_k: int, max_tokens: int, tile_rows: int) -> int:
    """Return the most rows that a rank can receive, pads included: a multiple of ``tile_rows``."""
    local = experts // ranks
    rows = ranks * max_tokens * min(top_k, local)
    return (rows + min(rows, local) * (tile_rows - 1)) // tile_rows * tile_rows


class RoutesToExperts(NamedTuple):
    """The places that rows go to and come from.

    Attributes:
        targets: int32 [slots]: rank * rows_per_rank + row in the receive block of that rank; -1 for a slot without expert.
        groups: the rows of each of this rank's experts in its own receive block.
        slots: int64 [experts]: of all ranks together.
    """

    targets: Tensor
    groups: Groups
    slots: Tensor


def route(
    experts: Tensor,
    window: ReceiveWindow,
    *,
    count: int,
    tile_rows: int,
    rows_per_rank: int,
    block: tuple[Tensor, Tensor] | None = None,
    elsewhere: Tensor | None = None,
) -> RoutesToExperts:
    """Routes of this rank's slots. One epoch: collective. On GPUs the host does not wait for the device.

    Args:
        experts: int64 [tokens, k], contiguous: ids of experts of this host's ranks, or -1. To kernels, with ``elsewhere``, also
            -2 - id of those of other hosts, which are counted alone. They take any other id for -1, and every repetition of an
            id in a row.
        window: int32 [ranks, count] on each rank, for the counts of all ranks.
        count: experts of all ranks.
        tile_rows: rows of a tile.
        rows_per_rank: of a receive block.
        block: the rows [R, d] of this rank's receive block, and their destinations, int32 [R]: kernels make pads of them, zeros
            and -1, where no rank will store. Tiles of one row have none.
        elsewhere: given between hosts, int32 [any, count], in rows of 1 + count elements: more tokens that have experts of
            other hosts, which are added to this rank's.

    Raises:
        CommunicationError: on the CPU, if a peer is lost or makes another call; on GPUs a later call raises it.
    """
    if not uses_kernels(window.memory.local.device):
        return _route_by_host(experts, window, count, tile_rows, rows_per_rank, elsewhere)
    memory, channel, _, fingerprint = window
    slots, top_k = experts.numel(), experts.shape[1]
    lanes = max(_LANES, next_power_of_2(top_k))
    chunk = lanes // top_k * top_k
    chunks = ceil_div(slots, chunk)
    starts = torch.empty(max(chunks, 1), count, dtype=torch.int32, device=experts.device)
    positions = torch.empty(slots, dtype=torch.int32, device=experts.device)
    if slots:
        launch_again(
            (layout_of(experts), count, elsewhere is None), count_kernel, (chunks,),
            experts, slots, starts, positions, count,
            TOP_K=top_k, COUNTS_ELSEWHERE=elsewhere is not None, CHUNK=chunk, LANES=lanes, EXPERTS=next_power_of_2(count),
            num_warps=8,
        )  # fmt: skip
    # Counts of chunks become sums over the chunks before, and all ranks are told the totals; then as in `place_experts`.
    at_a_time = min(_SCAN_EXPERTS, next_power_of_2(count))
    channel.launches(
        (count, kinds_of(elsewhere)), exchange_counts_kernel, (ceil_div(count, at_a_time),),
        starts, starts if elsewhere is None else elsewhere, chunks, 0 if elsewhere is None else len(elsewhere), count,
        memory.addresses, channel.args, fingerprint, CHUNKS=_SCAN_CHUNKS, EXPERTS=at_a_time, num_warps=4,
    )  # fmt: skip
    ranks, local = channel.group.world_size, count // channel.group.world_size
    counts = memory.local.view(torch.int32)[: ranks * count].view(ranks, count)
    targets, first_rows = torch.empty_like(positions), starts.new_empty(count)
    tiles, parts = rows_per_rank // tile_rows, ceil_div(tile_rows, _PAD_ROWS.value)
    order, slots_of_experts = starts.new_empty(2, tiles), experts.new_empty(count)
    groups = Groups(tile_rows, starts.new_empty(local + 1), starts.new_empty(local), {tiles: order})
    block_rows, destinations = block or (targets, targets)
    of_slots, of_tiles = ceil_div(slots, _SLOTS_OF_PROGRAM.value), ceil_div(tiles, TILES_OF_PROGRAM.value)
    layout = layout_of(experts, block_rows, destinations), count, tile_rows, rows_per_rank, block is None
    channel.launches(
        layout, place_kernel, (max(of_slots, of_tiles, local * parts),),
        SlotArgs(experts, positions, starts, targets), counts, first_rows, slots_of_experts, groups.bounds,
        groups.local_from, order, block_rows, destinations,
        slots, count, tile_rows, tiles, rows_per_rank, block_rows.shape[-1],
        RANK=channel.group.rank, WORLD=ranks, RANKS=next_power_of_2(ranks), LANES=next_power_of_2(local),
        CHUNK=chunk, CLEARS_PADS=block is not None, PARTS=parts, num_warps=4,
    )  # fmt: skip
    return RoutesToExperts(targets, groups, slots_of_experts)


@triton.jit(do_not_specialize=["slots"])
def count_kernel(
    ids, slots, counts, positions, experts,
    TOP_K: tl.constexpr, COUNTS_ELSEWHERE: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Count each chunk's slots of each expert, and for each slot the earlier ones of its chunk with the same expert.

    Args:
        ids: int64 [slots]; with COUNTS_ELSEWHERE -2 - id for experts of other hosts.
        counts: int32 [chunks, experts].
        positions: int32 [slots]; -1 for a slot without expert of this host.
        CHUNK: slots, a multiple of TOP_K, at most LANES.
        EXPERTS: power of two, at least ``experts``.
    """
    of_chunk = counts + tl.program_id(0).to(tl.int64) * experts
    expert = tl.arange(0, EXPERTS)
    tl.store(of_chunk + expert, tl.zeros((EXPERTS,), tl.int32), mask=expert < experts)
    lane = tl.arange(0, LANES)
    slot = tl.program_id(0) * CHUNK + lane
    there = (lane < CHUNK) & (slot < slots)
    id_ = tl.load(ids + slot, mask=there, other=-1)
    for back in range(1, TOP_K):
        is_of_token = there & (lane % TOP_K >= back)
        id_ = tl.where(tl.load(ids + slot - back, mask=is_of_token, other=-1) == id_, -1, id_)
    is_here = (id_ >= 0) & (id_ < experts)
    if COUNTS_ELSEWHERE:
        id_ = tl.where(is_here, id_, -2 - id_)
        id_ = tl.where((id_ >= 0) & (id_ < experts), id_, -1).to(tl.int32)
    else:
        id_ = tl.where(is_here, id_, -1).to(tl.int32)
    # Earlier slots count 1, others 2^16: one sum is both numbers.
    weights = tl.where(lane[None, :] < lane[:, None], 1, 1 << 16)
    same = tl.sum(tl.where(id_[None, :] == id_[:, None], weights, 0), axis=1)
    position, is_last = same & 0xFFFF, same >> 16 == 1
    tl.debug_barrier()  # the zeros are stored
    tl.store(of_chunk + id_, position + 1, mask=(id_ >= 0) & is_last)
    tl.store(positions + slot, tl.where(is_here, position, -1), mask=there)


@triton.jit(do_not_specialize=["chunks", "rows_elsewhere", "fingerprint"])
def exchange_counts_kernel(
    counts, elsewhere, chunks, rows_elsewhere, experts, addresses, channel, fingerprint,
    CHUNKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Turn counts of chunks into sums over the chunks before, and tell all ranks of the host the sums over all chunks.

    Args:
        counts: int32 [chunks, experts]; of :func:`count_kernel`, and overwritten.
        elsewhere: int32 [rows_elsewhere, experts], of rows of 1 + experts elements: is added to what ranks are told.
        addresses: int64 [ranks], of memory for int32 [ranks, experts].
    """
    epoch = begin(channel, 0, fingerprint)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    exists = expert < experts
    total = tl.zeros((EXPERTS,), tl.int32)
    for first in range(0, chunks, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        inside = (chunk < chunks)[:, None] & exists[None, :]
        places = counts + chunk[:, None].to(tl.int64) * experts + expert[None, :]
        count = tl.load(places, mask=inside, other=0)
        tl.store(places, tl.cumsum(count, axis=0) - count + total[None, :], mask=inside)
        total += tl.sum(count, axis=0)
    for _ in range(rows_elsewhere):
        total += tl.load(elsewhere + expert, mask=exists, other=0)
        elsewhere += 1 + experts
    are_ready = wait_until_all_ready(channel, epoch, fingerprint)
    for i in tl.static_range(1, channel.world + 1):
        peer = (channel.rank + i) % channel.world
        of_ranks = peer_pointer(addresses, peer, 0, tl.int32)
        is_there = are_ready & (tl.load(addresses + peer) != 0)
        tl.store(of_ranks + channel.rank * experts + expert, total, mask=exists & is_there)
    finish(channel, epoch)


class SlotArgs(NamedTuple):
    """Arrays with an element for each of a rank's slots, as one argument of the kernel."""

    ids: Any  # int64, of experts
    positions: Any  # int32, of count_kernel
    starts: Any  # int32 [chunks, experts]: slots of each expert in the chunks before
    targets: Any  # int32: RoutesToExperts.targets, to be stored


@triton.jit(do_not_specialize=["slots", "tiles"])
def place_kernel(
    of_slots, counts, first_rows, slots_of_experts, bounds, local_from, order, rows, destinations, slots, experts,
    tile_rows, tiles, rows_per_rank, width,
    RANK: tl.constexpr, WORLD: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
    CLEARS_PADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """:func:`place_experts`, and what follows from it: targets, order of tiles, pads; of each every program has a part.

    Args:
        of_slots: :class:`SlotArgs`.
        counts: int32 [ranks, experts].
        first_rows: int32 [experts], scratch: where this rank's rows begin. All programs store the same.
        rows, destinations: of the receive block, with CLEARS_PADS.
        RANKS, LANES: powers of two, at least WORLD and experts / WORLD.
    """
    program, local = tl.program_id(0), experts // WORLD
    receiver, lane = tl.arange(0, RANKS)[:, None], tl.arange(0, LANES)[None, :]
    exists = (receiver < WORLD) & (lane < local)
    expert = receiver * local + lane
    total, before = tl.zeros((RANKS, LANES), tl.int32), tl.zeros((RANKS, LANES), tl.int32)
    remote = tl.zeros((RANKS, LANES), tl.int32)
    own_turn = (RANK - receiver - 1 + WORLD) % WORLD
    for source in tl.static_range(WORLD):
        count = tl.load(counts + source * experts + expert, mask=exists, other=0)
        total += count
        before += tl.where((source - receiver - 1 + WORLD) % WORLD < own_turn, count, 0)
        remote += tl.where(source == receiver, 0, count)
    tiles_of_expert = tl.cdiv(total, tile_rows)
    end = tl.cumsum(tiles_of_expert, axis=1)
    tl.store(first_rows + expert, (end - tiles_of_expert) * tile_rows + before, mask=exists)
    tl.debug_barrier()

    slot = program * _SLOTS_OF_PROGRAM + tl.arange(0, _SLOTS_OF_PROGRAM)
    position = tl.load(of_slots.positions + slot, mask=slot < slots, other=-1)
    is_sent = position >= 0
    id_ = tl.load(of_slots.ids + slot, mask=is_sent, other=0).to(tl.int32)
    row = tl.load(of_slots.starts + (slot // CHUNK).to(tl.int64) * experts + id_, mask=is_sent, other=0) + position
    row += tl.load(first_rows + id_, mask=is_sent, other=0)
    tl.store(
        of_slots.targets + slot, tl.where(is_sent, id_ // local * rows_per_rank + row, -1),
        mask=slot < slots,
    )  # fmt: skip

    # The groups of this rank's experts, in one dimension.
    is_own, group = receiver == RANK, tl.arange(0, LANES)
    last_tile = tl.sum(tl.where(is_own, end, 0), axis=0)
    first_tile = last_tile - tl.sum(tl.where(is_own, tiles_of_expert, 0), axis=0)
    middle = first_tile + tl.cdiv(tl.sum(tl.where(is_own, remote, 0), axis=0), tile_rows)
    if program == 0:
        tl.store(slots_of_experts + expert, total.to(tl.int64), mask=exists)
        tl.store(bounds, 0)
        tl.store(bounds + 1 + group, last_tile, mask=group < local)
        tl.store(local_from + group, middle, mask=group < local)
    store_order(order, tiles, first_tile, middle, last_tile, LANES)
    if CLEARS_PADS:
        # Program p: some of those of group p // PARTS.
        is_mine = group == program // PARTS
        end_of_rows = tl.sum(tl.where(is_mine, first_tile * tile_rows + tl.sum(tl.where(is_own, total, 0), axis=0), 0), axis=0)
        end_of_tiles = tl.sum(tl.where(is_mine, last_tile * tile_rows, 0), axis=0)
        pad = end_of_rows + program % PARTS * _PAD_ROWS + tl.arange(0, _PAD_ROWS)
        is_pad = pad < end_of_tiles
        tl.store(destinations + pad, -1, mask=is_pad)
        clear_rows(rows, pad, is_pad, width, _PAD_ROWS, _PAD_COLUMNS)


@triton.jit
def clear_rows(rows, row, is_cleared, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero those of ROWS rows that are to be cleared."""
    if tl.max(is_cleared.to(tl.int32), axis=0) > 0:
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            places = rows + row.to(tl.int64)[:, None] * tl.multiple_of(width, 4) + column[None, :]
            zeros = tl.zeros((ROWS, COLUMNS), rows.dtype.element_ty)
            tl.store(places, zeros, mask=is_cleared[:, None] & (column < width)[None, :])


def _route_by_host(
    experts: Tensor, window: ReceiveWindow, count: int, tile_rows: int, rows_per_rank: int, elsewhere: Tensor | None
) -> RoutesToExperts:
    memory, channel, _, fingerprint = window
    group, slots = channel.group, experts.flatten()
    own, positions = count_slots(slots, count)
    if elsewhere is not None:
        own = own + elsewhere.sum(0)

    def counts_at(peer: int) -> Tensor:
        return memory.peer(peer).view(torch.int32).view(group.world_size, count)

    channel.run_epoch(lambda peer, _: counts_at(peer)[group.rank].copy_(own), fingerprint=fingerprint)
    counts = counts_at(group.rank)
    first_rows, groups = place_experts(counts, group.rank, tile_rows)
    receivers = slots // (count // group.world_size)
    targets = torch.where(slots >= 0, receivers * rows_per_rank + first_rows[group.rank][slots] + positions, -1)
    return RoutesToExperts(targets.int(), groups, counts.sum(0))


def count_slots(slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return how many of int64 [slots] name each of ``count`` experts, and for each slot how many before it equal it; int64.

    Slots of -1 are not counted.
    """
    order = torch.argsort(slots, stable=True)
    counts = torch.bincount(slots + 1, minlength=count + 1)
    starts = counts.cumsum(0) - counts
    positions = torch.empty_like(slots)
    positions[order] = torch.arange(slots.numel(), device=slots.device) - starts[slots[order] + 1]
    return counts[1:], positions


def place_experts(counts: Tensor, rank: int, tile_rows: int) -> tuple[Tensor, Groups]:
    """Return the rows at which each rank's part of each expert begins, from the counts of all ranks.

    Args:
        counts: [ranks, experts]: slots of each rank for each expert.
        rank: this one.

    Returns:
        int64 [ranks, experts]: the row in the receive block of the expert's rank at which the rows of a rank begin; and the
        groups of this rank.
    """
    ranks, experts = counts.shape
    by_receiver = counts.long().view(ranks, ranks, experts // ranks)  # source, receiver, expert
    totals = by_receiver.sum(0)
    tiles = _ceil_div(totals, tile_rows)
    first_tiles = tiles.cumsum(1) - tiles
    receiver = torch.arange(ranks, device=counts.device)[:, None]
    source = (receiver + 1 + receiver.T) % ranks  # by receiver, in the order of their rows there
    in_turn = by_receiver[source, receiver]
    first_rows = torch.empty_like(by_receiver)
    first_rows[source, receiver] = (first_tiles * tile_rows)[:, None] + in_turn.cumsum(1) - in_turn
    bounds = torch.cat([first_tiles[rank], tiles[rank].sum()[None]])
    local_from = first_tiles[rank] + _ceil_div(totals[rank] - by_receiver[rank, rank], tile_rows)
    return first_rows.view(ranks, experts), Groups(tile_rows, bounds.int(), local_from.int())


def _ceil_div(value: Tensor, divisor: int) -> Tensor:
    return (value + divisor - 1) // divisor
