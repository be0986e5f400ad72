"""Collectives beside the times that ASTRA-Sim's analytical network took for the same messages, recorded at commit a7b5fa7."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.environment import ROOT
from dlrm_fused.scaleout.collectives import COLLECTIVES, seconds
from dlrm_fused.scaleout.topologies import Cluster, Switch, Topology, Torus

RECORDED = json.loads((ROOT / "benchmarks/results/scaleout_astra_sim.json").read_text())["rows"]
ALLOWED = 0.05
HOST = {"nvlink": 450e9, "nic": 50e9, "nvlink_latency": 2e-6, "nic_latency": 5e-6}
TOPOLOGIES: dict[str, Topology] = {
    **{f"switch of {ranks}": Switch(ranks, 50e9, 5e-6) for ranks in (2, 8, 32)},
    **{f"torus of {rows} x {columns}": Torus(rows, columns, 25e9, 0.7e-6) for rows, columns in ((1, 8), (4, 4), (8, 8))},
    **{f"{hosts} hosts of 8": Cluster(hosts, 8, **HOST) for hosts in (2, 4, 8)},
}


@pytest.mark.parametrize("network", list(TOPOLOGIES))
def test_collectives_take_as_long_as_astra_sims(network: str) -> None:
    rows = [row for row in RECORDED if row["network"] == network]
    assert rows
    for row in rows:
        kind, algorithm = row["collective"].split(", ")
        ours = 1e6 * seconds(TOPOLOGIES[network], COLLECTIVES[kind][algorithm](TOPOLOGIES[network], row["bytes"]))
        assert ours == pytest.approx(row["astra_sim_us"], rel=ALLOWED), row["collective"]
