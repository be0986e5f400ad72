"""The benchmark between hosts: what it makes of runs, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import across_hosts
from benchmarks.training.runs_on_hosts import Mark, sent_per_step
from tests.distributed.network import needs_hosts


def run(comm: str, step_ms: float, sent: list[int], loss: float = 0.5) -> dict[str, Any]:
    cell = {"config": "quickstart", "gbit_per_second": 0.1, "comm": comm}
    return {**cell, "step_ms": step_ms, "sent_bytes_per_step": sent, "losses": [[10, 0.7], [20, loss]]}


def test_a_cell_has_medians_over_rounds_the_floor_of_the_busiest_host_and_ratios() -> None:
    fused = [run("fused", ms, [50_000, 30_000]) for ms in (9.0, 6.0, 5.0)]
    baseline = [run("baseline", ms, [100_000, 60_000]) for ms in (12.0, 8.0, 99.0)]
    (row,) = across_hosts.summarize([*fused, *baseline])
    assert row["rounds"] == 3
    assert (row["fused_step_ms"], row["baseline_step_ms"], row["fused_over_baseline"]) == (6, 12, 0.5)
    assert (row["fused_bytes"], row["baseline_bytes"], row["fused_over_baseline_bytes"]) == (80_000, 160_000, 0.5)
    assert (row["fused_floor_ms"], row["baseline_floor_ms"]) == pytest.approx((4, 8))


def test_a_cell_counts_once_both_settings_have_run() -> None:
    assert across_hosts.summarize([run("fused", 1, [1, 1])]) == []


@pytest.mark.parametrize(("loss", "marked"), [(0.5, False), (0.5 + 4e-6, False), (0.5 + 6e-6, True)])
def test_a_cell_whose_losses_differ_is_marked(loss: float, marked: bool) -> None:
    rows = across_hosts.summarize([run("fused", 1, [1, 1], loss), run("baseline", 1, [1, 1])])
    assert across_hosts.table(rows).splitlines()[2].endswith("!") == marked


def test_bytes_of_a_step_are_those_after_warm_up_and_before_the_end() -> None:
    start_up, final_evaluation = Mark(10, [7_000, 7_000]), Mark(60, [90_000, 90_000])
    late = [Mark(step, [9_000 + 100 * step, 9_000 + 200 * step + 20 * (step % 20)]) for step in (20, 30, 40, 50)]
    assert sent_per_step([start_up, *late, final_evaluation], warmup=20) == [100, 204]


@pytest.mark.exhaustive
@needs_hosts
def test_both_settings_train_the_same_over_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "results.json"
    short = ["--rounds", "1", "--warmup", "2", "--steps", "6", "--interval", "2", "--output", str(output)]
    across_hosts.main(["--configs", "mixed_sharding", "--rates", "1", *short])
    assert "mixed_sharding" in capsys.readouterr().out
    report = json.loads(output.read_text())
    assert [one["comm"] for one in report["runs"]] == ["fused", "baseline"]
    assert report["summary"][0]["loss_difference"] <= 1e-5
    assert all(sent > 1000 for one in report["runs"] for sent in one["sent_bytes_per_step"])
