"""A model of several labels over HTTP, and scored online: a probability for each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.distributed.launch import run_ranks, train
from tests.inference.exporting import export, predictions_of_eval, running_service
from tests.inference.rows import prepared_rows
from tests.inference.test_online import TRANSFORMER, score_online

TWO = "data.synthetic.labels=2"


def test_each_row_is_answered_by_a_probability_for_each_label(tmp_path: Path) -> None:
    run = train(tmp_path, 1, "training.max_steps=40", TWO)
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
    run = train(tmp_path, 2, *TRANSFORMER, TWO)
    run_ranks(2, score_online, run, [])
    assert json.loads((run / "online.json").read_text())["difference_from_full_model"] < 1e-5
