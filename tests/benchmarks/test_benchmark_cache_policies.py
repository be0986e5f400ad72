"""The benchmark of cache policies: what it says of workloads, which policies it times once, and that it sees other results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cache_policies import benchmark, workloads
from benchmarks.cache_policies.benchmark import candidates
from benchmarks.cache_policies.replay import WINDOW, replay
from benchmarks.cache_policies.report import line, summarize, text
from benchmarks.cache_policies.workloads import Run, Workload, full
from dlrm_fused.ops.common import cache_policy
from dlrm_fused.ops.common.cache_hints import EVICT_LAST, OFF, STATIC, with_hints
from tests.distributed.launch import run_program


def cell(name: str, selected: float, best: float, **others: Any) -> dict[str, Any]:
    """Of a workload whose calls take 10 us by default."""
    of_off = {"selected_over_off": selected, "selected_over_hardware": selected, "best_over_off": best}
    ratios = {"selected_over_best": selected / best, **of_off}
    hints = {"off": {"rows": "off"}, "selected": {"rows": "evict_last"}, "best": "loads .cg", "us": {"off": 10.0}}
    return {"name": name, "passed": True, "differ": [], **ratios, **hints, **others}


def test_the_summary_has_means_and_names_what_is_beyond_the_bounds() -> None:
    cells = [
        cell("a", 0.9, 0.9, off_over_off=0.99),
        cell("b", 1.05, 1.0, off_over_off=1.003),
        cell("c", 0.1, 0.1, passed=False, differ=["loads .cg"]),
        {"name": "d", "passed": False, "error": "rank 0: out of memory"},
    ]
    summary = summarize(cells)
    assert summary["failed"] == ["c", "d"]
    assert summary["selected_over_off"]["mean"] == pytest.approx((0.9 * 1.05) ** 0.5)
    assert summary["selected_over_best"]["most"] == pytest.approx(1.05)
    assert summary["off_apart"] == pytest.approx({"median": 0.0065, "most": 0.01})
    beyond = ("beyond 2% of the best", "slower than off by 1%", "slower than hardware by 1%")
    assert [summary[name] for name in beyond] == [["b"]] * 3
    printed = text({"summary": summary})
    assert "4 workloads, 2 failed: c, d" in printed
    assert "off / off, apart from 1: median 0.0065, most 0.0100" in printed
    assert "slower than off by 1%: b" in printed


def test_a_line_says_what_was_selected_and_what_failed() -> None:
    assert "best static loads .cg 0.900, selected 0.950 (rows evict_last), selected / best 1.056" in line(cell("a", 0.95, 0.9))
    measured = cell("a", 1.0, 1.0, off_over_off=1.002, final_spread={"off": 0.01}, window={"over_off": 0.98})
    assert line(measured).endswith("off / off 1.002, spread 0.010, L2 window 0.980")
    assert line(cell("a", 1.0, 1.0, passed=False, differ=["loads .cg"])).endswith("FAILED, other results than off: loads .cg")
    assert line({"name": "d", "passed": False, "error": "out of memory"}) == "d: FAILED out of memory"


def test_policies_that_are_the_same_for_a_workload_are_timed_once() -> None:
    workload = Workload("sums", ("received", "results"), lambda world: Run([]))
    found = candidates(workload, OFF)
    names = {own.name: own.names for own in found.values()}
    assert names["off"] == ["off", "no hints", "selected"]
    assert names["loads evict_first"] == ["loads evict_first", "received evict_first"]
    assert {"received evict_last", "stores .wt"} <= names.keys()
    assert set(STATIC) | {"selected"} <= {name for own in found.values() for name in own.names}
    # What the selector gives, and no static policy, is one of its own.
    with_own = candidates(workload, with_hints(received=EVICT_LAST, results=EVICT_LAST))
    assert "selected" in {own.name for own in with_own.values()}


def lookup_of_uniform_rows(**us: float) -> dict[str, Any]:
    """As recorded, when the selector gave no hints."""
    hints = dict.fromkeys(("rows", "indices", "sent"), "off")
    streams = {"rows": {"distinct_bytes": 250e6, "passes": 1.1}, "sent": {"distinct_bytes": 17e6, "passes": 1.0}}
    record = {"name": "lookup", "passed": True, "differ": [], "streams": streams, "off": hints, "selected": hints}
    return {**record, "window": {"off_us": [100.0, 160.0], "us": 95.0, "over_off": 0.95}, "us": {"off": 100.0, **us}}


def test_a_recorded_run_tells_what_the_selector_would_cost_now() -> None:
    now = replay(lookup_of_uniform_rows(**{"loads evict_first": 96.0, "rows evict_last": 90.0}), 52.4e6)
    assert now["selected"] == {"rows": "evict_first", "indices": "evict_first", "sent": "off"}
    assert now["best"] == WINDOW
    assert (now["selected_over_off"], now["best_over_off"]) == (pytest.approx(0.96), pytest.approx(0.95))
    assert line(replay(lookup_of_uniform_rows(), 52.4e6)) == "lookup: FAILED not timed: rows evict_first, indices evict_first"


def test_a_replayed_update_is_compared_with_the_choice_of_the_hardware() -> None:
    hints = {"old_rows": "evict_first", "gradients": "off", "new_rows": "evict_first"}
    streams = {"old_rows": {"distinct_bytes": 100e6, "passes": 1.0}, "gradients": {"distinct_bytes": 60e6, "passes": 1.0}}
    record = {"name": "update", "passed": True, "differ": [], "streams": streams, "off": hints, "selected": hints, "window": {}}
    now = replay({**record, "us": {"off": 100.0, "no hints": 105.0}}, 52.4e6)
    assert (now["selected_over_off"], now["selected_over_hardware"]) == (1.0, pytest.approx(1 / 1.05))


def test_a_run_that_is_cut_short_has_some_workloads_of_each_kind() -> None:
    first = [workload.name for workload in full()[:10]]
    for kind in ("lookup 1", "update", "lookup and update", "GEMM", "GEMV", "gather and put", "sum"):
        assert any(name.startswith(kind) for name in first), kind


def test_there_are_workloads_of_every_kernel_that_takes_hints() -> None:
    assert len(full()) >= 17
    assert len({workload.name for workload in full()}) == len(full())
    streams = {stream for workload in full() for stream in workload.streams}
    assert streams == set(OFF.hints())


def _run(folder: Path, *arguments: str, main: Any = benchmark.main) -> dict[str, Any]:
    given = ["--output", "results.json", "--workloads", "tiny", "--seconds-per-workload", "0.01", *arguments]
    ended = run_program(1, folder, 240.0, main, given)
    assert ended.statuses == [0], ended.output
    return dict(json.loads((folder / "results.json").read_text()))


@pytest.mark.interpreted
def test_tiny_workloads_on_the_cpu_pass(tmp_path: Path) -> None:
    report = _run(tmp_path, "--match", "sum of|sent|and update", "--commit", "abc")
    assert [cell["name"] for cell in report["cells"]] == [
        "lookup and update 1 x 50 rows dim 8 float32, 6 bags of 2, zipf 1.05",
        "GEMM 32 x 32 x 32, sent",
        "sum of 2 parts 6 x 16 float32",
        "sum of 2 experts 4 x 16",
    ]
    for own in report["cells"]:
        assert own["passed"]
        assert own["best"] in own["us"]
        assert own["selected_over_best"] == pytest.approx(own["selected_over_off"] / own["best_over_off"])
        timed = {name for first in own["us"] for name in (first, *own["same_kernels"].get(first, ()))}
        assert timed >= {*STATIC, "selected"}
        assert own["off_over_off"] > 0
        assert set(own["streams"]) >= set(own["selected"])
    assert report["commit"] == "abc"
    assert report["summary"]["failed"] == []


def _main_with_other_results(arguments: list[str]) -> None:
    """One policy changes one element."""
    right = workloads.add_up

    def wrong(sources: Tensor, output: Tensor) -> None:
        right(sources, output)
        if cache_policy._used is STATIC["stores .wt"]:
            output.view(torch.int32)[1, 2] += 1

    workloads.add_up = wrong
    benchmark.main(arguments)


@pytest.mark.interpreted
def test_a_policy_with_other_results_fails_its_workload(tmp_path: Path) -> None:
    report = _run(tmp_path, "--match", "sum of 2 parts", main=_main_with_other_results)
    (own,) = report["cells"]
    assert not own["passed"]
    assert own["differ"] == ["stores .wt"]
    assert report["summary"]["failed"] == [own["name"]]
