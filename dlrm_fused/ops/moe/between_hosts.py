"""Tokens of other hosts: a token crosses once to each host that has some of its experts, and one sum comes back.

The ranks of a host compute the layer of the experts there. The tokens of a rank in it are its own and its *guests*: those that
the ranks of other hosts that it serves (:attr:`~dlrm_fused.symmetric.hosts.Hosts.served`) send it. So nothing inside a host
knows of other hosts.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.2: tokens go to the GPU of the same number on another node, and from there
to those of their experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_fused.ops.common.workspace import fingerprint_of
from dlrm_fused.symmetric import Channel


class Crossings(NamedTuple):
    """The tokens of a call that cross between hosts. Empty tensors where all ranks are on one host.

    Attributes:
        tokens: int64 [other hosts * T]: the numbers of those of this rank that go to each counterpart, ascending; one
            counterpart after the other. What is beyond means nothing.
        counts: int64 [2, ranks], on the host: how many tokens of this rank go to each rank, and how many guests each sends.
        gates: fp32 [T + most guests, k]: those of own tokens, and then of guests.
    """

    tokens: Tensor
    counts: Tensor
    gates: Tensor

    @staticmethod
    def none(like: Tensor) -> Crossings:
        """Return those of ranks on one host."""
        return Crossings(like.new_empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64), like.new_empty(0))

    def leaving(self) -> list[int]:
        """Return how many tokens go to each rank."""
        return self.counts[0].tolist()

    def guests(self) -> list[int]:
        """Return how many guests each rank sends."""
        return self.counts[1].tolist()


class HostBoundary:
    """The exchanges of a rank with its counterparts, to which its tokens go, and with the ranks that it serves.

    A rank has T tokens of its own and at most ``most_guests``. Tensors of all of them are [T + most guests, ...]: own tokens
    first, then the guests of one served rank after the other. What is beyond these has no experts, and means nothing. All
    methods are collective, and raise CommunicationError if a rank is lost or makes another call; on GPUs a later call may.
    """

    def __init__(self, channel: Channel, experts: int, max_tokens: int) -> None:
        """Local.

        Args:
            channel: of the layer.
            experts: of all ranks.
            max_tokens: of a rank and call.
        """
        self._channel, self._experts, device = channel, experts, channel.group.device
        hosts, local = channel.group.hosts, experts // channel.group.world_size
        self._own_host, self._other_hosts = hosts.own, hosts.others
        self._counterparts, self._served = hosts.counterparts(), hosts.served
        self.most_guests = len(self._served) * max_tokens
        self._counterpart_numbers = torch.tensor(self._counterparts, device=device)
        host_of = torch.tensor([hosts.of_rank[expert // local] for expert in range(experts)])
        self._experts_of_host = [(host_of == host).nonzero()[:, 0].to(device) for host in range(len(hosts.ranks))]
        # The last but one place is for ids that are too large, the last one for -1: they are on no host.
        self._host_of_expert = torch.cat([host_of, host_of.new_full((2,), -1)]).to(device)
        self._others = torch.tensor(hosts.others, device=device)[:, None, None]

    def receive_guests(self, x: Tensor, experts: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Crossings]:
        """Send tokens to the other hosts of their experts. The host waits for the device, for the numbers of tokens.

        Args:
            x: [T, d].
            experts: int64 [T, k].
            gates: fp32 [T, k].

        Returns:
            [T + most guests, d]: all tokens; int64 [T + most guests, k]: their experts on this host, -1 for others; and what
            has crossed, with all gates.
        """
        experts = experts.clamp(-1, self._experts)
        visits = (self._host_of_expert[experts] == self._others).any(2)  # [other hosts, T]
        tokens = torch.nonzero_static(visits, size=visits.numel(), fill_value=0)[:, 1].contiguous()
        counts = self._exchange_counts(visits.sum(1))
        count = len(x) + self.most_guests
        crossings = Crossings(tokens, counts, gates.new_zeros(count, gates.shape[1]))
        all_x, all_experts = x.new_empty(count, x.shape[1]), experts.new_full((count, experts.shape[1]), -1)
        leaving = tokens[: sum(crossings.leaving())]
        sent = _side_by_side([part.index_select(0, leaving) for part in (x, experts, gates)])
        arrived = sent.new_empty(sum(crossings.guests()), sent.shape[1])
        self._exchange(self._of_counterparts(sent, crossings), self._of_served(arrived, crossings), "tokens")
        every_gates, guests = crossings.gates, slice(len(x), len(x) + len(arrived))
        columns = arrived.split([_words(part).shape[1] for part in (x, experts, gates)], 1)
        for every, own, of_guests in zip((all_x, all_experts, every_gates), (x, experts, gates), columns, strict=True):
            every[: len(x)] = own
            _words(every)[guests] = of_guests
        is_here = self._host_of_expert[all_experts] == self._own_host
        return all_x, all_experts.where(is_here, -1), crossings

    def fake_crossings(self, experts: Tensor, gates: Tensor) -> Crossings:
        """Return tensors of the shapes of those that cross."""
        tokens = experts.new_empty(len(self._other_hosts) * len(experts))
        counts = torch.empty((2, self._channel.group.world_size), dtype=torch.int64)
        return Crossings(tokens, counts, gates.new_empty(len(gates) + self.most_guests, gates.shape[1]))

    def receive_gradients(self, gradient: Tensor, crossings: Crossings) -> Tensor:
        """Send the gradients of results, [T, d], to where the tokens went; return those of all tokens."""
        own = len(gradient)
        every = gradient.new_empty(own + self.most_guests, gradient.shape[1])
        every[:own] = gradient
        sent = gradient.index_select(0, crossings.tokens[: sum(crossings.leaving())])
        arrived = every[own : own + sum(crossings.guests())]
        self._exchange(self._of_counterparts(sent, crossings), self._of_served(arrived, crossings), "gradients of results")
        return every

    def return_sums(self, rows: Tensor, crossings: Crossings) -> Tensor:
        """Send the guests' sums home; return those of own tokens, [T, d], of the sums [T + most guests, d] of this host.

        Sums of hosts are added in fp32, this host's first and then those of the others in the order of ``Hosts.others``.
        """
        return self._return([rows], crossings, "results")[0]

    def return_gradients(self, rows: Tensor, gates: Tensor, crossings: Crossings) -> list[Tensor]:
        """:meth:`return_sums` of the tokens' gradients, and of those of their gates, fp32 [T + most guests, k]."""
        return self._return([rows, gates], crossings, "gradients of tokens")

    def sum_slots(self, slots: Tensor) -> Tensor:
        """Complete int64 [experts], how many tokens have each expert of this host, by the numbers for those of other hosts."""
        own = slots[self._experts_of_host[self._own_host]]
        others = [slots.new_empty(len(self._experts_of_host[host])) for host in self._other_hosts]
        self._exchange(dict.fromkeys(self._served, own), dict(zip(self._counterparts, others, strict=True)), "slots")
        for host, of_host in zip(self._other_hosts, others, strict=True):
            slots[self._experts_of_host[host]] = of_host
        return slots

    def _return(self, sums: Sequence[Tensor], crossings: Crossings, what: str) -> list[Tensor]:
        own = len(sums[0]) - self.most_guests
        sent = _side_by_side([rows[own : own + sum(crossings.guests())] for rows in sums])
        arrived = sent.new_empty(sum(crossings.leaving()), sent.shape[1])
        of_counterparts = self._of_counterparts(arrived, crossings)
        self._exchange(self._of_served(sent, crossings), of_counterparts, what)
        totals = [rows[:own].to(torch.float32, copy=True) for rows in sums]
        tokens_of = self._of_counterparts(crossings.tokens[: len(arrived)], crossings)
        for rank, of_rank in of_counterparts.items():  # a token is there once, and so the order of additions is always the same
            columns = of_rank.split([_words(rows).shape[1] for rows in sums], 1)
            for total, column, rows in zip(totals, columns, sums, strict=True):
                total.index_add_(0, tokens_of[rank], column.view(rows.dtype).float())
        return [total.to(rows.dtype) for total, rows in zip(totals, sums, strict=True)]

    def _exchange_counts(self, leaving: Tensor) -> Tensor:
        """Return :attr:`Crossings.counts` from the numbers of tokens that go to each counterpart."""
        group = self._channel.group
        counts = leaving.new_zeros(2, group.world_size)
        counts[0].index_copy_(0, self._counterpart_numbers, leaving)
        sent, received = ({rank: way[rank : rank + 1] for rank in range(group.world_size)} for way in counts)
        self._exchange(
            {rank: sent[rank] for rank in self._counterparts},
            {rank: received[rank] for rank in self._served},
            "numbers of tokens",
        )
        counts = counts.cpu()
        self._channel.raise_fault()  # the numbers of a message that was aborted mean nothing
        return counts

    def _of_counterparts(self, rows: Tensor, crossings: Crossings) -> dict[int, Tensor]:
        return _by_rank(rows, self._counterparts, crossings.leaving())

    def _of_served(self, rows: Tensor, crossings: Crossings) -> dict[int, Tensor]:
        return _by_rank(rows, self._served, crossings.guests())

    def _exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], what: str) -> None:
        self._channel.exchange(sent, received, fingerprint=fingerprint_of(what)).complete()


def _by_rank(rows: Tensor, ranks: Sequence[int], counts: Sequence[int]) -> dict[int, Tensor]:
    """Return the rows of each rank, in this order, from ``counts`` of all ranks."""
    return dict(zip(ranks, rows.split([counts[rank] for rank in ranks]), strict=True))


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return matrices of as many rows as one of int32."""
    return _words(parts[0]) if len(parts) == 1 else torch.cat([_words(part) for part in parts], 1)


def _words(rows: Tensor) -> Tensor:
    """Return rows, whose bytes are a multiple of 4, as int32."""
    return rows.view(torch.int32)
