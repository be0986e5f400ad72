"""Groups of ranks that communicate each for itself, all at the same time, on the network of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dlrm_fused.errors import UsageError
from dlrm_fused.scaleout.topologies import Cluster, Flows, Links, Pattern, Switch, Topology


@dataclass(frozen=True)
class Groups:
    """A topology of one group, with the flows of all groups on the links of all."""

    one: Topology
    count: int
    links: Mapping[str, Links]

    @property
    def ranks(self) -> int:
        return self.one.ranks

    @property
    def ranks_per_host(self) -> int:
        return self.one.ranks_per_host

    def flows(self, pattern: Pattern) -> list[Flows]:
        return [replace(some, count=some.count * self.count) for some in self.one.flows(pattern)]


def consecutive(topology: Topology, size: int) -> Topology:
    """Groups of ``size`` ranks that follow each other, such as the ranks of a host.

    Raises:
        UsageError: Groups that are neither parts of hosts nor whole hosts, or parts of a torus.
    """
    if size == topology.ranks:
        return topology
    match topology:
        case Switch():
            return _groups(topology, replace(topology, ranks=size))
        case Cluster() if topology.ranks_per_host % size == 0:
            return _groups(topology, replace(topology, hosts=1, ranks_per_host=size))
        case Cluster() if size % topology.ranks_per_host == 0:
            hosts = size // topology.ranks_per_host
            return _groups(topology, replace(topology, hosts=hosts, hosts_per_pod=_pod(topology, hosts)))
    return _alone(topology, size)


def strided(topology: Topology, size: int) -> Topology:
    """Return the ranks of the same place in each of the groups of :func:`consecutive`.

    Raises:
        UsageError: As there.
    """
    if size == 1:
        return topology
    match topology:
        case Switch():
            return _groups(topology, replace(topology, ranks=topology.ranks // size))
        case Cluster() if topology.ranks_per_host % size == 0:
            return _groups(topology, replace(topology, ranks_per_host=topology.ranks_per_host // size))
        case Cluster() if size % topology.ranks_per_host == 0:
            a_group = size // topology.ranks_per_host
            hosts, pod = topology.hosts // a_group, max(1, topology.hosts_per_pod // a_group)
            return _groups(topology, replace(topology, hosts=hosts, ranks_per_host=1, hosts_per_pod=min(hosts, pod)))
    return _alone(topology, topology.ranks // size)


def _groups(whole: Topology, one: Topology) -> Groups:
    return Groups(one, whole.ranks // one.ranks, whole.links)


def _pod(topology: Cluster, hosts: int) -> int:
    """Hosts of a group in one pod, if pods and groups end together; otherwise, about."""
    pod = min(hosts, topology.hosts_per_pod)
    return pod if hosts % pod == 0 else 1


def _alone(topology: Topology, size: int) -> Topology:
    if size == 1:
        return Groups(Switch(1, 1.0, 0.0), topology.ranks, topology.links)
    raise UsageError(
        f"layers that {size} of {topology.ranks} ranks share: allowed on {type(topology).__name__.lower()}: all ranks, one rank"
        + (f", or a divisor or a multiple of the {topology.ranks_per_host} of a host" if topology.ranks_per_host > 1 else "")
    )
