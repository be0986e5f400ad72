"""Runs of the trainer in processes of their own, on this machine or on several hosts, and what they write of themselves."""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.environment import ROOT
from benchmarks.common.network import Hosts
from dlrm_fused.config import load_config

_LONGEST_SECONDS_ON_HOSTS = 600.0
_SECONDS_BETWEEN_LOOKS = 0.005
_LAUNCHER = [sys.executable, "-m", "torch.distributed.run"]


@dataclass(frozen=True)
class Lengths:
    """Steps of a run: those before the timed ones, the timed ones, and those between two lines of metrics.jsonl."""

    warmup: int
    timed: int
    interval: int

    def settings(self) -> list[str]:
        """Return those of a run so long, which writes no checkpoint but the last, since what is timed is training."""
        return [
            f"training.max_steps={self.warmup + self.timed}",
            f"telemetry.log_every_steps={self.interval}",
            *("checkpoint.every_steps=0", "checkpoint.keep_best=false", "checkpoint.resume=false"),
        ]


@dataclass(frozen=True)
class Mark:
    """The bytes that each host had sent when ``step`` was done."""

    step: int
    sent: list[int]


def train(config: str, settings: Sequence[str], ranks: int, folder: Path, lengths: Lengths, hosts: int = 1) -> dict[str, Any]:
    """Train on this machine into ``folder/run``; ends this program if that fails.

    Args:
        hosts: each an agent of torchrun with its share of the ranks and of the GPUs, which ``DLRM_FUSED_HOST`` calls a host.
            Where ranks are more than GPUs, hosts share them, for correctness alone.

    Returns:
        As :func:`measured`.
    """
    arguments = _train_py(config, settings, folder)
    if hosts == 1:
        _output_of([*_LAUNCHER, "--standalone", f"--nproc-per-node={ranks}", *arguments])
        return measured(folder / "run", config, settings, lengths.warmup)
    if ranks % hosts:
        raise SystemExit(f"hosts={hosts}: {ranks} ranks cannot be divided equally")
    folder.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meeting = f"localhost:{free.getsockname()[1]}"
    agents, of_host, gpu_count = [], ranks // hosts, torch.cuda.device_count() or ranks
    if of_host > gpu_count:
        raise SystemExit(f"hosts={hosts}: {of_host} ranks of a host, but {gpu_count} GPUs")
    for host in range(hosts):
        gpus = ",".join(str(rank % gpu_count) for rank in range(host * of_host, (host + 1) * of_host))
        env = {**os.environ, "DLRM_FUSED_HOST": f"host{host}", "CUDA_VISIBLE_DEVICES": gpus}
        if gpu_count < ranks:
            env["NCCL_HOSTID"] = f"host{host}"  # else NCCL refuses ranks that share a GPU
        with (folder / f"log_{host}.txt").open("w") as log:
            command = [*_agent(hosts, of_host, meeting), *arguments]
            agents.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    while not any(statuses := [agent.poll() for agent in agents]) and None in statuses:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    if any(statuses):
        for agent in agents:
            agent.terminate()
        raise SystemExit(_failure(config, settings, folder))
    return measured(folder / "run", config, settings, lengths.warmup)


