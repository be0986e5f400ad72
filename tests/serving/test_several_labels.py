"""A model of several labels over HTTP, and scored online: a probability for each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from benchmarks.serving.rows import prepared_rows
from benchmarks.serving.service_process import running_service
from dlrm_fused.config import Split
from dlrm_fused.training.online_evaluation import score_run_online
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import run_ranks, train
from tests.export.exporting import export, predictions_of_eval

TWO = ("training.max_steps=40", "data.synthetic.labels=2")
TRANSFORMER = (
    "model.kind=transformer",
    "model.d_model=16",
    "data.synthetic.history_length=6",
    "data.synthetic.history_items=200",
)


def test_each_row_is_answered_by_a_probability_for_each_label(tmp_path: Path) -> None:
    run = train(tmp_path, 1, *TWO)
    export(run, run / "model")
    with running_service(run / "model", []) as service:
        status, answer = service.request("POST", "/predict", json.dumps({"rows": prepared_rows(run, 50)}).encode())
    assert status == 200
    rows = json.loads(answer)["probabilities"]
    expected = predictions_of_eval(run)[:50]
    for number, label in enumerate(("label_0", "label_1")):
        np.testing.assert_allclose([row[label] for row in rows], expected[:, number], rtol=0, atol=1e-6)
    assert all(set(row) == {"label_0", "label_1"} for row in rows)


def test_online_scores_are_those_of_the_full_model(tmp_path: Path) -> None:
    run = train(tmp_path, 2, *TWO, *TRANSFORMER)
    run_ranks(2, _score_online, run)
    assert json.loads((run / "online.json").read_text())["difference_from_full_model"] < 1e-5


def _score_online(run: Path) -> None:
    rank = Rank.from_environment()
    score_run_online(run, "last", Split.test, [], 10, rank, ErrorStore(rank))
