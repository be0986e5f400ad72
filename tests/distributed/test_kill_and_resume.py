"""Runs that are killed and started again by the same command end as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_fused.training.checkpoint import CheckpointFolder
from tests.distributed.killing import (
    Attempt,
    assert_checkpoints_are_complete,
    assert_same_outcome,
    kill_at_step,
    kill_in_checkpoint,
    last_step,
    unfinished,
    wait_for,
)
from tests.distributed.launch import metrics, small_config, start_training, summary, train
from tests.distributed.launched import TORCHRUN, Launched

STEPS = 60
SETTINGS = (f"training.max_steps={STEPS}", "checkpoint.every_steps=5", "evaluation.every_steps=13")


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
    start: Callable[[], Attempt] = (
        (lambda: Launched(tmp_path, TORCHRUN, *SETTINGS)) if number < 2 else (lambda: start_training(config, 2))
    )
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
    attempt = Launched(tmp_path, (*TORCHRUN, "--max-restarts=1"), *SETTINGS)
    wait_for(lambda: last_step(run) >= 25, attempt)
    next(rank for rank in attempt.ranks() if rank.environ()["RANK"] == "1").kill()
    assert attempt.wait() == 0
    assert "continuing" in attempt.log.read_text()
    assert_same_outcome(run, uninterrupted)
