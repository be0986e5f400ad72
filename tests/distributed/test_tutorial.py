"""docs/from_logs_to_service.md: its commands run as they stand there, but for the port."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dlrm_fused.inference.export.loader import load
from tests.distributed.launch import free_port, summary
from tests.distributed.test_own_tables import CRITEO_SAMPLE

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/from_logs_to_service.md"


def commands_of(section: str) -> str:
    """The block of commands of a section of the page."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## )", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return str(commands)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the programs of the repository, in which others may be written."""
    (tmp_path / "data").mkdir()
    for program in ("train.py", "export.py", "data/prepare.py", "data/movielens_ratings.py"):
        (tmp_path / program).symlink_to(ROOT / program)
    return tmp_path


@dataclass(frozen=True)
class Ended:
    status: int
    output: str
    errors: str


def run_in_bash(commands: str, folder: Path) -> Ended:
    """Run them up to the first that fails, in the environment of this process as ``activate`` would make it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # A service that a failure leaves behind would hold the pipes open.
    script = "trap 'kill $(jobs -p) || true' EXIT\n" + commands.replace("8000", str(free_port()))
    bash = subprocess.Popen(
        ["bash", "-o", "errexit", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = bash.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(bash.pid, signal.SIGKILL)
        raise
    return Ended(bash.returncode, output, errors)


def answered(ended: Ended) -> list[float]:
    """The probabilities that curl has printed."""
    (answer,) = re.findall(r'\{"probabilities":.*\}', ended.output)
    return list(json.loads(answer)["probabilities"])


@pytest.mark.slow
def test_from_a_parquet_file_to_an_answer_in_eight_commands(checkout: Path) -> None:
    commands = commands_of("A Parquet file")
    assert len(commands.splitlines()) <= 8
    ended = run_in_bash(commands, checkout)
    if "pip cannot download" in ended.errors:
        pytest.skip(f"MovieLens: {ended.errors}")
    assert ended.status == 0, ended.errors
    assert summary(checkout / "runs/ratings")["test_auc"] >= 0.78
    (body,) = re.findall(r"-d '(.*)'", commands)
    (probability,) = answered(ended)
    assert 0 < probability < 1
    (predicted,) = load(checkout / "ratings_model").predict(json.loads(body)["rows"])
    assert probability == pytest.approx(predicted, rel=0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not CRITEO_SAMPLE.exists(), reason="Criteo's sample is not part of the project")
def test_from_a_csv_file_to_answers_in_eight_commands(checkout: Path) -> None:
    commands = commands_of("A CSV file")
    assert len(commands.splitlines()) <= 8
    (checkout / "logs").mkdir()
    (checkout / "logs/train.txt").symlink_to(CRITEO_SAMPLE)
    ended = run_in_bash(commands, checkout)
    assert ended.status == 0, ended.errors
    assert summary(checkout / "runs/criteo")["test_auc"] > 0.6
    rows = json.loads((checkout / "logs/rows.json").read_text())["rows"]
    probabilities = answered(ended)
    assert len(probabilities) == 2
    np.testing.assert_allclose(probabilities, load(checkout / "criteo_model").predict(rows), rtol=0, atol=1e-6)
