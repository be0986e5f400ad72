"""Preparation tells splits whose labels are all the same, since no AUC is defined there."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_fused.datasets.preparation import cli
from tests.unit.tables import prepare, random_table, write_table


def test_each_label_of_each_split_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = random_table(100)
    fold = ["train"] * 60 + ["validation"] * 30 + ["test"] * 10
    bought = [0, 1] * 30 + [1] * 30 + [0, 1] * 5
    weights = [1.0] * 90 + [1.0, 0.0] * 5  # of the test split, what is bought does not count
    for name, values in (("fold", fold), ("bought", bought), ("w", weights)):
        table = table.append_column(name, [values])
    source = write_table(table, tmp_path / "t.parquet")
    options = ("--label", "clicked,bought", "--sample-weight", "w", "--split-by-column", "fold")
    prepare(source, tmp_path / "out", *options)
    out = capsys.readouterr().out
    warnings = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: validation split: bought is 1 in all 30 samples, so its AUC is not defined; take other rows, or more",
        "warning: test split: bought is 0 in all 10 samples, so its AUC is not defined; take other rows, or more",
    ]


def test_a_description_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = random_table(100).set_column(0, "clicked", [[0, 1] * 40 + [0] * 20])
    table = table.append_column("fold", [["train"] * 80 + ["validation", "test"] * 10])
    source = write_table(table, tmp_path / "t.parquet")
    arguments = [
        "table",
        "--input",
        str(source),
        "--output",
        str(tmp_path / "out"),
        "--label",
        "clicked",
        "--sparse",
        "color",
    ]
    assert cli.main([*arguments, "--split-by-column", "fold", "--describe"]) == 0
    out = capsys.readouterr().out
    assert "\nwarning: test split: clicked is 0 in all 10 samples, so its AUC is not defined" in out
    assert "train split:" not in out
