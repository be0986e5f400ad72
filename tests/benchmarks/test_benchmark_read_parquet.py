"""The benchmark of Parquet files measures both orders, on every number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.data import read_parquet


def test_every_order_and_number_of_ranks_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "read_parquet.json"
    sizes = ["--samples", "2000", "--batch", "64", "--row-group-rows", "100", "--window", "200", "--seconds", "0.05"]
    read_parquet.main([*sizes, "--output", str(output)])
    rates = json.loads(output.read_text())["rates"]
    cells = [("of files", 1, 1), ("of files", 8, 1), ("shuffled", 1, 1), ("shuffled", 8, 2)]
    assert [(row["order"], row["ranks"], row["lanes"]) for row in rates] == cells
    assert all(row["samples_per_second"] > 0 for row in rates)
