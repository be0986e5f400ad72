"""The phases in which collectives send, each of which starts when the one before has arrived.

``size`` is what a rank holds, in bytes, as in nccl-tests: the tensor of an AllReduce, all that a rank sends in an
All-to-All (its own part included), the result of an AllGather, the input of a ReduceScatter.

Algorithms: ring (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69(2), 2009); direct and pairwise exchange (Thakur,
Rabenseifner, Gropp, Int. J. High Perform. Comput. Appl. 19(1), 2005); two trees (Sanders, Speck, Traeff, Parallel Computing
35(12), 2009); hierarchical: within hosts, then along rails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace

import simpy

from dlrm_fused.errors import UsageError
from dlrm_fused.scaleout.network import Network
from dlrm_fused.scaleout.topologies import Flows, Pattern, Topology, Torus


@dataclass(frozen=True)
class Phase:
    """Flows that start together, each with ``bytes_each`` a round; a round starts when the one before is there."""

    flows: Sequence[Flows]
    bytes_each: float
    rounds: int = 1


def all_to_all_direct(topology: Topology, size: float) -> list[Phase]:
    """Every rank sends all its messages at once."""
    return [Phase(topology.flows(Pattern.all_pairs), size / topology.ranks)]


def all_to_all_pairwise(topology: Topology, size: float) -> list[Phase]:
    """Return the phases of one message at a time. All steps count as alike, with the links of all pairs on average."""
    peers = topology.ranks - 1
    if peers == 0:
        return []
    evenly = [
        Flows(some.count, {name: crossed / peers for name, crossed in some.crossings.items()}, some.latency)
        for some in topology.flows(Pattern.all_pairs)
    ]
    return [Phase(evenly, size / topology.ranks, rounds=peers)]


def all_to_all_hierarchical(topology: Topology, size: float) -> list[Phase]:
    """Within hosts to the rank on the rail of the receiver, then along rails: one message a host, not one a rank."""
    return [
        Phase(topology.flows(Pattern.within_hosts), size / topology.ranks_per_host),
        Phase(topology.flows(Pattern.rails), size * topology.ranks_per_host / topology.ranks),
    ]


def reduce_scatter_ring(topology: Topology, size: float) -> list[Phase]:
    return [Phase(topology.flows(Pattern.ring), size / topology.ranks, topology.ranks - 1)]


all_gather_ring = reduce_scatter_ring


def all_reduce_ring(topology: Topology, size: float) -> list[Phase]:
    return reduce_scatter_ring(topology, size) + all_gather_ring(topology, size)


def all_reduce_direct(topology: Topology, size: float) -> list[Phase]:
    """Every rank sums its part, and sends the sum to all: two messages to every other rank."""
    return 2 * [Phase(topology.flows(Pattern.all_pairs), size / topology.ranks)]


def all_reduce_hierarchical(topology: Topology, size: float) -> list[Phase]:
    """ReduceScatter in each host, AllReduce along rails, AllGather in each host, all by rings."""
    inside = Phase(topology.flows(Pattern.ring_within_hosts), size / topology.ranks_per_host, topology.ranks_per_host - 1)
    hosts = topology.ranks // topology.ranks_per_host
    between = Phase(topology.flows(Pattern.ring_of_rails), size / topology.ranks, 2 * (hosts - 1))
    return [inside, between, inside]


def all_reduce_tree(topology: Topology, size: float) -> list[Phase]:
    """Two binary trees of ranks, each with half of the bytes, up and down; pipelined. A rank that is a leaf in one of them is
    inside the other, so all send and receive as much: nearly twice ``size``. With hosts: rings inside, trees along rails.

    The ranks of a tree are taken as spread over the network as all pairs are.

    Raises:
        UsageError: on a torus, where the edges of a tree are no links.
    """
    if isinstance(topology, Torus):
        raise UsageError("all_reduce=tree: a torus has links between neighbours only; choose ring or direct")
    hosts = topology.ranks // topology.ranks_per_host
    if hosts == 1:
        return _trees(topology.flows(Pattern.all_pairs), topology.ranks, size)
    inside = Phase(topology.flows(Pattern.ring_within_hosts), size / topology.ranks_per_host, topology.ranks_per_host - 1)
    return [inside, *_trees(topology.flows(Pattern.rails), hosts, size / topology.ranks_per_host), inside]


def _trees(pairs: Sequence[Flows], ranks: int, size: float) -> list[Phase]:
    up_and_down = 2 * math.floor(math.log2(ranks))
    deep = [replace(flows, latency=(flows.lead + flows.latency) * up_and_down, lead=0.0) for flows in pairs]
    return [Phase(deep, 2 * size / ranks)]


Collective = Callable[[Topology, float], list[Phase]]

COLLECTIVES: dict[str, dict[str, Collective]] = {
    "all_to_all": {"direct": all_to_all_direct, "pairwise": all_to_all_pairwise, "hierarchical": all_to_all_hierarchical},
    "all_reduce": {
        "ring": all_reduce_ring,
        "direct": all_reduce_direct,
        "hierarchical": all_reduce_hierarchical,
        "tree": all_reduce_tree,
    },
    "all_gather": {"ring": all_gather_ring},
    "reduce_scatter": {"ring": reduce_scatter_ring},
}


def all_reduce_auto(topology: Topology, size: float) -> list[Phase]:
    """Return the faster of ring and trees, as NCCL chooses; on a torus the ring."""
    ring = all_reduce_ring(topology, size)
    if isinstance(topology, Torus):
        return ring
    tree = all_reduce_tree(topology, size)
    return min((ring, tree), key=lambda phases: seconds(topology, phases))


def algorithms_of(collective: str) -> dict[str, Collective]:
    """Return the algorithms of a collective by name: those of :data:`COLLECTIVES`, and ``auto`` for an AllReduce."""
    chosen = {"auto": all_reduce_auto} if collective == "all_reduce" else {}
    return {**chosen, **COLLECTIVES[collective]}


def run(environment: simpy.Environment, network: Network, phases: Sequence[Phase]) -> simpy.Process:
    """Send them; the process ends when the last phase is there."""
    return environment.process(_in_turn(environment, network, phases))


def _in_turn(environment: simpy.Environment, network: Network, phases: Sequence[Phase]) -> Generator[simpy.Event, object, None]:
    for phase in phases:
        yield environment.all_of([network.send(flows, phase.bytes_each, phase.rounds) for flows in phase.flows])


def seconds(topology: Topology, phases: Sequence[Phase]) -> float:
    """Time of the collective alone on the network, from the start of all ranks."""
    environment = simpy.Environment()
    environment.run(run(environment, Network(environment, topology.links), phases))
    return float(environment.now)
