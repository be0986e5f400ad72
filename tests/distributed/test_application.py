"""``dlrm_fused.train`` and ``dlrm_fused.evaluate`` in a program of one's own, as docs/training.md shows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.distributed.launch import run_script, summary

CONFIG = Path(__file__).parents[2] / "configs/synthetic.yaml"
SMALL = ["training.max_steps=5", "evaluation.every_steps=0", "data.synthetic.test_samples=4096"]
PROGRAM = f"""
from dlrm_fused import evaluate, train

if __name__ == "__main__":
    train({str(CONFIG)!r}, [*{SMALL}, "comm=fused", "name=own"])
    evaluate("runs/own", split="test", predictions="runs/own/predictions.parquet")
"""


def test_a_program_trains_and_evaluates(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ended = run_script(2, script, [], tmp_path, timeout=300)
    assert ended.statuses == [0, 0], ended.output
    run = tmp_path / "runs/own"
    evaluation = json.loads((run / "eval.json").read_text())
    assert (evaluation["step"], evaluation["split"], evaluation["samples"]) == (5, "test", 4096)
    assert evaluation["auc"] == summary(run)["test_auc"]
    assert (run / "predictions.parquet").is_file()


def test_an_error_ends_the_program_on_all_ranks_with_one_message(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import dlrm_fused\ndlrm_fused.evaluate('runs/nothing')\nprint('not reached')\n")
    ended = run_script(2, script, [], tmp_path, timeout=300)
    assert ended.statuses == [1, 1]
    assert ended.output.count("--run runs/nothing: no run there") == 1
    assert "not reached" not in ended.output
