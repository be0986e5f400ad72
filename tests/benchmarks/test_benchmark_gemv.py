"""The benchmarks of GEMV + AllReduce: their cells, what they make of times, and runs on the CPU."""

from __future__ import annotations

import itertools
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.common import harness
from benchmarks.gemv_all_reduce import benchmark as gemv_all_reduce
from benchmarks.gemv_all_reduce import cells as cells_of_gemv
from benchmarks.gemv_all_reduce import simulated_ranks
from benchmarks.gemv_all_reduce import stress as stress_gemv
from benchmarks.gemv_all_reduce import tune as tune_gemv
from benchmarks.gemv_all_reduce.cells import LARGE_ROWS, ROWS, SHAPES, Cell, large_cells, small_cells, tiny_cells, weight_copies
from benchmarks.gemv_all_reduce.report import REPORT
from dlrm_fused.ops.gemv_all_reduce.tuning import Blocks
from tests.distributed.launch import Ended, run_program


def test_the_grid_has_all_shapes_with_all_numbers_of_rows() -> None:
    for cells, rows, large in ((small_cells(), ROWS, False), (large_cells(), LARGE_ROWS, True)):
        assert {((cell.n, cell.k), cell.m) for cell in cells} == set(itertools.product(SHAPES, rows))
        assert len(cells) == len(SHAPES) * len(rows)
        assert all(cell.is_large == large for cell in cells)
    assert len({cell.name for cell in small_cells() + large_cells()}) == 66


