"""The Transformer and HSTU on GPUs: the same losses whatever ranks share its layers and whatever carries the sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import losses
from tests.gpu.training_runs import WITHOUT_AMPLIFIED_ROUNDING, check_losses_of_groups, gpu_counts, train, train_together

pytestmark = pytest.mark.gpu(2)

SETTINGS = [
    "model.kind=transformer",
    "model.d_model=256",
    "model.heads=4",
    "data.synthetic.history_length=30",
    "data.synthetic.history_items=2000",
    *WITHOUT_AMPLIFIED_ROUNDING,
]


def test_losses_do_not_depend_on_tensor_parallelism_and_comm(tmp_path: Path) -> None:
    check_losses_of_groups(tmp_path, SETTINGS, "model.tensor_parallel")


def test_losses_of_hstu_do_not_either(tmp_path: Path) -> None:
    """Eight steps: later on, the norm of an attention's result that is nearly zero has amplified rounding."""
    check_losses_of_groups(tmp_path, [*SETTINGS, "model.kind=hstu", "training.max_steps=8"], "model.tensor_parallel")


def test_a_run_goes_on_with_another_tensor_parallel_size(tmp_path: Path) -> None:
    gpus = gpu_counts()[-1]
    fused = [*SETTINGS, "comm=fused"]
    runs = {"whole": (gpus, fused), "parts": (gpus, [*fused, "training.max_steps=20"])}
    whole = train_together(tmp_path, runs)["whole"]
    parts = train(tmp_path / "parts", gpus, *SETTINGS, "model.tensor_parallel=1")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
