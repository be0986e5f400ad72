"""The Transformer on GPUs: the same losses whatever ranks share its layers and whatever carries the sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.launch import losses
from tests.gpu.test_training_cuda import gpu_counts, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

# As in tests/distributed/test_transformer_training.py: rounding is not amplified.
SETTINGS = [
    "model.kind=transformer",
    "model.d_model=256",
    "model.heads=4",
    "data.synthetic.history_length=30",
    "data.synthetic.history_items=2000",
    "embedding.optimizer.kind=sgd",
    "embedding.optimizer.learning_rate=1.0",
    "training.dense_optimizer.kind=sgd",
    "training.dense_optimizer.learning_rate=0.1",
    "training.global_batch_size=256",
    "training.max_steps=50",
    "evaluation.global_batch_size=512",
]


def test_losses_do_not_depend_on_tensor_parallelism_and_comm(tmp_path: Path) -> None:
    reference = losses(train(tmp_path / "one", 1, *SETTINGS))
    gpus = gpu_counts()[-1]
    for size in gpu_counts():
        for comm in ("baseline", "fused"):
            run = train(tmp_path / f"{comm}_{size}", gpus, *SETTINGS, f"model.tensor_parallel={size}", f"comm={comm}")
            assert losses(run) == pytest.approx(reference, rel=1e-4), (size, comm)


def test_a_run_goes_on_with_another_tensor_parallel_size(tmp_path: Path) -> None:
    gpus = gpu_counts()[-1]
    whole = train(tmp_path / "whole", gpus, *SETTINGS, "comm=fused")
    train(tmp_path / "parts", gpus, *SETTINGS, "comm=fused", "training.max_steps=20")
    parts = train(tmp_path / "parts", gpus, *SETTINGS, "model.tensor_parallel=1")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)