def train_on_hosts(
    hosts: Hosts, ranks: Sequence[int], config: str, settings: Sequence[str], folder: Path, lengths: Lengths
) -> dict[str, Any]:
    """Train on hosts with so many ranks each, as :func:`train` does.

    Returns:
        As :func:`measured`, and ``sent_bytes_per_step`` by host, of the steps after the warm-up.
    """
    folder.mkdir(parents=True)
    agents = []
    for host, of_host in enumerate(ranks):
        with (folder / f"log_{host}.txt").open("w") as log:
            command = [*_agent(len(ranks), of_host, f"{hosts.names[0]}:29400"), *_train_py(config, settings, folder)]
            agents.append(hosts.popen(host, command, {"OMP_NUM_THREADS": "1"}, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    try:
        marks = list(_marks(hosts, agents, folder / "run/metrics.jsonl"))
        if any(agent.wait() for agent in agents):
            raise SystemExit(_failure(config, settings, folder))
    finally:
        for host in range(len(ranks)):
            hosts.kill(host)
    found = measured(folder / "run", config, settings, lengths.warmup)
    return {**found, "sent_bytes_per_step": sent_per_step(marks, lengths.warmup)}


def run_bare_loop(config: str, settings: Sequence[str], ranks: int, data: str, lengths: Lengths) -> dict[str, Any]:
    """Run :mod:`benchmarks.training.bare_torchrec_loop`, which has a rate and nothing else to tell.

    Returns:
        As :func:`measured`, with one interval.
    """
    steps = ["--data", data, "--warmup", str(lengths.warmup), "--steps", str(lengths.timed)]
    program = ["-m", "benchmarks.training.bare_torchrec_loop", "--config", config, *steps, *settings]
    printed = _output_of([*_LAUNCHER, "--standalone", f"--nproc-per-node={ranks}", *program])
    rate = float(json.loads(printed.strip().splitlines()[-1])["samples_per_second"])
    return _described(config, settings, [(lengths.warmup + lengths.timed, rate, lengths.timed)])


def measured(run: Path, config: str, settings: Sequence[str], warmup: int) -> dict[str, Any]:
    """Return what metrics.jsonl says of the steps after the warm-up, and summary.json of the end.

    The rate is that of all these steps: the time in which a checkpoint or an evaluation holds training up counts. ``intervals``
    are the last step of each and its samples/s, ``step_ms`` their median.
    """
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if line["kind"] == "train"]
    timed = [line for line in training if line["step"] >= warmup]
    intervals = [
        (line["step"], line["samples_per_second"], line["step"] - last["step"]) for last, line in itertools.pairwise(timed)
    ]
    return {
        **_described(config, settings, intervals),
        "median_parts": {
            key: statistics.median(line[key] for line in timed[1:] if key in line)
            for key in timed[-1]
            if key.endswith(("_ms", "_utilization", "_gb_per_second"))
        },
        "peak_memory_gib": max((line["gpu_memory_gib"] for line in lines if "gpu_memory_gib" in line), default=None),
        "losses": [[line["step"], line["loss"]] for line in training],
        "test_auc": json.loads((run / "summary.json").read_text())["test_auc"],
        "plan": (run / "plan.txt").read_text().splitlines(),
    }


def sent_per_step(marks: Sequence[Mark], warmup: int) -> list[int]:
    """Return the bytes of a step by host, of the steps after ``warmup``: the slope, since each mark is a little late.

    The last mark is left out: what follows the last step may have begun.
    """
    timed = [mark for mark in marks[:-1] if mark.step >= warmup]
    steps = [mark.step for mark in timed]
    return [round(statistics.linear_regression(steps, sent).slope) for sent in zip(*(m.sent for m in timed), strict=True)]


def _described(config: str, settings: Sequence[str], intervals: Sequence[tuple[int, float, int]]) -> dict[str, Any]:
    """Return the rate and the time of a step; ``intervals``: the last step of each, its samples/s and its number of steps."""
    batch = load_config(config, settings).training.global_batch_size
    seconds = sum(steps * batch / rate for _, rate, steps in intervals)
    return {
        "samples_per_second": sum(steps * batch for _, _, steps in intervals) / seconds,
        "step_ms": statistics.median(1e3 * batch / rate for _, rate, _ in intervals),
        "intervals": [[step, round(rate)] for step, rate, _ in intervals],
        "losses": [],
    }


def _agent(hosts: int, ranks: int, meeting: str) -> list[str]:
    """Return the start of the command of a host with so many ranks; the hosts meet at a name and port."""
    counts = [f"--nnodes={hosts}", f"--nproc-per-node={ranks}"]
    return [*_LAUNCHER, *counts, "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}"]


def _failure(config: str, settings: Sequence[str], folder: Path) -> str:
    return f"{config} {' '.join(settings)} failed:\n{(folder / 'log_0.txt').read_text()[-8000:]}"


def _train_py(config: str, settings: Sequence[str], folder: Path) -> list[str]:
    return ["train.py", "--config", config, *settings, f"output_dir={folder}", "name=run"]


def _output_of(program: Sequence[str]) -> str:
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{' '.join(program)}\nfailed:\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}")
    return ended.stdout


def _marks(hosts: Hosts, agents: Sequence[subprocess.Popen[str]], metrics: Path) -> Iterator[Mark]:
    """Yield a mark at each line of metrics.jsonl about training, as soon as it is there, until an agent ends."""
    deadline, seen = time.monotonic() + _LONGEST_SECONDS_ON_HOSTS, 0
    while all(agent.poll() is None for agent in agents):
        if time.monotonic() > deadline:
            raise SystemExit(f"the run has not ended after {_LONGEST_SECONDS_ON_HOSTS:.0f} s; it is at step {seen}")
        step = _last_step(metrics)
        if step > seen:
            yield Mark(step, [hosts.sent_bytes(host) for host in range(len(hosts.names))])
            seen = step
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _last_step(metrics: Path) -> int:
    """Return 0 before the first."""
    if not metrics.exists():
        return 0
    # A line that is being written has no end yet.
    lines = [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((line["step"] for line in lines if line["kind"] == "train"), default=0)
