"""Real Criteo rows from the raw file to a falling loss: preparation, config and training as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from dlrm_fused.config import load_config
from tests.distributed.launch import losses, start_training

SAMPLE = Path(__file__).parents[3] / "shared/data/criteo_kaggle_sample.tsv"


@pytest.mark.skipif(not SAMPLE.exists(), reason="Criteo's sample is not part of the project")
def test_the_loss_falls_on_real_rows(tmp_path: Path) -> None:
    data = tmp_path / "criteo-kaggle"
    prepare = [sys.executable, "data/prepare.py", "criteo", "--input", str(SAMPLE), "--output", str(data)]
    subprocess.run(prepare, check=True, capture_output=True)
    overrides = ["training.max_steps=60", "training.global_batch_size=64", "telemetry.log_every_steps=1"]
    unused = ["evaluation.every_steps=0", "checkpoint.every_steps=0", "runtime.device=cpu"]
    config = load_config("configs/criteo_kaggle.yaml", [f"data.path={data}", f"output_dir={tmp_path}", *overrides, *unused])
    start_training(config, ranks=2).wait()
    by_step = list(losses(config.run_dir).values())
    assert len(by_step) == 60
    assert mean(by_step[-10:]) < mean(by_step[:10]) - 0.05
