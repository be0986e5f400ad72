"""Runs that SIGTERM stops save their last step on all ranks, end soon, and go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from dlrm_fused.training.checkpoint import CheckpointFolder
from tests.distributed.killing import assert_same_outcome, last_step, unfinished, wait_for
from tests.distributed.launch import train
from tests.distributed.launched import ALONE, OUR_TORCHRUN, TORCHRUN, Launched

# The number of moments at which a run is stopped.
STOPS = int(os.environ.get("KILLS", "2"))
# An evaluation takes about as long as the steps between two of them.
STEPS = 280 + 60 * STOPS
SETTINGS = (
    f"training.max_steps={STEPS}",
    "checkpoint.every_steps=40",
    "evaluation.every_steps=100",
    "evaluation.global_batch_size=16",
)
KINDS = ("step", "evaluation", "checkpoint", "start", "step")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("uninterrupted"), 2, *SETTINGS)


def wait_for_moment(attempt: Launched, run: Path, kind: str, seed: random.Random) -> None:
    begun_at = last_step(run)
    leftovers = unfinished(run)
    if kind == "start":
        time.sleep(seed.uniform(0, 6))
        return
    step = begun_at + seed.randint(1, 40)
    if kind == "evaluation":  # its step has been reported, its result has not
        step = begun_at // 100 * 100 + 100
    wait_for(lambda: last_step(run) >= step and last_step(run) != begun_at, attempt)
    if kind == "checkpoint":
        wait_for(lambda: bool(unfinished(run) - leftovers), attempt)
    time.sleep(seed.uniform(0, 0.05))


@pytest.mark.slow
def test_a_stopped_run_ends_like_an_uninterrupted_one(tmp_path: Path, uninterrupted: Path) -> None:
    run, seed = tmp_path / "run", random.Random(0)
    for number in range(STOPS):
        attempt = Launched(tmp_path, OUR_TORCHRUN, *SETTINGS)
        kind = KINDS[number % len(KINDS)]
        wait_for_moment(attempt, run, kind, seed)
        began = time.monotonic()
        status = attempt.stop()
        saved = CheckpointFolder(run / "checkpoints").last() or 0
        print(f"stop {number}, {kind}: ended in {time.monotonic() - began:.1f} s, step {last_step(run)}, saved {saved}")
        # Python itself ends before its first line has run; shells call both 143.
        assert status in (128 + signal.SIGTERM, -signal.SIGTERM), attempt.log.read_text()
        assert "Traceback" not in attempt.log.read_text()
        assert last_step(run) - saved <= 1
        if saved > STEPS - 120:  # the outcome's list of checkpoints is that of the settings
            break
    assert Launched(tmp_path, OUR_TORCHRUN, *SETTINGS).wait() == 0
    assert_same_outcome(run, uninterrupted)


@pytest.mark.slow
def test_ranks_of_plain_torchrun_save_too_and_leave_no_traceback_of_their_own(tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    attempt = Launched(tmp_path, TORCHRUN, *SETTINGS)
    wait_for(lambda: last_step(run) >= 20, attempt)
    assert attempt.stop() == 1
    log = attempt.log.read_text()
    assert log.count("Traceback") == 1
    assert "SignalException: Process" in log  # torchrun's own
    assert "stopped by SIGTERM after step" in log
    assert CheckpointFolder(run / "checkpoints").last() == last_step(run)


@pytest.mark.slow
def test_one_process_without_torchrun_stops_by_ctrl_c(tmp_path: Path) -> None:
    run, attempt = tmp_path / "run", Launched(tmp_path, ALONE, *SETTINGS, "training.max_steps=100000")
    wait_for(lambda: last_step(run) >= 20, attempt)
    assert attempt.stop(signal.SIGINT) == 128 + signal.SIGINT
    assert "Traceback" not in attempt.log.read_text()
    assert CheckpointFolder(run / "checkpoints").last() == last_step(run)


@pytest.mark.slow
def test_a_killed_torchrun_takes_its_ranks_along_and_a_second_run_waits_for_them(tmp_path: Path) -> None:
    """At random moments, also while ranks start; no step is written twice."""
    run, seed = tmp_path / "run", random.Random(1)
    for number in range(int(os.environ.get("KILLS", "1"))):
        first = Launched(tmp_path, TORCHRUN, *SETTINGS, "training.max_steps=100000")
        if number % 2:
            time.sleep(seed.uniform(0, 6))
        else:
            begun_at = last_step(run)
            wait_for(lambda begun_at=begun_at: last_step(run) > begun_at + 30, first)
        ranks = first.process.children(recursive=True)
        first.process.kill()
        began = time.monotonic()
        second = Launched(tmp_path, TORCHRUN, *SETTINGS, "training.max_steps=100000")
        _, alive = psutil.wait_procs(ranks, timeout=40)
        assert not alive
        print(f"kill {number}: ranks have ended in {time.monotonic() - began:.1f} s")
        begun_at = last_step(run)
        wait_for(lambda begun_at=begun_at: last_step(run) > begun_at + 30, second)
        second.stop()
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"train"' in line]
        assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
def test_a_second_writer_is_told_who_writes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Launched(tmp_path, ALONE, *SETTINGS, "training.max_steps=100000")
    wait_for(lambda: last_step(run) >= 20, first)
    (tmp_path / "log.txt").rename(tmp_path / "first.txt")
    second = Launched(tmp_path, ALONE, *SETTINGS, "training.max_steps=100000")
    assert second.wait() == 1
    (line,) = [line for line in second.log.read_text().splitlines() if "ERROR" in line]
    assert f"process {first.process.pid} on {os.uname().nodename} has been writing there since" in line
    assert first.stop() == 128 + signal.SIGTERM
