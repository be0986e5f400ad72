"""The planner's costs where communication runs beside the lookup."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, Perf, ShardingOption
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_fused.sharding.estimates import fused_enumerator, overlapped

BATCH = 4096
TABLES = [
    EmbeddingBagConfig(name=f"table_{i}", num_embeddings=10**5, embedding_dim=dim, feature_names=[f"feature_{i}"])
    for i, dim in enumerate((32, 128))
]
OVERLAPPED = ("table_wise", "column_wise", "table_column_wise")  # row-wise ones are fused, too, but add up afterwards


@pytest.mark.parametrize(
    ("compute", "comms", "left"),
    [(3.0, 2.0, 0.0), (2.0, 3.0, 1.0), (2.0, 2.0, 0.0)],
    ids=["lookup lasts longer", "communication lasts longer", "equal"],
)
def test_the_longer_of_lookup_and_communication_counts(compute, comms, left):
    forward = overlapped(Perf(fwd_compute=compute, fwd_comms=comms, bwd_compute=0.0, bwd_comms=0.0))
    assert (forward.fwd_comms, forward.total) == (left, max(compute, comms))
    backward = overlapped(Perf(fwd_compute=0.0, fwd_comms=0.0, bwd_compute=compute, bwd_comms=comms))
    assert (backward.bwd_comms, backward.total) == (left, max(compute, comms))


def test_other_costs_stay():
    perf = Perf(1.0, 2.0, 3.0, 4.0, input_dist_comms=5.0, prefetch_compute=6.0)
    assert overlapped(perf) == Perf(1.0, 1.0, 3.0, 1.0, input_dist_comms=5.0, prefetch_compute=6.0)


def options(device: str, fused: bool, hosts: int = 1) -> dict[tuple[str, str, str, int], ShardingOption]:
    topology = Topology(world_size=4, local_world_size=4 // hosts, compute_device=device)
    constraints = {table.name: ParameterConstraints(min_partition=32, pooling_factors=[10.0]) for table in TABLES}
    enumerator = fused_enumerator(topology, BATCH, constraints) if fused else EmbeddingEnumerator(topology, BATCH, constraints)
    found = enumerator.enumerate(EmbeddingBagCollection(TABLES, device=torch.device("meta")), [EmbeddingBagCollectionSharder()])
    return {(o.name, o.sharding_type, o.compute_kernel, len(o.shards)): o for o in found}


def test_of_the_options_those_that_are_delivered_as_they_are_looked_up_get_cheaper():
    fused, torchrecs = options("cuda", fused=True), options("cuda", fused=False)
    assert fused.keys() == torchrecs.keys()
    assert {kind for _, kind, kernel, _ in fused if kernel == "fused"} >= {*OVERLAPPED, "row_wise"}
    for key, option in fused.items():
        _, sharding_type, kernel, _ = key
        is_overlapped = sharding_type in OVERLAPPED and kernel == "fused"
        for shard, torchrecs_shard in zip(option.shards, torchrecs[key].shards, strict=True):
            assert shard.perf == (overlapped(torchrecs_shard.perf) if is_overlapped else torchrecs_shard.perf)
            assert not is_overlapped or shard.perf.total < torchrecs_shard.perf.total
            assert shard.storage == torchrecs_shard.storage


@pytest.mark.parametrize(("device", "hosts"), [("cpu", 1), ("cuda", 2)])
def test_on_the_cpu_and_between_hosts_they_cost_what_torchrec_says(device, hosts):
    fused, torchrecs = (options(device, fused, hosts) for fused in (True, False))
    assert {kind for _, kind, _, _ in fused} >= set(OVERLAPPED[:2])
    for key, option in fused.items():
        assert [shard.perf for shard in option.shards] == [shard.perf for shard in torchrecs[key].shards]


def test_torchrecs_planner_takes_them():
    topology = Topology(world_size=2, compute_device="cuda")
    planner = EmbeddingShardingPlanner(topology, BATCH, enumerator=fused_enumerator(topology, BATCH), debug=False)
    plan = planner.plan(EmbeddingBagCollection(TABLES, device=torch.device("meta")), [EmbeddingBagCollectionSharder()])
    (module_plan,) = plan.plan.values()
    assert set(module_plan) == {"table_0", "table_1"}
