"""Whole runs on GPUs: the same losses on any number of them and with any plan, and resuming bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import losses, summary
from tests.gpu.training_runs import gpu_counts, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_first_losses_are_the_same_on_any_number_of_gpus_and_with_any_plan(tmp_path: Path) -> None:
    # Ten steps: later on, Adagrad has amplified rounding wherever a gradient is nothing else.
    # SGD for the tables, since rowwise Adagrad is another optimizer when columns are cut.
    overrides = ("embedding.optimizer.kind=sgd", "training.max_steps=10")
    reference = losses(train(tmp_path / "one", 1, *overrides))
    for sharding in ("table_wise", "row_wise", "column_wise"):
        several = losses(train(tmp_path / sharding, gpu_counts()[-1], *overrides, f"embedding.sharding={sharding}"))
        assert several == pytest.approx(reference, rel=1e-6)


def test_a_resumed_run_continues_bit_by_bit(tmp_path: Path) -> None:
    most = gpu_counts()[-1]
    whole = train(tmp_path / "whole", most)
    train(tmp_path / "parts", most, "training.max_steps=60")
    parts = train(tmp_path / "parts", most)
    assert losses(parts) == losses(whole)
    assert summary(parts)["test_auc"] == summary(whole)["test_auc"]
