"""The benchmarks of GEMM + All-to-All and of expert layers: their cells, what they make of times, and runs on the CPU."""

from __future__ import annotations

import itertools
import json
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common import killed_rank
from benchmarks.common.harness import Ceilings, Work
from benchmarks.gemm_all_to_all import benchmark as gemm_all_to_all
from benchmarks.gemm_all_to_all import products as gemm_products
from benchmarks.gemm_all_to_all import stress as stress_gemm
from benchmarks.gemm_all_to_all import tune as tune_gemm
from benchmarks.gemm_all_to_all.cells import (
    DTYPE,
    Layer,
    Product,
    few_tiles,
    full_layers,
    full_products,
    tiny_layers,
    tiny_products,
)
from benchmarks.gemm_all_to_all.report import REPORT
from dlrm_fused.models import expert_parallel
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles
from tests.distributed.launch import Ended, run_program

MEBI = 1 << 20


def test_products_are_those_of_common_experts() -> None:
    cells = full_products()
    assert len({cell.name for cell in cells}) == len(cells) >= 16
    assert {min(cell.m for cell in cells), max(cell.m for cell in cells)} == {1024, 32768}
    for sizes in ([cell.n for cell in cells], [cell.k for cell in cells]):
        assert (min(sizes), max(sizes)) == (1024, 14336)
    assert {Product(8192, 4096, 4096), Product(16384, 7168, 2048), Product(2048, 4096, 1024)} <= set(cells)


def test_layers_have_all_numbers_of_experts_balanced_and_skewed() -> None:
    cells = full_layers()
    assert len({cell.name for cell in cells}) == len(cells) >= 12
    assert {(cell.experts, cell.top_k) for cell in cells} == set(itertools.product((8, 32, 128), (2, 8)))
    assert {cell.routing for cell in cells} == {"balanced", "zipf"}
    for sizes in ([cell.width for cell in cells], [cell.hidden for cell in cells]):
        assert (min(sizes), max(sizes)) == (1024, 4096)
    assert {min(cell.tokens for cell in cells), max(cell.tokens for cell in cells)} == {2048, 16384}


def test_work_of_a_product_and_its_floor() -> None:
    work = Product(1024, 2048, 512).work(ranks=4)
    assert work == Work(flops=2 * 1024 * MEBI, memory_bytes=2 * 3.5 * MEBI, link_bytes=2 * 2 * MEBI * 3 / 4)
    slow_links = Ceilings(copy=1000.0, peer_stores=1.0, peer_copies=2.0)
    assert work.least_microseconds(slow_links, teraflops=1000.0) == pytest.approx(3 * MEBI / 2 / 1e3)
    assert work.least_microseconds(slow_links, teraflops=0.1) == pytest.approx(2 * 1024 * MEBI / 0.1 / 1e6)


def test_work_of_a_layer() -> None:
    layer = Layer(experts=8, top_k=2, width=16, hidden=32, tokens=10, routing="balanced")
    forward = layer.forward_work(received=7, sent=12, away=4, ranks=4)
    weights = 2 * 2 * 16 * 32
    assert forward == Work(2 * 2 * 7 * 16 * 32, 2 * (weights + 2 * 10 * 16), 2 * (12 + 4) * 16)
    backward = layer.backward_work(received=7, sent=12, away=4, ranks=4)
    assert backward == Work(2 * forward.flops, forward.memory_bytes + 2 * weights, forward.link_bytes)


@pytest.mark.parametrize(("routing", "least", "most"), [("balanced", 1.0, 1.4), ("zipf", 1.8, 4.0)])
def test_the_most_popular_expert(routing: str, least: float, most: float) -> None:
    """How often it is wanted, over the mean."""
    layer = Layer(8, 2, 64, 64, 5000, routing)
    logits = layer.draw_tokens(0, 1, torch.device("cpu")).float() @ layer.draw_router(torch.device("cpu")).float().T
    slots = torch.bincount(logits.topk(2).indices.flatten(), minlength=8).double()
    assert least <= slots.max() / slots.mean() <= most


def test_operands_that_take_turns_are_three_times_the_cache_or_eight() -> None:
    for cell in full_products():
        assert 1 <= cell.operands <= 8
        assert cell.operands == 8 or cell.operands * DTYPE.itemsize * cell.k * (cell.m + cell.n) >= 180e6


def _result(name: str, stage: str, ratio: float, *, passed: bool = True) -> dict[str, Any]:
    result = {
        "name": name,
        "stage": stage,
        "passed": passed,
        "errors": {"fused": 0.5},
        "us": {"fused": 10.0 * ratio, "kernel": 10.0 * ratio, "nccl": 10.0, "gemm": 3.0, "baseline": 10.0},
        "ratio": ratio,
        "floor_us": 2.0,
        "over_floor": 5.0 * ratio,
    }
    return {**result, "overlap": 2 * ratio, "schedule": "kernel"} if stage == "op" else result


