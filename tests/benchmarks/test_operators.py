"""The operators' benchmarks: their cells, what a run on the CPU reports, and how recorded results are shown."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.__main__ import main
from benchmarks.common import harness
from benchmarks.common.environment import ROOT
from benchmarks.common.harness import Ceilings, Work
from benchmarks.operators import OPERATORS, load
from benchmarks.operators.all_gather_gemm import Layer as ShardedLayer
from benchmarks.operators.case import DTYPE
from benchmarks.operators.expert_layer import Layer
from benchmarks.operators.gemm_all_to_all import Product
from benchmarks.operators.gemv_all_reduce import Cell
from benchmarks.operators.products import ROTATED_BYTES
from benchmarks.operators.report import STAGES, figure, summarize, table
from dlrm_fused.ops.common.recorded import recorded_schedules
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.rule import SPACE
from dlrm_fused.symmetric.launches import Launches
from tests.distributed.launch import run_program, run_ranks

RESULTS = ROOT / "benchmarks/results"
MEBI = 1 << 20
GATHER, SCATTER = Pair.all_gather_gemm, Pair.gemm_reduce_scatter
# A mistake is put into these: a module, and the operator as it calls it.
CALLED = {
    "embedding_all_to_all": ("benchmarks.operators.embedding_all_to_all", "pooled_all_to_all"),
    "sequence_all_to_all": ("dlrm_fused.sharding.sequence_sharder", "sequence_all_to_all"),
    "gemv_all_reduce": ("benchmarks.operators.gemv_all_reduce", "gemv_all_reduce"),
    "gemm_all_to_all": ("benchmarks.operators.gemm_all_to_all", "gemm_all_to_all"),
    "expert_layer": ("dlrm_fused.models.expert_parallel", "expert_layer_with_slots"),
    "all_gather_gemm": ("benchmarks.operators.all_gather_gemm", "call"),
    "hstu_attention": ("benchmarks.operators.hstu_attention", "hstu_attention"),
}


def run(folder: Path, operator: str, *arguments: str, program: Callable[..., Any] = main) -> dict[str, Any]:
    given = ["run", operator, "--output", "results.json", "--cells", "tiny", "--seconds-per-cell", "0.01", *arguments]
    ended = run_program(2, folder, 240.0, program, given)
    assert ended.statuses == [0, 0], ended.output
    return dict(json.loads((folder / "results.json").read_text()))


# Cells.


@pytest.mark.parametrize(
    ("operator", "cells"),
    [
        ("embedding_all_to_all", 64),
        ("gemv_all_reduce", 66),
        ("gemm_all_to_all", 20),
        ("expert_layer", 23),
        ("all_gather_gemm", 64),
        ("hstu_attention", 24),
    ],
)
def test_all_cells_have_names_that_tell_them_apart(operator: str, cells: int) -> None:
    declared = load(operator)
    entries = [declared.entry(cell, declared.stages(cell)[0]) for cell in declared.sets["all"]()]
    assert len({(entry["name"], entry[declared.key]) for entry in entries}) == len(entries) == cells
    assert {stage for cell in declared.sets["all"]() for stage in declared.stages(cell)} <= set(STAGES)


def test_operands_that_take_turns_are_three_times_the_cache_or_eight() -> None:
    for cell in [*load("gemm_all_to_all").sets["all"](), *load("all_gather_gemm").sets["all"]()]:
        assert 1 <= cell.operands <= 8
        assert cell.operands == 8 or cell.operands * DTYPE.itemsize * cell.k * (cell.m + cell.n) >= ROTATED_BYTES
    for cell in load("gemv_all_reduce").sets["small"]():
        assert cell.operands_of_rank(4) >= 2
        assert cell.operands_of_rank(4) * cell.n * (cell.k // 4) * DTYPE.itemsize >= ROTATED_BYTES


def test_rows_of_sharded_layers_are_of_whole_tiles_for_eight_ranks() -> None:
    cells = load("all_gather_gemm").sets["all"]()
    assert all(cell.n * DTYPE.itemsize % 16 == cell.k * DTYPE.itemsize % 16 == cell.m % (8 * 128) == 0 for cell in cells)


def test_least_work_and_floor() -> None:
    product = Product(1024, 2048, 512).work(ranks=4)
    assert product == Work(flops=2 * 1024 * MEBI, memory_bytes=2 * 3.5 * MEBI, link_bytes=2 * 2 * MEBI * 3 / 4)
    slow_links = Ceilings(copy=1000.0, peer_stores=1.0, peer_copies=2.0)
    assert product.least_microseconds(slow_links, teraflops=1000.0) == pytest.approx(3 * MEBI / 2 / 1e3)
    assert product.least_microseconds(slow_links, teraflops=0.1) == pytest.approx(2 * 1024 * MEBI / 0.1 / 1e6)
    gemv = Cell(16, 8192, 28672).work(ranks=4)
    assert gemv == Work(0, 2 * (8192 * 7168 + 16 * 7168 + 16 * 8192), 2 * 16 * 8192 * 2 * 3 / 4)
    forward, backward = Layer(8, 2, 16, 32, 10, "balanced").phases(received=7, sent=12, away=4, ranks=4)
    weights = 2 * 2 * 16 * 32
    assert forward == Work(2 * 2 * 7 * 16 * 32, 2 * (weights + 2 * 10 * 16), 2 * (12 + 4) * 16)
    assert backward == Work(2 * forward.flops, forward.memory_bytes + 2 * weights, forward.link_bytes)
    # Bytes that travel count once over the links, and twice in memory: where they are read, and where they are written.
    moved = 2 * MEBI // 2 + 2 * MEBI + 2 * (256 * 512 + 2 * 256 * 512 * 3)
    for layer in (ShardedLayer(1024, 1024, 512, GATHER), ShardedLayer(1024, 512, 1024, SCATTER)):
        assert layer.work(ranks=4) == Work(2 * 1024 * 1024 * 512, moved, 2 * 256 * 512 * 3)


@pytest.mark.parametrize(("routing", "least", "most"), [("balanced", 1.0, 1.4), ("zipf", 1.8, 4.0)])
def test_the_most_popular_expert(routing: str, least: float, most: float) -> None:
    """It gets as many times the tokens of the mean expert as its routing says."""
    layer = Layer(8, 2, 64, 64, 5000, routing)
    logits = layer.draw_tokens(0, 1, torch.device("cpu")).float() @ layer.draw_router(torch.device("cpu")).float().T
    slots = torch.bincount(logits.topk(2).indices.flatten(), minlength=8).double()
    assert least <= slots.max() / slots.mean() <= most


# Runs.


@pytest.mark.parametrize("operator", OPERATORS)
def test_tiny_cells_on_the_cpu_pass_and_are_drawn(operator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tmp_path, operator, "--commit", "abc")
    declared = load(operator)
    names = [cell.name for cell in declared.sets["tiny"]()]
    stages = [(stage, cell.name) for cell in declared.sets["tiny"]() for stage in declared.stages(cell)]
    assert [(cell[declared.key], cell["name"]) for cell in report["cells"]] == stages
    for cell in report["cells"]:
        us = cell["us"]
        assert cell["passed"]
        assert max(cell["errors"].values()) >= 0
        fused = us[cell.get("best", "fused")]
        assert cell["ratio"] == pytest.approx(fused / us["nccl" if "nccl" in us else "baseline"])
        assert cell["over_floor"] == pytest.approx(fused / cell["floor_us"])
        assert cell["over_floor"] > 1
        assert len(next(iter(cell["by_rank_us"].values()))) == 2
        if cell["overlap"] is not None:
            alone = us["gemm" if "gemm" in us else "lookup"]
            assert cell["overlap"] == pytest.approx(fused / max(alone, cell["link_us"]))
    assert (report["commit"], report["not_run"]) == ("abc", [])
    assert main(["report", str(tmp_path / "results.json"), "--plot", str(tmp_path / "plot.png")]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in names)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["embedding_all_to_all", "gemv_all_reduce", "gemm_all_to_all", "expert_layer"])
def test_slices_of_ranks_that_are_hosts_of_their_own_are_measured(operator: str, tmp_path: Path) -> None:
    report = run(tmp_path, operator, "--ranks-per-host", "1")
    assert report["cells"]
    assert all(cell["passed"] and cell["hosts"] == [[0], [1]] for cell in report["cells"])


def change_results(module: str, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the operator's results, of several the first, be changed on rank 1."""
    holder = importlib.import_module(module)
    right = getattr(holder, name)

    def wrong(*given: Any, **options: Any) -> Any:
        result = right(*given, **options)
        if torch.distributed.get_rank() != 1:
            return result
        return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

    setattr(holder, name, wrong)


