"""docs/extending.md, followed to the letter in a copy of the package: a file in its place, one line in the registry, a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed.launch import SMALL

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def follow(title: str, checkout: Path) -> list[str]:
    """Do what a section says; returns the overrides of its command."""
    text = section(title)
    (source, place) = re.search(r"`cp (docs/examples/\S+) (dlrm_fused/\S+)`", text).groups()
    kind = re.search(r"line in `(\w+)`", text)[1]
    (line,) = re.findall(r"^```python\n( {4}\w+ = .*)\n```$", text, re.MULTILINE)
    shutil.copytree(ROOT / "dlrm_fused", checkout / "dlrm_fused", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", checkout)
    shutil.copy(ROOT / source, checkout / place)
    registry = checkout / "dlrm_fused/config/registry.py"
    before, enumeration, after = registry.read_text().partition(f"class {kind}(Enum):\n")
    docstring, end, members = after.partition('"""\n\n')
    registry.write_text(f"{before}{enumeration}{docstring}{end}{line}\n{members}")
    return re.search(r"train\.py --config \S+ ([^`]+)`", text)[1].split()


@pytest.mark.parametrize("title", ["A model", "A data set"])
def test_an_added_one_trains(title: str, tmp_path: Path) -> None:
    overrides = follow(title, tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "train.py", "--config", "small.yaml", "training.max_steps=30", *overrides]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended.stderr
    (found,) = tmp_path.glob("runs/*/metrics.jsonl")
    losses = [line["loss"] for line in map(json.loads, found.read_text().splitlines()) if "loss" in line]
    assert len(losses) == 30
    assert sum(losses[-5:]) < sum(losses[:5])
