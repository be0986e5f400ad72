"""Models of several labels, and weighted samples, in the trainer: what is learned, and the same run on any number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.config import load_config
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.preparation.parquet import SAMPLE_WEIGHT
from dlrm_fused.errors import CheckpointError
from dlrm_fused.inference.export.loader import load
from tests.distributed.launch import (
    WITHOUT_AMPLIFIED_ROUNDING,
    RankFailed,
    evaluate,
    losses,
    metrics,
    start_training,
    summary,
    train,
)
from tests.inference.exporting import export, predictions_of_eval
from tests.unit.several_labels import LABELS, TWO_LABELS, two_labels
from tests.unit.tables import random_table, write_table

TWO = "data.synthetic.labels=2"
# Few ids, all of which are seen often, and enough samples to learn their effects.
EASY = [
    TWO,
    "data.synthetic.jagged=false",
    "data.synthetic.rows=[50]",
    "data.synthetic.pooling=[1]",
    "data.synthetic.train_samples=2000000",
    "data.synthetic.test_samples=50000",
    "evaluation.global_batch_size=8192",
    "telemetry.log_every_steps=50",
    "training.global_batch_size=4096",
    "training.max_steps=150",
    "training.dense_optimizer.learning_rate=0.04",
    "embedding.optimizer.learning_rate=0.1",
    "model.bottom_mlp=[32,8]",
    "model.top_mlp=[64,32,1]",
]


@pytest.mark.parametrize("comm", ["fused", pytest.param("baseline", marks=pytest.mark.slow)])
def test_both_planted_labels_are_learned(tmp_path: Path, comm: str) -> None:
    """On two ranks, each AUC comes within 0.01 of what the true probabilities reach."""
    found = summary(train(tmp_path, 2, f"comm={comm}", *EASY))
    for label in ("label_0", "label_1"):
        assert found[f"attainable_auc/{label}"] > 0.8
        assert found[f"test_auc/{label}"] >= found[f"attainable_auc/{label}"] - 0.01


def test_a_label_of_weight_0_is_not_learned(tmp_path: Path) -> None:
    found = summary(train(tmp_path, 2, TWO, "training.task_weights.label_1=0", "training.max_steps=80"))
    assert found["test_auc/label_0"] > 0.7
    assert found["test_auc/label_1"] < 0.6


def test_metrics_are_named_by_their_labels(tmp_path: Path) -> None:
    run = train(tmp_path, 2, TWO, "training.max_steps=20", "evaluation.every_steps=10")
    values = ("auc", "auc_error", "log_loss", "normalized_entropy", "calibration")
    names = {f"{name}/{label}" for name in values for label in ("label_0", "label_1")}
    for line in metrics(run, "evaluation"):
        assert set(line) == {"kind", "step", "split", "samples", *names}
    found = evaluate(run, 1)
    assert set(found) == {"step", "split", "samples", *names}
    assert found["auc/label_1"] == pytest.approx(summary(run)["test_auc/label_1"], abs=1e-12)
    # The best checkpoint is that of the first label.
    by_step = {line["step"]: line["auc/label_0"] for line in metrics(run, "evaluation")}
    saved = {step: json.loads((run / f"checkpoints/step_{step:09d}/progress.json").read_text()) for step in by_step}
    assert {step: progress["validation_auc"] for step, progress in saved.items()} == by_step


MODELS = {
    "dlrm": ["comm=fused"],
    "compiled": ["model.kind=dcnv2", "training.compile=always"],
    "transformer": [
        "model.kind=transformer",
        "model.d_model=16",
        "model.tensor_parallel=1",
        "data.synthetic.history_length=6",
        "data.synthetic.history_items=200",
    ],
    "experts": ["model.top_mlp=[16,8,1]", "model.experts.count=8", "model.experts.hidden=16", "model.experts.parallel=1"],
}


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=pytest.mark.exhaustive if model == "compiled" else ()) for model in MODELS]
)
def test_losses_are_the_same_on_any_number_of_ranks(tmp_path: Path, model: str) -> None:
    settings = [TWO, "training.task_weights.label_1=0.5", "training.max_steps=20", *WITHOUT_AMPLIFIED_ROUNDING, *MODELS[model]]
    alone, spread = (train(tmp_path / str(ranks), ranks, *settings) for ranks in (1, 2))
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5, abs=0)
    for label in ("label_0", "label_1"):
        assert summary(spread)[f"test_auc/{label}"] == pytest.approx(summary(alone)[f"test_auc/{label}"], abs=1e-5)


COLUMNS = ("--dense", "price,age", "--sparse", "user,color,tags")
# No number of ranks divides the batch, and its samples' weights differ, so ranks have other sums of weights.
SETTINGS = [
    "runtime.device=cpu",
    "training.max_steps=15",
    "training.global_batch_size=61",
    "training.task_weights={bought: 0.5}",
    "telemetry.log_every_steps=1",
    "evaluation.every_steps=5",
]


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set of two labels and weights."""
    folder = tmp_path_factory.mktemp("weighted")
    source = write_table(two_labels(), folder / "t.parquet")
    command = ["table", "--input", str(source), "--output", str(folder / "set"), *TWO_LABELS, *COLUMNS]
    assert cli.main(command) == 0
    return folder / "set"