def _with_one_wrong_element(result: torch.Tensor) -> torch.Tensor:
    result = result.clone()
    result[0, 3] += 1
    return result


def _main_with_wrong_results(arguments: list[str]) -> None:
    change_results(*CALLED[arguments[1]], _with_one_wrong_element)
    main(arguments)


@pytest.mark.parametrize("operator", OPERATORS)
def test_wrong_results_fail_their_cells(operator: str, tmp_path: Path) -> None:
    report = run(tmp_path, operator, program=_main_with_wrong_results)
    for cell in report["cells"]:
        assert not cell["passed"]
        assert max(cell["errors"].values()) > 0.1
        assert cell["errors"].get("nccl", 0) < 0.1
    assert all(figures["ratio"] is None and figures["failed"] for figures in report["summary"].values())


def _with_another_last_bit(result: torch.Tensor) -> torch.Tensor:
    result.view(torch.int16)[0, 0] += 1
    return result


def _main_with_other_bits_on_a_rank(arguments: list[str]) -> None:
    change_results(*CALLED["gemv_all_reduce"], _with_another_last_bit)
    main(arguments)


def test_results_that_differ_between_ranks_by_less_than_the_tolerance_fail_their_cells(tmp_path: Path) -> None:
    report = run(tmp_path, "gemv_all_reduce", "--match", "m1$", program=_main_with_other_bits_on_a_rank)
    (cell,) = report["cells"]
    assert cell["errors"]["fused"] < 2**-6
    assert cell["same_bits_on_all_ranks"] == {"fused": False, "nccl": True}
    assert not cell["passed"]
    assert "not the same bits on all ranks" in table(report)


