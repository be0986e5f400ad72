"""The two kernels of the exchange of sparse features."""

from __future__ import annotations

import triton
import triton.language as tl

from dlrm_fused.symmetric.device import begin, finish, peer_pointer, wait_until_all_ready

ROUTE_FIELDS = 4
_FIELDS = tl.constexpr(ROUTE_FIELDS)


@triton.jit
def _copy(source, destination, count, number, programs, ELEMENTS: tl.constexpr):
    """Copy this program's blocks of ``count`` elements: of as many ``programs``, it has the number ``number``."""
    for begin_at in range(number.to(tl.int64) * ELEMENTS, count, programs.to(tl.int64) * ELEMENTS):
        place = begin_at + tl.arange(0, ELEMENTS)
        inside = place < count
        tl.store(destination + place, tl.load(source + place, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["routes_count", "bags", "blocks", "count", "most_bags", "most_values", "told_at", "fingerprint"])
def send_kernel(
    lengths, offsets, values, routes, routes_count, bags, blocks, count, most_bags, most_values, told_at, addresses, channel,
    fingerprint,
    BAGS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Tell the tables' owners the lengths of this rank's bags, and leave its values where they can fetch them. One epoch.

    Args:
        lengths: int32 or int64 [features * bags].
        offsets: int32 or int64 [features * bags + 1], where bags begin in ``values``.
        routes: int64 [routes_count, 4]: an owner, a feature, and at which bytes the owner keeps the lengths of this rank's bags
            of it, and its two words: their values' count, and where these begin.
        blocks: of BAGS bags in ``bags``.
        count: of values.
        most_bags, most_values: for which there is memory. If there are more, nothing is sent but how many there are.
        told_at: byte of two words at all ranks: how many values this rank has, and how many bags.
        addresses: of the ranks' memory, which begins with their values.
    """
    epoch = begin(channel, 0, fingerprint)
    are_ready = wait_until_all_ready(channel, epoch, fingerprint)
    if (tl.program_id(0) == 0) & are_ready:
        for peer in range(channel.world):
            told = peer_pointer(addresses, peer, told_at, tl.int64)
            tl.store(told, count.to(tl.int64))
            tl.store(told + 1, bags.to(tl.int64))
    has_room = are_ready & (bags <= most_bags) & (count <= most_values)
    for item in range(tl.program_id(0), routes_count * blocks, tl.num_programs(0)):
        fields = routes + item // blocks * _FIELDS
        peer, feature = tl.load(fields), tl.load(fields + 1)
        bag = item % blocks * BAGS + tl.arange(0, BAGS)
        inside = (bag < bags) & has_room
        there = peer_pointer(addresses, peer, tl.load(fields + 2), lengths.dtype.element_ty)
        tl.store(there + bag, tl.load(lengths + feature * bags + bag, mask=inside, other=0), mask=inside)
        if (item % blocks == 0) & has_room:
            first = tl.load(offsets + feature * bags).to(tl.int64)
            words = peer_pointer(addresses, peer, tl.load(fields + 3), tl.int64)
            tl.store(words, tl.load(offsets + (feature + 1) * bags) - first)
            tl.store(words + 1, first)
    if has_room:
        own = peer_pointer(addresses, channel.rank, 0, values.dtype.element_ty)
        _copy(values, own, count, tl.program_id(0), tl.num_programs(0), ELEMENTS)
    finish(channel, epoch)


@triton.jit(do_not_specialize=["runs"])
def fetch_kernel(words, runs, addresses, values, WORLD: tl.constexpr, RUNS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Bring the values of all ranks here, by feature and then by rank. Program (r, p) has every P-th block of run r.

    Args:
        words: int64 [runs, 2] of the runs, by feature and rank: how many values, and where they begin at the rank.
        addresses: of the ranks' memory, which begins with their values.
        RUNS: a power of two, at least ``runs``.
    """
    run = tl.program_id(0)
    earlier = tl.arange(0, RUNS)
    before = tl.sum(tl.load(words + 2 * earlier, mask=earlier < run, other=0), axis=0)
    count, first = tl.load(words + 2 * run), tl.load(words + 2 * run + 1)
    source = peer_pointer(addresses, run % WORLD, 0, values.dtype.element_ty) + first
    _copy(source, values + before, count, tl.program_id(1), tl.num_programs(1), ELEMENTS)