def train_set(prepared: Path, output: Path, ranks: int, *overrides: str) -> Path:
    """Train by the proposed config; returns the folder of the run."""
    config = load_config(prepared / "config.yaml", [f"output_dir={output}", *SETTINGS, *overrides])
    start_training(config, ranks).wait()
    return config.run_dir


@pytest.fixture(scope="module")
def weighted_run(weighted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_set(weighted, tmp_path_factory.mktemp("run"), 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_of_weighted_samples_are_the_same_on_any_number_of_ranks(
    weighted: Path, weighted_run: Path, tmp_path: Path, ranks: int
) -> None:
    spread = train_set(weighted, tmp_path, ranks)
    assert losses(spread) == pytest.approx(losses(weighted_run), rel=1e-5, abs=0)
    for label in LABELS:
        assert summary(spread)[f"test_auc/{label}"] == pytest.approx(summary(weighted_run)[f"test_auc/{label}"], abs=1e-6)


def test_what_samples_of_weight_0_say_changes_nothing(weighted: Path, weighted_run: Path, tmp_path: Path) -> None:
    """Their labels are turned around; losses and metrics stay, bit for bit."""
    shutil.copytree(weighted, tmp_path / "turned")
    for split in ("train", "validation", "test"):
        labels, weights = (np.load(weighted / split / f"{name}.npy") for name in ("labels", "weights"))
        assert 0 < (weights == 0).sum() < len(weights)
        labels[weights == 0] ^= 1
        np.save(tmp_path / "turned" / split / "labels.npy", labels)
    (tmp_path / "turned" / CHECKSUMS_FILE).unlink()
    run = train_set(weighted, tmp_path, 1, f"data.path={tmp_path / 'turned'}")
    assert losses(run) == losses(weighted_run)
    assert metrics(run, "evaluation") == metrics(weighted_run, "evaluation")


def test_a_prediction_does_not_depend_on_the_weight_of_its_sample(weighted: Path, tmp_path: Path) -> None:
    """With experts, from which padding is kept, samples of weight 0 are none."""
    run = train_set(weighted, tmp_path, 2, "model.experts.count=4", "model.experts.hidden=8", "training.max_steps=10")
    shutil.copytree(weighted, tmp_path / "of_weight_1")
    path = tmp_path / "of_weight_1/test/weights.npy"
    weights = np.load(path)
    assert not weights.all()
    np.save(path, np.ones_like(weights))
    (tmp_path / "of_weight_1" / CHECKSUMS_FILE).unlink()
    weighted_predictions = predictions_of_eval(run)
    assert weighted_predictions.shape == (len(weights), 2)
    np.testing.assert_array_equal(weighted_predictions, predictions_of_eval(run, f"data.path={tmp_path / 'of_weight_1'}"))


def test_parquet_files_give_the_losses_of_the_prepared_set(weighted: Path, weighted_run: Path, tmp_path: Path) -> None:
    command = ["parquet", "--input", str(weighted), "--output", str(tmp_path / "files"), "--row-group-rows", "40"]
    assert cli.main(command) == 0
    order = "data.shuffle_window_rows=0"
    source = ["data.source=parquet", f"data.path={tmp_path / 'files'}", "data.labels=[clicked,bought]"]
    of_set = train_set(weighted, tmp_path / "of_set", 2, order)
    of_files = train_set(weighted, tmp_path / "of_files", 2, order, *source, f"data.sample_weight={SAMPLE_WEIGHT}")
    assert losses(of_files) == losses(of_set)
    assert losses(of_files) != losses(weighted_run)  # which is shuffled


def test_the_exported_model_predicts_rows_of_the_table_as_eval_does(weighted: Path, weighted_run: Path, tmp_path: Path) -> None:
    source = weighted.parent / "t.parquet"
    command = ["apply", "--transformation", str(weighted), "--input", str(source), "--output", str(tmp_path / "all")]
    assert cli.main(command) == 0
    export(weighted_run, tmp_path / "model")
    model = load(tmp_path / "model")
    predicted = model.predict(two_labels().select(["price", "age", "user", "color", "tags"]))
    expected = predictions_of_eval(weighted_run, f"data.path={tmp_path / 'all'}")
    assert model.labels == list(LABELS)
    np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)
    # Weighted, as in an evaluation.
    evaluated = evaluate(weighted_run, 2)
    for label in LABELS:
        assert model.info["quality"][label]["auc"] == pytest.approx(evaluated[f"auc/{label}"], abs=1e-12)


class TestOtherLabels:
    """A model predicts the labels that it was trained on; those of other data are not mixed up with them."""

    @pytest.fixture(scope="class")
    def swapped(self, weighted: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("swapped")
        command = ["table", "--input", str(weighted.parent / "t.parquet"), "--output", str(folder / "set")]
        assert cli.main([*command, "--label", "bought,clicked", "--sample-weight", "w", *COLUMNS]) == 0
        return folder / "set"

    @pytest.fixture(scope="class")
    def single(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("single")
        source = write_table(random_table(), folder / "t.parquet")
        command = ["table", "--input", str(source), "--output", str(folder / "set"), "--label", "clicked", *COLUMNS]
        assert cli.main(command) == 0
        return folder / "set"

    def test_are_not_evaluated(self, weighted_run: Path, swapped: Path, single: Path) -> None:
        for data, labels in ((swapped, "bought, clicked"), (single, "label")):
            with pytest.raises(RankFailed) as failed:
                evaluate(weighted_run, 1, f"data.path={data}")
            assert isinstance(failed.value.error, CheckpointError)
            assert f"its model predicts clicked, bought, the data set has {labels}; prepare" in str(failed.value.error)

    def test_are_no_warm_start(self, weighted: Path, single: Path, tmp_path: Path) -> None:
        one = load_config(
            single / "config.yaml", [f"output_dir={tmp_path}", "name=one", "runtime.device=cpu", "training.max_steps=5"]
        )
        start_training(one, 1).wait()
        with pytest.raises(RankFailed) as failed:
            train_set(weighted, tmp_path, 2, "name=two", f"checkpoint.warm_start={one.run_dir}")
        assert isinstance(failed.value.error, CheckpointError)
        assert "its model predicts label, the data set has clicked, bought; prepare the data with" in str(failed.value.error)

    def test_and_task_weights_are_not_changed_when_a_run_continues(self, weighted: Path, weighted_run: Path) -> None:
        with pytest.raises(RankFailed) as failed:
            train_set(weighted, weighted_run.parent, 1, "training.max_steps=40", "training.task_weights={bought: 2}")
        assert "training.task_weights={'bought': 2.0}: the run in" in str(failed.value.error)
