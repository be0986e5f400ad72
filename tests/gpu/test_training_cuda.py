"""Whole runs on GPUs: the same losses on any number of them and with any plan, and after kills the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.distributed.killing import assert_same_outcome, kill_at_step
from tests.distributed.launch import losses, small_config, start_training
from tests.gpu.training_runs import gpu_counts, train_together

pytestmark = pytest.mark.gpu(1)

# With all that replays, which needs batches of one size: fused lookups, a dense part in one tensor.
KILLED = [
    "runtime.device=cuda",
    "data.synthetic.jagged=false",
    "comm=fused",
    "training.max_steps=300",
    "checkpoint.every_steps=25",
    "evaluation.every_steps=60",
]
HSTU = [
    "model.kind=hstu",
    "data.synthetic.jagged=true",
    "model.d_model=64",
    "model.heads=2",
    "model.layers=2",
    "training.dense_optimizer.learning_rate=0.001",
    "data.synthetic.history_length=30",
    "data.synthetic.history_items=2000",
]


def test_the_first_losses_are_the_same_on_any_number_of_gpus_and_with_any_plan(tmp_path: Path) -> None:
    # Ten steps: later on, Adagrad has amplified rounding wherever a gradient is nothing else.
    # SGD for the tables, since rowwise Adagrad is another optimizer when columns are cut.
    overrides = ("embedding.optimizer.kind=sgd", "training.max_steps=10")
    gpus = gpu_counts()[-1]
    runs = {
        "one": (1, overrides),
        **{way: (gpus, [*overrides, f"embedding.sharding={way}"]) for way in ("table_wise", "row_wise", "column_wise")},
    }
    done = {name: losses(run) for name, run in train_together(tmp_path, runs).items()}
    for name, found in done.items():
        assert found == pytest.approx(done["one"], rel=1e-6), name


@pytest.mark.parametrize(
    ("dense", "tables"),
    [("adam", "rowwise_adagrad"), ("adagrad", "rowwise_adagrad"), ("adam", "adam"), ("sgd", "rowwise_adam")],
)
def test_a_run_that_is_killed_three_times_ends_like_an_uninterrupted_one(tmp_path: Path, dense: str, tables: str) -> None:
    assert_ends_like_an_uninterrupted_one(
        tmp_path, [*KILLED, f"training.dense_optimizer.kind={dense}", f"embedding.optimizer.kind={tables}"]
    )


def test_so_does_a_run_of_hstu(tmp_path: Path) -> None:
    """Its batches have different numbers of rows: as many as their histories have interactions."""
    assert_ends_like_an_uninterrupted_one(tmp_path, [*KILLED, *HSTU])


def assert_ends_like_an_uninterrupted_one(tmp_path: Path, settings: list[str]) -> None:
    ranks = gpu_counts()[-1]
    whole, config = (small_config(tmp_path / name, *settings) for name in ("uninterrupted", "killed"))
    uninterrupted = start_training(whole, ranks)  # beside the other, since most of its time is its start
    moments = random.Random(" ".join(settings))
    for step in sorted(moments.sample(range(10, 250), 3)):
        kill_at_step(start_training(config, ranks), config.run_dir, step, moments.uniform(0, 0.05))
    start_training(config, ranks).wait()
    uninterrupted.wait()
    assert_same_outcome(config.run_dir, whole.run_dir)
