"""The benchmark of readers measures each kind of set in both orders."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.data import loading
from dlrm_fused.config import Split

LARGE = f"parquet_{loading.ROW_GROUP_ROWS}"


def test_every_set_is_measured_in_both_orders_on_every_number_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank needs a row group.
    monkeypatch.setattr(loading, "SETS", {**loading.SETS, LARGE: partial(loading.parquet, row_group_rows=20)})
    output = tmp_path / "loading.json"
    sizes = ["--samples", "400", "--batch", "20", "--workers", "1", "--ranks", "1", "8", "--seconds", "0.05"]
    sets = [name for name in loading.SETS if name != "parquet_8192"]
    loading.main([*sizes, "--sets", *sets, "--output", str(output)])
    rates = json.loads(output.read_text())["rates"]
    cells = list(product(sets, ("shuffled", "of files"), (1, 8)))
    assert [(row["set"], row["order"], row["ranks"]) for row in rates] == cells
    assert all(row["samples_per_second"] > 0 for row in rates)


@pytest.mark.parametrize("name", loading.SETS)
def test_sets_have_as_many_ids_as_they_say(name: str, tmp_path: Path) -> None:
    dataset = loading.SETS[name](tmp_path / "set", 10)
    assert dataset.samples(Split.train) == 10
    samples = dataset.read(Split.train, torch.arange(10))
    assert samples.sparse.values().numel() == 10 * (214 if "214" in name else 26)
    assert samples.dense.shape == (10, 13)
