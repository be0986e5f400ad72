"""The comparison of two checkouts on the CPU: which of them is slower, and which computes something wrong, is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.environment import ROOT
from benchmarks.embedding_all_to_all import compare_checkouts
from benchmarks.embedding_all_to_all.cells import CELLS, Cell

TINY = Cell(1, 4, 2, 8, "fp32", "uniform", largest_rows=20)
# In place of the operator as the benchmark calls it. Its clock goes 1,000 s forward in each call: that is faster than to sleep.
SLOW = """
import time
perf_counter, calls = time.perf_counter, 0
time.perf_counter = lambda: perf_counter() + 1000 * calls

def embedding_all_to_all(*given, right=embedding_all_to_all):
    global calls
    calls += 1
    return right(*given)
"""
WRONG = """
def embedding_all_to_all(*given, right=embedding_all_to_all):
    return 1.01 * right(*given)
"""


def _changed_checkout(folder: Path, change: str) -> Path:
    """A copy of this checkout with another operator."""
    for package in ("dlrm_fused", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    benchmark = folder / "benchmarks/embedding_all_to_all/benchmark.py"
    text = benchmark.read_text()
    before, after = "\nLEARNING_RATE", f"{change}\nLEARNING_RATE"
    assert text.count(before) == 1
    benchmark.write_text(text.replace(before, after))
    return folder


def _compare(against: Path, output: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, dict[str, Any]]:
    monkeypatch.setitem(CELLS, "tiny", lambda: [TINY])
    status = compare_checkouts.main(
        ["--against", str(against), "--output", str(output), "--cells", "tiny", "--commit", "abc", *arguments]
    )
    return status, json.loads(output.read_text())


@pytest.mark.exhaustive
def test_a_checkout_with_slower_forward_passes_has_ratios_below_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = _changed_checkout(tmp_path / "slow", SLOW)
    status, report = _compare(then, tmp_path / "out.json", monkeypatch, "--match", "^1x4", "--ranks", "1", "--rounds", "1")
    assert status == 0
    assert (report["commit"], report["against"]) == ("abc", "slow")
    (cell,) = report["cells"]
    assert cell["name"] == TINY.name
    assert cell["passed"] is True
    for figure in ("forward", "training", "launch_forward"):
        assert cell[figure]["then_us"] > 1000e6
        assert cell[figure]["ratio"] == pytest.approx(cell[figure]["today_us"] / cell[figure]["then_us"])
        assert cell[figure]["ratio"] < 1
    assert cell["launch_backward"]["then_us"] < 1000e6
    ratios = {figure: cell[figure]["ratio"] for figure in compare_checkouts.FIGURES}
    assert report["geometric_means"] == pytest.approx(ratios)


@pytest.mark.exhaustive
def test_wrong_results_fail_a_cell_on_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = _changed_checkout(tmp_path / "wrong", WRONG)
    status, report = _compare(then, tmp_path / "out.json", monkeypatch, "--match", "^row-wise", "--ranks", "2")
    assert status == 1
    (cell,) = report["cells"]
    assert cell["passed"] is False
    assert cell["errors"]["today"]["output of fused"] < 1e-5 < cell["errors"]["then"]["output of fused"]
    assert report["geometric_means"] == {}


@pytest.mark.slow
def test_cells_for_which_no_time_is_left_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, report = _compare(ROOT, tmp_path / "out.json", monkeypatch, "--ranks", "1", "--seconds-budget", "-1")
    assert report["not_run"] == [TINY.name, f"row-wise {TINY.name}"]


def test_a_ratio_is_the_median_over_rounds() -> None:
    summary = compare_checkouts.summarize({"today": [1.0, 8.0, 3.0], "then": [2.0, 2.0, 2.0]})
    spread = (8.0 + 3.0) / 4 - (3.0 + 1.0) / 4
    assert summary == {"today_us": 3.0, "then_us": 2.0, "ratio": 1.5, "spread": spread}


@pytest.mark.slow
def test_a_rank_that_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=f"rank 0 of the checkout {tmp_path} ended"):
        _compare(tmp_path, tmp_path / "out.json", monkeypatch, "--ranks", "1")
