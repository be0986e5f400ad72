"""Runs of the trainer in processes of their own, and what they write of themselves."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.environment import ROOT, describe_environment
from dlrm_fused.config import load_config

_START_SECONDS = 300.0
# No checkpoint but the last: what is timed is training.
_ONLY_TRAINING = ["checkpoint.every_steps=0", "checkpoint.keep_best=false", "checkpoint.resume=false"]


def launch(ranks: int, script: Sequence[str], arguments: Sequence[str]) -> str:
    """What a program prints that so many ranks run; ends this one if it fails."""
    process = subprocess.run([*_launcher(ranks), *script, *arguments], cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(script)} failed:\n{process.stdout[-2000:]}\n{process.stderr[-6000:]}")
    return process.stdout


def _launcher(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


class WaitingRun:
    """A run of the trainer whose processes have started, and wait for their turn; a context manager, which ends them.

    To import torch and TorchRec takes longer than many a measurement: those of several runs can be imported at once.

    Args:
        folder: a new one, in which the run lies as ``run``.
    """

    def __init__(self, config: str, overrides: Sequence[str], ranks: int, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self._ranks, self._config, self._overrides = folder, ranks, config, list(overrides)
        self._log = (folder / "log.txt").open("w+")
        program = ["-m", "benchmarks.training.train_in_turn", str(folder), "--config", config]
        self._process = subprocess.Popen(
            [*_launcher(ranks), *program, *overrides, f"output_dir={folder}", "name=run"],
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait_until_ready(self) -> None:
        """Ends this program if one of the ranks has failed."""
        deadline = time.monotonic() + _START_SECONDS
        while not all((self.folder / f"ready_{rank}").exists() for rank in range(self._ranks)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._fail()
            time.sleep(0.05)

    def train(self, warmup: int) -> dict[str, Any]:
        """What metrics.jsonl says of the steps after ``warmup``, and summary.json of the end.

        The rate is that of all these steps: the time in which a checkpoint or an evaluation holds training up counts.
        """
        (self.folder / "turn").touch()
        if self._process.wait():
            self._fail()
        return measured(self.folder / "run", load_config(self._config, self._overrides).training.global_batch_size, warmup)

    def _fail(self) -> None:
        self._log.seek(0)
        raise SystemExit(f"{self._config} {' '.join(self._overrides)} failed:\n{self._log.read()[-8000:]}")

    def __enter__(self) -> WaitingRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


@dataclass(frozen=True)
class Turns:
    """How long runs train that take turns, and how many of them wait at once. Of :func:`add_turns`."""

    warmup: int
    steps: int
    interval: int
    at_once: int
    scratch: str | None

    def train(self, runs: Sequence[tuple[str, Sequence[str], int]]) -> Iterator[dict[str, Any]]:
        """Start some, and then train one after the other.

        Args:
            runs: of each its config, settings and number of ranks.

        Returns:
            What :meth:`WaitingRun.train` does, in the order of the runs.
        """
        for begin in range(0, len(runs), self.at_once):
            own = runs[begin : begin + self.at_once]
            with tempfile.TemporaryDirectory(dir=self.scratch) as scratch, ExitStack() as stack:
                waiting = [
                    stack.enter_context(WaitingRun(config, [*self._settings, *settings], ranks, Path(scratch) / str(number)))
                    for number, (config, settings, ranks) in enumerate(own)
                ]
                for run in waiting:
                    run.wait_until_ready()
                for run in waiting:
                    yield run.train(self.warmup)
                    shutil.rmtree(run.folder)  # its checkpoint may be large

    @property
    def _settings(self) -> list[str]:
        lengths = [f"training.max_steps={self.warmup + self.steps}", f"telemetry.log_every_steps={self.interval}"]
        return [*_ONLY_TRAINING, *lengths]


def add_turns(parser: argparse.ArgumentParser, *, warmup: int, steps: int, at_once: int) -> None:
    """Options of :class:`Turns`, with these defaults."""
    parser.add_argument("--warmup", type=int, default=warmup, help="steps before those that are timed")
    parser.add_argument("--steps", type=int, default=steps, help="that are timed")
    parser.add_argument("--interval", type=int, default=50, help="steps between lines of metrics.jsonl")
    parser.add_argument(
        "--at-once", type=int, default=at_once, help="runs whose processes are started together, and then take turns"
    )
    parser.add_argument("--scratch", help="folder for the runs; a temporary one by default")


def turns_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Turns:
    """Ends this program if they do not go together."""
    if options.warmup % options.interval or options.steps % options.interval:
        parser.error(
            f"--warmup={options.warmup} --steps={options.steps}: both must be multiples of --interval={options.interval}"
        )
    return Turns(options.warmup, options.steps, options.interval, options.at_once, options.scratch)


def report_of_runs(ranks: int, commit: str | None) -> dict[str, Any]:
    """The report of a benchmark that trains, to which ``runs`` are added, with a ``summary`` of them."""
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())][:ranks]
    return {**describe_environment(names or ["CPU"] * ranks, commit), "summary": [], "runs": []}


def train(config: str, overrides: Sequence[str], ranks: int, folder: Path, warmup: int) -> dict[str, Any]:
    """Train into ``folder/run``, where the folder is a new one; returns what :meth:`WaitingRun.train` does."""
    with WaitingRun(config, overrides, ranks, folder) as run:
        return run.train(warmup)


def measured(folder: Path, batch: int, warmup: int) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["kind"] == "train" and line["step"] >= warmup]
    samples = [(b["step"] - a["step"]) * batch for a, b in itertools.pairwise(timed)]
    seconds = [n / line["samples_per_second"] for n, line in zip(samples, timed[1:], strict=True)]
    after = timed[1:]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "samples_per_second": sum(samples) / sum(seconds),
        "intervals": [[line["step"], round(line["samples_per_second"])] for line in after],
        "median_parts": {
            key: statistics.median(line[key] for line in after if key in line)
            for key in after[-1]
            if key.endswith(("_ms", "_utilization", "_gb_per_second"))
        },
        "peak_memory_gib": max((line["gpu_memory_gib"] for line in lines if "gpu_memory_gib" in line), default=None),
        "losses": [[line["step"], line["loss"]] for line in lines if line["kind"] == "train"],
        "test_auc": summary["test_auc"],
    }
