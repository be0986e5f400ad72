"""The comparison of two checkouts on the CPU: which of them is slower, and which computes something wrong, is seen."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.common.environment import ROOT
from benchmarks.operators import compare

TINY = "8x16x8"
# In place of the operator. Its clock goes 1,000 s forward in each call: that is faster than to sleep.
SLOW = """

import time
perf_counter, calls = time.perf_counter, 0
time.perf_counter = lambda: perf_counter() + 1000 * calls

def gemm_all_to_all(*given, right=gemm_all_to_all, **options):
    global calls
    calls += 1
    return right(*given, **options)
"""
WRONG = """

def gemm_all_to_all(*given, right=gemm_all_to_all, **options):
    return 1.1 * right(*given, **options)
"""


def _changed_checkout(folder: Path, change: str) -> Path:
    """The package of this checkout with another operator; no benchmarks, which are today's."""
    shutil.copytree(ROOT / "dlrm_fused", folder / "dlrm_fused", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "dlrm_fused/ops/gemm_all_to_all/__init__.py").open("a") as file:
        file.write(change)
    return folder


def _compare(against: Path, output: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    given = ["--against", str(against), "--output", str(output), "--cells", "tiny", "--match", TINY, "--commit", "abc"]
    status = main(["compare", "gemm_all_to_all", *given, "--rounds", "1", *arguments])
    return status, json.loads(output.read_text())


@pytest.mark.slow
def test_a_checkout_with_slower_calls_has_ratios_below_one(tmp_path: Path) -> None:
    status, report = _compare(_changed_checkout(tmp_path / "slow", SLOW), tmp_path / "out.json", "--ranks", "2")
    assert status == 0
    assert (report["commit"], report["against"]) == ("abc", "slow")
    (cell,) = report["cells"]
    assert (cell["name"], cell["passed"]) == (TINY, True)
    for figure in compare.FIGURES:
        assert cell[figure]["then_us"] > 1000e6
        assert cell[figure]["ratio"] == pytest.approx(cell[figure]["today_us"] / cell[figure]["then_us"])
        assert cell[figure]["ratio"] < 1
    assert report["geometric_means"] == pytest.approx({figure: cell[figure]["ratio"] for figure in compare.FIGURES})


@pytest.mark.slow
def test_wrong_results_fail_a_cell(tmp_path: Path) -> None:
    status, report = _compare(_changed_checkout(tmp_path / "wrong", WRONG), tmp_path / "out.json", "--ranks", "2")
    assert status == 1
    (cell,) = report["cells"]
    assert cell["passed"] is False
    assert cell["errors"]["today"]["fused"] < 2**-7 < cell["errors"]["then"]["fused"]
    assert report["geometric_means"] == {}


@pytest.mark.slow
def test_cells_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    _, report = _compare(ROOT, tmp_path / "out.json", "--ranks", "1", "--seconds-budget", "-1")
    assert report["not_run"] == [TINY]


def test_a_ratio_is_the_median_over_rounds() -> None:
    summary = compare.summarize({"today": [1.0, 8.0, 3.0], "then": [2.0, 2.0, 2.0]})
    spread = (8.0 + 3.0) / 4 - (3.0 + 1.0) / 4
    assert summary == {"today_us": 3.0, "then_us": 2.0, "ratio": 1.5, "spread": spread}


@pytest.mark.slow
def test_a_rank_that_ends_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"rank 0 of the checkout {tmp_path} ended"):
        _compare(tmp_path, tmp_path / "out.json", "--ranks", "1")
