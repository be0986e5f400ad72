"""The links that flows between ranks cross, by classes: all members of a class are alike by the topology's symmetry.

A topology names its classes of links, and says for the pairs of ranks that a pattern of communication uses (all pairs, the
neighbours of a ring) how many flows are alike and which links each of them crosses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Protocol

from dlrm_fused.errors import UsageError


@dataclass(frozen=True)
class Links:
    """Equal links, each in one direction. ``bytes_per_second`` is the rate of one."""

    count: int
    bytes_per_second: float


@dataclass(frozen=True)
class Flows:
    """Equal flows between pairs of ranks.

    Args:
        crossings: For each class of links, how many of them one flow crosses. A fraction: it is divided over several
            routes.
        latency: Seconds from the moment when the last byte has been sent until it is there.
        lead: Seconds before the first byte comes to the links that are shared, such as those over NVLink to another rail.
        idle: Of a ring of unequal links only: seconds that a byte takes a hop, on average, if nothing else is on the links.
            Its rounds are not in step, so that slow links are always busy, or a message goes round without waiting: it
            takes the longer of its bytes at its rate, and of ``latency`` and ``idle`` for each hop.
    """

    count: int
    crossings: Mapping[str, float] = field(hash=False)
    latency: float
    lead: float = 0.0
    idle: float | None = None


class Pattern(Enum):
    """The pairs of ranks between which there is a flow."""

    all_pairs = "from every rank to every other one"
    within_hosts = "from every rank to every other one of its host"
    rails = "from every rank to the rank of the same place in every other host"
    ring = "from every rank to the next one, in the order of the ranks and back to the first"
    ring_within_hosts = "a ring in each host"
    ring_of_rails = "from every rank to the rank of the same place in the next host"


class Topology(Protocol):
    """Ranks and the links between them."""

    @property
    def ranks(self) -> int: ...

    @property
    def ranks_per_host(self) -> int: ...

    @property
    def links(self) -> Mapping[str, Links]: ...

    def flows(self, pattern: Pattern) -> list[Flows]:
        """Return the flows of a pattern; none where there are no such pairs."""
        ...


def _without_empty(flows: list[Flows]) -> list[Flows]:
    return [some for some in flows if some.count]


@dataclass(frozen=True)
class Switch:
    """Ranks on one switch that is never the bottleneck: an NVLink domain, or hosts of one rank each.

    Args:
        ranks: Their number; each sends and receives at ``bytes_per_second`` at the same time.
    """

    ranks: int
    bytes_per_second: float
    latency: float

    @property
    def ranks_per_host(self) -> int:
        return self.ranks

    @property
    def links(self) -> Mapping[str, Links]:
        return {name: Links(self.ranks, self.bytes_per_second) for name in ("port out", "port in")}

    def flows(self, pattern: Pattern) -> list[Flows]:
        peers = {
            Pattern.all_pairs: self.ranks - 1,
            Pattern.within_hosts: self.ranks - 1,
            Pattern.ring: min(self.ranks - 1, 1),
            Pattern.ring_within_hosts: min(self.ranks - 1, 1),
        }.get(pattern, 0)
        return _without_empty([Flows(self.ranks * peers, {"port out": 1, "port in": 1}, self.latency)])


@dataclass(frozen=True)
class Torus:
    """A torus of two dimensions, one rank a node, a link in each direction to each neighbour (a ring where ``rows`` is 1).

    Messages take a shortest way, first along the row. Where both directions of a row or column are as long, half of the
    bytes takes each.

    Args:
        bytes_per_second: Of one link in one direction.
        latency: Seconds a hop.
    """

    rows: int
    columns: int
    bytes_per_second: float
    latency: float

    @property
    def ranks(self) -> int:
        return self.rows * self.columns

    @property
    def ranks_per_host(self) -> int:
        return 1

    @cached_property
    def links(self) -> Mapping[str, Links]:
        directions = (("east", self.columns), ("west", self.columns), ("south", self.rows), ("north", self.rows))
        return {name: Links(self.ranks, self.bytes_per_second) for name, size in directions if size > 1}

    def _to(self, row: int, column: int) -> Flows:
        """Return the flows of all ranks to the one so many rows and columns further."""
        along_row = _ways(column, self.columns, "east", "west")
        along_column = _ways(row, self.rows, "south", "north")
        hops = sum(along_row.values()) + sum(along_column.values())
        return Flows(self.ranks, {**along_row, **along_column}, hops * self.latency)

    def flows(self, pattern: Pattern) -> list[Flows]:
        match pattern:
            case Pattern.all_pairs | Pattern.rails:
                return [self._to(row, column) for row in range(self.rows) for column in range(self.columns) if row or column]
            case Pattern.ring | Pattern.ring_of_rails:
                return self._ring()
        return []

    def _ring(self) -> list[Flows]:
        """Along a Hamiltonian cycle, where there is one whose edges are links; a rank's next one is a neighbour.

        There is one ring per direction, each with its share of the bytes: none waits for another's links.
        """
        if self.ranks == 1:
            return []
        if self.rows > 1 and self.columns > 1 and self.ranks % 2:
            raise UsageError(f"a torus of {self.rows} x {self.columns} has no ring modelled here; make one side even")
        return [Flows(self.ranks, dict.fromkeys(self.links, 1 / len(self.links)), self.latency)]


def _ways(distance: int, size: int, forward: str, backward: str) -> dict[str, float]:
    """Hops in each direction of a ring of ``size`` to a rank ``distance`` further."""
    back = size - distance
    if distance == 0:
        return {}
    if distance == back:
        return {forward: distance / 2, backward: distance / 2}
    return {forward: distance} if distance < back else {backward: back}


@dataclass(frozen=True)
class Cluster:
    """Hosts of GPUs: an NVLink domain in each, a NIC for each GPU, rail-optimized fat tree between them.

    NIC i of every host of a pod is on one leaf switch, rail i. A message to another rail goes NCCL's PXN way, over NVLink to
    the GPU on the rail of the receiver; one to another pod crosses the spine.

    Args:
        nvlink, nic: Bytes/s of one GPU in one direction.
        nvlink_latency, nic_latency: Seconds from rank to rank.
        hosts_per_pod: Hosts whose rails end on the same leaf switches.
        oversubscription: Bandwidth of all NICs over that of the spine; 1 is a full fat tree.
    """

    hosts: int
    ranks_per_host: int
    nvlink: float
    nic: float
    nvlink_latency: float
    nic_latency: float
    hosts_per_pod: int = 32
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        if self.hosts > self.hosts_per_pod and self.hosts % self.hosts_per_pod:
            raise UsageError(
                f"hosts is {self.hosts}: it must be at most, or a multiple of, hosts_per_pod = {self.hosts_per_pod}"
            )

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @cached_property
    def links(self) -> Mapping[str, Links]:
        links = {"nvlink out": Links(self.ranks, self.nvlink), "nvlink in": Links(self.ranks, self.nvlink)}
        if self.hosts > 1:
            spine = Links(self.ranks, self.nic / self.oversubscription)
            links |= {"nic out": Links(self.ranks, self.nic), "nic in": Links(self.ranks, self.nic), "spine": spine}
        return links

    def _inside(self, peers: int) -> list[Flows]:
        return _without_empty([Flows(self.ranks * peers, {"nvlink out": 1, "nvlink in": 1}, self.nvlink_latency)])

    def _outside(self, hosts: int, ranks_a_host: int, *, same_rail: bool, same_pod: bool) -> Flows:
        crossings: dict[str, float] = {"nic out": 1, "nic in": 1}
        if not same_rail:
            crossings |= {"nvlink out": 1, "nvlink in": 1}
        if not same_pod:
            crossings["spine"] = 1
        lead = 0.0 if same_rail else self.nvlink_latency
        return Flows(self.ranks * hosts * ranks_a_host, crossings, self.nic_latency, lead)

    def _to_other_hosts(self, ranks_a_host: int, *, same_rail: bool) -> list[Flows]:
        near = min(self.hosts, self.hosts_per_pod) - 1
        far = self.hosts - 1 - near
        return _without_empty(
            [
                self._outside(near, ranks_a_host, same_rail=same_rail, same_pod=True),
                self._outside(far, ranks_a_host, same_rail=same_rail, same_pod=False),
            ]
        )

    def flows(self, pattern: Pattern) -> list[Flows]:
        match pattern:
            case Pattern.all_pairs:
                other_rails = self._to_other_hosts(self.ranks_per_host - 1, same_rail=False)
                return [*self.flows(Pattern.within_hosts), *self.flows(Pattern.rails), *other_rails]
            case Pattern.within_hosts:
                return self._inside(self.ranks_per_host - 1)
            case Pattern.rails:
                return self._to_other_hosts(1, same_rail=True)
            case Pattern.ring if self.hosts > 1:
                return self._ring()
            case Pattern.ring | Pattern.ring_within_hosts:
                return self._inside(min(self.ranks_per_host - 1, 1))
            case Pattern.ring_of_rails if self.hosts > 1:
                # Between pods once in a ring through each of them; a slice waits for the slowest link, which is no spine of its
                # own.
                return [Flows(self.ranks, {"nic out": 1, "nic in": 1}, self.nic_latency)]
        return []

    def _ring(self) -> list[Flows]:
        """Return as many rings as a host has ranks; each leaves it by another NIC and has its share of the bytes."""
        outside = 1 / self.ranks_per_host
        inside = 1 - outside
        latency = inside * self.nvlink_latency + outside * self.nic_latency
        idle = (inside / self.nvlink + outside / self.nic) / self.ranks_per_host
        crossings = {"nvlink out": inside, "nvlink in": inside, "nic out": outside, "nic in": outside}
        return [Flows(self.ranks, crossings, latency, idle=idle)]
