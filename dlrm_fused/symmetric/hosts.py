"""The hosts of a group: ranks of one host store into each other's memory, and counterparts talk to other hosts.

GPUs of one machine that have no peer access count as if they were on different hosts.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# Takes processes with different values for processes on different hosts, whatever they are: to try out on one machine what
# happens between machines.
_HOST_VARIABLE = "DLRM_FUSED_HOST"


@dataclass(frozen=True)
class Host:
    """The facts that processes must have in common to map each other's memory."""

    name: str
    boot: str  # differs between machines, and between two starts of one
    processes: str  # the namespace of process ids: another one in another container

    @staticmethod
    def here() -> Host:
        """Return the host of this process."""
        return Host(
            os.environ.get(_HOST_VARIABLE) or socket.gethostname(),
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.processes})"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group, seen from one of its ranks.

    Attributes:
        ranks: of each host, ascending; hosts in the order of their first ranks.
    """

    ranks: tuple[tuple[int, ...], ...]
    rank: int

    @staticmethod
    def of(host_of_ranks: Sequence[Host], rank: int) -> Hosts:
        """Return the hosts of a group, from the host of each rank."""
        by_host: dict[Host, list[int]] = {}
        for number, host in enumerate(host_of_ranks):
            by_host.setdefault(host, []).append(number)
        return Hosts(tuple(map(tuple, by_host.values())), rank)

    def divided(self, unreachable: Sequence[Collection[int]]) -> Hosts:
        """Hosts divided until all ranks of each reach each other's memory.

        Args:
            unreachable: by rank, those whose memory it does not reach though they are on its host.
        """
        parts: list[list[int]] = []
        for ranks in self.ranks:
            of_host: list[list[int]] = []
            for rank in ranks:
                fitting = (
                    part
                    for part in of_host
                    if not any(rank in unreachable[other] or other in unreachable[rank] for other in part)
                )
                part = next(fitting, None)
                if part is None:
                    part = []
                    of_host.append(part)
                part.append(rank)
            parts += of_host
        return Hosts(tuple(map(tuple, sorted(parts))), self.rank)

    @property
    def are_many(self) -> bool:
        """Whether there is more than one."""
        return len(self.ranks) > 1

    @cached_property
    def own(self) -> int:
        """Number of this rank's host."""
        return self.of_rank[self.rank]

    @cached_property
    def of_rank(self) -> dict[int, int]:
        """Number of each rank's host."""
        return {rank: host for host, ranks in enumerate(self.ranks) for rank in ranks}

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this host, this one included."""
        return self.ranks[self.own]

    @cached_property
    def local_rotation(self) -> tuple[int, ...]:
        """The ranks of this host, from the one after this rank to itself, so that not all store to one of them at once."""
        after = self.local.index(self.rank) + 1
        return self.local[after:] + self.local[:after]

    @cached_property
    def others(self) -> tuple[int, ...]:
        """Numbers of the other hosts, the next one first: a shift at a time, each host sends to one and hears from one."""
        return tuple((self.own + shift) % len(self.ranks) for shift in range(1, len(self.ranks)))

    @cached_property
    def remote(self) -> tuple[int, ...]:
        """The ranks of other hosts, in the order of :attr:`others`; of each host the counterpart first."""
        return tuple(
            ranks[(first + i) % len(ranks)]
            for ranks in (self.ranks[host] for host in self.others)
            for first in (self.local.index(self.rank) % len(ranks),)
            for i in range(len(ranks))
        )

    @cached_property
    def remote_runs(self) -> tuple[range, ...]:
        """The ranks of other hosts, ascending, neighbours together."""
        return tuple(runs_of(sorted(self.remote)))

    def counterpart(self, rank: int, host: int) -> int:
        """Return the rank of a host that talks to a rank of another one: that with the same number within its host."""
        there = self.ranks[host]
        return there[self.ranks[self.of_rank[rank]].index(rank) % len(there)]

    def counterparts(self) -> tuple[int, ...]:
        """Return the counterparts of this rank on the other hosts, in the order of :attr:`others`."""
        return tuple(self.counterpart(self.rank, host) for host in self.others)

    @cached_property
    def served(self) -> tuple[int, ...]:
        """The ranks of other hosts whose counterpart on this host is this rank."""
        return tuple(rank for rank in self.remote if self.counterpart(rank, self.own) == self.rank)

    @cached_property
    def served_by(self) -> Counter[int]:
        """By rank, how many ranks of other hosts it serves."""
        return Counter(
            self.counterpart(rank, host) for rank, own in self.of_rank.items() for host in range(len(self.ranks)) if host != own
        )

    @property
    def most_served(self) -> int:
        """The most ranks of other hosts that any rank serves."""
        return max(self.served_by.values(), default=0)


def runs_of(ranks: Iterable[int]) -> list[range]:
    """Return ranks in their order, those that follow each other together: what belongs to them may lie side by side."""
    runs: list[range] = []
    for rank in ranks:
        if runs and runs[-1].stop == rank:
            runs[-1] = range(runs[-1].start, rank + 1)
        else:
            runs.append(range(rank, rank + 1))
    return runs
