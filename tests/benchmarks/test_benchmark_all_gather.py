"""The benchmark of AllGather + GEMM and GEMM + ReduceScatter: its cells, what it makes of times, and runs on the CPU."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.all_gather_gemm import benchmark, layers, stress
from benchmarks.all_gather_gemm.cells import ROWS, Layer, full_cells, tiny_cells
from benchmarks.all_gather_gemm.report import PAIRS, REPORT, contestants
from benchmarks.common import killed_rank
from benchmarks.common import report as any_report
from benchmarks.common.environment import ROOT
from benchmarks.common.harness import Work
from benchmarks.gemm_all_to_all.cells import DTYPE
from dlrm_fused.ops.all_gather_gemm.schedule import NAMES
from dlrm_fused.ops.common.recorded import recorded_schedules
from dlrm_fused.ops.schedules import Pair
from tests.distributed.launch import Ended, run_program

GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter
MEBI = 1 << 20


def test_cells_are_layers_of_known_models_from_few_rows_to_many() -> None:
    cells = full_cells()
    assert len({(cell.pair, cell.name) for cell in cells}) == len(cells)
    for pair in PAIRS:
        own = [cell for cell in cells if cell.pair is pair]
        assert {cell.m for cell in own} == set(ROWS)
        assert len({(cell.n, cell.k) for cell in own}) >= 8
    # Rows of all matrices are multiples of 16 bytes, and shards of 8 ranks are of whole tiles.
    assert all(cell.n * DTYPE.itemsize % 16 == cell.k * DTYPE.itemsize % 16 == cell.m % (8 * 128) == 0 for cell in cells)


def test_work_counts_what_travels() -> None:
    """Once over the links, and in memory once where it is read and once where it is written."""
    sent = 2 * 256 * 512 * 3
    gathered = 2 * MEBI // 2 + 2 * MEBI + 2 * (256 * 512 + 2 * 256 * 512 * 3)  # weight and result, then x and what comes
    assert Layer(GATHER, 1024, 1024, 512).work(ranks=4) == Work(2 * 1024 * 1024 * 512, gathered, sent)
    scattered = 2 * MEBI // 2 + 2 * MEBI + 2 * (256 * 512 + 2 * 256 * 512 * 3)  # weight and x, then the result
    assert Layer(SCATTER, 1024, 512, 1024).work(ranks=4) == Work(2 * 1024 * 1024 * 512, scattered, sent)


def test_operands_of_a_rank() -> None:
    for cell, rows in ((Layer(GATHER, 12, 16, 8), 3), (Layer(SCATTER, 12, 16, 8), 12)):
        (x, weight), *others = cell.draw(1, 4, torch.device("cpu"), count=2)
        assert (list(x.shape), list(weight.shape)) == ([rows, 8], [16, 8])
        assert not torch.equal(x, others[0][0])
        assert torch.equal(x, cell.draw(1, 4, torch.device("cpu"))[0][0])
        assert not torch.equal(x, cell.draw(2, 4, torch.device("cpu"))[0][0])


def _result(pair: Pair, name: str, ratio: float, *, passed: bool = True) -> dict[str, Any]:
    return {
        "pair": str(pair),
        "name": name,
        "passed": passed,
        "errors": {"chunks": 0.5},
        "us": {"nccl": 10.0, "chunks": 10.0 * ratio, "gemm": 3.0},
        "best": "chunks",
        "ratio": ratio,
        "link_us": 4.0,
        "overlap": 2 * ratio,
        "floor_us": 2.0,
        "over_floor": 5 * ratio,
    }


def test_summary_has_geometric_means_worst_cells_and_failures() -> None:
    cells = [
        _result(GATHER, "a", 0.5),
        _result(GATHER, "b", 2.0),
        _result(GATHER, "c", 0.01, passed=False),
        {"pair": str(GATHER), "name": "d", "passed": False, "error": "rank 1: out of memory"},
        _result(SCATTER, "e", 0.7, passed=False),
    ]
    summary = REPORT.summarize(cells)
    assert list(summary) == [GATHER, SCATTER]
    assert summary[GATHER]["ratio"] == pytest.approx(1.0)
    assert summary[GATHER]["overlap"] == pytest.approx(2.0)
    assert summary[GATHER]["over_floor"] == pytest.approx(5.0)
    assert summary[GATHER]["failed"] == ["c", "d"]
    assert summary[GATHER]["slower"] == 1
    assert summary[GATHER]["worst"][0] == {"name": "b", "ratio": 2.0}
    assert summary[SCATTER]["ratio"] is None
    text = REPORT.table({"cells": cells, "not_run": ["all_gather_gemm y"]})
    assert "FAILED rank 1: out of memory" in text
    assert "FAILED {'chunks': 0.5}" in text
    assert "geometric means of 2 cells: best schedule / (cuBLAS + NCCL) 1.000" in text
    assert "not run: all_gather_gemm y" in text


def _run(folder: Path, *arguments: str, main: Any = benchmark.main) -> dict[str, Any]:
    given = ["--output", "results.json", "--cells", "tiny", "--seconds-per-cell", "0.01", *arguments]
    ended = run_program(2, folder, 240.0, main, given)
    assert ended.statuses == [0, 0], ended.output
    return dict(json.loads((folder / "results.json").read_text()))


def test_tiny_cells_on_the_cpu_pass_and_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = _run(tmp_path, "--commit", "abc")
    assert [(cell["pair"], cell["name"]) for cell in report["cells"]] == [(cell.pair, cell.name) for cell in tiny_cells()]
    for cell in report["cells"]:
        assert cell["passed"]
        us = cell["us"]
        assert list(us) == contestants(Pair(cell["pair"]))
        assert all(len(by_rank) == 2 for by_rank in cell["by_rank_us"].values())
        assert max(cell["errors"].values()) > 0
        assert cell["best"] == min(us.keys() - {"nccl", "gemm"}, key=us.__getitem__)
        assert cell["ratio"] == pytest.approx(us[cell["best"]] / us["nccl"])
        assert cell["overlap"] == pytest.approx(us[cell["best"]] / max(us["gemm"], cell["link_us"]))
        assert cell["over_floor"] > 1
    assert report["commit"] == "abc"
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "results.json"), "--plot", str(tmp_path / "plot.png")])
    any_report.main()
    printed = capsys.readouterr().out
    for cell in report["cells"]:
        assert f"{cell['pair']} (us)\nM x N x K" in printed
        assert f"\n{cell['name']} " in printed
        assert f"{cell['ratio']:.3f}" in printed
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_schedules_that_are_asked_for_are_timed_alone(tmp_path: Path) -> None:
    report = _run(tmp_path, "--schedules", "chunks", "arriving_4")
    timed = {cell["pair"]: list(cell["us"]) for cell in report["cells"]}
    assert timed == {GATHER: ["nccl", "chunks", "arriving_4", "gemm"], SCATTER: ["nccl", "chunks", "gemm"]}


def _main_with_wrong_results(arguments: list[str]) -> None:
    """By one schedule rank 1 has one wrong element."""
    multiply = layers.call

    def with_mistake(*given: Any) -> Tensor:
        result = multiply(*given)
        if given[-1] == "chunks_2" and torch.distributed.get_rank() == 1:
            result = result.clone()
            result[2, 3] += 1
        return result

    layers.call = with_mistake  # type: ignore[assignment]
    benchmark.main(arguments)


def test_wrong_results_fail_their_cells(tmp_path: Path) -> None:
    report = _run(tmp_path, "--schedules", "chunks", "chunks_2", main=_main_with_wrong_results)
    for cell in report["cells"]:
        assert not cell["passed"]
        assert cell["errors"]["chunks_2"] > 0.1
        tolerance = report["tolerances"][cell["pair"]]
        assert max(cell["errors"][name] for name in ("nccl", "chunks", "gemm") if name in cell["errors"]) <= tolerance
    assert [summary["ratio"] for summary in report["summary"].values()] == [None, None]


# The stress test.


def _stress(arguments: list[str]) -> None:
    sys.exit(stress.main(arguments))


def _stress_with_a_rare_mistake(arguments: list[str]) -> None:
    """In the 100th result one element of rank 1 differs in its last bit."""
    multiply, calls = stress.call, itertools.count()

    def with_mistake(*given: Any) -> Tensor:
        result = multiply(*given)
        if next(calls) == 100 and torch.distributed.get_rank() == 1:
            result = result.clone()
            result.view(torch.int16)[0, 3] += 1
        return result

    stress.call = with_mistake  # type: ignore[assignment]
    _stress(arguments)


def _run_stress(folder: Path, main: Any) -> tuple[Ended, dict[str, Any]]:
    ended = run_program(2, folder, 240.0, main, ["--tiny", "--replays", "200", "--seed", "3", "--output", "stress.json"])
    return ended, json.loads((folder / "stress.json").read_text())


def test_repeated_products_with_random_delays_have_the_same_bits_by_every_schedule(tmp_path: Path) -> None:
    ended, report = _run_stress(tmp_path, _stress)
    assert ended.statuses == [0, 0], ended.output
    assert report["passed"] is True
    assert report["replays"] == 200
    for pair in PAIRS:
        own = [work for work in report["works"] if work["layer"]["pair"] == pair]
        assert {work["schedule"] for work in own} == set(NAMES[pair])
    assert all(work["relative_error"] > 0 and work["elements_that_differ"] == 0 for work in report["works"])


def test_one_element_that_differs_once_is_seen(tmp_path: Path) -> None:
    ended, report = _run_stress(tmp_path, _stress_with_a_rare_mistake)
    assert ended.statuses == [1, 1], ended.output
    assert report["passed"] is False
    assert sum(work["elements_that_differ"] for work in report["works"]) == 1


def test_every_other_rank_names_a_rank_that_is_killed(tmp_path: Path) -> None:
    arguments = ["--tiny", "--kill-rank", "1", "--kill-after", "0.3", "--output", "killed.json"]
    ended = run_program(3, tmp_path, 240.0, _stress, arguments)
    assert ended.statuses == [0, -signal.SIGKILL, 0], ended.output
    for rank in (0, 2):
        seen = json.loads((tmp_path / f"killed.rank{rank}.json").read_text())
        assert killed_rank._is_right(seen, killed=1), seen


@pytest.mark.parametrize("pair", [Pair.all_gather_gemm, Pair.gemm_reduce_scatter])
def test_the_operators_table_has_the_fastest_schedules_of_the_raw_results(pair: Pair) -> None:
    measured = recorded_schedules("NVIDIA H200", pair, 2, torch.bfloat16)
    cells = json.loads((ROOT / f"benchmarks/results/schedules/{pair}_2_h200.json").read_text())["cells"]
    assert len(measured) >= 29
    for cell in cells:
        chosen = measured.get((cell["m"], cell["n"], cell["k"]))
        own = {name: us for name, us in cell["us"].items() if name in NAMES[pair]}
        assert chosen in (None, min(own, key=own.__getitem__))