def test_contestants_that_are_asked_for_are_timed_alone(tmp_path: Path) -> None:
    report = run(tmp_path, "all_gather_gemm", "--contestants", "chunks", "arriving")
    timed = {cell["pair"]: list(cell["us"]) for cell in report["cells"]}
    assert timed == {GATHER: ["nccl", "chunks", "arriving", "gemm"], SCATTER: ["nccl", "chunks", "gemm"]}


def test_cells_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    report = run(tmp_path, "gemv_all_reduce", "--match", "m[13]$", "--seconds-budget", "0")
    assert report["cells"] == []
    assert report["not_run"] == ["32x64 m1", "32x64 m3"]


def _turns() -> list[str]:
    called: list[str] = []
    with harness.open_world() as world:
        calls = {name: partial(called.append, name) for name in "abc"}
        timings = harness.time_interleaved(world, calls, seconds=0.0, rounds=(3, 3))
    assert all(timing.microseconds >= timing.host > 0 for timing in timings.values())
    return called


def test_contestants_take_turns_each_first_once() -> None:
    (called,) = run_ranks(1, _turns)
    by_turn = [called[i] for i in range(len(called)) if i == 0 or called[i] != called[i - 1]]
    assert by_turn[-9:] == list("abcbcacab")


# Reports.


