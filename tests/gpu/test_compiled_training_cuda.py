"""training.compile=auto, the default on GPUs, gives the losses of eager mode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlrm_fused.models.dense_part import CompiledForTraining
from tests.distributed.launch import losses, metrics
from tests.gpu.training_runs import WITHOUT_AMPLIFIED_ROUNDING, gpu_counts, train_together

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("comm", ["fused", "baseline"])
def test_losses_are_those_of_eager_mode(tmp_path: Path, comm: str) -> None:
    settings = [*WITHOUT_AMPLIFIED_ROUNDING, "model.kind=dcnv2", f"comm={comm}", "evaluation.every_steps=20"]
    gpus = gpu_counts()[-1]
    runs = train_together(tmp_path, {"compiled": (gpus, settings), "eager": (gpus, [*settings, "training.compile=never"])})
    compiled, eager = runs["compiled"], runs["eager"]
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)
    assert losses(compiled) != losses(eager), "nothing was compiled: no sum has another order"
    of_evaluations = [[line["auc"] for line in metrics(run, "evaluation")] for run in (compiled, eager)]
    assert of_evaluations[0] == pytest.approx(of_evaluations[1], abs=1e-4)


def test_matrices_of_odd_widths_are_filled_up_for_tensor_cores() -> None:
    """479 columns: the kernels for rows that begin anywhere take several times as long."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        layer = torch.nn.Linear(479, 1024, device="cuda")

        def function(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return layer(x).float()

        compiled: CompiledForTraining[torch.Tensor] = CompiledForTraining(function, is_compiled=True, layers=lambda: [layer])
        x = torch.randn(4096, 479, device="cuda", requires_grad=True)
        found, expected = compiled(x), function(x)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.autograd.grad(compiled(x).square().mean(), [x, layer.weight])
        kernels = {event.key for event in profile.key_averages()}
        assert any("gemm" in name or "nvjet" in name for name in kernels), kernels
        assert not any("align1" in name for name in kernels), kernels
    finally:
        torch.set_float32_matmul_precision(before)
