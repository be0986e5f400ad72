"""Collectives on the simulated network take the time of their closed forms, and never more of a link than it has."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import simpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlrm_fused.errors import UsageError
from dlrm_fused.scaleout import collectives
from dlrm_fused.scaleout.collectives import COLLECTIVES, Phase, algorithms_of, seconds
from dlrm_fused.scaleout.network import Network, max_min_rates
from dlrm_fused.scaleout.topologies import Cluster, Flows, Links, Pattern, Switch, Topology, Torus

GB = 1e9
MIB = 2**20
NODES = (1, 2, 3, 8, 64, 1024)
SIZES = (64 * 1024, 64 * MIB)
EXACTLY = 1e-6


def switch(ranks: int) -> Switch:
    return Switch(ranks, 50 * GB, 5e-6)


def cluster(hosts: int, **settings: object) -> Cluster:
    return Cluster(hosts, 8, nvlink=400 * GB, nic=50 * GB, nvlink_latency=2e-6, nic_latency=5e-6, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "size"), list(product(NODES, SIZES)))
class TestOnOneSwitch:
    """alpha: a message's latency, beta: seconds a byte (Thakur, Rabenseifner, Gropp 2005)."""

    def test_direct_all_to_all(self, ranks: int, size: int) -> None:
        expected = 5e-6 + size * (ranks - 1) / ranks / (50 * GB) if ranks > 1 else 0
        assert seconds(switch(ranks), collectives.all_to_all_direct(switch(ranks), size)) == pytest.approx(
            expected, rel=EXACTLY
        )

    def test_pairwise_all_to_all(self, ranks: int, size: int) -> None:
        expected = (ranks - 1) * (5e-6 + size / ranks / (50 * GB))
        assert seconds(switch(ranks), collectives.all_to_all_pairwise(switch(ranks), size)) == pytest.approx(
            expected, rel=EXACTLY
        )

    def test_ring_all_reduce(self, ranks: int, size: int) -> None:
        expected = 2 * (ranks - 1) * (5e-6 + size / ranks / (50 * GB))
        assert seconds(switch(ranks), collectives.all_reduce_ring(switch(ranks), size)) == pytest.approx(expected, rel=EXACTLY)

    def test_direct_all_reduce(self, ranks: int, size: int) -> None:
        expected = 2 * (5e-6 + size * (ranks - 1) / ranks / (50 * GB)) if ranks > 1 else 0
        assert seconds(switch(ranks), collectives.all_reduce_direct(switch(ranks), size)) == pytest.approx(
            expected, rel=EXACTLY
        )

    def test_tree_all_reduce(self, ranks: int, size: int) -> None:
        """Up and down the tree, and twice the bytes in each direction, but for those of one rank (Sanders et al. 2009)."""
        levels = int(np.log2(ranks))
        expected = 2 * levels * 5e-6 + 2 * size * (ranks - 1) / ranks / (50 * GB)
        taken = seconds(switch(ranks), collectives.all_reduce_tree(switch(ranks), size))
        assert taken == pytest.approx(expected, rel=EXACTLY)


@pytest.mark.parametrize(("hosts", "size"), list(product(NODES, SIZES)))
class TestOnAClusterOfEightGpusAHost:
    def test_hierarchical_all_reduce(self, hosts: int, size: int) -> None:
        inside = 7 * (2e-6 + size / 8 / (400 * GB))
        between = 2 * (hosts - 1) * (5e-6 + size / 8 / hosts / (50 * GB))
        topology = cluster(hosts, hosts_per_pod=1024)
        taken = seconds(topology, collectives.all_reduce_hierarchical(topology, size))
        assert taken == pytest.approx(2 * inside + between, rel=EXACTLY)

    def test_tree_all_reduce_along_rails(self, hosts: int, size: int) -> None:
        inside = 7 * (2e-6 + size / 8 / (400 * GB))
        between = 2 * int(np.log2(hosts)) * 5e-6 + 2 * size / 8 * (hosts - 1) / hosts / (50 * GB)
        topology = cluster(hosts, hosts_per_pod=1024)
        expected = 2 * inside + between if hosts > 1 else 2 * 3 * 2e-6 + 2 * size * 7 / 8 / (400 * GB)
        assert seconds(topology, collectives.all_reduce_tree(topology, size)) == pytest.approx(expected, rel=EXACTLY)

    def test_ring_all_reduce(self, hosts: int, size: int) -> None:
        """A ring for each NIC: NICs are always busy, or a message goes round alone."""
        topology = cluster(hosts, hosts_per_pod=1024)
        steps = 2 * (8 * hosts - 1)
        message = size / 8 / hosts / 8
        inside, outside = 2e-6 + message / (400 * GB), 5e-6 + message / (50 * GB)
        expected = steps * max(message / (50 * GB), 7 / 8 * inside + 1 / 8 * outside)
        if hosts == 1:
            expected = steps * (2e-6 + size / 8 / (400 * GB))
        assert seconds(topology, collectives.all_reduce_ring(topology, size)) == pytest.approx(expected, rel=EXACTLY)

    def test_hierarchical_all_to_all(self, hosts: int, size: int) -> None:
        inside = 2e-6 + size * 7 / 8 / (400 * GB)
        between = 5e-6 + size * (hosts - 1) / hosts / (50 * GB) if hosts > 1 else 0
        topology = cluster(hosts, hosts_per_pod=1024)
        taken = seconds(topology, collectives.all_to_all_hierarchical(topology, size))
        assert taken == pytest.approx(inside + between, rel=EXACTLY)

    def test_direct_all_to_all_is_bound_by_the_nics(self, hosts: int, size: int) -> None:
        """But on one host. Messages that change the rail come later, after those on it if these are few."""
        topology = cluster(hosts, hosts_per_pod=1024)
        taken = seconds(topology, collectives.all_to_all_direct(topology, size))
        if hosts == 1:
            expected = 2e-6 + size * 7 / 8 / (400 * GB)
        else:
            between = size * (hosts - 1) / hosts / (50 * GB)
            expected = 5e-6 + max(between, 2e-6 + between * 7 / 8)
        assert taken == pytest.approx(expected, rel=EXACTLY)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [2, 4, 8, 32])
