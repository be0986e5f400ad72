"""Runs of the trainer on several hosts, and the bytes that these send each other while it trains."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.environment import ROOT
from benchmarks.common.network import Hosts
from benchmarks.training.trainer_runs import measured
from dlrm_fused.config import load_config

_LONGEST_SECONDS = 600.0
_SECONDS_BETWEEN_LOOKS = 0.005


@dataclass(frozen=True)
class Mark:
    """How many bytes each host had sent when ``step`` was done."""

    step: int
    sent: list[int]


def train_on_hosts(
    hosts: Hosts, ranks_of_hosts: Sequence[int], config: str, overrides: Sequence[str], folder: Path, warmup: int
) -> dict[str, Any]:
    """Train into ``folder/run``, where the folder is a new one; ends this program if it fails.

    Returns:
        What :func:`~benchmarks.training.trainer_runs.measured` does, ``step_ms``, the median over the intervals of
        metrics.jsonl after ``warmup`` steps, and ``sent_bytes_per_step`` by host, of the same steps. As ranks wait for each
        other in every step, the time is that of the slowest.
    """
    folder.mkdir(parents=True)
    agents = [_start_agent(hosts, host, ranks, config, overrides, folder) for host, ranks in enumerate(ranks_of_hosts)]
    try:
        marks = list(_marks(hosts, agents, folder / "run/metrics.jsonl"))
        if any(agent.wait() for agent in agents):
            raise SystemExit(f"{config} {' '.join(overrides)} failed:\n{_log(folder, 0).read_text()[-8000:]}")
    finally:
        for host in range(len(hosts.names)):
            hosts.kill(host)
    batch = load_config(config, overrides).training.global_batch_size
    run = measured(folder / "run", batch, warmup)
    return {
        **run,
        "step_ms": statistics.median(1e3 * batch / rate for _, rate in run["intervals"]),
        "sent_bytes_per_step": sent_per_step(marks, warmup),
    }


def sent_per_step(marks: Sequence[Mark], warmup: int) -> list[int]:
    """Bytes of a step by host, of the steps after ``warmup``: the slope, since each mark is a little late.

    The last mark is left out: what follows the last step may have begun.
    """
    timed = [mark for mark in marks[:-1] if mark.step >= warmup]
    steps = [mark.step for mark in timed]
    return [round(statistics.linear_regression(steps, sent).slope) for sent in zip(*(m.sent for m in timed), strict=True)]


def _start_agent(
    hosts: Hosts, host: int, ranks: int, config: str, overrides: Sequence[str], folder: Path
) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts.names)}", f"--nproc-per-node={ranks}"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.names[0]}:29400"]
    command = [*launcher, "train.py", "--config", config, *overrides, f"output_dir={folder}", "name=run"]
    with _log(folder, host).open("w") as log:
        return hosts.popen(host, command, {"OMP_NUM_THREADS": "1"}, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def _marks(hosts: Hosts, agents: Sequence[subprocess.Popen[str]], metrics: Path) -> Iterator[Mark]:
    """A mark at each line of metrics.jsonl about training, as soon as it is there, until an agent ends."""
    deadline, seen = time.monotonic() + _LONGEST_SECONDS, 0
    while all(agent.poll() is None for agent in agents) and time.monotonic() < deadline:
        step = _last_step(metrics)
        if step > seen:
            yield Mark(step, [hosts.sent_bytes(host) for host in range(len(hosts.names))])
            seen = step
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    if time.monotonic() >= deadline:
        raise SystemExit(f"the run has not ended after {_LONGEST_SECONDS:.0f} s; it is at step {seen}")


def _last_step(metrics: Path) -> int:
    """0 before the first."""
    if not metrics.exists():
        return 0
    # A line that is being written has no end yet.
    lines = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((line["step"] for line in lines if line["kind"] == "train"), default=0)


def _log(folder: Path, host: int) -> Path:
    return folder / f"log_{host}.txt"
