"""Runs with ``training.precision=fp8`` learn, go on, change their precision and are read as any others."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_fused.config import Config
from dlrm_fused.models import fp8
from dlrm_fused.training import trainer
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import evaluate, losses, metrics, run_ranks, small_config
from tests.inference.exporting import export

# In these runs a layer of 64 x 64 and so many samples are large enough to be multiplied in 8 bits: processors without products
# of 16 bits take minutes for those of 512 x 512. Rates are small enough that six steps do not leave the region where losses
# compare.
COLUMNS, SAMPLES = 64, 2048
LARGE = (
    f"model.top_mlp=[{COLUMNS},{COLUMNS},1]",
    f"training.global_batch_size={SAMPLES}",
    "data.synthetic.train_samples=15000",
    "training.dense_optimizer.learning_rate=0.002",
    "comm=fused",
)
DCNV2 = ("model.kind=dcnv2", f"model.cross_rank={COLUMNS}", "model.cross_layers=1")
BF16, FP8 = "training.precision=bf16", "training.precision=fp8"


def train(folder: Path, ranks: int, *overrides: str) -> Path:
    config = small_config(folder, *overrides)
    run_ranks(ranks, _train, config)
    return config.run_dir


def _train(config: Config) -> None:
    fp8._FEWEST_COLUMNS, fp8._FEWEST_ROWS = COLUMNS, SAMPLES
    rank = Rank.from_environment()
    trainer.train(config, rank, ErrorStore(rank))


def until(step: int) -> str:
    return f"training.max_steps={step}"


@pytest.fixture(scope="module")
def of_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("fp8"), 1, *LARGE, FP8, until(6))


@pytest.fixture(scope="module")
def of_bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("bf16"), 1, *LARGE, BF16, until(6))


def test_losses_are_near_those_of_bf16_and_not_the_same(of_fp8: Path, of_bf16: Path) -> None:
    assert losses(of_fp8) == pytest.approx(losses(of_bf16), rel=1e-2)
    assert losses(of_fp8) != losses(of_bf16)


def test_nothing_is_cut_off(of_fp8: Path, of_bf16: Path) -> None:
    assert [line["fp8_cut_off"] for line in metrics(of_fp8, "train")] == [0] * 6
    assert not [line for line in metrics(of_bf16, "train") if "fp8_cut_off" in line]


def _train_without_room(config: Config) -> None:
    fp8._LARGEST_OPERAND = 4096.0  # beyond the range of 8 bits
    _train(config)


def test_what_is_cut_off_on_all_ranks_is_told_for_each_interval(tmp_path: Path) -> None:
    counts = {}
    for compile in ("never", "always"):
        settings = (*LARGE, f"training.global_batch_size={2 * SAMPLES}", FP8, until(2), f"training.compile={compile}")
        config = small_config(tmp_path / compile, *settings, "telemetry.log_every_steps=1")
        run_ranks(2, _train_without_room, config)
        counts[compile] = [line["fp8_cut_off"] for line in metrics(config.run_dir, "train")]
    assert len(counts["never"]) == 2
    assert all(2 * 900 < count < 2 * 1100 * COLUMNS for count in counts["never"])  # ranks, rows and columns
    assert counts["always"] == pytest.approx(counts["never"], rel=0.01)


def test_a_run_that_goes_on_has_the_bits_of_one_that_did_not_stop(of_fp8: Path, tmp_path: Path) -> None:
    for steps in (3, 6):
        run = train(tmp_path, 1, *LARGE, FP8, until(steps))
    assert losses(run) == losses(of_fp8)


def test_the_precision_of_a_run_may_change_and_change_back(of_bf16: Path, tmp_path: Path) -> None:
    for precision, steps in ((BF16, 2), (FP8, 4), (BF16, 6)):
        run = train(tmp_path, 1, *LARGE, precision, until(steps))
    found, expected = losses(run), losses(of_bf16)
    assert [found[step] == expected[step] for step in (1, 2, 4)] == [True, True, False]
    assert found == pytest.approx(expected, rel=1e-2)


@pytest.fixture(scope="module")
def of_dcnv2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("dcnv2"), 1, *LARGE, *DCNV2, FP8, until(2))


@pytest.mark.parametrize("name", ["of_fp8", "of_dcnv2"])
def test_evaluation_multiplies_as_bf16_does(name: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(name)
    found, of_bf16, of_fp32 = (evaluate(run, 1, f"training.precision={p}")["log_loss"] for p in ("fp8", "bf16", "fp32"))
    assert found == of_bf16 != of_fp32


def test_an_export_predicts_what_the_run_does_in_fp32(of_fp8: Path, tmp_path: Path) -> None:
    assert export(of_fp8, tmp_path / "model").auc == pytest.approx(
        evaluate(of_fp8, 1, "training.precision=fp32")["auc"], abs=1e-6
    )


@pytest.mark.parametrize("model", [(), DCNV2], ids=["dlrm", "dcnv2"])
def test_ranks_with_few_samples_train_in_bf16(model: tuple[str, ...], tmp_path: Path) -> None:
    """Half the batch is too small to gain, so losses have the bits of two ranks with bf16."""
    ours, theirs = (train(tmp_path / p, 2, *LARGE, *model, p, until(2)) for p in (FP8, BF16))
    assert losses(ours) == losses(theirs)


def test_a_compiled_run_learns_the_same(of_fp8: Path, tmp_path: Path) -> None:
    run = train(tmp_path, 1, *LARGE, FP8, until(3), "training.compile=always")
    assert losses(run) == pytest.approx({step: losses(of_fp8)[step] for step in (1, 2, 3)}, rel=1e-2)