def test_direct_all_to_all_on_a_square_torus(side: int, size: int) -> None:
    """A link carries the mean distance along its dimension, side / 4, of all bytes, in one of two directions."""
    topology = Torus(side, side, 25 * GB, 1e-6)
    message = size / topology.ranks
    bytes_of_a_link = message * topology.ranks * (side / 4) / 2
    expected = bytes_of_a_link / (25 * GB) + side * 1e-6
    assert seconds(topology, collectives.all_to_all_direct(topology, size)) == pytest.approx(expected, rel=EXACTLY)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (1, 8), (3, 4), (4, 4), (5, 5), (2, 6)])
def test_classes_of_flows_of_a_torus_load_its_links_as_its_messages_do(rows: int, columns: int) -> None:
    """Every message is walked, hop by hop, on links that are told apart."""
    loads: Counter[str] = Counter()
    on_one_link: dict[str, set[float]] = {}
    links: Counter[tuple[str, int, int]] = Counter()
    for source, target in product(product(range(rows), range(columns)), repeat=2):
        for share, steps in _shortest_ways(source, target, rows, columns):
            for step in steps:
                links[step] += share
    for (direction, _, _), load in links.items():
        loads[direction] += load
        on_one_link.setdefault(direction, set()).add(round(load, 9))
    expected: Counter[str] = Counter()
    for flows in Torus(rows, columns, GB, 0).flows(Pattern.all_pairs):
        for name, crossed in flows.crossings.items():
            expected[name] += flows.count * crossed
    assert dict(loads) == pytest.approx({name: load for name, load in expected.items() if load})
    assert all(len(seen) == 1 for seen in on_one_link.values())  # all links of a class are alike


def _shortest_ways(
    source: tuple[int, int], target: tuple[int, int], rows: int, columns: int
) -> list[tuple[float, list[tuple[str, int, int]]]]:
    """Along the row, then along the column: each way with its share of the message and the links that it takes."""
    ways = []
    along_row = _directions(source[1], target[1], columns, ("east", "west"))
    along_column = _directions(source[0], target[0], rows, ("south", "north"))
    for (row_share, east_west, columns_moved), (column_share, south_north, rows_moved) in product(along_row, along_column):
        sign = 1 if east_west == "east" else -1
        steps = [(east_west, source[0], (source[1] + sign * hop) % columns) for hop in range(columns_moved)]
        sign = 1 if south_north == "south" else -1
        steps += [(south_north, (source[0] + sign * hop) % rows, target[1]) for hop in range(rows_moved)]
        ways.append((row_share * column_share, steps))
    return ways


def _directions(start: int, end: int, size: int, names: tuple[str, str]) -> list[tuple[float, str, int]]:
    forward = (end - start) % size
    back = (start - end) % size
    if forward == back:
        return [(0.5, names[0], forward), (0.5, names[1], back)]
    return [(1.0, names[0], forward)] if forward < back else [(1.0, names[1], back)]


def test_a_torus_has_no_trees() -> None:
    with pytest.raises(UsageError, match="choose ring or direct"):
        collectives.all_reduce_tree(Torus(4, 4, GB, 0), 1)


TOPOLOGIES = st.one_of(
    st.builds(switch, st.integers(1, 64)),
    st.builds(cluster, st.integers(1, 32), oversubscription=st.sampled_from([1.0, 2.0])),
    st.builds(cluster, st.sampled_from([4, 8, 12]), hosts_per_pod=st.just(4)),
    st.builds(Torus, st.integers(1, 6), st.sampled_from([2, 4, 6]), st.just(25 * GB), st.just(1e-6)),
)
ALGORITHMS = [algorithm for choices in COLLECTIVES.values() for algorithm in choices.values()]


