"""Collectives beside the times that ASTRA-Sim's analytical network took for the same messages, as recorded."""

from __future__ import annotations

import json

import pytest

from benchmarks.common.environment import ROOT
from benchmarks.scaleout.against_astra_sim import ALLOWED, networks
from dlrm_fused.scaleout.collectives import COLLECTIVES, seconds

RECORDED = json.loads((ROOT / "benchmarks/results/scaleout_astra_sim.json").read_text())["rows"]
TOPOLOGIES = {name: topology for name, topology, _, _ in networks()}


@pytest.mark.parametrize("network", list(TOPOLOGIES))
def test_collectives_take_as_long_as_astra_sims(network: str) -> None:
    rows = [row for row in RECORDED if row["network"] == network]
    assert rows
    for row in rows:
        kind, algorithm = row["collective"].split(", ")
        ours = 1e6 * seconds(TOPOLOGIES[network], COLLECTIVES[kind][algorithm](TOPOLOGIES[network], row["bytes"]))
        assert ours == pytest.approx(row["astra_sim_us"], rel=ALLOWED), row["collective"]