def test_summary_has_geometric_means_worst_cells_and_failures() -> None:
    cells = [
        _result("a", "op", 0.5),
        _result("b", "op", 2.0),
        _result("c", "op", 0.01, passed=False),
        {"name": "d", "stage": "op", "passed": False, "error": "rank 1: out of memory"},
        _result("e", "gemm", 1.1),
        _result("f", "layer_training", 0.7, passed=False),
    ]
    summary = REPORT.summarize(cells)
    assert list(summary) == ["op", "gemm", "layer_training"]
    assert summary["op"]["ratio"] == pytest.approx(1.0)
    assert summary["op"]["overlap"] == pytest.approx(2.0)
    assert summary["op"]["failed"] == ["c", "d"]
    assert summary["op"]["slower"] == 1
    assert summary["op"]["worst"][0] == {"name": "b", "ratio": 2.0}
    assert summary["layer_training"]["ratio"] is None
    text = REPORT.table({"cells": cells, "not_run": ["op y"]})
    assert "FAILED rank 1: out of memory" in text
    assert "FAILED {'fused': 0.5}" in text
    assert "geometric means of 1 cells: kernel / cuBLAS 1.100" in text
    assert "not run: op y" in text


def _run(folder: Path, *arguments: str, main: Any = gemm_all_to_all.main) -> dict[str, Any]:
    ended = run_program(2, folder, 240.0, main, ["--output", "results.json", *arguments])
    assert ended.statuses == [0, 0], ended.output
    return dict(json.loads((folder / "results.json").read_text()))


def test_tiny_cells_on_the_cpu_pass_and_are_drawn(tmp_path: Path) -> None:
    report = _run(tmp_path, "--cells", "tiny", "--seconds-per-cell", "0.01", "--commit", "abc")
    products, layers = [cell.name for cell in tiny_products()], [cell.name for cell in tiny_layers()]
    stages = [("op", name) for name in products]
    stages += [(stage, name) for name in layers for stage in ("layer_forward", "layer_training")]
    assert [(cell["stage"], cell["name"]) for cell in report["cells"]] == stages
    for cell in report["cells"]:
        assert cell["passed"]
        assert cell["us"]["fused"] > 0
        assert cell["over_floor"] > 1
        assert len(cell["by_rank_us"]["fused"]) == 2
        assert max(cell["errors"].values()) > 0
    product, training = report["cells"][0], report["cells"][-1]
    assert product["ratio"] == pytest.approx(product["us"]["fused"] / product["us"]["nccl"])
    assert product["overlap"] == pytest.approx(product["us"]["fused"] / max(product["us"]["gemm"], product["link_us"]))
    assert set(training["errors"]) == {"output", *(f"gradient of {name}" for name in ("tokens", "router", "w_in", "w_out"))}
    assert training["rows_received"] >= 20 * 3  # of two ranks, one has at least half
    assert report["commit"] == "abc"
    REPORT.plot(report, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_slices_of_ranks_that_are_hosts_of_their_own_are_measured(tmp_path: Path) -> None:
    report = _run(
        tmp_path,
        "--cells",
        "tiny",
        "--match",
        f"{tiny_products()[0].name}|{tiny_layers()[0].name}",
        "--seconds-per-cell",
        "0.01",
        "--slices-by",
        "messages",
    )
    assert report["cells"]
    assert all(cell["passed"] for cell in report["cells"])


def _main_with_wrong_results(arguments: list[str]) -> None:
    """Rank 1 has one wrong element, of a product and of a layer's output."""
    multiply, compute = gemm_products.gemm_all_to_all, expert_parallel.expert_layer_with_slots

    def with_mistake(result: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            result = result.clone()
            result[2, 3] += 1
        return result

    gemm_products.gemm_all_to_all = lambda *given, **options: with_mistake(multiply(*given, **options))
    expert_parallel.expert_layer_with_slots = lambda *given: (with_mistake((found := compute(*given))[0]), found[1])
    gemm_all_to_all.main(arguments)


def test_wrong_results_fail_their_cells(tmp_path: Path) -> None:
    match = f"{tiny_products()[0].name}|{tiny_layers()[0].name}"
    arguments = ("--cells", "tiny", "--match", match, "--seconds-per-cell", "0.01")
    report = _run(tmp_path, *arguments, main=_main_with_wrong_results)
    assert [cell["stage"] for cell in report["cells"]] == ["op", "layer_forward", "layer_training"]
    for cell in report["cells"]:
        assert not cell["passed"]
        assert cell["errors"]["fused" if cell["stage"] == "op" else "output"] > 0.1
    assert report["cells"][0]["errors"]["nccl"] <= report["tolerances"]["products"]
    assert report["summary"]["op"]["ratio"] is None


def test_what_is_tuned_begins_with_what_is_used_today() -> None:
    for cell in full_products() + few_tiles():
        choices = tune_gemm.candidates(cell, None)
        assert choices[0] == tune_gemm.chosen_tiles(cell)
        assert len(set(choices)) == len(choices) > 40
        assert all(tune_gemm.is_of_use(cell, tiles) for tiles in choices[1:])
        assert tune_gemm.candidates(cell, 5) == choices[:5]


def test_tiles_that_are_no_use() -> None:
    cell, tiles = Product(1024, 1024, 4096), Tiles(64, 128, 128, band=4, warps=4, stages=4, programs=1)
    assert tune_gemm.is_of_use(cell, tiles)
    assert tune_gemm.share_of(cell, tiles) == 64 * 128
    assert tune_gemm.share_of(cell, replace(tiles, splits=4)) == 4 * 64 * 128 / 4
    for change in ({"rows": 256, "columns": 256}, {"stages": 5}, {"band": 16}, {"splits": 8}):
        assert not tune_gemm.is_of_use(cell, replace(tiles, **change)), change
    assert not tune_gemm.is_of_use(Product(4096, 4096, 4096), tiles), "there are enough larger ones"


def test_of_tiles_that_are_as_fast_the_largest_are_printed_as_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large, slow = (Tiles(rows, 128, 64, 8, 4, 3, 1) for rows in (64, 128, 256))
    times = [
        {"us": us, "schedule": schedule, "tiles": asdict(tiles)}
        for us, schedule, tiles in (
            (9.0, "library", slow), (10.0, "kernel", small), (10.05, "kernel", large), (10.5, "kernel", slow)
        )
    ]  # fmt: skip
    cell = {"m": 1, "n": 2, "k": 3, "element_size": 2, "times": times, "library_us": 9.0}
    (tmp_path / "results.json").write_text(json.dumps({"cells": [cell]}))
    tune_gemm.main(["--table", str(tmp_path / "results.json")])
    assert "[1, 2, 3, 2, [128, 128, 64, 8, 4, 3, 1, 1]]," in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("alone", [[], ["--alone"]])
def test_the_fastest_tiles_are_printed_as_rows_of_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], alone: list[str]
) -> None:
    _run(tmp_path, "--cells", "tiny", "--most", "3", *alone, main=tune_gemm.main)
    tune_gemm.main(["--table", str(tmp_path / "results.json")])
    rows = json.loads(f"[{capsys.readouterr().out.rstrip().rstrip(',')}]")
    assert [row[:4] for row in rows] == [[cell.m, cell.n, cell.k, 2] for cell in tiny_products()]
    assert all(Tiles(*fields) for *_, fields in rows)


