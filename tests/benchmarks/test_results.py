"""Results as JSON: the same objects when they are read again, a line for each record, and no part of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.environment import ROOT, without_folders
from benchmarks.common.results import as_json, write_results

RESULTS = sorted(path for path in (ROOT / "benchmarks/results").rglob("*.json") if path.name != "summary.json")


@pytest.mark.parametrize(
    "content", [{}, [], {"a": {}}, {"a": [1, 2.5e-7, "x\n"], "b": {"c": [{"d": None}, {"e": [1]}]}}, [[1], [2]]]
)
def test_what_is_written_is_read_again(content: Any, tmp_path: Path) -> None:
    write_results(tmp_path / "new/results.json", content)
    assert json.loads((tmp_path / "new/results.json").read_text()) == content
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["results.json"]


def test_each_record_has_a_line_and_a_list_of_numbers_has_one() -> None:
    text = as_json({"commit": "abc", "times": [1, 2], "cells": [{"us": [1.5, 2]}, {"us": []}], "runs": {1: {"auc": 0.5}}})
    assert text.splitlines() == [
        "{",
        '"commit":"abc",',
        '"times":[1,2],',
        '"cells":[',
        '{"us":[1.5,2]},',
        '{"us":[]}',
        "],",
        '"runs":{',
        '"1":{"auc":0.5}',
        "}",
        "}",
    ]


def test_tuples_are_written_as_the_lists_that_are_read_again() -> None:
    content = {"hosts": ((0, 1),), "cells": [{"us": (1.5, 2)}]}
    assert as_json(content) == as_json(json.loads(as_json(content)))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: str(path.relative_to(ROOT / "benchmarks/results")))
def test_recorded_results_are_in_that_form(path: Path) -> None:
    assert path.read_text() == as_json(json.loads(path.read_text()))


def test_arguments_are_recorded_without_folders_of_the_machine() -> None:
    given = ["--output", "/srv/runs/results.json", "data.path=/data/criteo", "configs/quickstart.yaml", "comm=fused"]
    assert without_folders(given) == ["--output", "results.json", "data.path=criteo", "configs/quickstart.yaml", "comm=fused"]
