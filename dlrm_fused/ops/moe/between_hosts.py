"""Tokens of other hosts: a token crosses once to each host that has some of its experts, and one sum comes back.

On GPUs, where few bytes would be saved by asking how many tokens cross, all of them do (:func:`all_tokens_cross`): the host
then waits for nothing, and a CUDA graph can have the layer.

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
from dlrm_fused.ops.moe.crossing_steps import HostCrossing, KernelCrossing, words
from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.device import uses_kernels

# Bytes that a rank may send in vain, in one message to each other host, so that no host waits for its device. To wait, and to
# tell how many tokens cross, takes 0.1 ms and more; so many bytes take 0.04 ms at 50 GB/s, in each of two messages.
_MOST_BYTES_IN_VAIN = 2 * 2**20


def share_of_visitors(hosts: int, top_k: int) -> float:
    """Return the share of tokens that have some of their ``top_k`` experts on a given host of so many, if evenly spread."""
    return 1 - (1 - 1 / hosts) ** top_k


def all_tokens_cross(hosts: int, top_k: int, max_tokens: int, row_bytes: int) -> bool:
    """Return whether all tokens go to all other hosts, whatever their experts, so that nobody has to tell how many.

    Then every call sends as many rows as one of ``max_tokens``, also with fewer tokens.

    Args:
        hosts: of the layer's ranks.
        top_k: experts of a token; those of evenly spread tokens count.
        max_tokens: of a rank and call.
        row_bytes: of a token.
    """
    in_vain = (hosts - 1) * max_tokens * (1 - share_of_visitors(hosts, top_k))
    return in_vain * row_bytes <= _MOST_BYTES_IN_VAIN


class Crossings(NamedTuple):
    """The tokens of a call that cross between hosts. Empty tensors where all ranks are on one host.

    Attributes:
        places: int32 [other hosts, 1 + T]: how many tokens of this rank go to each counterpart, and for each token its place
            among them, or -1.
        counts: int32 [counterparts + 1 + served ranks], on the host: how many tokens go to each, a zero, and how many guests
            each sends.
        gates: fp32 [T + most guests, k]: those of own tokens, and then of guests.
    """

    places: Tensor
    counts: Tensor
    gates: Tensor

    @staticmethod
    def none(like: Tensor) -> Crossings:
        """Return those of ranks on one host."""
        return Crossings(
            like.new_empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32, device="cpu"), like.new_empty(0)
        )


class Visit(NamedTuple):
    """The tokens of which a rank computes the layer of its host.

    Attributes:
        x: [T + guests, d].
        experts: int64 [T + most guests, k]: -1 beyond the guests. Those of other hosts are -1, or -2 - id if all tokens cross.
        elsewhere: int32 [1 + served ranks, experts]: how many tokens of this rank, and of each that it serves, have each expert
            of other hosts; [0, experts] if all tokens cross.
        crossings: what has crossed.
    """

    x: Tensor
    experts: Tensor
    elsewhere: Tensor
    crossings: Crossings


class HostBoundary:
    """The exchanges of a rank with its counterparts, to which its tokens go, and with the ranks that it serves.

    A rank has T tokens of its own, and at most ``most_guests``. Tensors of all of them have own tokens first, then the guests
    of one served rank after the other. All methods are collective, and raise CommunicationError if a rank is lost or makes
    another call; on GPUs a later call may.
    """

    def __init__(self, channel: Channel, experts: int, top_k: int, max_tokens: int, row_bytes: int) -> None:
        """Local.

        Args:
            channel: of the layer.
            experts: of all ranks.
            top_k: experts of a token.
            max_tokens: of a rank and call.
            row_bytes: of a token.
        """
        group, with_kernels = channel.group, uses_kernels(channel.group.device)
        hosts, local = group.hosts, experts // group.world_size
        self._channel, self._experts = channel, experts
        self._counterparts, self._served = hosts.counterparts(), hosts.served
        self.most_guests = len(self._served) * max_tokens
        host_of_expert = torch.tensor([hosts.of_rank[expert // local] for expert in range(experts)])
        self.all_cross = with_kernels and all_tokens_cross(len(hosts.ranks), top_k, max_tokens, row_bytes)
        steps = KernelCrossing if with_kernels else HostCrossing
        self._steps = steps(
            host_of_expert.to(group.device), hosts.own, hosts.others, len(self._served), names_elsewhere=self.all_cross
        )
        # All tokens' number, then the place of each.
        self._in_order = torch.arange(-1, max_tokens, dtype=torch.int32, device=group.device)
        self._in_order[0] = max_tokens

    def receive_guests(self, x: Tensor, experts: Tensor, gates: Tensor) -> Visit:
        """Send tokens to the other hosts of their experts. The host waits for the device, unless all tokens cross.

        Args:
            x: [T, d].
            experts: int64 [T, k]. Ids that are no experts count as none.
            gates: fp32 [T, k].
        """
        places, counts, elsewhere = self._all_of(len(x)) if self.all_cross else self._count(experts)
        leaving, guests = self._split(counts)
        sent = self._steps.pack(sum(leaving), places, x, experts, gates)
        arrived = sent.new_empty(sum(guests), sent.shape[1])
        self._to_hosts(sent, arrived, counts, "tokens")
        every_x, every_experts, every_gates = self._steps.unpack(arrived, x, experts, gates, self.most_guests)
        return Visit(every_x, every_experts, elsewhere, Crossings(places, counts, every_gates))

    def _all_of(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`_count` where all tokens cross: messages have room for as many as a call can have."""
        places = self._in_order[: 1 + tokens].repeat(len(self._counterparts), 1)
        most = len(self._in_order) - 1
        numbers = [most] * len(self._counterparts) + [0] + [most] * len(self._served)
        counts = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        return places, counts, places.new_empty(0, self._experts)

    def _count(self, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return places and counts of :class:`Crossings`, and ``elsewhere`` of :class:`Visit`."""
        places, numbers = self._steps.find_places(experts)
        own = len(self._counterparts)
        # A message that is aborted leaves zeros.
        to, from_ = _by_rank(self._counterparts, numbers[:own]), _by_rank(self._served, numbers[own + 1 :])
        self._exchange(to, from_, "numbers of tokens")
        counts = numbers[:, 0].contiguous().cpu()
        self._channel.raise_fault()
        return places, counts, numbers[own:, 1:]

    def receive_gradients(self, gradient: Tensor, crossings: Crossings) -> Tensor:
        """Send the gradients of results, [T, d], to where the tokens went; return those of all tokens, [T + guests, d]."""
        leaving, guests = self._split(crossings.counts)
        every = gradient.new_empty(len(gradient) + sum(guests), gradient.shape[1])
        every[: len(gradient)] = gradient
        sent = self._steps.pack(sum(leaving), crossings.places, gradient)
        self._to_hosts(sent, words(every[len(gradient) :]), crossings.counts, "gradients of results")
        return every

    def return_sums(self, rows: Tensor, crossings: Crossings) -> Tensor:
        """Send the guests' sums home; return those of own tokens, [T, d], of the sums [T + guests, d] of this host.

        Sums of hosts are added in fp32, this host's first and then those of the others in the order of ``Hosts.others``.
        """
        own = crossings.places.shape[1] - 1
        arrived = self._to_homes(words(rows[own:]), crossings.counts, "results")
        return self._steps.add(arrived, crossings.places, rows)[0]

    def return_gradients(self, rows: Tensor, gates: Tensor, crossings: Crossings) -> tuple[Tensor, Tensor]:
        """:meth:`return_sums` of the tokens' gradients, and of those of their gates, fp32 [T + guests, k]."""
        own = crossings.places.shape[1] - 1
        sent = self._steps.pack(len(rows) - own, None, rows[own:], gates=gates[own:])
        arrived = self._to_homes(sent, crossings.counts, "gradients of tokens")
        of_rows, of_gates = self._steps.add(arrived, crossings.places, rows, gates)
        assert of_gates is not None
        return of_rows, of_gates

    def fake_crossings(self, experts: Tensor, gates: Tensor) -> Crossings:
        """Return tensors of the shapes of those that cross."""
        tokens, top_k = gates.shape
        places = experts.new_empty(len(self._counterparts), 1 + tokens, dtype=torch.int32)
        counts = torch.empty(len(self._counterparts) + 1 + len(self._served), dtype=torch.int32, device="cpu")
        return Crossings(places, counts, gates.new_empty(tokens + self.most_guests, top_k))

    def _split(self, counts: Tensor) -> tuple[list[int], list[int]]:
        """Return how many tokens go to each counterpart, and how many guests each served rank sends."""
        numbers = counts.tolist()
        return numbers[: len(self._counterparts)], numbers[len(self._counterparts) + 1 :]

    def _to_hosts(self, sent: Tensor, arrived: Tensor, counts: Tensor, what: str) -> None:
        leaving, guests = self._split(counts)
        to, from_ = sent.split(leaving), arrived.split(guests)
        self._exchange(_by_rank(self._counterparts, to), _by_rank(self._served, from_), what)

    def _to_homes(self, sent: Tensor, counts: Tensor, what: str) -> Tensor:
        """Return what comes back for own tokens, of one counterpart after the other."""
        leaving, guests = self._split(counts)
        arrived = sent.new_empty(sum(leaving), sent.shape[1])
        to, from_ = sent.split(guests), arrived.split(leaving)
        self._exchange(_by_rank(self._served, to), _by_rank(self._counterparts, from_), what)
        return arrived

    def _exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], what: str) -> None:
        self._channel.exchange(sent, received, fingerprint=fingerprint_of(what, self._experts), beside=False).complete()


def _by_rank(ranks: Sequence[int], slices: Sequence[Tensor] | Tensor) -> dict[int, Tensor]:
    return dict(zip(ranks, slices, strict=True))
