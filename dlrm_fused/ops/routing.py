"""Where each token's row goes in the memory of its experts' ranks.

A token has up to k experts; each such (token, expert) is a *slot*, number ``token * k + j``. Rank r has experts ``r * L`` to
``(r + 1) * L``, L = experts / ranks. It receives the rows of its experts one expert after the other, each padded to whole
tiles of ``tile_rows``; within an expert, the rows of rank r + 1 come first, then those of r + 2, and so on to its own, in
the order of their slots. So the tiles whose results have to travel come first, and every rank knows every row's place from the
counts of all ranks alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_fused.symmetric import Channel, SymmetricMemory


@dataclass(frozen=True)
class Routes:
    """Of one call, on the device.

    Attributes:
        targets: int32 [slots]: rank * rows_per_rank + row in the receive block of that rank; -1 for a slot without expert.
        bounds: int32 [L + 1]: the first tile of each of this rank's experts in its own receive block, and the end.
        local_from: int32 [L]: of each of them the first tile with rows of this rank alone.
    """

    targets: Tensor
    bounds: Tensor
    local_from: Tensor


def most_rows(ranks: int, experts: int, top_k: int, max_tokens: int, tile_rows: int) -> int:
    """The most rows that a rank can receive, pads included: a multiple of ``tile_rows``."""
    local = experts // ranks
    rows = ranks * max_tokens * min(top_k, local)
    return (rows + min(rows, local) * (tile_rows - 1)) // tile_rows * tile_rows


def route_by_host(
    experts: Tensor,
    memory: SymmetricMemory,
    channel: Channel,
    *,
    count: int,
    tile_rows: int,
    rows_per_rank: int,
    fingerprint: int,
) -> Routes:
    """Routes of this rank's slots; one epoch of the channel. Between processes on the CPU.

    Args:
        experts: int64 [tokens, k]: ids below ``count``, or -1.
        memory: int32 [ranks, count] on each rank, for the counts of all ranks.
        count: experts of all ranks.
        tile_rows: rows of a tile.
        rows_per_rank: of a receive block.
    """
    group = channel.group
    slots = experts.flatten()
    own, positions = _count(slots, count)
    channel.announce(0, fingerprint)
    for i in range(group.world_size):
        peer = (group.rank + 1 + i) % group.world_size
        channel.wait_ready(peer)
        memory.peer(peer).view(torch.int32).view(group.world_size, count)[group.rank] = own
        channel.signal(peer)
    channel.wait_arrivals()
    counts = memory.local.view(torch.int32).view(group.world_size, count)
    first_rows, bounds, local_from = place_experts(counts, group.rank, tile_rows)
    owners = slots // (count // group.world_size)
    targets = torch.where(slots >= 0, owners * rows_per_rank + first_rows[slots] + positions, -1)
    return Routes(targets.int(), bounds.int(), local_from.int())


def _count(slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Slots of each expert [count], and how many earlier slots each slot's expert has [slots]."""
    order = torch.argsort(slots, stable=True)
    counts = torch.bincount(slots + 1, minlength=count + 1)
    starts = counts.cumsum(0) - counts
    positions = torch.empty_like(slots)
    positions[order] = torch.arange(slots.numel(), device=slots.device) - starts[slots[order] + 1]
    return counts[1:], positions


def place_experts(counts: Tensor, rank: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows begin, from the counts of all ranks.

    Args:
        counts: [ranks, experts]: slots of each rank for each expert.
        rank: this one.

    Returns:
        [experts]: the row in the receive block of the expert's rank at which this rank's rows begin; and ``bounds`` and
        ``local_from`` of :class:`Routes`. All int64.
    """
    ranks, experts = counts.shape
    by_owner = counts.long().view(ranks, ranks, experts // ranks)  # source, owner, expert
    totals = by_owner.sum(0)
    tiles = _ceil_div(totals, tile_rows)
    first_tiles = tiles.cumsum(1) - tiles
    numbers = torch.arange(ranks, device=counts.device)
    turn = (numbers[:, None] - numbers - 1) % ranks  # of a source (row) at an owner (column)
    is_earlier = turn < turn[rank]
    first_rows = first_tiles * tile_rows + (by_owner * is_earlier[:, :, None]).sum(0)
    bounds = torch.cat([first_tiles[rank], tiles[rank].sum()[None]])
    local_from = first_tiles[rank] + _ceil_div(totals[rank] - by_owner[rank, rank], tile_rows)
    return first_rows.flatten(), bounds, local_from


def _ceil_div(value: Tensor, divisor: int) -> Tensor:
    return (value + divisor - 1) // divisor
