"""A split whose labels are all the same has no AUC: a run says so, goes on, and has a checkpoint to go on from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlrm_fused.training.checkpoint import CheckpointFolder
from tests.distributed.launch import metrics, run_script, small_config, summary
from tests.unit.prepared_sets import write_prepared_set

ROOT = Path(__file__).parents[2]
NO_AUC = "{} split: label is {} in all {} samples, so its AUC is not defined; take other rows, or more"


@pytest.fixture
def sets(tmp_path: Path) -> tuple[Path, Path]:
    """A set whose validation split is of zeros, and whose test split is of ones; and one whose splits are not."""
    for name in ("one_class", "both"):
        write_prepared_set(tmp_path / name, {"train": 400, "validation": 64, "test": 50})
    for split, label in (("validation", 0), ("test", 1)):
        path = tmp_path / "one_class" / split / "labels.npy"
        np.save(path, np.full_like(np.load(path), label))
    return tmp_path / "one_class", tmp_path / "both"


def train(folder: Path, data: Path, steps: int) -> str:
    """Train with an evaluation every second step and patience for two; return the output."""
    small_config(folder)
    settings = ["--config", str(folder / "small.yaml"), f"output_dir={folder}", "data.source=prepared", f"data.path={data}"]
    settings += ["evaluation.every_steps=2", "evaluation.patience=2", f"training.max_steps={steps}"]
    ended = run_script(1, ROOT / "train.py", settings, folder, timeout=200)
    assert ended.statuses == [0], ended.output
    return ended.output


def test_a_run_goes_on_without_an_auc(tmp_path: Path, sets: tuple[Path, Path]) -> None:
    one_class, both = sets
    said, run = train(tmp_path, one_class, steps=11), tmp_path / "run"
    assert said.count(NO_AUC.format("validation", 0, 64)) == 1
    assert NO_AUC.format("test", 1, 50) in said
    assert "test AUC not defined" in said
    ended = summary(run)
    assert (ended["steps"], ended["lost_patience"], ended["test_auc"]) == (11, False, None)
    assert ended["test_auc_undefined"] == NO_AUC.format("test", 1, 50)
    assert [line["auc"] for line in metrics(run, "evaluation")] == [None] * 5
    assert CheckpointFolder(run / "checkpoints").best() == 10

    # An AUC that is defined is better than none, also for a run that is continued.
    said = train(tmp_path, both, steps=13)
    assert "not defined" not in said
    assert CheckpointFolder(run / "checkpoints").best() == 12