@settings(deadline=None, max_examples=150)
@given(TOPOLOGIES, st.sampled_from(ALGORITHMS), st.floats(1, 1e9))
def test_links_carry_the_bytes_that_are_sent_and_none_is_above_its_rate(
    topology: Topology, algorithm: collectives.Collective, size: float
) -> None:
    assume(not (algorithm is collectives.all_reduce_tree and isinstance(topology, Torus)))
    phases = algorithm(topology, size)
    environment = simpy.Environment()
    network = Network(environment, topology.links)
    environment.run(collectives.run(environment, network, phases))
    sent = _bytes_by_link(phases)
    assert network.carried == pytest.approx({name: sent[name] for name in topology.links}, rel=1e-6)
    assert all(share <= 1 + 1e-9 for share in network.busiest.values())
    for name, links in topology.links.items():
        assert sent[name] / (links.count * links.bytes_per_second) <= environment.now * (1 + 1e-9)


def _bytes_by_link(phases: list[Phase]) -> Counter[str]:
    sent: Counter[str] = Counter()
    for phase in phases:
        for flows in phase.flows:
            for name, crossed in flows.crossings.items():
                sent[name] += flows.count * crossed * phase.bytes_each * phase.rounds
    return sent


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 6), st.integers(1, 8), st.randoms(use_true_random=False))
def test_rates_are_max_min_fair(links: int, flows: int, random: np.random.Generator) -> None:
    """Every flow crosses a full link on which no flow is faster (Bertsekas and Gallager, 1992)."""
    usage = np.array([[random.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(flows)] for _ in range(links)])
    usage[0] = np.maximum(usage[0], 0.25)
    capacity = np.array([random.uniform(1, 10) for _ in range(links)])
    rates = max_min_rates(usage, capacity)
    load = usage @ rates
    assert (load <= capacity * (1 + 1e-9)).all()
    for flow, rate in enumerate(rates):
        bottlenecks = [
            link
            for link in range(links)
            if usage[link, flow] > 0
            and load[link] >= capacity[link] * (1 - 1e-9)
            and rate >= max(rates[usage[link] > 0]) * (1 - 1e-9)
        ]
        assert bottlenecks


def test_flows_that_start_later_share_from_then_on() -> None:
    """10 bytes/s: 50 bytes alone for 2 s leave 30, at half the rate 6 s; the later one has 40, and the last 10 alone."""
    environment = simpy.Environment()
    network = Network(environment, {"wire": Links(1, 10.0)})
    first = network.send(Flows(1, {"wire": 1}, 0.5), 50)
    ends = {}

    def watch(name: str, event: simpy.Event) -> None:
        event.callbacks.append(lambda _: ends.setdefault(name, environment.now))

    watch("first", first)

    def later(environment: simpy.Environment):  # type: ignore[no-untyped-def]
        yield environment.timeout(2)
        watch("second", network.send(Flows(1, {"wire": 1}, 0.5), 40))

    environment.process(later(environment))
    environment.run()
    assert ends == pytest.approx({"first": 8.5, "second": 9.5})


def test_a_thousand_hosts_cost_no_more_than_two() -> None:
    """Equal ranks are simulated once."""
    few, many = cluster(64), cluster(1024)
    for algorithm in ALGORITHMS:
        flows_of_few = sum(len(phase.flows) for phase in algorithm(few, MIB))
        assert sum(len(phase.flows) for phase in algorithm(many, MIB)) == flows_of_few


def test_a_class_of_links_that_the_network_lacks_is_named() -> None:
    network = Network(simpy.Environment(), {"wire": Links(1, 1.0)})
    with pytest.raises(UsageError, match=r"flows cross \['fibre'\], which are not links of this network"):
        network.send(Flows(1, {"fibre": 1}, 0), 1)


def test_bytes_cannot_be_negative() -> None:
    network = Network(simpy.Environment(), {"wire": Links(1, 1.0)})
    with pytest.raises(UsageError, match="bytes_each is -1"):
        network.send(Flows(1, {"wire": 1}, 0), -1)


def test_hosts_fill_their_pods() -> None:
    with pytest.raises(UsageError, match="hosts is 40"):
        cluster(40)


def test_a_flow_that_crosses_nothing_has_no_rate() -> None:
    with pytest.raises(UsageError, match="at least one link"):
        max_min_rates(np.zeros((1, 1)), np.ones(1))


@pytest.mark.parametrize(("size", "name"), [(2**10, "tree"), (2**30, "ring")])
def test_auto_takes_trees_for_few_bytes_and_the_ring_for_many(size: int, name: str) -> None:
    hosts = Cluster(hosts=128, ranks_per_host=8, nvlink=450e9, nic=50e9, nvlink_latency=2e-6, nic_latency=5e-6)
    chosen, same = (seconds(hosts, algorithms_of("all_reduce")[some](hosts, size)) for some in ("auto", name))
    assert chosen == same


def test_auto_takes_the_ring_of_a_torus() -> None:
    torus = Torus(4, 4, 1e11, 1e-6)
    assert algorithms_of("all_reduce")["auto"](torus, 2**20) == COLLECTIVES["all_reduce"]["ring"](torus, 2**20)
