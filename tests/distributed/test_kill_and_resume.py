"""Runs that are killed and started again by the same command end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dlrm_fused.training.checkpoint import CheckpointFolder
from tests.distributed.killing import (
    DEADLINE_SECONDS,
    Attempt,
    assert_checkpoints_are_complete,
    assert_same_outcome,
    kill_at_step,
    kill_in_checkpoint,
    last_step,
    unfinished,
    wait_for,
)
from tests.distributed.launch import SMALL, metrics, small_config, start_training, summary, train

ROOT = Path(__file__).parents[2]
STEPS = 60
SETTINGS = (f"training.max_steps={STEPS}", "checkpoint.every_steps=5", "evaluation.every_steps=13")


class Torchrun:
    """``torchrun ... train.py`` with 2 ranks, as a user starts it."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "small.yaml"
        config.write_text(json.dumps(SMALL))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
        self._log = (folder / "log.txt").open("a+")
        self.process = psutil.Popen(
            [*launcher, "train.py", "--config", str(config), f"output_dir={folder}", *SETTINGS],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def alive(self) -> bool:
        return self.process.poll() is None

    def worker(self, rank: int) -> psutil.Process:
        return next(p for p in self.process.children(recursive=True) if p.environ().get("RANK") == str(rank))

    def kill(self) -> None:
        """SIGKILL to the launcher and its workers."""
        tree = [self.process, *self.process.children(recursive=True)]
        for process in tree:
            process.kill()
        psutil.wait_procs(tree)

    def wait(self) -> str:
        """Wait for the end, which must be a success; returns what was printed."""
        status = self.process.wait(DEADLINE_SECONDS)
        self._log.seek(0)
        log = self._log.read()
        assert status == 0, log
        return log


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("uninterrupted"), 2, *SETTINGS)


def test_the_last_checkpoints_and_the_best_are_kept(uninterrupted):
    aucs = {line["step"]: line["auc"] for line in metrics(uninterrupted, "evaluation")}
    assert list(aucs) == [13, 26, 39, 52]
    folder = CheckpointFolder(uninterrupted / "checkpoints")
    best = max(aucs, key=lambda step: aucs[step])
    assert folder.best() == best
    assert folder.last() == STEPS
    assert folder.steps() == sorted({best, 55, 60})


@pytest.mark.parametrize(
    "number",
    [
        number if number == 2 else pytest.param(number, marks=pytest.mark.slow if number in (3, 4) else pytest.mark.exhaustive)
        for number in range(10)
    ],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, uninterrupted, number):
    """Each run is killed up to three times: at a random step, and, if its number is even, in a random checkpoint.

    The first two start by torchrun, the others fork their ranks, which saves the imports.
    """
    config = small_config(tmp_path, *SETTINGS)
    run = config.run_dir
    start: Callable[[], Attempt] = (lambda: Torchrun(tmp_path)) if number < 2 else (lambda: start_training(config, 2))
    seed = random.Random(number)

    step, delay = seed.randint(0, STEPS // 2), seed.uniform(0, 0.05)
    print(f"run {number}: killed {1000 * delay:.0f} ms after step {step}")
    kill_at_step(start(), run, step, delay)
    assert_checkpoints_are_complete(run)

    kills = 0
    while number % 2 == 0 and not unfinished(run):  # a kill may come just too late
        assert kills < 4
        kills += 1
        checkpoint, delay = seed.randint(1, 2), seed.uniform(0, 0.01)
        print(f"run {number}: killed {1000 * delay:.0f} ms into its checkpoint {checkpoint} since the start")
        kill_in_checkpoint(start(), run, checkpoint, delay)
        assert_checkpoints_are_complete(run)

    start().wait()
    assert_same_outcome(run, uninterrupted)


@pytest.mark.slow
def test_a_run_killed_after_its_last_step_only_evaluates(tmp_path, uninterrupted):
    """Killed after its last line of metrics.jsonl, and before its summary."""
    run = train(tmp_path, 2, *SETTINGS)
    (run / "summary.json").unlink()
    train(tmp_path, 2, *SETTINGS)
    assert_same_outcome(run, uninterrupted)


def test_a_run_killed_after_reaching_its_target_makes_no_more_steps(tmp_path):
    settings = (*SETTINGS, "training.target_auc=0.6")
    run = train(tmp_path, 2, *settings)
    assert summary(run)["reached_target"]
    assert summary(run)["steps"] == 13
    (run / "summary.json").unlink()
    train(tmp_path, 2, *settings)
    assert summary(run)["reached_target"]
    assert summary(run)["steps"] == 13


def test_a_finished_run_is_left_alone(tmp_path, uninterrupted):
    files = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()}
    train(uninterrupted.parent, 2, *SETTINGS)
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.is_file()} == files


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_worker_was_killed(tmp_path, uninterrupted):
    run = tmp_path / "run"
    attempt = Torchrun(tmp_path, "--max-restarts=1")
    wait_for(lambda: last_step(run) >= 25, attempt)
    attempt.worker(rank=1).kill()
    log = attempt.wait()
    assert "continuing" in log
    assert_same_outcome(run, uninterrupted)
