"""Training by windows of time: what is reported of each window, and runs that are killed or stopped and go on."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm_fused.config import Config
from dlrm_fused.datasets.preparation.movielens import MovieLensOptions, SplitBy, prepare_movielens
from dlrm_fused.datasets.preparation.parquet import write_parquet
from dlrm_fused.datasets.time_windows import Window
from dlrm_fused.training import trainer
from dlrm_fused.training.runtime import Rank, Stopped
from tests.distributed import launch
from tests.distributed.killing import assert_checkpoints_are_complete, assert_same_outcome, kill_at_step
from tests.distributed.launch import RankFailed, metrics, run_ranks, small_config, start_training, train
from tests.unit.prepared_sets import write_prepared_set
from tests.unit.test_histories import MOVIES, write_release

# Windows of 3, 11, 12 and 13 batches of 16, and one of 5 samples between them.
SAMPLES_OF_DAYS = {"2024-01-01": 50, "2024-01-02": 180, "2024-01-03": 5, "2024-01-05": 200, "2024-01-06": 215}
STEPS = 3 + 11 + 12 + 13
BEGINS = {3: ["2024-01-02"], 14: ["2024-01-03", "2024-01-05"], 26: ["2024-01-06"]}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data") / "set"
    of_training = np.concatenate([np.full(count, day, "datetime64[us]") for day, count in SAMPLES_OF_DAYS.items()])
    later = np.full(200, "2024-01-07", "datetime64[us]")
    times = {"train": np.random.default_rng(1).permutation(of_training), "validation": later, "test": later}
    samples = {split: len(of_split) for split, of_split in times.items()}
    write_prepared_set(folder, samples, times={split: of_split.astype(np.int64) for split, of_split in times.items()})
    data = ["data.source=prepared", f"data.path={folder}", "data.windows=day", "data.shuffle_window_rows=1000"]
    training = [f"training.max_steps={STEPS}", "training.global_batch_size=16", "checkpoint.every_steps=5"]
    return [*data, *training, "evaluation.every_steps=13", "telemetry.mlperf_log=true"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Path:
    return train(tmp_path_factory.mktemp("uninterrupted"), 2, *settings)


def test_each_window_is_evaluated_on_before_it_is_trained_on(uninterrupted: Path) -> None:
    lines = [line for line in metrics(uninterrupted, "evaluation") if line["split"] == "window"]
    assert [(line["step"], line["window"]) for line in lines] == [(step, day) for step, days in BEGINS.items() for day in days]
    assert [line["samples"] for line in lines] == [SAMPLES_OF_DAYS[line["window"]] for line in lines]
    assert len([line for line in metrics(uninterrupted, "evaluation") if line["split"] == "validation"]) == STEPS // 13
    (final,) = metrics(uninterrupted, "final_evaluation")
    assert (final["split"], final["step"], final["samples"]) == ("test", STEPS, 200)
    of_mlperf = [line for line in mlperf_lines(uninterrupted) if line["key"] == "eval_accuracy"]
    evaluations = metrics(uninterrupted, "evaluation")
    assert [(line["value"], line["metadata"]["step_num"]) for line in of_mlperf] == [(e["auc"], e["step"]) for e in evaluations]


def mlperf_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of mlperf.log, but for the times in them."""
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in (run / "mlperf.log").read_text().splitlines()]
    return [{**line, "time_ms": 0, "value": None if line["key"] == "tracked_stats" else line["value"]} for line in lines]


def assert_goes_on_to_the_same_end(config: Config, uninterrupted: Path) -> None:
    start_training(config, 2).wait()
    assert_same_outcome(config.run_dir, uninterrupted)
    assert mlperf_lines(config.run_dir) == mlperf_lines(uninterrupted)


def test_windows_do_not_depend_on_the_number_of_ranks(tmp_path: Path, uninterrupted: Path, settings: list[str]) -> None:
    alone = train(tmp_path, 1, *settings)
    for own, other in zip(metrics(alone, "evaluation"), metrics(uninterrupted, "evaluation"), strict=True):
        assert own["samples"] == other["samples"]
        assert own["log_loss"] == pytest.approx(other["log_loss"], rel=1e-5)


def test_parquet_files_are_trained_on_as_the_prepared_set_in_the_same_order(tmp_path: Path, settings: list[str]) -> None:
    folder = tmp_path / "set"
    days = np.concatenate([np.full(count, day, "datetime64[us]") for day, count in SAMPLES_OF_DAYS.items()])
    times = {"train": days, "validation": np.full(200, "2024-01-07", "datetime64[us]")}
    times["test"] = times["validation"]
    samples = {split: len(of_split) for split, of_split in times.items()}
    write_prepared_set(folder, samples, times={split: of_split.astype(np.int64) for split, of_split in times.items()})
    write_parquet(folder, tmp_path / "files", row_group_rows=20)
    for split, of_split in times.items():
        path = tmp_path / "files" / split / "part-00000.parquet"
        pq.write_table(pq.read_table(path).append_column("day", pa.array(of_split)), path, row_group_size=20)
    in_order = [*settings, "data.shuffle_window_rows=0"]
    of_set = train(tmp_path / "of_set", 2, *in_order, f"data.path={folder}")
    of_files = [f"data.path={tmp_path / 'files'}", "data.source=parquet", "data.sample_time=day"]
    files = train(tmp_path / "of_files", 2, *in_order, *of_files)
    assert windows_of(files) == [day for days in BEGINS.values() for day in days]
    assert metrics(files, "evaluation") == metrics(of_set, "evaluation")
    assert launch.losses(files) == launch.losses(of_set)


NUMBERS = pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(1, 10))]
)


