"""The benchmark of readers measures each kind of set in both orders."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks.data import loading
from dlrm_fused.config import Split


def test_every_set_is_measured_in_both_orders(tmp_path: Path) -> None:
    output = tmp_path / "loading.json"
    loading.main(["--samples", "400", "--batch", "20", "--workers", "1", "--seconds", "0.05", "--output", str(output)])
    rates = json.loads(output.read_text())["rates"]
    sets = ["prepared", "criteo_npy", "criteo_npy, 214 ids"]
    assert [(row["set"], row["order"]) for row in rates] == [
        (name, order) for name in sets for order in ("shuffled", "of files")
    ]
    assert all(row["samples_per_second"] > 0 for row in rates)


def test_sets_have_as_many_ids_as_they_say(tmp_path: Path) -> None:
    for dataset, ids in (
        (loading.prepared(tmp_path / "prepared", 10), 26),
        (loading.criteo_npy(tmp_path / "single", 10, is_multi_hot=False), 26),
        (loading.criteo_npy(tmp_path / "multi", 10, is_multi_hot=True), 214),
    ):
        assert dataset.samples(Split.train) == 10
        samples = dataset.read(Split.train, torch.arange(10))
        assert samples.sparse.values().numel() == 10 * ids
        assert samples.dense.shape == (10, 13)