def test_a_report_has_means_worst_cells_and_failures() -> None:
    def record(name: str, ratio: float, m: int = 1, **others: Any) -> dict[str, Any]:
        us = {"fused": 10 * ratio, "nccl": 10.0}
        figures = {"ratio": ratio, "over_floor": 5 * ratio, "overlap": 2 * ratio, "floor_us": 2.0}
        return {"name": name, "size": "small", "m": m, "passed": True, "errors": {"fused": 0.5}, "us": us, **figures, **others}

    cells = [
        record("a", 0.25),
        record("b", 1.0, m=16, ratio_to_symmetric=0.5),
        record("c", 2.0, m=64),
        record("d", 0.01, passed=False),
        {"name": "e", "size": "small", "m": 2, "passed": False, "error": "rank 1: out of memory"},
    ]
    small = summarize(cells)["small"]
    assert small["ratio_of_few_rows"] == pytest.approx(0.5)
    assert small["ratio"] == pytest.approx(0.5 ** (1 / 3))
    assert small["ratio_to_symmetric"] == pytest.approx(0.5)
    assert small["overlap"] == pytest.approx(2 * 0.5 ** (1 / 3))
    assert small["failed"] == ["d", "e"]
    assert small["worst"][0] == {"name": "c", "ratio": 2.0}
    assert (small["cells"], small["slower"]) == (5, 2)
    text = table({"cells": cells, "not_run": ["y"]})
    assert "FAILED rank 1: out of memory" in text
    assert "FAILED {'fused': 0.5}" in text
    assert "geometric means of 3 cells: ratio 0.794" in text
    assert "not run: y" in text


@pytest.mark.parametrize(
    "path",
    [
        *("embedding_all_to_all", "gemv_all_reduce_4_h200", "gemv_all_reduce_2_h200", "gemm_all_reduce_2_h200"),
        *("gemm_all_to_all_4_h200", "schedules/all_gather_gemm_2_h200", "schedules/gemm_reduce_scatter_2_h200"),
    ],
)
def test_recorded_results_are_shown_with_the_means_that_were_recorded(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = RESULTS / f"{path}.json"
    recorded = json.loads(file.read_text())
    assert main(["report", str(file), "--plot", str(tmp_path / "plot.png")]) == 0
    printed = capsys.readouterr().out
    for stage, figures in summarize(recorded["cells"]).items():
        before = recorded["summary"][stage]
        for today, then in {"ratio": "ratio", "overlap": "overlap", "ratio_of_few_rows": "ratio_of_few_rows"}.items():
            if today in figures and then in before and figures[today] is not None:
                assert figures[today] == pytest.approx(before[then])
        assert f"ratio {figure(before['ratio'])}" in printed
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_what_is_no_result_of_an_operator_is_refused() -> None:
    with pytest.raises(SystemExit, match="no cells of an operator's benchmark"):
        main(["report", str(RESULTS / "calibration_cpu.json")])


@pytest.mark.parametrize("pair", [GATHER, SCATTER])
def test_the_operators_table_has_the_fastest_schedules_of_the_raw_results(pair: Pair) -> None:
    measured = recorded_schedules("NVIDIA H200", pair, 2, torch.bfloat16)
    cells = json.loads((RESULTS / f"schedules/{pair}_2_h200.json").read_text())["cells"]
    assert len(measured) >= 29
    assert set(measured.values()) <= set(SPACE[pair])
    for cell in cells:
        chosen = measured.get((cell["m"], cell["n"], cell["k"]))
        own = {name: us for name, us in cell["us"].items() if name in SPACE[pair]}
        assert chosen in (None, min(own, key=own.__getitem__))


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


def test_nothing_is_launched_while_kernels_are_collected() -> None:
    """A remembered launch would compute on memory that earlier kernels, which are not launched now, have not written."""
    run: list[int] = []
    compiled = {(1,): lambda number: run.append(number), (1, 1, 1): lambda number: run.append(number)}
    kernel = MagicMock(arg_names=["number"])
    kernel.__getitem__.return_value = lambda number: compiled
    launches = Launches()
    for number in range(2):  # by Triton, and then what Triton has compiled
        launches("layout", kernel, (1,), number)
    assert run == [1]
    harness._kernels_of([lambda: launches("layout", kernel, (1,), 2)])
    assert run == [1]


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
