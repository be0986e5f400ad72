"""The runs behind docs/quickstart_tuning.md: the quickstart with other seeds, splits and settings, on one process each.

python -m benchmarks.training.quickstart_tuning --output benchmarks/results/quickstart_tuning.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.environment import ROOT
from benchmarks.common.results import write_results

_ROWWISE = "embedding.optimizer.kind=rowwise_adagrad embedding.optimizer.learning_rate=0.05"
VARIANTS = [
    "",
    "embedding.optimizer.learning_rate=20",
    "embedding.optimizer.learning_rate=80",
    "embedding.optimizer.learning_rate=1",
    "training.dense_optimizer.learning_rate=0.01",
    "training.dense_optimizer.weight_decay=1e-4",
    "embedding.init_std=0.03",
    "embedding.init_std=0.1",
    "embedding.dim=32 model.bottom_mlp=[64,32]",
    _ROWWISE,
    f"{_ROWWISE} training.schedule.decay_steps=0",
    f"{_ROWWISE} training.dense_optimizer.learning_rate=0.04",
    f"{_ROWWISE} training.dense_optimizer.learning_rate=0.08",
    "embedding.optimizer.kind=rowwise_adagrad embedding.optimizer.learning_rate=0.03",
]


def run(folder: Path, split: int, seed: int, overrides: str) -> dict[str, Any]:
    name = f"{split}-{seed}-{abs(hash(overrides))}"
    settings = [f"data.path={folder}/data-{split}", f"output_dir={folder}", f"name={name}", f"seed={seed}", *overrides.split()]
    command = [sys.executable, "train.py", "--config", "configs/quickstart.yaml", *settings]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    validation = [line["auc"] for line in lines if line["kind"] == "evaluation"]
    summary = json.loads((folder / name / "summary.json").read_text())
    return {
        "overrides": overrides,
        "split": split,
        "seed": seed,
        "validation_auc": validation[-1],
        "best_validation_auc": max(validation),
        "test_auc": summary["test_auc"],
        "test_log_loss": summary["log_loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(temporary)
        for split in (1, 2, 3):
            prepare = ["data/prepare.py", "movielens", "--source", "recbole", "--seed", str(split)]
            command = [sys.executable, *prepare, "--output", f"{folder}/data-{split}"]
            subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        cases = [(split, seed, "") for split, seed in product((1, 2, 3), repeat=2)]
        cases += [(number, number, variant) for variant in VARIANTS[1:] for number in (1, 2, 3)]
        runs = list(pool.map(lambda case: run(folder, *case), cases))
    write_results(options.output, runs)


if __name__ == "__main__":
    main()
