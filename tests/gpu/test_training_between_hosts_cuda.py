"""Whole runs between hosts on GPUs: they have the losses of one GPU, the other host names a rank that fails, and a restart ends
with the same bits.

Two ranks are declared to be two hosts, and share a GPU where there is one alone; for losses on two GPUs also two hosts of two
ranks each, which share them.
``FAULTS=20 pytest tests/gpu/test_training_between_hosts_cuda.py`` for so many of each fault.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.training.runs import Lengths, train
from dlrm_fused.cli import train_command
from tests.distributed.killing import assert_same_outcome, last_step
from tests.distributed.launch import Ended, run_program, small_config
from tests.gpu.training_runs import WITHOUT_AMPLIFIED_ROUNDING

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(600)]
MOST_SECONDS = 30.0
FAULTS = int(os.environ.get("FAULTS", "1"))
STEPS = 100
SETTINGS = [
    "runtime.device=cuda",
    "runtime.peer_timeout_seconds=10",
    "comm=fused",
    # Batches of one size are replayed as CUDA graphs.
    "data.synthetic.jagged=false",
    f"training.max_steps={STEPS}",
    "checkpoint.every_steps=25",
    "evaluation.every_steps=60",
]
LOSSES = [
    *WITHOUT_AMPLIFIED_ROUNDING,
    "embedding.sharding=table_wise",
    "data.synthetic.test_samples=8192",
    "evaluation.every_steps=0",
    "training.compile=never",
]
MODELS = {
    "dcnv2": ["model.kind=dcnv2", "model.top_mlp=[128,64,1]"],
    # In fp32 experts run unfused on GPUs.
    "experts": [
        "model.kind=dcnv2",
        "model.top_mlp=[128,64,1]",
        "model.experts.count=16",
        "model.experts.hidden=256",
        "training.precision=tf32",
    ],
    "transformer": [
        "model.kind=transformer",
        "model.d_model=256",
        "model.heads=4",
        "data.synthetic.history_length=30",
        "data.synthetic.history_items=2000",
    ],
}


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    # It ends long after the other host should have named it.
    subprocess.Popen(["sh", "-c", f"sleep {2 * MOST_SECONDS}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def be_train(arguments: Sequence[str], run: Path, fault: Callable[[], None] | None, step: int) -> None:
    """train.py on a rank; rank 1 makes the fault after that step, and says when."""

    def watch() -> None:
        begun_at = last_step(run)
        while not step <= last_step(run) != begun_at:
            time.sleep(0.001)
        assert fault is not None
        Path("fault").write_text(str(time.time()))
        fault()

    if fault is not None and os.environ["RANK"] == "1":
        threading.Thread(target=watch, daemon=True).start()
    # As under torchrun on one machine: on two GPUs LOCAL_WORLD_SIZE counts both.
    host, gpus = int(os.environ["RANK"]), min(2, torch.cuda.device_count())
    os.environ.update(DLRM_FUSED_HOST=f"host{host}", NCCL_HOSTID=f"host{host}")
    os.environ.update(LOCAL_RANK=str(host % gpus), LOCAL_WORLD_SIZE=str(gpus))
    train_command(arguments)


@pytest.mark.parametrize("seed", range(FAULTS))
@pytest.mark.parametrize("fault", [kill, stop])
def test_the_other_host_names_a_rank_that_fails_and_a_restart_ends_with_the_same_bits(
    fault: Callable[[], None], seed: int, tmp_path: Path
) -> None:
    whole, config = (small_config(tmp_path / name, *SETTINGS) for name in ("uninterrupted", "failing"))
    moments = random.Random(f"{fault.__name__} {seed}")

    def train(name: str, run: Path, fault: Callable[[], None] | None = None, step: int = 0) -> Ended:
        folder = tmp_path / name
        arguments = ["--config", str(folder / "small.yaml"), f"output_dir={folder}", *SETTINGS]
        return run_program(2, folder, 200.0, be_train, arguments, run, fault, step)

    failed = train("failing", config.run_dir, fault, moments.randrange(10, STEPS - 10))
    assert failed.statuses[0] == 1, failed.output
    assert re.search(r"rank 1 on .*(is lost|longer than|no sign of life)", failed.output), failed.output
    last_words = (tmp_path / "failing/output_of_rank_0").stat().st_mtime
    assert last_words - float((tmp_path / "failing/fault").read_text()) < MOST_SECONDS

    for name, run in (("failing", config.run_dir), ("uninterrupted", whole.run_dir)):
        ended = train(name, run)
        assert ended.statuses == [0, 0], ended.output
    assert_same_outcome(config.run_dir, whole.run_dir)


def losses_of(model: str, folder: Path, ranks: int, hosts: int, *settings: str) -> list[float]:
    lengths = Lengths(warmup=0, timed=50, interval=1)
    settings = (*LOSSES, *MODELS[model], *lengths.settings(), *settings)
    run = train("configs/synthetic.yaml", settings, ranks, folder, lengths, hosts)
    return [loss for _, loss in run["losses"]]


@pytest.mark.parametrize("model", MODELS)
def test_losses_on_two_hosts_are_those_of_one_gpu(model: str, tmp_path: Path) -> None:
    one = losses_of(model, tmp_path / "one", 1, 1)
    assert len(one) == 50
    for ranks in (2, 4)[: torch.cuda.device_count()]:
        found = losses_of(model, tmp_path / f"{ranks} ranks", ranks, 2, "comm=fused", "comm_strict=true")
        assert found == pytest.approx(one, rel=1e-4), ranks
