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
from dlrm_fused.ops.moe.crossing_steps import HostCrossing, KernelCrossing, words
from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.device import uses_kernels


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
        return Crossings(like.new_empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int32), like.new_empty(0))


class Visit(NamedTuple):
    """The tokens of which a rank computes the layer of its host.

    Attributes:
        x: [T + guests, d].
        experts: int64 [T + most guests, k]: -1 for experts of other hosts, and beyond the guests.
        elsewhere: int32 [1 + served ranks, experts]: how many tokens of this rank, and of each that it serves, have each expert
            of other hosts.
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

    def __init__(self, channel: Channel, experts: int, max_tokens: int) -> None:
        """Local.

        Args:
            channel: of the layer.
            experts: of all ranks.
            max_tokens: of a rank and call.
        """
        group = channel.group
        hosts, local = group.hosts, experts // group.world_size
        self._channel, self._experts = channel, experts
        self._counterparts, self._served = hosts.counterparts(), hosts.served
        self.most_guests = len(self._served) * max_tokens
        host_of_expert = torch.tensor([hosts.of_rank[expert // local] for expert in range(experts)])
        steps = KernelCrossing if uses_kernels(group.device) else HostCrossing
        self._steps = steps(host_of_expert.to(group.device), hosts.own, hosts.others, len(self._served))

    def receive_guests(self, x: Tensor, experts: Tensor, gates: Tensor) -> Visit:
        """Send tokens to the other hosts of their experts. The host waits for the device, for the numbers of tokens.

        Args:
            x: [T, d].
            experts: int64 [T, k]. Ids that are no experts count as none.
            gates: fp32 [T, k].
        """
        places, numbers = self._steps.find_places(experts)
        own = len(self._counterparts)
        # A message that is aborted leaves zeros.
        to, from_ = _by_rank(self._counterparts, numbers[:own]), _by_rank(self._served, numbers[own + 1 :])
        self._exchange(to, from_, "numbers of tokens")
        counts = numbers[:, 0].cpu()
        self._channel.raise_fault()
        leaving, guests = self._split(counts)
        sent = self._steps.pack(sum(leaving), places, x, experts, gates)
        arrived = sent.new_empty(sum(guests), sent.shape[1])
        self._to_hosts(sent, arrived, counts, "tokens")
        every_x, every_experts, every_gates = self._steps.unpack(arrived, x, experts, gates, self.most_guests)
        return Visit(every_x, every_experts, numbers[own:, 1:], Crossings(places, counts, every_gates))

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
        counts = torch.empty(len(self._counterparts) + 1 + len(self._served), dtype=torch.int32)
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
        self._channel.exchange(sent, received, fingerprint=fingerprint_of(what, self._experts)).complete()


def _by_rank(ranks: Sequence[int], slices: Sequence[Tensor] | Tensor) -> dict[int, Tensor]:
    return dict(zip(ranks, slices, strict=True))
