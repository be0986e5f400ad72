"""Does comm=fused train like comm=baseline? The same run with both, compared step by step.

    python benchmarks/loss_parity.py --config configs/quickstart.yaml --nproc 2 --steps 2000 --output results.json
    python benchmarks/loss_parity.py --config configs/synthetic.yaml --nproc 4 --steps 2000 --mixed-plan

``--mixed-plan`` shards the tables table-, row- and column-wise in turn, instead of as the config says. Further arguments are
settings of both runs, such as ``embedding.dim=64``. The result is one JSON object: of the training losses of every step the
largest relative difference, and where it is; the test AUC of both; what is written is printed as well.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from dlrm_fused.config import DataSource, load_config

_ROOT = Path(__file__).resolve().parent.parent
_COMMS = ("baseline", "fused")
_PLANS = ("table_wise", "row_wise", "column_wise")
_STRETCHES = 10


def train(config: Path, comm: str, processes: int, folder: Path, settings: list[str]) -> Path:
    """Run train.py; returns the folder of the run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    own = [f"comm={comm}", f"output_dir={folder}", f"name={comm}", "telemetry.log_every_steps=1", "checkpoint.every_steps=0"]
    subprocess.run([*launcher, "train.py", "--config", str(config.resolve()), *settings, *own], cwd=_ROOT, check=True)
    return folder / comm


def mixed_plan(config: Path, settings: list[str]) -> list[str]:
    """Settings that shard the tables of synthetic data in different ways, in turn."""
    loaded = load_config(config, settings)
    if loaded.data.source is not DataSource.synthetic:
        raise SystemExit(f"--mixed-plan: for data.source=synthetic only; {config} has {loaded.data.source.name}")
    tables = range(loaded.data.synthetic.tables)
    return [f"embedding.tables.table_{i}.sharding={_PLANS[i % len(_PLANS)]}" for i in tables]


def training_losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


def compare(runs: dict[str, Path]) -> dict[str, Any]:
    """What differs between the two runs."""
    baseline, fused = (training_losses(runs[comm]) for comm in _COMMS)
    if len(baseline) != len(fused):
        raise SystemExit(f"the runs have {len(baseline)} and {len(fused)} losses; they must be of the same steps")
    differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(fused, baseline, strict=True)]
    largest = max(differences)
    length = -(-len(differences) // _STRETCHES)
    aucs = {comm: json.loads((run / "summary.json").read_text())["test_auc"] for comm, run in runs.items()}
    return {
        "steps": len(differences),
        "largest_relative_difference_of_losses": largest,
        "at_step": differences.index(largest) + 1,
        "equal_to_the_bit": baseline == fused,
        "largest_by_stretch": [max(differences[i : i + length]) for i in range(0, len(differences), length)],
        "losses_at_the_end": {"baseline": baseline[-1], "fused": fused[-1]},
        "test_auc": aucs,
        "difference_of_test_auc": abs(aucs["fused"] - aucs["baseline"]),
        "plan": (runs["fused"] / "plan.txt").read_text().splitlines(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mixed-plan", action="store_true", help="table-, row- and column-wise tables in turn")
    parser.add_argument("--output", type=Path, help="file for the result")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of both runs")
    arguments = parser.parse_args()
    settings = [f"training.max_steps={arguments.steps}", *arguments.settings]
    if arguments.mixed_plan:
        settings += mixed_plan(arguments.config, settings)
    with tempfile.TemporaryDirectory() as folder:
        runs = {comm: train(arguments.config, comm, arguments.nproc, Path(folder), settings) for comm in _COMMS}
        result = {
            "config": str(arguments.config),
            "ranks": arguments.nproc,
            "settings": settings,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "torchrec")},
            **compare(runs),
        }
    text = json.dumps(result, indent=2)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
