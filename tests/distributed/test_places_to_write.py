"""Places to write are tried before the work; an evaluation of a run that may only be read shows its table."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from dlrm_fused.errors import CheckpointError
from tests.distributed.launch import RankFailed, be_script, run_alone, train

ROOT = Path(__file__).parents[2]
BLOCKED = ".eval.json.partial"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = train(tmp_path_factory.mktemp("read_only"), 1, "training.max_steps=4")
    # Root may write everywhere, but not a file where a folder is.
    (run / BLOCKED).mkdir()
    return run


def evaluate(run: Path, *options: str) -> CompletedProcess[str]:
    return run_alone(ROOT, be_script, ROOT / "eval.py", ["--run", str(run), *options])


@pytest.mark.slow
def test_a_run_that_may_only_be_read_is_evaluated_with_a_warning(run: Path) -> None:
    done = evaluate(run)
    assert done.returncode == 0, done.stderr
    assert "auc" in done.stdout
    (warning,) = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert f"{run / 'eval.json'} was not written" in warning
    assert "name another place with --output" in warning


@pytest.mark.slow
def test_another_place_is_written_and_tried_before_the_evaluation(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "table.json"
    done = evaluate(run, "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert json.loads(output.read_text())["step"] == 4
    assert not (run / "eval.json").exists()
    (tmp_path / "new" / ".other.json.partial").mkdir()
    done = evaluate(run, "--output", str(tmp_path / "new" / "other.json"))
    assert (done.returncode, done.stdout) == (1, "")  # no table: nothing was evaluated
    assert "cannot be written" in done.stderr


def test_training_tries_its_place_for_checkpoints_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints/.rank_1.partial").mkdir(parents=True)
    with pytest.raises(RankFailed) as failed:
        train(tmp_path, 2, "training.max_steps=4")
    assert isinstance(failed.value.error, CheckpointError)
    assert "checkpoints: rank 1 on" in str(failed.value.error)
    assert "cannot write there" in str(failed.value.error)
    assert not (tmp_path / "run/metrics.jsonl").exists()
