"""The log in MLPerf's lines: their order, what a run that goes on keeps of it, and the rules of MLPerf."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dlrm_fused.config import Config, Split, load_config
from dlrm_fused.datasets import Dataset
from dlrm_fused.errors import ConfigError
from dlrm_fused.training.mlperf_log import mlperf_facts
from dlrm_fused.training.telemetry import RunWriter
from tests.unit.mlperf_rules import VERSIONS, complaints

ROOT = Path(__file__).parents[2]
CRITEO = {Split.train: 4_195_197_692, Split.validation: 89_137_319, Split.test: 89_137_319}


class Sizes:
    """A data set of which only the sizes are known."""

    def __init__(self, samples: dict[Split, int]) -> None:
        self._samples = samples

    def samples(self, split: Split) -> int:
        return self._samples[split]


def open_writer(folder: Path, config: Config, samples: dict[Split, int], *resume: Any) -> RunWriter:
    facts = mlperf_facts(config, cast(Dataset, Sizes(samples)), torch.device("cpu"), world_size=2)
    return RunWriter(folder, config, 0, *(resume or (0, ())), facts)


@pytest.fixture
def config() -> Config:
    config = Config()
    config.training.global_batch_size, config.evaluation.every_steps = 2, 2
    return config


# Steps of 2 samples make epochs of 4 steps.
SMALL = {Split.train: 8, Split.validation: 3, Split.test: 4}


def train(writer: RunWriter, *steps: int) -> None:
    for step in steps:
        writer.train(step, {"samples_per_second": 10.0})


def evaluate(writer: RunWriter, step: int, auc: float, split: str = "validation", **window: str) -> None:
    with writer.evaluating():
        pass
    writer.evaluation(step, split, {**window, "auc": auc, "samples": 3})


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in (folder / "mlperf.log").read_text().splitlines()]


def course(folder: Path) -> list[tuple[str, int]]:
    """Keys from the start of training on, and the samples trained until then."""
    with_samples = [event for event in events(folder) if "samples_count" in event["metadata"]]
    return [(event["key"], event["metadata"]["samples_count"]) for event in with_samples]


EVALUATION = ["eval_start", "eval_accuracy", "eval_stop"]


def of_block(first: int, last: int) -> list[tuple[str, int]]:
    """The keys of two steps and the evaluation after them."""
    steps = [("tracked_stats", last - 2), ("tracked_stats", last)]
    return [("block_start", first), *steps, *((key, last) for key in ("block_stop", *EVALUATION))]


def test_a_run_is_blocks_of_steps_between_evaluations(tmp_path: Path, config: Config) -> None:
    before = time.time()
    writer = open_writer(tmp_path, config, SMALL)
    train(writer, 1, 2)
    evaluate(writer, 2, 0.6)
    train(writer, 3, 4)
    evaluate(writer, 4, 0.7)
    writer.training_ends(4, reached_target=True)
    writer.evaluation(4, "test", {"auc": 0.7}, final=True)  # of the model that has been trained
    writer.close()
    lines = events(tmp_path)
    keys = [line["key"] for line in lines]
    assert keys[0] == "init_start"
    assert keys.index("init_stop") + 1 == keys.index("run_start")
    assert course(tmp_path) == [("run_start", 0), *of_block(0, 4), *of_block(4, 8), ("run_stop", 8)]
    assert lines[-1]["metadata"]["status"] == "success"
    assert lines[-1]["time_ms"] == lines[-2]["time_ms"], "the end of the last evaluation"
    accuracies = [(line["value"], line["metadata"]["epoch_num"]) for line in lines if line["key"] == "eval_accuracy"]
    assert accuracies == [(0.6, 0.5), (0.7, 1.0)]
    assert lines[0]["time_ms"] < 1000 * before, "the start of the process"
    assert all(line["metadata"]["file"] == "dlrm_fused/training/mlperf_log.py" for line in lines)


def test_evaluations_on_windows_and_without_an_auc(tmp_path: Path, config: Config) -> None:
    writer = open_writer(tmp_path, config, SMALL)
    train(writer, 1, 2)
    evaluate(writer, 2, math.nan, "window", window="2024-01-02")
    evaluate(writer, 2, 0.6)
    train(writer, 3)
    writer.training_ends(3, reached_target=False)
    of_evaluations = [line for line in events(tmp_path) if line["key"].startswith("eval_s")]
    shown = [(line["key"], line["metadata"].get("split"), line["metadata"].get("window")) for line in of_evaluations]
    assert shown == [
        ("eval_samples", None, None),
        ("eval_start", "window", "2024-01-02"),
        ("eval_stop", "window", "2024-01-02"),
        ("eval_start", "validation", None),
        ("eval_stop", "validation", None),
    ]
    assert course(tmp_path)[-4:] == [("block_start", 4), ("tracked_stats", 6), ("block_stop", 6), ("run_stop", 6)]
    assert events(tmp_path)[-1]["metadata"]["status"] == "aborted"


def test_a_run_that_was_killed_goes_on_in_whole_lines_with_each_step_once(tmp_path: Path, config: Config) -> None:
    killed = open_writer(tmp_path, config, SMALL)
    train(killed, 1, 2)
    evaluate(killed, 2, 0.6)
    train(killed, 3, 4)
    with (tmp_path / "mlperf.log").open("a") as file:
        file.write(':::MLLOG {"namespace": "", "time_')
    begun = (tmp_path / "mlperf.log").read_text().splitlines()[0]
    writer = open_writer(tmp_path, config, SMALL, 3, ())
    train(writer, 4)
    evaluate(writer, 4, 0.7)
    writer.training_ends(4, reached_target=False)
    assert (tmp_path / "mlperf.log").read_text().splitlines()[0] == begun, "time goes on"
    assert course(tmp_path) == [("run_start", 0), *of_block(0, 4), *of_block(4, 8), ("run_stop", 8)]
    killed.close()


def test_a_finished_run_that_is_trained_further_has_one_end(tmp_path: Path, config: Config) -> None:
    writer = open_writer(tmp_path, config, SMALL)
    train(writer, 1, 2)
    evaluate(writer, 2, 0.6)
    writer.training_ends(2, reached_target=False)
    writer.close()
    writer = open_writer(tmp_path, config, SMALL, 2, ())
    train(writer, 3, 4)
    evaluate(writer, 4, 0.7)
    writer.training_ends(4, reached_target=True)
    assert course(tmp_path) == [("run_start", 0), *of_block(0, 4), *of_block(4, 8), ("run_stop", 8)]


def test_an_evaluation_that_is_made_again_is_told_of_once(tmp_path: Path, config: Config) -> None:
    writer = open_writer(tmp_path, config, SMALL)
    train(writer, 1, 2)
    evaluate(writer, 2, 0.6)
    writer.close()
    writer = open_writer(tmp_path, config, SMALL, 2, ["validation"])
    evaluate(writer, 2, 0.6)
    assert course(tmp_path) == [("run_start", 0), *of_block(0, 4)]


def test_a_log_that_is_wanted_later_begins_there(tmp_path: Path, config: Config) -> None:
    writer = open_writer(tmp_path, config, SMALL, 2, ())
    train(writer, 3, 4)
    evaluate(writer, 4, 0.6)
    assert course(tmp_path) == [("run_start", 4), *of_block(4, 8)]


@pytest.mark.parametrize("rules", ["common", "closed_dlrm_dcnv2"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_config_of_mlperfs_benchmark_keeps_its_rules(tmp_path: Path, version: str, rules: str) -> None:
    """Those of the closed division, too. A trainer does not clear the caches of its hosts, and does not say so."""
    config = load_config(ROOT / "configs/criteo_1tb_dcnv2.yaml")
    writer = open_writer(tmp_path, config, CRITEO)
    train(writer, 3200)
    evaluate(writer, 3200, 0.803)
    writer.training_ends(3200, reached_target=True)
    assert complaints(tmp_path / "mlperf.log", rules, version) == (["cache_clear"] if rules == "common" else [])


def test_a_log_without_evaluations_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluation.every_steps=0: allowed: 1 or more with telemetry.mlperf_log=true"):
        load_config(ROOT / "configs/synthetic.yaml", ["telemetry.mlperf_log=true", "evaluation.every_steps=0"])
