"""Stress tests of ranks that are declared to be two hosts of two: compared with one host, and with a killed rank. On the CPU.

That of embedding + All-to-All, which needs Triton's interpreter, is in test_stress_embedding.py.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import killed_rank
from benchmarks.common.harness import open_world
from dlrm_fused.models import expert_parallel
from dlrm_fused.ops.moe import ExpertWorkspace
from tests.distributed.launch import Ended, run_program

RANKS = 4
TWO_BY_TWO = ("--slices-by", "messages", "--ranks-per-host", "2")
OPERATORS = ("all_gather_gemm", "gemm_all_to_all", "gemv_all_reduce")


def _stress(operator: str, arguments: list[str]) -> None:
    sys.exit(importlib.import_module(f"benchmarks.{operator}.stress").main(arguments))


def _stress_with_other_bits_between_hosts(operator: str, arguments: list[str]) -> None:
    """One element of the outputs of layers on rank 0 always differs in its last bit."""
    compute = expert_parallel.expert_layer_with_slots

    def with_mistake(workspace: ExpertWorkspace, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, slots = compute(workspace, *given)
        if workspace.group.hosts.are_many and workspace.rank == 0:
            out = out.clone()
            out.detach().view(torch.int16)[0, 3] += 1
        return out, slots

    expert_parallel.expert_layer_with_slots = with_mistake  # type: ignore[assignment]
    _stress(operator, arguments)


def _run(folder: Path, operator: str, *arguments: str, main: Any = _stress) -> Ended:
    return run_program(RANKS, folder, 240.0, main, operator, ["--tiny", "--output", "stress.json", *arguments])


def _report(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "stress.json").read_text()))


@pytest.mark.parametrize("operator", OPERATORS)
def test_two_hosts_of_two_ranks_have_the_same_bits_again_and_again_and_those_of_one_host(operator: str, tmp_path: Path) -> None:
    ended = _run(tmp_path, operator, "--replays", "40", *TWO_BY_TWO)
    assert ended.statuses == [0] * RANKS, ended.output
    report = _report(tmp_path)
    assert report["passed"] is True
    assert report["hosts"] == [[0, 1], [2, 3]]
    assert all(work["elements_that_differ"] == 0 for work in report["works"])
    same = [work for work in report["works"] if "elements_unlike_one_host" in work]
    close = [work for work in report["works"] if "relative_error_to_one_host" in work]
    assert len(same) + len(close) == len(report["works"])
    assert all(work["elements_unlike_one_host"] == 0 for work in same)
    assert all(work["relative_error_to_one_host"] < 2**-5 for work in close)
    assert bool(same) == (operator != "gemv_all_reduce")  # which gives nothing but sums
    assert all("elements_unlike_one_host" in work for work in report["works"] if work.get("layer", {}).get("experts"))


def test_bits_that_are_always_others_between_hosts_are_seen(tmp_path: Path) -> None:
    ended = _run(tmp_path, "gemm_all_to_all", "--replays", "1", *TWO_BY_TWO, main=_stress_with_other_bits_between_hosts)
    assert ended.statuses == [1] * RANKS, ended.output
    report = _report(tmp_path)
    assert report["passed"] is False
    assert {work["elements_unlike_one_host"] for work in report["works"] if "layer" in work} == {1}
    assert all(work["elements_that_differ"] == 0 for work in report["works"])


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_killed_rank_is_named_on_its_host_and_on_the_other(operator: str, tmp_path: Path) -> None:
    ended = _run(tmp_path, operator, "--kill-rank", "1", "--kill-after", "0.3", *TWO_BY_TWO)
    assert ended.statuses == [0, -signal.SIGKILL, 0, 0], ended.output
    for rank in (0, 2, 3):
        seen = json.loads((tmp_path / f"stress.rank{rank}.json").read_text())
        assert killed_rank._is_right(seen, killed=1), seen


@pytest.mark.parametrize(
    ("slices_by", "ranks_per_host", "reason"),
    [(None, 2, "--ranks-per-host 2 needs --slices-by"), ("messages", 4, "the 4 ranks would not be several hosts")],
)
def test_ranks_that_are_no_several_hosts_are_refused(
    slices_by: str | None, ranks_per_host: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": RANKS}.items():
        monkeypatch.setenv(key, str(value))
    with pytest.raises(SystemExit, match=reason), open_world(slices_by, ranks_per_host):
        pass
