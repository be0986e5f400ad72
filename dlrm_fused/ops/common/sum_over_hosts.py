"""AllReduce between the ranks of several hosts, in two levels, so that as little as possible goes between hosts.

Inside a host the ranks read each other's memory. Of the elements each rank has its share: it adds up its host's values, and
with the ranks that have the same share on other hosts it sums them by a reduce-scatter and an all-gather. So a host sends
``2 * (hosts - 1) / hosts`` times the elements, where a ring over all ranks sends ``2 * (ranks - 1) / ranks`` times as many
between every two hosts that are neighbours in it.

The order of addition is fixed, ranks of a host first: all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_fused.ops.common.meeting import meet
from dlrm_fused.ops.common.workspace import fingerprint_of
from dlrm_fused.symmetric import Channel, SymmetricGroup


class SumOverHosts:
    """The memory of sums of up to ``elements`` fp32 elements. Making one is collective.

    Args:
        channel: of the sums, and of nothing that runs at the same time in another thread.
        wire: dtype in which sums of hosts and of all travel between hosts, and are rounded.
    """

    def __init__(
        self, group: SymmetricGroup, channel: Channel, name: str, elements: int, wire: torch.dtype = torch.float32
    ) -> None:
        self._hosts, self._channel, self._elements, self._wire = group.hosts, channel, elements, wire
        # Two halves in turn: who writes one again has seen everybody begin the epoch after, done with reading it.
        self._group, self._memory = group, group.allocate(name, 2 * 4 * elements)
        self._shares = max(map(len, self._hosts.ranks))
        self._half = 0

    def sum(self, values: Tensor, *what: object, divisor: int = 1) -> Tensor:
        """The sum over the ranks of what they have, divided by ``divisor``. Collective.

        Args:
            values: fp32, contiguous, at most ``elements``; overwritten by the sum, and returned.
            what: must be equal on all ranks, beside the number of elements.

        Raises:
            CommunicationError: if a peer is lost, was waited for too long, or makes another call; on GPUs from a later call.
        """
        flat, fingerprint = values.view(-1), fingerprint_of(values.numel(), *what)
        begin = self._half * self._elements
        self._half = 1 - self._half
        parts = {
            rank: self._memory.peer(rank).view(torch.float32)[begin : begin + flat.numel()].tensor_split(self._shares)
            for rank in self._hosts.local
        }
        own = self._hosts.local.index(self._hosts.rank)
        shares = range(own, self._shares, len(self._hosts.local))
        for part, value in zip(parts[self._hosts.rank], flat.tensor_split(self._shares), strict=True):
            torch.div(value, divisor, out=part)
        meet(self._channel, fingerprint)
        for share in shares:
            # Nobody else reads this rank's copy of its own shares before the next epoch: it receives their sums.
            total = parts[self._hosts.rank][share]
            _sum([parts[rank][share] for rank in self._hosts.local], total)
            if self._hosts.are_many:
                self._sum_between_hosts(total, share, fingerprint)
        meet(self._channel, fingerprint)
        for share, value in enumerate(flat.tensor_split(self._shares)):
            value.copy_(parts[self._hosts.local[share % len(self._hosts.local)]][share])
        return values

    def release(self) -> None:
        """Let go of the memory; nothing is summed after."""
        self._group.release(self._memory)

    def _sum_between_hosts(self, total: Tensor, share: int, fingerprint: int) -> None:
        """Sum in place over the ranks that have this share, one on each host. By TCP: others take no part."""
        own, pieces = self._hosts.own, list(total.to(self._wire).tensor_split(len(self._hosts.ranks)))
        # By host; in the order in which all send to different ones.
        others = {host: self._hosts.ranks[host][share % len(self._hosts.ranks[host])] for host in self._hosts.others}
        arrived = {host: torch.empty_like(pieces[own]) for host in others}
        self._channel.exchange(
            {rank: pieces[host] for host, rank in others.items()},
            {rank: arrived[host] for host, rank in others.items()},
            fingerprint=fingerprint,
        ).complete()
        arrived[own] = pieces[own]
        own_sum = _sum([arrived[host] for host in sorted(arrived)], total.tensor_split(len(pieces))[own])
        pieces[own] = own_sum.to(self._wire)
        self._channel.exchange(
            dict.fromkeys(others.values(), pieces[own]),
            {rank: pieces[host] for host, rank in others.items()},
            fingerprint=fingerprint,
        ).complete()
        for value, piece in zip(total.tensor_split(len(pieces)), pieces, strict=True):
            value.copy_(piece)


def _sum(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """The sum of the parts in their order, in fp32, in ``out``, which may be one of them."""
    first, *others = (part.float() for part in parts)
    if not others:
        return out.copy_(first)
    second, *others = others
    kept = [part.clone() if part.data_ptr() == out.data_ptr() else part for part in others]
    torch.add(first, second, out=out)
    for part in kept:
        out += part
    return out
