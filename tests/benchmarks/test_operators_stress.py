"""Stress tests of the operators on the CPU: bits after random delays, ranks that are taken for hosts, a rank that is killed.

The fused lookup needs Triton's interpreter, so ranks of its test are processes of torchrun.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.common.environment import ROOT
from benchmarks.common.harness import open_world
from benchmarks.operators import all_gather_gemm, killed_rank
from benchmarks.operators.all_gather_gemm import PAIRS
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace
from dlrm_fused.ops.all_gather_gemm.op import NAMES
from dlrm_fused.ops.schedules import Pair
from tests.benchmarks.test_operators import CALLED, change_results
from tests.distributed.launch import Ended, run_program

ON_THE_CPU = ("all_gather_gemm", "expert_layer", "gemm_all_to_all", "gemv_all_reduce")
QUICK = {("gemv_all_reduce", "one host"), ("expert_layer", "two hosts")}
TWO_BY_TWO = ("--ranks-per-host", "2")


def stress(operator: str, arguments: list[str]) -> None:
    sys.exit(main(["stress", operator, "--tiny", "--output", "stress.json", *arguments]))


def run(
    folder: Path, ranks: int, operator: str, *arguments: str, program: Callable[[str, list[str]], None] = stress
) -> tuple[Ended, dict[str, Any]]:
    ended = run_program(ranks, folder, 240.0, program, operator, list(arguments))
    report = folder / "stress.json"
    return ended, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.parametrize("operator", ON_THE_CPU)
def test_repeated_works_with_random_delays_have_the_same_bits(operator: str, tmp_path: Path) -> None:
    ended, report = run(tmp_path, 2, operator, "--replays", "100")
    assert ended.statuses == [0, 0], ended.output
    assert report["passed"] is True
    assert report["replays"] == 100
    assert all(work["relative_error"] > 0 and work["elements_that_differ"] == 0 for work in report["works"])
    if operator == "gemv_all_reduce":
        kinds = {(work["with_bias_and_residual"], work["with_norm"]) for work in report["works"]}
        assert kinds == {(False, False), (True, False), (True, True)}
        assert max(work["m"] for work in report["works"]) > 64 > min(work["m"] for work in report["works"])
    if operator == "expert_layer":
        assert {work["layer"]["routing"] for work in report["works"]} == {"balanced", "zipf"}
        assert [5, 0] in [work["tokens"] for work in report["works"]]
    if operator == "all_gather_gemm":
        schedules = {(work["layer"]["pair"], work["schedule"]) for work in report["works"]}
        assert schedules == {(str(pair), name) for pair in PAIRS for name in NAMES[pair]}


def _stress_with_a_rare_mistake(operator: str, arguments: list[str]) -> None:
    """In a late result that is not empty, one element of rank 1 differs in its last bit."""
    calls = itertools.count()

    def with_another_bit(result: torch.Tensor) -> torch.Tensor:
        if not len(result) or next(calls) != 60:
            return result
        result = result.clone()
        result.detach().view(torch.int16)[0, 3] += 1
        return result

    change_results(*CALLED[operator], with_another_bit)
    stress(operator, arguments)


@pytest.mark.parametrize("operator", ON_THE_CPU)
def test_one_element_that_differs_once_is_seen(operator: str, tmp_path: Path) -> None:
    ended, report = run(tmp_path, 2, operator, "--replays", "240", "--seed", "3", program=_stress_with_a_rare_mistake)
    assert ended.statuses == [1, 1], ended.output
    assert report["passed"] is False
    assert sum(work["elements_that_differ"] for work in report["works"]) == 1


# All operators wait by the same protocol: in the quick tests, one of them does inside a host, and one over two.
@pytest.mark.parametrize(
    ("operator", "ranks", "hosts"),
    [
        pytest.param(operator, *world, marks=() if (operator, kind) in QUICK else pytest.mark.slow, id=f"{kind}-{operator}")
        for kind, world in {"one host": (3, ()), "two hosts": (4, TWO_BY_TWO)}.items()
        for operator in ON_THE_CPU
    ],
)
def test_every_other_rank_names_a_rank_that_is_killed(
    operator: str, ranks: int, hosts: tuple[str, ...], tmp_path: Path
) -> None:
    ended, _ = run(tmp_path, ranks, operator, "--kill-rank", "1", "--kill-after", "0.3", *hosts)
    assert ended.statuses == [-signal.SIGKILL if rank == 1 else 0 for rank in range(ranks)], ended.output
    for rank in set(range(ranks)) - {1}:
        seen = json.loads((tmp_path / f"stress.rank{rank}.json").read_text())
        assert killed_rank._is_right(seen, killed=1), seen


@pytest.mark.parametrize("operator", ON_THE_CPU)
def test_two_hosts_of_two_ranks_have_the_same_bits_again_and_again_and_those_of_one_host(operator: str, tmp_path: Path) -> None:
    ended, report = run(tmp_path, 4, operator, "--replays", "40", *TWO_BY_TWO)
    assert ended.statuses == [0] * 4, ended.output
    assert report["passed"] is True
    assert report["hosts"] == [[0, 1], [2, 3]]
    assert all(work["elements_that_differ"] == 0 for work in report["works"])
    same = [work for work in report["works"] if "elements_unlike_one_host" in work]
    close = [work for work in report["works"] if "relative_error_to_one_host" in work]
    assert len(same) + len(close) == len(report["works"])
    assert all(work["elements_unlike_one_host"] == 0 for work in same)
    assert all(work["relative_error_to_one_host"] < 2**-5 for work in close)
    # Some give nothing but sums; the products of GEMM + All-to-All are torch's, which has other bits for other numbers of rows.
    assert bool(same) == (operator == "all_gather_gemm")
    assert close


def _stress_with_other_bits_between_hosts(operator: str, arguments: list[str]) -> None:
    """One element of the products of gathered rows on rank 0 always differs in its last bit."""
    call = all_gather_gemm.call

    def with_mistake(workspace: ShardWorkspace, pair: Pair, *given: Any) -> torch.Tensor:
        out = call(workspace, pair, *given)
        if pair.moves_first and workspace.group.hosts.are_many and workspace.rank == 0:
            out = out.clone()
            out.view(torch.int16)[0, 3] += 1
        return out

    all_gather_gemm.call = with_mistake  # type: ignore[assignment]
    stress(operator, arguments)


def test_bits_that_are_always_others_between_hosts_are_seen(tmp_path: Path) -> None:
    ended, report = run(
        tmp_path, 4, "all_gather_gemm", "--replays", "1", *TWO_BY_TWO, program=_stress_with_other_bits_between_hosts
    )
    assert ended.statuses == [1] * 4, ended.output
    assert report["passed"] is False
    unlike = [work["elements_unlike_one_host"] for work in report["works"] if "elements_unlike_one_host" in work]
    assert unlike
    assert set(unlike) == {1}
    assert all(work["elements_that_differ"] == 0 for work in report["works"])


@pytest.mark.parametrize("ranks_per_host", [0, 4])
def test_ranks_that_are_no_several_hosts_are_refused(ranks_per_host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(key, str(value))
    with pytest.raises(SystemExit, match="the 4 ranks would not be several hosts"), open_world(ranks_per_host):
        pass


# The fused lookup, interpreted.

MODULE = ["-m", "benchmarks", "stress", "embedding_all_to_all", "--tiny"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def interpreted(command: list[object], output: Path) -> tuple[int, dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [*map(str, command), "--output", str(output)]
    ended = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(ended.stdout, ended.stderr[-5_000:])
    return ended.returncode, json.loads(output.read_text())


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [pytest.param(2, (), marks=pytest.mark.slow), pytest.param(4, TWO_BY_TWO, marks=pytest.mark.exhaustive)],
)
def test_lookups_with_random_delays_give_the_same_bits(ranks: int, hosts: tuple[str, ...], tmp_path: Path) -> None:
    status, report = interpreted(
        [*TORCHRUN, f"--nproc-per-node={ranks}", *MODULE, "--replays", 20, *hosts], tmp_path / "out.json"
    )
    assert status == 0
    assert report["passed"] is True
    assert all(0 < work["relative_error"] < 1e-2 and work["elements_that_differ"] == 0 for work in report["works"])
    assert any(len(set(work["batch_sizes"])) > 1 for work in report["works"])
    if hosts:
        assert report["hosts"] == [[0, 1], [2, 3]]
        assert all(work["relative_error_to_one_host"] < 1e-5 for work in report["works"])


# Outputs do not hold their blocks, as with double buffering.
MUTANT = """
import runpy, sys
sys.path.insert(0, "")
from dlrm_fused.symmetric import BlockPool

