"""The places of tokens' rows in the memory of their experts' ranks.

A token has up to k experts; each such (token, expert) is a *slot*, number ``token * k + j``. Rank r has experts ``r * L`` to
``(r + 1) * L``, L = experts / ranks. It receives the rows of its experts one expert after the other, each padded to whole
tiles of ``tile_rows``; within an expert, the rows of rank r + 1 come first, then those of r + 2, and so on to its own, in
the order of their slots. So the tiles whose results have to travel come first, and every rank knows every row's place from the
counts of all ranks alone.

A rank of another host gets a slice: the rows of its experts one expert after the other, in the order of their slots.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.scatter_rows import ItemsByRank
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.gemm_all_to_all.kernel import TILES_OF_PROGRAM, Groups, store_order
from dlrm_fused.symmetric.device import begin, finish, peer_pointer, uses_kernels, wait_until_all_ready
from dlrm_fused.symmetric.hosts import Hosts
from dlrm_fused.symmetric.launches import ceil_div, launch_again, layout_of, next_power_of_2

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


class ExpertSlices(NamedTuple):
    """The rows that travel between hosts. Both lists have one rank of another host after the other, in the order of its slice.

    Attributes:
        slots: int64 [slots]: those whose rows this rank sends; what is beyond their number means nothing.
        rows: int64 [rows of a receive block]: those of this rank's block where the rows that it is sent belong; likewise.
        counts: int64 [2, ranks], on the host: how many slots, and rows, of each rank; 0 for ranks of this host.
    """

    slots: Tensor
    rows: Tensor
    counts: Tensor

    @staticmethod
    def none(like: Tensor) -> ExpertSlices:
        """Return those of ranks on one host."""
        slots, rows = (like.new_empty(0, dtype=torch.int64) for _ in range(2))
        return ExpertSlices(slots, rows, torch.empty(0, dtype=torch.int64))

    @property
    def sent(self) -> ItemsByRank | None:
        """The slots by the rank to which their rows go; None on one host."""
        return self._items(self.slots, 0)

    @property
    def received(self) -> ItemsByRank | None:
        """The rows by the rank from which they come; None on one host."""
        return self._items(self.rows, 1)

    def _items(self, flat: Tensor, way: int) -> ItemsByRank | None:
        if not self.counts.numel():
            return None
        return ItemsByRank([0, *itertools.accumulate(self.counts[way].tolist())], flat, None, 0)


class RoutesToExperts(NamedTuple):
    """The places that rows go to and come from.

    Attributes:
        targets: int32 [slots]: rank * rows_per_rank + row in the receive block of that rank; for a rank of another host, the
            number in the slice in place of the row; -1 for a slot without expert.
        groups: the rows of each of this rank's experts in its own receive block.
        slices: between hosts.
        slots: int64 [experts]: of all ranks together.
    """

    targets: Tensor
    groups: Groups
    slices: ExpertSlices
    slots: Tensor


def route(
    experts: Tensor,
    window: ReceiveWindow,
    *,
    count: int,
    tile_rows: int,
    rows_per_rank: int,
    block: tuple[Tensor, Tensor] | None = None,
) -> RoutesToExperts:
    """Routes of this rank's slots. One epoch: collective. On GPUs the host waits for the device between hosts alone, for the
    sizes of slices.

    Args:
        experts: int64 [tokens, k], contiguous: ids below ``count``, or -1. Kernels take any other id for -1, and so every
            repetition of an id in a row.
        window: int32 [ranks, count] on each rank, for the counts of all ranks.
        count: experts of all ranks.
        tile_rows: rows of a tile.
        rows_per_rank: of a receive block.
        block: the rows [R, d] of this rank's receive block, and their destinations, int32 [R]: kernels make pads of them, zeros
            and -1, where no rank will store. Tiles of one row have none.

    Raises:
        CommunicationError: on the CPU and between hosts, if a peer is lost or makes another call; on GPUs of one host a later
            call raises it.
    """
    if not uses_kernels(window.memory.local.device):
        return _route_by_host(experts, window, count, tile_rows, rows_per_rank)
    memory, channel, _, fingerprint = window
    slots, top_k = experts.numel(), experts.shape[1]
    lanes = max(_LANES, next_power_of_2(top_k))
    chunk = lanes // top_k * top_k
    chunks = ceil_div(slots, chunk)
    starts = torch.empty(max(chunks, 1), count, dtype=torch.int32, device=experts.device)
    positions = torch.empty(slots, dtype=torch.int32, device=experts.device)
    if slots:
        launch_again(
            (layout_of(experts), count), count_kernel, (chunks,),
            experts, slots, starts, positions, count,
            TOP_K=top_k, CHUNK=chunk, LANES=lanes, EXPERTS=next_power_of_2(count), num_warps=8,
        )  # fmt: skip
    # Counts of chunks become sums over the chunks before, and all ranks are told the totals; then as in `place_experts`.
    at_a_time = min(_SCAN_EXPERTS, next_power_of_2(count))
    channel.launches(
        count, exchange_counts_kernel, (ceil_div(count, at_a_time),),
        starts, chunks, count, memory.addresses, channel.args, fingerprint,
        CHUNKS=_SCAN_CHUNKS, EXPERTS=at_a_time, num_warps=4,
    )  # fmt: skip
    ranks, local = channel.group.world_size, count // channel.group.world_size
    counts = memory.local.view(torch.int32)[: ranks * count].view(ranks, count)
    slices = ExpertSlices.none(experts)
    if channel.group.hosts.are_many:
        _exchange_counts_between_hosts(counts, window)
        of_slices = _counts_of_slices(counts.cpu(), channel.group.hosts)
        channel.raise_fault()  # counts of a message that was aborted would send kernels beyond their memory
    targets, first_rows = torch.empty_like(positions), starts.new_empty(count)
    tiles, parts = rows_per_rank // tile_rows, ceil_div(tile_rows, _PAD_ROWS.value)
    order, slots_of_experts = starts.new_empty(2, tiles), experts.new_empty(count)
    groups = Groups(tile_rows, starts.new_empty(local + 1), starts.new_empty(local), {tiles: order})
    block_rows, destinations = block or (targets, targets)
    of_slots, of_tiles = ceil_div(slots, _SLOTS_OF_PROGRAM.value), ceil_div(tiles, TILES_OF_PROGRAM.value)
    layout = layout_of(experts, block_rows, destinations), count, tile_rows, rows_per_rank, block is None
    channel.launches(
        layout, place_kernel, (max(of_slots, of_tiles, local * parts),),
        SlotArgs(experts, positions, starts, targets), counts, memory.addresses, first_rows, slots_of_experts, groups.bounds,
        groups.local_from, order, block_rows, destinations,
        slots, count, tile_rows, tiles, rows_per_rank, block_rows.shape[-1],
        RANK=channel.group.rank, WORLD=ranks, RANKS=next_power_of_2(ranks), LANES=next_power_of_2(local),
        CHUNK=chunk, CLEARS_PADS=block is not None, PARTS=parts, num_warps=4,
    )  # fmt: skip
    if channel.group.hosts.are_many:
        flat, rows = targets.new_empty(slots, dtype=torch.int64), targets.new_empty(rows_per_rank, dtype=torch.int64)
        slices_kernel[(max(of_slots, ranks * local),)](
            targets, counts, memory.addresses, flat, rows, slots, count, tile_rows, rows_per_rank,
            RANK=channel.group.rank, WORLD=ranks, RANKS=next_power_of_2(ranks), LANES=next_power_of_2(local), num_warps=4,
        )  # fmt: skip
        slices = ExpertSlices(flat, rows, of_slices)
    return RoutesToExperts(targets, groups, slices, slots_of_experts)


@triton.jit(do_not_specialize=["slots"])
def count_kernel(
    ids, slots, counts, positions, experts,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Count each chunk's slots of each expert, and for each slot the earlier ones of its chunk with the same expert.

    Args:
        ids: int64 [slots].
        counts: int32 [chunks, experts].
        positions: int32 [slots]; -1 for a slot without expert.
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
    id_ = tl.where((id_ >= 0) & (id_ < experts), id_, -1).to(tl.int32)
    for back in range(1, TOP_K):
        is_of_token = there & (lane % TOP_K >= back)
        id_ = tl.where(tl.load(ids + slot - back, mask=is_of_token, other=-1) == id_, -1, id_)
    # Earlier slots count 1, others 2^16: one sum is both numbers.
    weights = tl.where(lane[None, :] < lane[:, None], 1, 1 << 16)
    same = tl.sum(tl.where(id_[None, :] == id_[:, None], weights, 0), axis=1)
    position, is_last = same & 0xFFFF, same >> 16 == 1
    tl.debug_barrier()  # the zeros are stored
    tl.store(of_chunk + id_, position + 1, mask=(id_ >= 0) & is_last)
    tl.store(positions + slot, tl.where(id_ >= 0, position, -1), mask=there)


@triton.jit(do_not_specialize=["chunks", "fingerprint"])
def exchange_counts_kernel(
    counts, chunks, experts, addresses, channel, fingerprint,
    CHUNKS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Turn counts of chunks into sums over the chunks before, and tell all ranks the sums over all chunks.

    Args:
        counts: int32 [chunks, experts]; of :func:`count_kernel`, and overwritten.
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
    of_slots, counts, addresses, first_rows, slots_of_experts, bounds, local_from, order, rows, destinations, slots, experts,
    tile_rows, tiles, rows_per_rank, width,
    RANK: tl.constexpr, WORLD: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
    CLEARS_PADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """:func:`place_experts`, and what follows from it: targets, order of tiles, pads; of each every program has a part.

    Args:
        of_slots: :class:`SlotArgs`.
        counts: int32 [ranks, experts].
        addresses: of the ranks' memory; 0 for ranks of other hosts, whose slices have rows of their own numbers.
        first_rows: int32 [experts], scratch: where this rank's rows begin. All programs store the same.
        rows, destinations: of the receive block, with CLEARS_PADS.
        RANKS, LANES: powers of two, at least WORLD and experts / WORLD.
    """
    program, local = tl.program_id(0), experts // WORLD
    receiver, lane = tl.arange(0, RANKS)[:, None], tl.arange(0, LANES)[None, :]
    exists = (receiver < WORLD) & (lane < local)
    expert = receiver * local + lane
    total, before = tl.zeros((RANKS, LANES), tl.int32), tl.zeros((RANKS, LANES), tl.int32)
    remote, own = tl.zeros((RANKS, LANES), tl.int32), tl.zeros((RANKS, LANES), tl.int32)
    own_turn = (RANK - receiver - 1 + WORLD) % WORLD
    for source in tl.static_range(WORLD):
        count = tl.load(counts + source * experts + expert, mask=exists, other=0)
        total += count
        before += tl.where((source - receiver - 1 + WORLD) % WORLD < own_turn, count, 0)
        remote += tl.where(source == receiver, 0, count)
        if source == RANK:
            own += count
    tiles_of_expert = tl.cdiv(total, tile_rows)
    end = tl.cumsum(tiles_of_expert, axis=1)
    is_here = tl.load(addresses + receiver, mask=receiver < WORLD, other=0) != 0
    first_row = tl.where(is_here, (end - tiles_of_expert) * tile_rows + before, tl.cumsum(own, axis=1) - own)
    tl.store(first_rows + expert, first_row, mask=exists)
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


@triton.jit(do_not_specialize=["slots", "tile_rows", "rows_per_rank"])
def slices_kernel(
    targets, counts, addresses, sent_slots, received_rows, slots, experts, tile_rows, rows_per_rank,
    RANK: tl.constexpr, WORLD: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Fill :class:`ExpertSlices`. A program has some slots, and the rows that one rank sends for one expert of this rank.

    Args:
        targets: int32 [slots], :attr:`RoutesToExperts.targets`.
        counts: int32 [ranks, experts].
        addresses: of the ranks' memory; 0 for ranks of other hosts.
        sent_slots, received_rows: int64, to be filled.
        RANKS, LANES: powers of two, at least WORLD and experts / WORLD.
    """
    program, local = tl.program_id(0), experts // WORLD
    slot = program * _SLOTS_OF_PROGRAM + tl.arange(0, _SLOTS_OF_PROGRAM)
    target = tl.load(targets + slot, mask=slot < slots, other=-1)
    lane = tl.arange(0, LANES)
    first_sent = tl.zeros((), tl.int32)
    for rank in range(WORLD):
        if tl.load(addresses + rank) == 0:
            is_sent = (target >= 0) & (target // rows_per_rank == rank)
            tl.store(sent_slots + first_sent + target % rows_per_rank, slot.to(tl.int64), mask=is_sent)
            first_sent += tl.sum(tl.load(counts + RANK * experts + rank * local + lane, mask=lane < local, other=0), axis=0)

    sender, expert = program // local, program % local
    if sender < WORLD:  # noqa: SIM102 - elsewhere there is no address
        if tl.load(addresses + sender) == 0:
            source, own = tl.arange(0, RANKS)[:, None], RANK * local + lane[None, :]
            is_there = (source < WORLD) & (lane < local)[None, :]
            count = tl.load(counts + source * experts + own, mask=is_there, other=0)
            tiles = tl.cdiv(tl.sum(count, axis=0), tile_rows)
            turn = (source - RANK - 1 + WORLD) % WORLD
            is_earlier = (turn < (sender - RANK - 1 + WORLD) % WORLD) & (lane == expert)[None, :]
            row = tl.sum(tl.where(lane < expert, tiles, 0), axis=0) * tile_rows
            row += tl.sum(tl.sum(tl.where(is_earlier, count, 0), axis=1), axis=0)
            is_remote = tl.load(addresses + source, mask=source < WORLD, other=1) == 0
            is_before = is_remote & ((source < sender) | ((source == sender) & (lane < expert)[None, :]))
            first = tl.sum(tl.sum(tl.where(is_before, count, 0), axis=1), axis=0)
            rows = tl.load(counts + sender * experts + RANK * local + expert)
            for begin in range(0, rows, _SLOTS_OF_PROGRAM):
                number = begin + tl.arange(0, _SLOTS_OF_PROGRAM)
                tl.store(received_rows + first + number, (row + number).to(tl.int64), mask=number < rows)


@triton.jit
def clear_rows(rows, row, is_cleared, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zero those of ROWS rows that are to be cleared."""
    if tl.max(is_cleared.to(tl.int32), axis=0) > 0:
        for first in range(0, width, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            places = rows + row.to(tl.int64)[:, None] * tl.multiple_of(width, 4) + column[None, :]
            zeros = tl.zeros((ROWS, COLUMNS), rows.dtype.element_ty)
            tl.store(places, zeros, mask=is_cleared[:, None] & (column < width)[None, :])


def _route_by_host(experts: Tensor, window: ReceiveWindow, count: int, tile_rows: int, rows_per_rank: int) -> RoutesToExperts:
    memory, channel, _, fingerprint = window
    group, slots = channel.group, experts.flatten()
    own, positions = count_slots(slots, count)

    def counts_at(peer: int) -> Tensor:
        return memory.peer(peer).view(torch.int32).view(group.world_size, count)

    channel.run_epoch(lambda peer, _: counts_at(peer)[group.rank].copy_(own), fingerprint=fingerprint)
    counts = counts_at(group.rank)
    if group.hosts.are_many:
        _exchange_counts_between_hosts(counts, window)
    first_rows_of_ranks, groups = place_experts(counts, group.rank, tile_rows)
    first_rows, received = first_rows_of_ranks[group.rank], slots.new_empty(0)
    if group.hosts.are_many:
        received = _received_rows(counts, first_rows_of_ranks, group.hosts)
        _number_rows_of_slices(first_rows, own, group.hosts)
    receivers = slots // (count // group.world_size)
    targets = torch.where(slots >= 0, receivers * rows_per_rank + first_rows[slots] + positions, -1)
    slices = ExpertSlices.none(targets)
    if group.hosts.are_many:
        by_rank = ItemsByRank.of(targets, rows_per_rank, group.world_size)
        sent = torch.cat(list(by_rank.of_ranks(sorted(group.hosts.remote)).values()))
        slices = ExpertSlices(
            _filled_up(sent, slots.numel()), _filled_up(received, rows_per_rank), _counts_of_slices(counts, group.hosts)
        )
    return RoutesToExperts(targets.int(), groups, slices, counts.sum(0))


def _filled_up(numbers: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(numbers, (0, size - len(numbers)))


def _counts_of_slices(counts: Tensor, hosts: Hosts) -> Tensor:
    """Return :attr:`ExpertSlices.counts` from int32 [ranks, experts] on the host."""
    of_pairs = counts.long().view(len(counts), len(counts), -1).sum(2)
    of_slices = torch.stack([of_pairs[hosts.rank], of_pairs[:, hosts.rank]])
    of_slices[:, list(hosts.local)] = 0
    return of_slices


def _exchange_counts_between_hosts(counts: Tensor, window: ReceiveWindow) -> None:
    """Complete int32 [ranks, experts] by the counts of the ranks of other hosts. Collective."""
    channel, remote = window.channel, window.channel.group.hosts.remote
    sent = counts[channel.group.rank].clone()
    channel.exchange(
        dict.fromkeys(remote, sent), {rank: counts[rank] for rank in remote}, fingerprint=window.fingerprint
    ).complete()


def _number_rows_of_slices(first_rows: Tensor, own: Tensor, hosts: Hosts) -> None:
    """Replace the first rows of experts on other hosts, in place, by those in the slices; as :func:`place_kernel` does.

    Args:
        first_rows: [experts], of :func:`place_experts`.
        own: [experts], this rank's counts.
    """
    by_rank = own.view(len(hosts.of_rank), -1)
    in_slice = by_rank.cumsum(1) - by_rank
    remote = torch.tensor(hosts.remote, dtype=torch.int64, device=first_rows.device)
    first_rows.view_as(by_rank)[remote] = in_slice[remote].to(first_rows.dtype)


def _received_rows(counts: Tensor, first_rows: Tensor, hosts: Hosts) -> Tensor:
    """Return :attr:`ExpertSlices.rows`.

    Args:
        counts: [ranks, experts], of all ranks, on the host.
        first_rows: of :func:`place_experts`.
    """
    local, remote = counts.shape[1] // counts.shape[0], sorted(hosts.remote)
    own = slice(hosts.rank * local, (hosts.rank + 1) * local)
    lengths = counts[remote, own].long().flatten()
    shifts = first_rows[remote, own].flatten() - lengths.cumsum(0) + lengths
    return torch.repeat_interleave(shifts, lengths) + torch.arange(int(lengths.sum()))


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
