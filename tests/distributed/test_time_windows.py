"""Training by windows of time: what is reported of each window, and runs that are killed or stopped and go on."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_fused.config import Config
from dlrm_fused.datasets.time_windows import Window
from dlrm_fused.training import trainer
from dlrm_fused.training.runtime import Stopped
from tests.distributed import launch
from tests.distributed.killing import assert_checkpoints_are_complete, assert_same_outcome, kill_at_step
from tests.distributed.launch import metrics, run_ranks, small_config, start_training, train
from tests.unit.prepared_sets import write_prepared_set

# Windows of 3, 11, 12 and 13 batches of 16, and one of 5 samples between them.
SAMPLES_OF_DAYS = {"2024-01-01": 50, "2024-01-02": 180, "2024-01-03": 5, "2024-01-05": 200, "2024-01-06": 215}
STEPS = 3 + 11 + 12 + 13
BEGINS = {3: ["2024-01-02"], 14: ["2024-01-03", "2024-01-05"], 26: ["2024-01-06"]}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data") / "set"
    of_training = np.concatenate([np.full(count, day, "datetime64[us]") for day, count in SAMPLES_OF_DAYS.items()])
    later = np.full(60, "2024-01-07", "datetime64[us]")
    times = {"train": np.random.default_rng(1).permutation(of_training), "validation": later, "test": later}
    samples = {split: len(of_split) for split, of_split in times.items()}
    write_prepared_set(folder, samples, times={split: of_split.astype(np.int64) for split, of_split in times.items()})
    data = ["data.source=prepared", f"data.path={folder}", "data.windows=day", "data.shuffle_window_rows=1000"]
    training = [f"training.max_steps={STEPS}", "training.global_batch_size=16", "checkpoint.every_steps=5"]
    return [*data, *training, "evaluation.every_steps=13"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Path:
    return train(tmp_path_factory.mktemp("uninterrupted"), 2, *settings)


def test_each_window_is_evaluated_on_before_it_is_trained_on(uninterrupted: Path) -> None:
    lines = [line for line in metrics(uninterrupted, "evaluation") if line["split"] == "window"]
    assert [(line["step"], line["window"]) for line in lines] == [(step, day) for step, days in BEGINS.items() for day in days]
    assert [line["samples"] for line in lines] == [SAMPLES_OF_DAYS[line["window"]] for line in lines]
    assert len([line for line in metrics(uninterrupted, "evaluation") if line["split"] == "validation"]) == STEPS // 13
    (final,) = metrics(uninterrupted, "final_evaluation")
    assert (final["split"], final["step"], final["samples"]) == ("test", STEPS, 60)


def test_windows_do_not_depend_on_the_number_of_ranks(tmp_path: Path, uninterrupted: Path, settings: list[str]) -> None:
    alone = train(tmp_path, 1, *settings)
    for own, other in zip(metrics(alone, "evaluation"), metrics(uninterrupted, "evaluation"), strict=True):
        assert own["samples"] == other["samples"]
        assert own["log_loss"] == pytest.approx(other["log_loss"], rel=1e-5)


@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(1, 10))])
def test_a_killed_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, uninterrupted: Path, settings: list[str], number: int
) -> None:
    config, chance = small_config(tmp_path, *settings), random.Random(number)
    for step in sorted(chance.sample(range(1, STEPS - 1), 2)):
        kill_at_step(start_training(config, 2), config.run_dir, step, chance.uniform(0, 0.02))
        assert_checkpoints_are_complete(config.run_dir)
    start_training(config, 2).wait()
    assert_same_outcome(config.run_dir, uninterrupted)


def train_with_signal_in(config: Config, window: str) -> str:
    """Train, with a SIGTERM while this window is evaluated on, if it is."""
    evaluate = trainer.evaluate

    def interrupted(*arguments: Any, window: Window | None = None, before_batch: Any, **others: Any) -> Any:
        if window is not None and window.name == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments, window=window, before_batch=before_batch, **others)

    signalled, trainer.evaluate = window, interrupted  # type: ignore[assignment]
    try:
        launch._train(config)
    except Stopped:
        return "stopped"
    return "done"


@pytest.mark.parametrize("window", ["2024-01-03", "2024-01-05"])
def test_a_run_that_is_stopped_in_an_evaluation_makes_it_again(
    tmp_path: Path, uninterrupted: Path, settings: list[str], window: str
) -> None:
    """Of two windows that are due the second one, too."""
    config = small_config(tmp_path, *settings)
    assert run_ranks(2, train_with_signal_in, config, window) == ["stopped"] * 2
    assert [line["step"] for line in metrics(config.run_dir, "evaluation") if line["split"] == "window"] == [3]
    assert run_ranks(2, train_with_signal_in, config, "none") == ["done"] * 2
    assert_same_outcome(config.run_dir, uninterrupted)
