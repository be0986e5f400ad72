"""training.compile=auto, the default on GPUs, gives the losses of eager mode."""

from __future__ import annotations

from pathlib import Path

import pytest

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
