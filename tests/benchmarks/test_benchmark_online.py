"""benchmarks/serving/online_latency.py on the CPU: both kinds are timed, and a difference of their scores is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.serving import online_latency
from tests.distributed.launch import Ended, run_program

CONFIG = Path(__file__).resolve().parents[2] / "configs/transformer_large.yaml"

SMALL = [
    "data.synthetic.tables=2",
    "data.synthetic.rows=[50]",
    "data.synthetic.history_length=6",
    "data.synthetic.history_items=40",
    "data.synthetic.test_samples=70",
    "model.d_model=16",
    "model.layers=2",
    "model.heads=2",
    "model.bottom_mlp=[8,8]",
    "model.top_mlp=[8,1]",
    "embedding.dim=8",
    "training.precision=fp32",
    "runtime.device=cpu",
]


def _latency(arguments: list[str]) -> None:
    online_latency.UNTIMED = 2
    sys.exit(online_latency.main(arguments))


def _latency_of_other_weights(arguments: list[str]) -> None:
    """The two kinds have different weights in their last layers."""
    make = online_latency.OnlineModel.build

    def changed(config: Any, *given: Any) -> Any:
        model = make(config, *given)
        if config.comm is online_latency.Comm.fused:
            for tensor in model.scorer._over_arch.parameters():
                tensor.data += 0.5
        return model

    online_latency.OnlineModel.build = changed
    _latency(arguments)


def _run(folder: Path, main: Any) -> tuple[Ended, dict[str, Any]]:
    arguments = ["--config", str(CONFIG), "--output", "online.json"]
    arguments += ["--candidates", "1", "5", "--requests", "8", *SMALL]
    ended = run_program(2, folder, 240.0, main, arguments)
    return ended, json.loads((folder / "online.json").read_text())


def test_both_kinds_score_the_same_and_are_timed(tmp_path: Path) -> None:
    ended, report = _run(tmp_path, _latency)
    assert ended.statuses == [0, 0], ended.output
    assert report["passed"] is True
    assert [own["candidates"] for own in report["scoring"]] == [1, 5]
    for own in report["scoring"]:
        assert own["difference"] < 1e-4
        assert own["ratio"] == own["fused"]["p50_ms"] / own["baseline"]["p50_ms"]
        assert own["fused"]["p99_over_p50"] >= 1
    assert set(report["encoding"]) == {"baseline", "fused"}


def test_scores_that_differ_are_seen(tmp_path: Path) -> None:
    ended, report = _run(tmp_path, _latency_of_other_weights)
    assert ended.statuses == [1, 1], ended.output
    assert report["passed"] is False
