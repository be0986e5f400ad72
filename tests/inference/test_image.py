"""The Dockerfile's target `serve`, step by step, without Docker: what it installs and copies is all that the service needs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlrm_fused.inference.export.loader import load
from tests.distributed.launch import train
from tests.inference.exporting import export
from tests.inference.rows import prepared_rows
from tests.inference.service_process import running_command

ROOT = Path(__file__).parents[2]


def instructions_of(target: str) -> list[tuple[str, str]]:
    """(keyword, arguments) of a target of the Dockerfile, but those that make its user."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    (stage,) = (stage for stage in stages if re.match(rf"\S+ AS {target}\n", stage))
    lines = stage.replace("\\\n", " ").splitlines()[1:]
    found = [(keyword, arguments) for keyword, _, arguments in (line.partition(" ") for line in lines if line[:1].isalpha())]
    return [each for each in found if each[0] not in ("USER", "WORKDIR", "EXPOSE") and "useradd" not in each[1]]


def copy(arguments: str, folder: Path) -> None:
    """As COPY: files into a folder, or the content of a folder into another."""
    *sources, destination = [each for each in arguments.split() if not each.startswith("--")]
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, folder / destination, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / destination).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, folder / destination)


@pytest.mark.slow
def test_what_the_image_holds_serves_an_exported_model(tmp_path: Path) -> None:
    run = train(tmp_path, 1, "training.max_steps=20")
    export(run, tmp_path / "model")
    app = tmp_path / "app"
    app.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    # The service is to have nothing of this test's environment. Where torch's index cannot be reached (and another has its
    # wheel), pip waits for it once for each package: briefly, and without retries.
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    path = f"{tmp_path / 'venv/bin'}:{os.environ['PATH']}"
    environment = {**variables, "PATH": path, "PIP_RETRIES": "0", "PIP_TIMEOUT": "3"}
    entry_point: list[str] = []
    for keyword, arguments in instructions_of("serve"):
        if keyword == "COPY":
            copy(arguments, app)
        elif keyword == "RUN":
            done = subprocess.run(
                ["sh", "-c", arguments], cwd=app, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
        else:
            assert keyword == "ENTRYPOINT", f"{keyword} {arguments}: not known to this test"
            entry_point = json.loads(arguments)
    command = [str(tmp_path / "model") if each == "/model" else each for each in entry_point]
    rows = prepared_rows(run, 20)
    with running_command(command, app, environment) as service:
        assert json.loads(service.request("GET", "/health")[1]) == {"run": "run", "step": 20, "table_dtype": "fp32"}
        status, answer = service.request("POST", "/predict", json.dumps({"rows": rows}).encode())
        assert status == 200
    expected = load(tmp_path / "model").predict(rows)
    np.testing.assert_allclose(json.loads(answer)["probabilities"], expected, rtol=0, atol=1e-6)
