"""The stress test of embedding + All-to-All agrees with itself, sees a mutant, and a killed rank is named. On the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = ["-m", "benchmarks.embedding_all_to_all.stress"]
ENVIRONMENT = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TWO_BY_TWO = ["--slices-by", "messages", "--ranks-per-host", 2]

# Outputs do not hold their blocks, as with double buffering.
MUTANT = """
import runpy, sys
sys.path.insert(0, "")
from dlrm_fused.symmetric import BlockPool

take = BlockPool.take

def take_and_forget(self, shape, dtype):
    block = take(self, shape, dtype)
    if block is None:
        return None
    return self.memory.local[self.offset_of(block) :][: block.nbytes].view(dtype).view(tuple(shape))

BlockPool.take = take_and_forget
BlockPool.to_hold = lambda self, received: received
runpy.run_module("benchmarks.embedding_all_to_all.stress", run_name="__main__")
"""


def run(command: list[object], output: Path) -> tuple[subprocess.CompletedProcess[str], dict]:
    ended = subprocess.run(
        [*map(str, command), "--tiny", "--output", str(output)], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    print(ended.stdout, ended.stderr[-5_000:])
    return ended, json.loads(output.read_text())


@pytest.mark.slow
def test_epochs_with_random_delays_give_the_same_bits(tmp_path: Path) -> None:
    ended, report = run([*TORCHRUN, "--nproc-per-node=2", *MODULE, "--epochs", 20], tmp_path / "stress.json")
    assert ended.returncode == 0
    assert report["passed"] is True
    assert report["epochs_completed_by_the_channels"] == [23, 23]  # with the first time of each batch
    assert set(report["elements_that_differ"].values()) == {0}
    assert any(len(set(sizes)) > 1 for sizes in report["batch_sizes"])
    assert 0 < report["largest_relative_error_against_plain_torch"] < 1e-4


@pytest.mark.exhaustive
def test_two_hosts_of_two_ranks_give_the_bits_of_one_host_but_in_sums(tmp_path: Path) -> None:
    ended, report = run([*TORCHRUN, "--nproc-per-node=4", *MODULE, "--epochs", 10, *TWO_BY_TWO], tmp_path / "stress.json")
    assert ended.returncode == 0
    assert report["passed"] is True
    assert report["hosts"] == [[0, 1], [2, 3]]
    assert report["epochs_completed_by_the_channels"] == [13] * 4
    assert report["elements_unlike_one_host"] == {"output": 0, "tables": 0, "weight_gradients": 0}
    assert report["relative_error_to_one_host"] < 1e-5
    assert set(report["elements_that_differ"].values()) == {0}


@pytest.mark.slow
def test_a_mutant_that_overwrites_held_outputs_is_seen(tmp_path: Path) -> None:
    (tmp_path / "mutant.py").write_text(MUTANT)
    ended, report = run([*TORCHRUN, "--nproc-per-node=2", tmp_path / "mutant.py", "--epochs", 8], tmp_path / "mutant.json")
    assert ended.returncode == 1
    assert report["passed"] is False
    assert report["elements_that_differ"]["output_held"] > 0
    assert report["epochs_with_a_mismatch"]


@pytest.mark.parametrize(
    ("ranks", "hosts"),
    [pytest.param(3, [], marks=pytest.mark.slow), pytest.param(4, TWO_BY_TWO, marks=pytest.mark.exhaustive)],
)
def test_every_other_rank_names_a_rank_that_is_killed(ranks: int, hosts: list[object], tmp_path: Path) -> None:
    ended, verdict = run(
        [sys.executable, *MODULE, "--ranks", ranks, "--kill-rank", 1, "--kill-after", 0.5, *hosts], tmp_path / "killed.json"
    )
    survivors = [rank for rank in range(ranks) if rank != 1]
    assert ended.returncode == 0
    assert verdict["passed"] is True
    assert verdict["exit_status_of_ranks"] == [-signal.SIGKILL if rank == 1 else 0 for rank in range(ranks)]
    assert [own["rank"] for own in verdict["survivors"]] == survivors
    for own in verdict["survivors"]:
        assert own["kind"] == "CommunicationError"
        assert "rank 1 on" in own["error"]
        assert own["seconds_from_kill_to_error"] < 10
        assert own["device_works_on"] is True