def test_weights_that_take_turns_are_three_times_the_cache() -> None:
    for n, k in SHAPES:
        copies = weight_copies(n, k // 4)
        assert copies >= 2
        assert copies * n * (k // 4) * 2 >= 180e6


def test_bytes_of_a_cell() -> None:
    cell = Cell(16, 8192, 28672)
    assert cell.memory_bytes(4) == 2 * (8192 * 7168 + 16 * 7168 + 16 * 8192)
    assert cell.link_bytes(4) == 2 * 16 * 8192 * 2 * 3 / 4


def _result(m: int, ratio: float, to_symmetric: float | None = None, *, passed: bool = True) -> dict[str, Any]:
    us = {"fused": 10.0 * ratio, "nccl": 10.0, "gemm": 3.0}
    return {
        "name": f"8x8 m{m}",
        "size": "large" if m > 64 else "small",
        "m": m,
        "n": 8,
        "k": 8,
        "passed": passed,
        "errors": {"fused": 0.5},
        "same_bits_on_all_ranks": {"fused": passed},
        "us": us,
        "ratio": ratio,
        "ratio_to_symmetric": to_symmetric,
        "floor_us": 2.0,
        "fused_over_floor": 5.0 * ratio,
    }


def test_summary_has_geometric_means_worst_cells_and_failures() -> None:
    cells = [
        _result(1, 0.25, 0.5),
        _result(16, 1.0, 0.5),
        _result(64, 2.0),
        _result(32, 0.01, passed=False),
        {"name": "x", "size": "small", "m": 2, "passed": False, "error": "rank 1: out of memory"},
        _result(2048, 0.8),
    ]
    summary = REPORT.summarize(cells)
    small = summary["small"]
    assert small["ratio_of_few_rows"] == pytest.approx(0.5)
    assert small["ratio"] == pytest.approx(0.5 ** (1 / 3))
    assert small["ratio_to_symmetric"] == pytest.approx(0.5)
    assert small["failed"] == ["8x8 m32", "x"]
    assert small["worst"][0] == {"name": "8x8 m64", "ratio": 2.0}
    assert small["slower_than_nccl"] == 2
    assert summary["large"]["ratio"] == pytest.approx(0.8)
    assert summary["large"]["ratio_to_symmetric"] is None
    text = REPORT.table({"cells": cells, "not_run": ["y"]})
    assert "FAILED rank 1: out of memory" in text
    assert "FAILED error 5.0e-01, not the same bits on all ranks" in text
    assert "0.500 for m <= 16" in text
    assert "not run: y" in text


def _run(folder: Path, *arguments: str, main: Any = gemv_all_reduce.main) -> dict[str, Any]:
    ended = run_program(2, folder, 240.0, main, ["--output", "results.json", *arguments])
    assert ended.statuses == [0, 0], ended.output
    return dict(json.loads((folder / "results.json").read_text()))


def test_tiny_cells_on_the_cpu_pass_and_are_drawn(tmp_path: Path) -> None:
    report = _run(tmp_path, "--cells", "tiny", "--seconds-per-cell", "0.01", "--commit", "abc")
    assert [cell["name"] for cell in report["cells"]] == [cell.name for cell in tiny_cells()]
    for cell in report["cells"]:
        assert cell["passed"]
        assert set(cell["us"]) == {"fused", "nccl", "gemm"}  # no CUDA, no symmetric memory of torch
        assert cell["ratio"] == pytest.approx(cell["us"]["fused"] / cell["us"]["nccl"])
        assert 0 < cell["errors"]["fused"] <= report["tolerances"][cell["size"]]
        assert cell["fused_over_floor"] > 1
        assert len(cell["by_rank_us"]["fused"]) == 2
    assert report["commit"] == "abc"
    REPORT.plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_slices_of_ranks_that_are_hosts_of_their_own_are_measured(tmp_path: Path) -> None:
    report = _run(tmp_path, "--cells", "tiny", "--rows", "1", "--seconds-per-cell", "0.01", "--slices-by", "messages")
    assert report["cells"]
    assert all(cell["passed"] for cell in report["cells"])


def _main_with_wrong_bits(arguments: list[str]) -> None:
    """Rank 1 has other bits in one element: one row is off by less than the tolerance, in the other product by more."""
    right = gemv_all_reduce.gemv_all_reduce

    def wrong(*given: Any, **how: Any) -> tuple[torch.Tensor, None]:
        out, _ = right(*given, **how)
        if torch.distributed.get_rank() == 1:
            row, change = (0, 1) if len(out) == 1 else (2, 64)
            out.view(torch.int16)[row, 0] += change
        return out, None

    gemv_all_reduce.gemv_all_reduce = wrong
    gemv_all_reduce.main(arguments)


def test_results_that_differ_between_ranks_or_are_wrong_fail_their_cells(tmp_path: Path) -> None:
    report = _run(tmp_path, "--cells", "tiny", "--rows", "1", "3", "--seconds-per-cell", "0.01", main=_main_with_wrong_bits)
    first, second = report["cells"]
    assert not first["passed"]
    assert not second["passed"]
    assert first["same_bits_on_all_ranks"] == {"fused": False, "nccl": True}
    assert first["errors"]["fused"] < 2**-6 < second["errors"]["fused"]
    assert report["summary"]["small"]["ratio"] is None


def test_cells_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    report = _run(tmp_path, "--cells", "tiny", "--match", "m[13]$", "--seconds-budget", "0")
    assert report["cells"] == []
    assert report["not_run"] == ["32x64 m1", "32x64 m3"]


def test_what_is_tuned_begins_with_what_is_used_today() -> None:
    cell = Cell(16, 2048, 8192)
    shapes = tune_gemv.candidates(cell, 4, None)
    assert shapes[0] == tune_gemv.chosen_blocks(cell, 4)
    assert set(shapes) >= set(tune_gemv.all_blocks(cell.m, cell.n, cell.depth(4)))
    assert len(set(shapes)) == len(shapes)
    assert tune_gemv.candidates(cell, 4, 5) == shapes[:5]


def test_the_fastest_blocks_are_printed_as_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _run(tmp_path, "--cells", "tiny", "--most", "3", main=tune_gemv.main)
    assert [cell["name"] for cell in report["cells"]] == ["32x64 m1", "32x64 m3"]
    tune_gemv.main(["--table", str(tmp_path / "results.json")])
    printed: dict[str, Any] = {"Blocks": Blocks}
    exec(capsys.readouterr().out, printed)
    assert list(printed["_MEASURED"]) == [(1, 32, 32), (3, 32, 32)]
    assert all(isinstance(blocks, Blocks) for blocks in printed["_MEASURED"].values())


# Kernels that are compiled ahead.


@triton.jit
def copy_kernel(source, target, n, BLOCK: tl.constexpr):  # noqa: N803
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + element, tl.load(source + element, mask=element < n), mask=element < n)


class _NoGpu:
    """Looks like the driver of an H100; nothing can be launched on it."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def test_kernels_compiled_ahead_are_those_of_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **seen: hits.append(seen["cache_hit"]))
    values = torch.zeros(100)
    call = partial(copy_kernel[(1,)], values, values, 100)
    monkeypatch.setattr(driver, "_active", _NoGpu())
    kernels = harness._kernels_of([lambda: call(BLOCK=128), lambda: call(BLOCK=64), lambda: call(BLOCK=128)])
    assert len(kernels) == 2
    assert hits == []
    for kernel in kernels.values():
        harness._compile(kernel)
    assert hits == [False, False]
    copy_kernel.warmup(values, values, 100, BLOCK=128, grid=(1,))
    assert hits == [False, False, True]


# The stress test.


def _stress(arguments: list[str]) -> None:
    sys.exit(stress_gemv.main(arguments))


def _stress_with_a_rare_mistake(arguments: list[str]) -> None:
    right, calls = stress_gemv.gemv_all_reduce, itertools.count()

    def wrong(*given: Any, **options: Any) -> Any:
        results = right(*given, **options)
        if next(calls) == 20 and torch.distributed.get_rank() == 1:
            results[0].view(torch.int16)[0, 3] += 1
        return results

    stress_gemv.gemv_all_reduce = wrong
    _stress(arguments)


def _run_stress(folder: Path, main: Any) -> tuple[Ended, dict[str, Any]]:
    ended = run_program(2, folder, 240.0, main, ["--tiny", "--replays", "60", "--output", "stress.json"])
    return ended, json.loads((folder / "stress.json").read_text())


def test_repeated_products_with_random_delays_have_the_same_bits(tmp_path: Path) -> None:
    ended, report = _run_stress(tmp_path, _stress)
    assert ended.statuses == [0, 0], ended.output
    assert report["passed"] is True
    assert report["replays"] == 60
    products = report["works"]
    assert {(own["with_bias_and_residual"], own["with_norm"]) for own in products} == {(0, 0), (1, 0), (1, 1)}
    assert max(own["m"] for own in products) > 64 > min(own["m"] for own in products)
    assert all(0 < own["relative_error"] < math.inf and own["elements_that_differ"] == 0 for own in products)


def test_one_element_that_differs_once_is_seen(tmp_path: Path) -> None:
    ended, report = _run_stress(tmp_path, _stress_with_a_rare_mistake)
    assert ended.statuses == [1, 1], ended.output
    assert report["passed"] is False
    assert sum(own["elements_that_differ"] for own in report["works"]) == 1


@pytest.mark.interpreted
def test_one_rank_is_simulated_by_the_kernel_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_of_gemv, "DTYPE", torch.float32)  # the interpreter has no product of bf16
    simulated_ranks.main(["--cells", "tiny", "--output", str(tmp_path / "results.json"), "--commit", "abc"])
    report = json.loads((tmp_path / "results.json").read_text())
    assert [cell["name"] for cell in report["cells"]] == [cell.name for cell in tiny_cells() if not cell.is_large]
    for cell in report["cells"]:
        assert cell["one_rank_us"] > 0
        assert cell["floor_us"] > 0


def _take_nothing(workspace: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), len(weight))


@pytest.mark.interpreted
def test_wrong_results_of_simulated_ranks_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_of_gemv, "DTYPE", torch.float32)
    monkeypatch.setattr(simulated_ranks, "multiply", _take_nothing)
    with pytest.raises(RuntimeError, match="relative error"):
        simulated_ranks.main(["--cells", "tiny", "--output", str(tmp_path / "results.json")])
