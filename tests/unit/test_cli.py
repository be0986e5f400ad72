"""The command ``dlrm-fused``, which `pip install` makes of dlrm_fused/cli.py."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def dlrm_fused(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dlrm-fused"]
    module, function = script.split(":")
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("train", "usage: dlrm-fused train [-h] --config CONFIG"),
        ("eval", "usage: dlrm-fused eval [-h] --run RUN"),
        ("prepare", "usage: dlrm-fused prepare [-h] {table,apply,movielens,criteo,synthetic,parquet}"),
    ],
)
def test_each_command_says_how_it_is_used(command: str, usage: str) -> None:
    shown = dlrm_fused(command, "--help")
    assert shown.returncode == 0
    assert " ".join(shown.stdout.split()).startswith(usage)
    assert re.search(rf"^  {command} ", dlrm_fused("--help").stdout, re.MULTILINE)


def test_a_wrong_argument_is_one_line_with_the_command() -> None:
    wrong = dlrm_fused("train", "--configuration", "quickstart.yaml")
    assert wrong.returncode == 1
    assert wrong.stderr.count("\n") == 1
    assert "the following arguments are required: --config; usage: dlrm-fused train " in wrong.stderr


def test_settings_may_stand_on_both_sides_of_an_option() -> None:
    wrong = dlrm_fused("train", "name=one", "--config", "configs/quickstart.yaml", "training.max_steps=-1")
    assert "training.max_steps=-1: allowed: " in wrong.stderr


def test_a_command_that_does_not_exist_shows_those_that_do() -> None:
    wrong = dlrm_fused("serve")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("usage: dlrm-fused {train,eval,export,prepare,torchrun}")