take = BlockPool.take

def take_and_forget(self, shape, dtype, size=0):
    block = take(self, shape, dtype, size)
    if block is None:
        return None
    return self.memory.local[self.offset_of(block) :][: block.nbytes].view(dtype).view(tuple(shape))

BlockPool.take = take_and_forget
BlockPool.to_hold = lambda self, received: received
runpy.run_module("benchmarks", run_name="__main__")
"""


@pytest.mark.slow
def test_a_mutant_that_overwrites_held_outputs_is_seen(tmp_path: Path) -> None:
    (tmp_path / "mutant.py").write_text(MUTANT)
    program = [tmp_path / "mutant.py", *MODULE[2:]]
    status, report = interpreted([*TORCHRUN, "--nproc-per-node=2", *program, "--replays", 12], tmp_path / "out.json")
    assert status == 1
    assert report["passed"] is False
    assert sum(work["held_elements_that_differ"] for work in report["works"]) > 0


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [pytest.param(3, (), marks=pytest.mark.slow), pytest.param(4, TWO_BY_TWO, marks=pytest.mark.exhaustive)],
)
def test_every_other_rank_names_a_rank_that_is_killed_in_a_lookup(ranks: int, hosts: tuple[str, ...], tmp_path: Path) -> None:
    killed = ["--ranks", ranks, "--kill-rank", 1, "--kill-after", 0.5, *hosts]
    status, verdict = interpreted([sys.executable, *MODULE, *killed], tmp_path / "killed.json")
    assert status == 0
    assert verdict["passed"] is True
    assert verdict["exit_status_of_ranks"] == [-signal.SIGKILL if rank == 1 else 0 for rank in range(ranks)]
    assert [own["rank"] for own in verdict["survivors"]] == [rank for rank in range(ranks) if rank != 1]
    for own in verdict["survivors"]:
        assert own["kind"] == "CommunicationError"
        assert "rank 1 on" in own["error"]
        assert own["seconds_from_kill_to_error"] < 10
        assert own["device_works_on"] is True
