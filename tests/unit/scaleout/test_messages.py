"""Classes of equal links carry what the messages of a collective put on them, each walked over links that are told apart."""

from __future__ import annotations

from collections import defaultdict

import pytest
import simpy

from dlrm_fused.scaleout import collectives
from dlrm_fused.scaleout.collectives import COLLECTIVES
from dlrm_fused.scaleout.network import Network
from dlrm_fused.scaleout.topologies import Cluster, Switch, Topology, Torus
from tests.unit.scaleout import messages
from tests.unit.scaleout.messages import MESSAGES, Message, Wires

SIZE = 2**20
LINKS = {"nvlink": 450e9, "nic": 50e9, "nvlink_latency": 2e-6, "nic_latency": 5e-6}
CLUSTERS = {
    f"{hosts} hosts of {each}": (Cluster(hosts, each, **LINKS), messages.cluster(hosts, each, **LINKS))
    for hosts, each in ((2, 2), (4, 8), (6, 3))
}
TORUSES = {
    f"torus of {rows} x {columns}": (Torus(rows, columns, 25e9, 1e-6), messages.torus(rows, columns, 25e9, 1e-6))
    for rows, columns in ((1, 5), (1, 8), (3, 3), (4, 4), (5, 5))
}
SWITCHES = {f"switch of {ranks}": (Switch(ranks, 50e9, 1e-6), messages.switch(ranks, 50e9, 1e-6)) for ranks in (2, 7)}
NETWORKS: dict[str, tuple[Topology, Wires]] = {**CLUSTERS, **TORUSES, **SWITCHES}
# A ring through all ranks of a torus of odd sides is refused.
NO_RING = {"torus of 3 x 3", "torus of 5 x 5"}
EVERYWHERE = (("all_to_all", "direct"), ("all_reduce", "direct"), ("all_reduce", "ring"))
CELLS = [(name, pair) for name in NETWORKS for pair in EVERYWHERE if not (pair[1] == "ring" and name in NO_RING)]
CELLS += [(name, (kind, "hierarchical")) for name in CLUSTERS for kind in ("all_to_all", "all_reduce")]
CELLS += [(name, ("all_to_all", "pairwise")) for name in SWITCHES]


@pytest.mark.parametrize(("name", "pair"), CELLS, ids=[f"{name}, {' '.join(pair)}" for name, pair in CELLS])
def test_links_carry_what_the_messages_put_on_them(name: str, pair: tuple[str, str]) -> None:
    topology, wires = NETWORKS[name]
    loads = _loads(wires, MESSAGES[pair](wires, SIZE))

    environment = simpy.Environment()
    network = Network(environment, topology.links)
    kind, algorithm = pair
    environment.run(collectives.run(environment, network, COLLECTIVES[kind][algorithm](topology, SIZE)))

    carried = {kind: sum(links.values()) for kind, links in loads.items()}
    assert {name: load for name, load in network.carried.items() if load} == pytest.approx(carried)
    for kind, links in loads.items():  # the links of a class are alike
        assert len(links) == topology.links[kind].count
        assert max(links.values()) == pytest.approx(min(links.values())), kind


def _loads(wires: Wires, sent: list[Message]) -> dict[str, dict[tuple[int, int], float]]:
    """Bytes on each link, by the name of its class."""
    loads: dict[str, dict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
    for message in sent:
        for start, end in zip(message.route, message.route[1:], strict=False):
            loads[_class_of(wires, start, end)][start, end] += message.bytes
    return loads


def _class_of(wires: Wires, start: int, end: int) -> str:
    assert (start, end) in wires.links
    if wires.devices == wires.ranks:
        columns = next(columns for topology, known in TORUSES.values() if known is wires for columns in [topology.columns])
        return _direction(start, end, columns, wires.ranks)
    direction = "in" if start >= wires.ranks else "out"
    device = max(start, end) - wires.ranks
    if wires.devices == wires.ranks + 1:
        return f"port {direction}"
    return f"{'nvlink' if device < wires.ranks // wires.ranks_per_host else 'nic'} {direction}"


def _direction(start: int, end: int, columns: int, ranks: int) -> str:
    if start // columns == end // columns:
        return "east" if (end - start) % columns == 1 else "west"
    return "south" if (end - start) % ranks == columns else "north"


@pytest.mark.parametrize("side", [3, 4, 8])
def test_rings_of_a_torus_have_no_common_links(side: int) -> None:
    rings = messages.torus(side, side, 25e9, 1e-6).rings
    edges = [edge for ring in rings for edge in zip(ring, [*ring[1:], ring[0]], strict=True)]
    assert all(sorted(ring) == list(range(side * side)) for ring in rings)
    assert len(set(edges)) == len(edges) == 4 * side * side


@pytest.mark.parametrize("side", [2, 4, 8, 32])
@pytest.mark.parametrize("size", [64 * 1024, 64 * 2**20])
def test_ring_all_reduce_on_a_torus_uses_all_links(side: int, size: int) -> None:
    """Four rings, one in each direction, with a quarter of the bytes each."""
    topology = Torus(side, side, 25e9, 1e-6)
    steps = 2 * (side * side - 1)
    expected = steps * (1e-6 + size / 4 / side**2 / 25e9)
    assert collectives.seconds(topology, collectives.all_reduce_ring(topology, size)) == pytest.approx(expected)
