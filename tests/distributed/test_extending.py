"""docs/extending.md, followed to the letter in a copy of the package: a file in its place, one line in the registry, a run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.distributed.launch import SMALL

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.partition(f"## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def follow(title: str, checkout: Path) -> list[str]:
    """Do what a section says in a copy of the package; returns the overrides of its command."""
    text = section(title)
    (source, place) = re.search(r"`cp (docs/examples/\S+) (dlrm_fused/\S+)`", text).groups()
    kind = re.search(r"line in `(\w+)`", text)[1]
    (line,) = re.findall(r"^```python\n( {4}\w+ = .*)\n```$", text, re.MULTILINE)
    shutil.copy(ROOT / source, checkout / place)
    registry = checkout / "dlrm_fused/config/registry.py"
    before, enumeration, after = registry.read_text().partition(f"class {kind}(Enum):\n")
    docstring, end, members = after.partition('"""\n\n')
    registry.write_text(f"{before}{enumeration}{docstring}{end}{line}\n{members}")
    return re.search(r"train\.py --config \S+ ([^`]+)`", text)[1].split()


def test_a_model_and_a_data_set_that_are_added_train(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "dlrm_fused", tmp_path / "dlrm_fused")
    shutil.copy(ROOT / "train.py", tmp_path)
    overrides = [*follow("A model", tmp_path), *follow("A data set", tmp_path)]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "train.py", "--config", "small.yaml", "training.max_steps=30", *overrides]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert ended.returncode == 0, ended.stderr
    (found,) = tmp_path.glob("runs/*/metrics.jsonl")
    losses = [line["loss"] for line in map(json.loads, found.read_text().splitlines()) if "loss" in line]
    assert len(losses) == 30
    assert sum(losses[-5:]) < sum(losses[:5])