def assert_ends_likewise_after_two_kills(config: Config, uninterrupted: Path, number: int) -> None:
    chance = random.Random(number)
    for step in sorted(chance.sample(range(1, STEPS - 1), 2)):
        kill_at_step(start_training(config, 2), config.run_dir, step, chance.uniform(0, 0.02))
        assert_checkpoints_are_complete(config.run_dir)
    assert_goes_on_to_the_same_end(config, uninterrupted)


@NUMBERS
def test_a_killed_run_ends_like_an_uninterrupted_one(
    tmp_path: Path, uninterrupted: Path, settings: list[str], number: int
) -> None:
    assert_ends_likewise_after_two_kills(small_config(tmp_path, *settings), uninterrupted, number)


@pytest.fixture(scope="module")
def settings_of_hstu(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """MovieLens in its format, 20 users rate a movie every two hours for four days and a half; histories of 5 movies."""
    folder, day = tmp_path_factory.mktemp("movielens"), 24 * 3600
    ratings = [
        (1 + user, 1 + (5 * user + number) % MOVIES, 1 + (user + number) % 5, 20_000 * day + number * 7200 + user)
        for number in range(55)
        for user in range(20)
    ]
    write_release(folder / "source", ratings)
    prepare_movielens(MovieLensOptions(str(folder / "source"), folder / "set", split=SplitBy.time, history=5))
    data = ["data.source=prepared", f"data.path={folder / 'set'}", "data.windows=day", "data.shuffle_window_rows=1000"]
    model = ["model.kind=hstu", "model.d_model=16", "model.layers=2", "model.heads=2"]
    training = [f"training.max_steps={STEPS}", "training.global_batch_size=20", "checkpoint.every_steps=5"]
    return [*data, *model, *training, "evaluation.every_steps=13", "telemetry.mlperf_log=true"]


@pytest.fixture(scope="module")
def uninterrupted_hstu(tmp_path_factory: pytest.TempPathFactory, settings_of_hstu: list[str]) -> Path:
    return train(tmp_path_factory.mktemp("uninterrupted_hstu"), 2, *settings_of_hstu)


@NUMBERS
def test_a_killed_run_of_hstu_ends_like_an_uninterrupted_one(
    tmp_path: Path, uninterrupted_hstu: Path, settings_of_hstu: list[str], number: int
) -> None:
    assert len(windows_of(uninterrupted_hstu)) == 3
    assert_ends_likewise_after_two_kills(small_config(tmp_path, *settings_of_hstu), uninterrupted_hstu, number)


def train_with_trouble_in(config: Config, trouble: str) -> str:
    """Train; a SIGTERM comes while the window of this name is evaluated on, or rank 0 fails to evaluate on this split."""
    evaluate = trainer.evaluate

    def troubled(*arguments: Any, window: Window | None = None, before_batch: Any, **others: Any) -> Any:
        if window is not None and window.name == trouble:
            os.kill(os.getpid(), signal.SIGTERM)
            while before_batch.__self__._promised is None:  # to stop at the next call
                time.sleep(0.01)
        if window is None and arguments[2].name == trouble and Rank.from_environment().index == 0:  # which writes the lines
            raise OSError("the end of a process")
        return evaluate(*arguments, window=window, before_batch=before_batch, **others)

    trainer.evaluate = troubled  # type: ignore[assignment]
    try:
        launch._train(config)
    except Stopped:
        return "stopped"
    return "done"


def windows_of(run: Path) -> list[str]:
    return [line["window"] for line in metrics(run, "evaluation") if line["split"] == "window"]


@pytest.mark.parametrize("window", ["2024-01-03", "2024-01-05"])
def test_a_run_that_is_stopped_in_an_evaluation_makes_it_again(
    tmp_path: Path, uninterrupted: Path, settings: list[str], window: str
) -> None:
    """Of two windows that are due the second one, too."""
    config = small_config(tmp_path, *settings)
    assert run_ranks(2, train_with_trouble_in, config, window) == ["stopped"] * 2
    assert windows_of(config.run_dir) == ["2024-01-02"]
    assert_goes_on_to_the_same_end(config, uninterrupted)


def test_a_run_that_ends_between_two_evaluations_of_a_step_reports_each_once(
    tmp_path: Path, uninterrupted: Path, settings: list[str]
) -> None:
    config = small_config(tmp_path, *settings)
    assert run_ranks(2, train_with_trouble_in, config, "2024-01-06") == ["stopped"] * 2
    with pytest.raises(RankFailed, match="the end of a process"):
        run_ranks(2, train_with_trouble_in, config, "validation")
    assert windows_of(config.run_dir)[-1] == "2024-01-06", "evaluated on, but not in a checkpoint"
    assert_goes_on_to_the_same_end(config, uninterrupted)


def test_a_model_that_is_trained_already_is_evaluated_on_the_first_window(
    tmp_path: Path, uninterrupted: Path, settings: list[str]
) -> None:
    warm = train(tmp_path, 1, *settings, f"checkpoint.warm_start={uninterrupted}", "training.max_steps=4")
    assert windows_of(warm) == ["2024-01-01", "2024-01-02"]
    assert metrics(warm, "evaluation")[0]["step"] == 0


def test_more_steps_than_windows_have_leave_a_finished_run_as_it_is(tmp_path: Path, settings: list[str]) -> None:
    config = small_config(tmp_path, *settings, "training.max_steps=4")
    start_training(config, 2).wait()
    before = {path: path.read_bytes() for path in config.run_dir.glob("*.*")}
    with pytest.raises(RankFailed, match=f"training.max_steps=40: allowed: at most {STEPS}"):
        train(tmp_path, 2, *settings, "training.max_steps=40")
    assert {path: path.read_bytes() for path in config.run_dir.glob("*.*")} == before