# The stress test.


def _stress(arguments: list[str]) -> None:
    sys.exit(stress_gemm.main(arguments))


def _stress_with_rare_mistakes(arguments: list[str]) -> None:
    """In the 20th result of each operator that is not empty, one element of rank 1 differs in its last bit."""
    multiply, compute = stress_gemm.gemm_all_to_all, expert_parallel.expert_layer_with_slots
    calls = {"products": itertools.count(), "layers": itertools.count()}

    def with_mistake(kind: str, result: Tensor) -> Tensor:
        if len(result) and next(calls[kind]) == 20 and torch.distributed.get_rank() == 1:
            result = result.clone()
            result.detach().view(torch.int16)[0, 3] += 1
        return result

    stress_gemm.gemm_all_to_all = lambda *given, **options: with_mistake("products", multiply(*given, **options))
    expert_parallel.expert_layer_with_slots = lambda *given: (with_mistake("layers", (found := compute(*given))[0]), found[1])
    _stress(arguments)


def _run_stress(folder: Path, main: Any) -> tuple[Ended, dict[str, Any]]:
    ended = run_program(2, folder, 240.0, main, ["--tiny", "--replays", "120", "--seed", "3", "--output", "stress.json"])
    return ended, json.loads((folder / "stress.json").read_text())


def test_repeated_products_and_layers_with_random_delays_have_the_same_bits(tmp_path: Path) -> None:
    ended, report = _run_stress(tmp_path, _stress)
    assert ended.statuses == [0, 0], ended.output
    assert report["passed"] is True
    assert report["replays"] == 120
    layers = [work for work in report["works"] if "layer" in work]
    assert {work["layer"]["routing"] for work in layers} == {"balanced", "zipf"}
    assert [5, 0] in [work["tokens"] for work in layers]
    assert {work["schedule"] for work in report["works"] if "product" in work} == set(gemm_products.SCHEDULES)
    assert all(work["relative_error"] > 0 and work["elements_that_differ"] == 0 for work in report["works"])


@pytest.mark.slow
def test_one_element_that_differs_once_is_seen(tmp_path: Path) -> None:
    ended, report = _run_stress(tmp_path, _stress_with_rare_mistakes)
    assert ended.statuses == [1, 1], ended.output
    assert report["passed"] is False
    differing = {
        kind: sum(work["elements_that_differ"] for work in report["works"] if kind in work) for kind in ("product", "layer")
    }
    assert differing == {"product": 1, "layer": 1}


def test_every_other_rank_names_a_rank_that_is_killed(tmp_path: Path) -> None:
    arguments = ["--tiny", "--kill-rank", "1", "--kill-after", "0.3", "--output", "killed.json"]
    ended = run_program(3, tmp_path, 240.0, _stress, arguments)
    assert ended.statuses == [0, -signal.SIGKILL, 0], ended.output
    for rank in (0, 2):
        seen = json.loads((tmp_path / f"killed.rank{rank}.json").read_text())
        assert killed_rank._is_right(seen, killed=1), seen
