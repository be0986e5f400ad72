"""What is measured on four GPUs and eight, in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import many_gpus
from benchmarks.common.environment import ROOT
from benchmarks.many_gpus import AIMS, PARTS, Command

RESULTS = ROOT / "benchmarks/results"
LONGEST_SECONDS = 480


def test_each_part_ends_in_less_than_eight_minutes() -> None:
    assert all(sum(command.seconds for command in commands) < LONGEST_SECONDS for commands in PARTS.values())


def test_ranks_are_divided_among_two_hosts() -> None:
    lines = [command.line(8, Path("out.json"), "abc") for part in ("hosts", "killed") for command in PARTS[part]]
    assert all(line[line.index("--ranks-per-host") + 1] == "4" for line in lines)
    assert "--nproc-per-node=8" in lines[0]
    assert "benchmarks.all_gather_gemm.stress" in lines[-1]
    scaling = PARTS["trainer"][0].line(8, Path("out.json"), "abc")
    assert scaling[scaling.index("--gpus") + 1 :][:4] == ["1", "2", "4", "8"]


def test_aims_are_shown_beside_recorded_results(tmp_path: Path) -> None:
    recorded = {"embedding": "embedding_all_to_all", "gemv": "gemv_all_reduce_4_h200", "gemm": "gemm_all_to_all_4_h200"}
    reports = {name: json.loads((RESULTS / f"{file}.json").read_text()) for name, file in recorded.items()}

    def write(part: str, results: dict[str, Any]) -> None:
        ended = {name: {"exit_status": 0, **found} for name, found in results.items()}
        (tmp_path / f"{part}.json").write_text(json.dumps({"gpus": 4, "commit": "abc", "results": ended}))

    write("embedding", {"embedding": reports["embedding"]})
    write("products", {"gemv": {**reports["gemv"], "not_run": ["one", "two"]}, "gemm": reports["gemm"]})
    passed = {"one": {"passed": True}, "two": {"passed": False}, "three": {"passed": True, "exit_status": 124}, "four": {}}
    write("hosts", passed)
    row = {"scaling": "strong", "comm": "fused", "over_baseline": 2.6}
    rows = [{**row, "gpus": 2, "samples_per_second": 7e6}, {**row, "gpus": 4, "samples_per_second": 13e6}]
    write("trainer", {"scaling": {"summary": rows}})

    lines = many_gpus.report(tmp_path).splitlines()
    assert lines[0] == "embedding: 4 GPUs, commit abc"
    assert len(lines) == 4 + len(AIMS) + 2
    assert lines[-2:] == ["gemv: 2 cells not run", "three: exit status 124"]
    found = {line[:66].strip(): line[66:].split() for line in lines}
    assert found["embedding + All-to-All, forward, geometric mean"] == ["<=", "0.5", "0.572", "missed"]
    assert found["the slowest cell of all"] == ["<=", "0.95", "0.952", "missed"]
    assert found["GEMM + AllReduce, many rows"] == ["<=", "0.8", "not", "run"]
    assert found["DLRM-DCNv2, batch 65,536, comm=fused: million samples/s"] == [">=", "12.4", "13.000", "met"]
    assert found["two hosts: stress tests that failed"] == ["<=", "0", "3.000", "missed"]
    assert found["one host: stress tests, and tests/gpu, that failed"] == ["<=", "0", "not", "run"]


def test_what_cannot_be_run_or_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no results of any part"):
        many_gpus.main(["report", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        many_gpus.main(["hosts", "--gpus", "3", "--output", str(tmp_path)])


def test_a_command_that_fails_or_takes_too_long_keeps_no_other_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [
        Command("late", "pytest --collect-only -q tests/unit", 1, is_started_by_torchrun=False),
        Command("wrong", "pytest no_such_file.py", 60, is_started_by_torchrun=False),
        Command("right", "pytest --version", 60, is_started_by_torchrun=False),
    ]
    monkeypatch.setitem(PARTS, "tests", commands)
    assert many_gpus.main(["tests", "--gpus", "2", "--output", str(tmp_path), "--commit", "abc"]) == 1
    report = json.loads((tmp_path / "tests.json").read_text())
    assert {name: (found["passed"], found["exit_status"]) for name, found in report["results"].items()} == {
        "late": (False, 124),
        "wrong": (False, 4),
        "right": (True, 0),
    }
    assert report["commit"] == "abc"
    assert "late: exit status 124" in capsys.readouterr().out
    assert "no_such_file.py" in (tmp_path / "tests.log").read_text()
