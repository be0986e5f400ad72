"""Training on Parquet files: the losses of the prepared set, and runs that are killed end as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dlrm_fused.datasets.preparation.parquet import write_parquet
from tests.distributed.killing import assert_checkpoints_are_complete, assert_same_outcome, kill_at_step
from tests.distributed.launch import evaluate, losses, metrics, small_config, start_training, summary, train
from tests.unit.prepared_sets import write_prepared_set

STEPS = 50
# Three epochs and a bit, of row groups that neither the batch nor a rank's share of it divides.
SAMPLES = {"train": 2000, "validation": 300, "test": 301}
SHUFFLED = (
    "data.source=parquet",
    "data.shuffle_window_rows=300",
    "training.global_batch_size=128",
    f"training.max_steps={STEPS}",
    "checkpoint.every_steps=10",
    "evaluation.every_steps=25",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_prepared_set(folder, SAMPLES)
    return folder


@pytest.fixture(scope="module")
def parquet(prepared: Path) -> Path:
    folder = prepared.with_name("parquet")
    write_parquet(prepared, folder, row_group_rows=150)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["dlrm", "dcnv2"])
def test_unshuffled_training_has_the_losses_of_the_prepared_set(
    tmp_path: Path, prepared: Path, parquet: Path, ranks: int, kind: str
) -> None:
    """Bit by bit: of every step, and of the evaluations."""
    runs = [
        train(
            tmp_path / source,
            ranks,
            f"data.source={source}",
            f"data.path={folder}",
            f"model.kind={kind}",
            "data.shuffle_window_rows=0",
            "training.max_steps=40",
        )
        for source, folder in (("prepared", prepared), ("parquet", parquet))
    ]
    assert len(losses(runs[0])) == 40
    assert losses(runs[1]) == losses(runs[0])
    assert metrics(runs[1], "final_evaluation") == metrics(runs[0], "final_evaluation")
    assert summary(runs[1])["test_auc"] == summary(runs[0])["test_auc"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, parquet: Path) -> Path:
    return train(tmp_path_factory.mktemp("uninterrupted"), 2, f"data.path={parquet}", *SHUFFLED)


def test_a_shuffled_run_is_evaluated_by_another_number_of_ranks(uninterrupted: Path) -> None:
    assert evaluate(uninterrupted, 1)["auc"] == pytest.approx(summary(uninterrupted)["test_auc"], abs=1e-12)


@pytest.mark.parametrize(
    "number",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(2, 10)),
    ],
)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path: Path, parquet: Path, uninterrupted: Path, number: int) -> None:
    """By SIGKILL to both ranks, a random time after a random step."""
    config = small_config(tmp_path, f"data.path={parquet}", *SHUFFLED)
    seed = random.Random(number)
    step, delay = seed.randint(0, STEPS - 20), seed.uniform(0, 0.05)
    print(f"run {number}: killed {1000 * delay:.0f} ms after step {step}")
    kill_at_step(start_training(config, 2), config.run_dir, step, delay)
    assert_checkpoints_are_complete(config.run_dir)
    start_training(config, 2).wait()
    assert_same_outcome(config.run_dir, uninterrupted)
