"""Groups of ranks on a network of all."""

from __future__ import annotations

import pytest

from dlrm_fused.errors import UsageError
from dlrm_fused.scaleout.collectives import COLLECTIVES, seconds
from dlrm_fused.scaleout.groups import consecutive, strided
from dlrm_fused.scaleout.topologies import Cluster, Switch, Topology, Torus

MIB = 2.0**20
CLUSTER = Cluster(hosts=8, ranks_per_host=4, nvlink=4e11, nic=5e10, nvlink_latency=2e-6, nic_latency=5e-6, hosts_per_pod=4)


def alone(hosts: int, ranks_per_host: int) -> Cluster:
    return Cluster(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        nvlink=CLUSTER.nvlink,
        nic=CLUSTER.nic,
        nvlink_latency=CLUSTER.nvlink_latency,
        nic_latency=CLUSTER.nic_latency,
    )


def times(topology: Topology) -> list[float]:
    return [seconds(topology, COLLECTIVES[kind][name](topology, MIB)) for kind in COLLECTIVES for name in COLLECTIVES[kind]]


@pytest.mark.parametrize(("size", "same"), [(2, alone(1, 2)), (4, alone(1, 4)), (8, alone(2, 4)), (16, alone(4, 4))])
def test_groups_that_follow_each_other_do_not_disturb_each_other(size: int, same: Cluster) -> None:
    assert times(consecutive(CLUSTER, size)) == pytest.approx(times(same))


@pytest.mark.parametrize(("size", "same"), [(2, alone(8, 2)), (4, alone(8, 1)), (8, alone(4, 1)), (16, alone(2, 1))])
def test_neither_do_ranks_of_one_place_in_each_of_them(size: int, same: Cluster) -> None:
    found = consecutive(CLUSTER, size), strided(CLUSTER, size)
    assert found[0].ranks * found[1].ranks == CLUSTER.ranks
    assert times(found[1]) == pytest.approx(times(same))


@pytest.mark.parametrize("topology", [CLUSTER, Switch(12, 1e11, 1e-6), Torus(4, 4, 1e11, 1e-6)])
def test_all_ranks_are_a_group_and_so_is_each(topology: Topology) -> None:
    assert consecutive(topology, topology.ranks) is topology
    assert strided(topology, 1) is topology
    for nobody in (consecutive(topology, 1), strided(topology, topology.ranks)):
        assert nobody.ranks == 1
        assert seconds(nobody, COLLECTIVES["all_reduce"]["ring"](nobody, MIB)) == 0


@pytest.mark.parametrize(("topology", "size"), [(Torus(4, 4, 1e11, 1e-6), 4), (CLUSTER, 6)])
@pytest.mark.parametrize("groups", [consecutive, strided])
def test_other_groups_are_refused(groups: object, topology: Topology, size: int) -> None:
    assert callable(groups)
    with pytest.raises(UsageError, match="allowed on"):
        groups(topology, size)
