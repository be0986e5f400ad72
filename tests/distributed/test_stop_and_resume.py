"""Runs that SIGTERM stops save their last step on all ranks, end soon, and go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from dlrm_fused.training.checkpoint import CheckpointFolder
from tests.distributed.killing import DEADLINE_SECONDS, assert_same_outcome, last_step, unfinished, wait_for
from tests.distributed.launch import SMALL, train

ROOT = Path(__file__).parents[2]
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
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
OUR_TORCHRUN = (sys.executable, "-c", "import sys; from dlrm_fused.launcher import torchrun; sys.exit(torchrun(sys.argv[1:]))")
SECONDS_TO_END = 20.0
KINDS = ("step", "evaluation", "checkpoint", "start", "step")


class Launched:
    """``torchrun ... train.py`` with 2 ranks, or ``train.py`` alone."""

    def __init__(self, folder: Path, launcher: Sequence[str], *overrides: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config, self.log = folder / "small.yaml", folder / "log.txt"
        config.write_text(json.dumps(SMALL))
        ranks = ["--standalone", "--nproc-per-node=2"] if launcher else [sys.executable]
        command = [*launcher, *ranks, "train.py", "--config", str(config), f"output_dir={folder}", *SETTINGS, *overrides]
        with self.log.open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            self.process = psutil.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def alive(self) -> bool:
        return self.process.poll() is None

    def ranks(self) -> list[psutil.Process]:
        return [p for p in self.process.children(recursive=True) if "RANK" in p.environ()]

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        return int(self.process.wait(DEADLINE_SECONDS))

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to the launcher; returns its status, when all processes have ended."""
        processes = [self.process, *self.process.children(recursive=True)]
        began = time.monotonic()
        self.process.send_signal(number)
        status = self.process.wait(SECONDS_TO_END)
        _, alive = psutil.wait_procs(processes, timeout=SECONDS_TO_END)
        assert not alive
        assert time.monotonic() - began < SECONDS_TO_END
        return int(status)


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
        attempt = Launched(tmp_path, OUR_TORCHRUN)
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
    assert Launched(tmp_path, OUR_TORCHRUN).wait() == 0
    assert_same_outcome(run, uninterrupted)


@pytest.mark.slow
def test_ranks_of_plain_torchrun_save_too_and_leave_no_traceback_of_their_own(tmp_path: Path, uninterrupted: Path) -> None:
    run = tmp_path / "run"
    attempt = Launched(tmp_path, TORCHRUN)
    wait_for(lambda: last_step(run) >= 20, attempt)
    assert attempt.stop() == 1
    log = attempt.log.read_text()
    assert log.count("Traceback") == 1
    assert "SignalException: Process" in log  # torchrun's own
    assert "stopped by SIGTERM after step" in log
    assert CheckpointFolder(run / "checkpoints").last() == last_step(run)


@pytest.mark.slow
def test_one_process_without_torchrun_stops_by_ctrl_c(tmp_path: Path) -> None:
    run, attempt = tmp_path / "run", Launched(tmp_path, (), "training.max_steps=100000")
    wait_for(lambda: last_step(run) >= 20, attempt)
    assert attempt.stop(signal.SIGINT) == 128 + signal.SIGINT
    assert "Traceback" not in attempt.log.read_text()
    assert CheckpointFolder(run / "checkpoints").last() == last_step(run)


@pytest.mark.slow
def test_a_killed_torchrun_takes_its_ranks_along_and_a_second_run_waits_for_them(tmp_path: Path) -> None:
    """At random moments, also while ranks start; no step is written twice."""
    run, seed = tmp_path / "run", random.Random(1)
    for number in range(int(os.environ.get("KILLS", "1"))):
        first = Launched(tmp_path, TORCHRUN, "training.max_steps=100000")
        if number % 2:
            time.sleep(seed.uniform(0, 6))
        else:
            begun_at = last_step(run)
            wait_for(lambda begun_at=begun_at: last_step(run) > begun_at + 30, first)
        ranks = first.process.children(recursive=True)
        first.kill()
        began = time.monotonic()
        second = Launched(tmp_path, TORCHRUN, "training.max_steps=100000")
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
    first = Launched(tmp_path, (), "training.max_steps=100000")
    wait_for(lambda: last_step(run) >= 20, first)
    (tmp_path / "log.txt").rename(tmp_path / "first.txt")
    second = Launched(tmp_path, (), "training.max_steps=100000")
    assert second.wait() == 1
    (line,) = [line for line in second.log.read_text().splitlines() if "ERROR" in line]
    assert f"process {first.process.pid} on {os.uname().nodename} has been writing there since" in line
    assert first.stop() == 128 + signal.SIGTERM
