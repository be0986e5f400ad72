"""Whole runs of train.py on GPUs, started as a user does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import losses

_SETTINGS = [
    "checkpoint.every_steps=0",
    "evaluation.every_steps=0",
    "telemetry.log_every_steps=1",
    "embedding.sharding=table_wise",
    "data.synthetic.test_samples=8192",
    "training.max_steps=100",
]

# What a run has logged, in its folder.
LOG = "log"

# Each rank of them has a process that imports torch, and shares a GPU with those of the others.
_RUNS_AT_ONCE = 3

# For comparisons of many steps: no optimizer amplifies rounding.
WITHOUT_AMPLIFIED_ROUNDING = [
    "embedding.optimizer.kind=sgd",
    "embedding.optimizer.learning_rate=1.0",
    "training.dense_optimizer.kind=sgd",
    "training.dense_optimizer.learning_rate=0.1",
    "training.global_batch_size=256",
    "training.max_steps=50",
    "evaluation.global_batch_size=512",
]


def gpu_counts() -> list[int]:
    return [count for count in (1, 2, 4) if count <= torch.cuda.device_count()]


def train(folder: Path, gpus: int, *overrides: str) -> Path:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "train.py"]
    arguments = ["--config", "configs/synthetic.yaml", f"output_dir={folder}", *_SETTINGS, *overrides]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / LOG).write_text(done.stderr)
    return folder / "synthetic"


def train_together(folder: Path, runs: Mapping[str, tuple[int, Sequence[str]]]) -> dict[str, Path]:
    """:func:`train` of several runs at once: most of the time of a short one is its start, on the host.

    Args:
        runs: by name, which is also that of its folder: GPUs and settings.
    """
    with ThreadPoolExecutor(_RUNS_AT_ONCE) as pool:
        started = {name: pool.submit(train, folder / name, gpus, *settings) for name, (gpus, settings) in runs.items()}
        return {name: run.result() for name, run in started.items()}


def check_losses_of_groups(folder: Path, settings: Sequence[str], size_of_groups: str) -> None:
    """Runs on all GPUs have the losses of a run on one, whatever ``size_of_groups`` and ``comm`` are."""
    runs: dict[str, tuple[int, Sequence[str]]] = {"one": (1, settings)}
    for size in gpu_counts():
        for comm in ("baseline", "fused"):
            runs[f"{comm}_{size}"] = (gpu_counts()[-1], [*settings, f"{size_of_groups}={size}", f"comm={comm}"])
    done = {name: losses(run) for name, run in train_together(folder, runs).items()}
    for name, found in done.items():
        assert found == pytest.approx(done["one"], rel=1e-4), name
