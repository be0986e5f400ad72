"""``dlrm_fused.train`` and ``dlrm_fused.evaluate`` in a program of one's own, as docs/training.md shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launch import free_port, run_script, summary

CONFIG = Path(__file__).parents[2] / "configs/synthetic.yaml"
SMALL = ["training.max_steps=5", "evaluation.every_steps=0", "data.synthetic.test_samples=4096"]
PROGRAM = f"""
import os, sys, time
from dlrm_fused import evaluate, train

if __name__ == "__main__":
    late_rank, port_of_rank_0 = sys.argv[1:]
    if port_of_rank_0:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=port_of_rank_0)
    train({str(CONFIG)!r}, [*{SMALL}, "comm=fused", "name=own"])
    time.sleep(1.5 if os.environ["RANK"] == late_rank else 0)
    evaluate("runs/own", split="test", predictions="runs/own/predictions.parquet")
"""


@pytest.mark.parametrize(
    ("late_rank", "store_of"),
    [
        (0, "rank 0"),
        (1, "torchrun"),
        pytest.param(1, "rank 0", marks=pytest.mark.slow),
        pytest.param(0, "torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_program_trains_and_evaluates(late_rank: int, store_of: str, tmp_path: Path) -> None:
    """Two process groups, one after the other: a rank must not take what is left of the first for the second."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    arguments = [str(late_rank), str(free_port()) if store_of == "rank 0" else ""]
    ended = run_script(2, script, arguments, tmp_path, timeout=240)
    assert ended.statuses == [0, 0], ended.output
    run = tmp_path / "runs/own"
    evaluation = json.loads((run / "eval.json").read_text())
    assert (evaluation["step"], evaluation["split"], evaluation["samples"]) == (5, "test", 4096)
    assert evaluation["auc"] == summary(run)["test_auc"]
    assert (run / "predictions.parquet").is_file()


def test_an_error_ends_the_program_on_all_ranks_with_one_message(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import dlrm_fused\ndlrm_fused.evaluate('runs/nothing')\nprint('not reached')\n")
    ended = run_script(2, script, [], tmp_path, timeout=240)
    assert ended.statuses == [1, 1]
    assert ended.output.count("--run runs/nothing: no run there") == 1
    assert "not reached" not in ended.output
