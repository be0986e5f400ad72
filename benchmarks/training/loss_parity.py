"""Does comm=fused train like comm=baseline? The same run with both, compared step by step.

    python -m benchmarks.training.loss_parity --config configs/quickstart.yaml --ranks 2 --output results.json \\
        training.schedule.decay_start_step=500 training.schedule.decay_steps=1500
    python -m benchmarks.training.loss_parity --config configs/synthetic.yaml --ranks 4 --mixed-plan --output results.json
    python -m benchmarks.training.loss_parity --config configs/synthetic.yaml --ranks 4 --tensor-parallel 1 2 4 \\
        --output results.json model.kind=transformer data.synthetic.history_length=20
    python -m benchmarks.training.loss_parity --config configs/moe_movielens.yaml --ranks 4 --also-ranks 1 2 \\
        --output results.json

``--mixed-plan`` shards the tables table-, row- and column-wise in turn, instead of as the config says. ``--tensor-parallel``
compares comm=baseline and fused with each of these tensor-parallel (TP) sizes with comm=baseline and the first.
``--also-ranks`` compares both on other numbers of ranks with comm=baseline on ``--ranks``. Further arguments are settings of
all runs.

Where sums are taken in another order, losses drift apart, and training amplifies that. How far is usual, two yardsticks show,
compared with comm=baseline in the same way:

* ``again``: comm=baseline a second time;
* ``other_ranks``: comm=baseline on half as many ranks: the same model and samples, with gradients summed in another order.

The result has the losses of comm=baseline, and by step the relative differences of the others from them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.environment import ROOT, command_line, current_commit, without_folders
from benchmarks.common.results import add_report_arguments, write_results
from dlrm_fused.config import Config, DataSource, load_config
from dlrm_fused.sharding.planning import shard_columns
from dlrm_fused.versions import installed_version

_KINDS = ("table_wise", "row_wise", "column_wise")
_YARDSTICKS = ("again", "other_ranks")
_STRETCHES = 10


def train(name: str, config: Path, ranks: int, folder: Path, settings: list[str]) -> Path:
    """Run train.py; returns the folder of the run."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    own = [f"output_dir={folder}", f"name={name}", "telemetry.log_every_steps=1"]
    without_checkpoints = ["checkpoint.every_steps=0", "checkpoint.keep_best=false", "checkpoint.resume=false"]
    command = [*launcher, "train.py", "--config", str(config.resolve()), *own, *without_checkpoints, *settings]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)}\nfailed:\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}")
    print(f"{name}: {(folder / name / 'summary.json').read_text()}", flush=True)
    return folder / name


def mixed_plan(config: Config, ranks: int) -> list[str]:
    """Settings that shard the tables of synthetic data in different ways, in turn."""
    if config.data.source is not DataSource.synthetic:
        raise SystemExit(f"--mixed-plan: for data.source=synthetic only; the config has {config.data.source.name}")
    # The same on any number of ranks: where columns are cut decides what rowwise Adagrad does.
    columns = f"embedding.shard_columns={shard_columns(config.embedding, config.embedding.dim, ranks)}"
    tables = range(config.data.synthetic.tables)
    return [columns, *(f"embedding.tables.table_{i}.sharding={_KINDS[i % len(_KINDS)]}" for i in tables)]


def make_runs(arguments: argparse.Namespace, settings: list[str], folder: Path) -> dict[str, Path]:
    """The folders of all runs, by their names."""
    ranks, sizes = arguments.ranks, arguments.tensor_parallel
    first = [f"model.tensor_parallel={sizes[0]}"] if sizes else []
    runs = {
        "baseline": (ranks, ["comm=baseline", *first]),
        "fused": (ranks, ["comm=fused", "comm_strict=true", *first]),
        "again": (ranks, ["comm=baseline", *first]),
        "other_ranks": (max(1, ranks // 2), ["comm=baseline", *first]),
    }
    for size in sizes[1:]:
        for comm, strict in (("baseline", []), ("fused", ["comm_strict=true"])):
            runs[f"{comm}_tp{size}"] = (ranks, [f"comm={comm}", *strict, f"model.tensor_parallel={size}"])
    for count in arguments.also_ranks:
        for comm, strict in (("baseline", []), ("fused", ["comm_strict=true"])):
            runs[f"{comm}_{count}_ranks"] = (count, [f"comm={comm}", *strict, *first])
    wanted = {name: run for name, run in runs.items() if name not in _YARDSTICKS or name in arguments.yardsticks}
    return {name: train(name, arguments.config, count, folder, [*settings, *own]) for name, (count, own) in wanted.items()}


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run, "train")]


def test_auc_of(run: Path) -> float:
    return float(json.loads((run / "summary.json").read_text())["test_auc"])


def compare(run: Path, baseline: Path) -> dict[str, Any]:
    """How far a run is from that with comm=baseline.

    Raises:
        SystemExit: if they are not of the same steps.
    """
    ours, theirs = losses_of(run), losses_of(baseline)
    if len(ours) != len(theirs):
        raise SystemExit(f"{run} has {len(ours)} losses and {baseline} {len(theirs)}: they must be of the same steps")
    differences = [abs(our - their) / abs(their) for our, their in zip(ours, theirs, strict=True)]
    length = -(-len(differences) // _STRETCHES)
    validation = [[line["auc"] for line in lines_of(folder, "evaluation")] for folder in (run, baseline)]
    return {
        "equal_to_the_bit": ours == theirs,
        "largest_relative_difference": max(differences),
        "at_step": differences.index(max(differences)) + 1,
        "largest_by_stretch": [max(differences[i : i + length]) for i in range(0, len(differences), length)],
        "test_auc": test_auc_of(run),
        "difference_of_test_auc": abs(test_auc_of(run) - test_auc_of(baseline)),
        "largest_difference_of_validation_auc": max((abs(a - b) for a, b in zip(*validation, strict=True)), default=None),
        "plan": (run / "plan.txt").read_text().splitlines(),
        "relative_differences": [float(f"{difference:.3g}") for difference in differences],
    }


def describe(arguments: argparse.Namespace, settings: list[str]) -> dict[str, Any]:
    on_gpus = torch.cuda.is_available()
    versions: dict[str, str | None] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchrec", "fbgemm-gpu", "triton"):
        versions[package] = installed_version(package)
    return {
        "machine": [torch.cuda.get_device_name(i) for i in range(arguments.ranks)]
        if on_gpus
        else f"{os.cpu_count()} CPU cores",
        "versions": versions,
        "commit": arguments.commit or current_commit(),
        "command": command_line(),
        "settings_of_all_runs": without_folders(settings),
    }


def show(result: dict[str, Any]) -> str:
    head = f"{'comm=baseline against':<24}{'largest difference':>20}{'at step':>9}{'test AUC':>12}{'difference':>12}"
    rows = [
        f"{name:<24}{c['largest_relative_difference']:>20.2e}{c['at_step']:>9}{c['test_auc']:>12.6f}"
        f"{c['difference_of_test_auc']:>12.1e}"
        for name, c in result["compared_with_baseline"].items()
    ]
    return "\n".join([head, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mixed-plan", action="store_true", help="table-, row- and column-wise tables in turn")
    parser.add_argument(
        "--tensor-parallel", nargs="*", type=int, default=[], metavar="RANKS", help="for model.kind=transformer"
    )
    parser.add_argument(
        "--also-ranks", nargs="*", type=int, default=[], metavar="RANKS", help="comm=baseline and fused on these"
    )
    parser.add_argument("--yardsticks", nargs="*", choices=_YARDSTICKS, default=_YARDSTICKS, metavar="NAME")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs; by default they are deleted")
    add_report_arguments(parser)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of all runs")
    arguments = parser.parse_args()
    settings = [f"training.max_steps={arguments.steps}", *arguments.settings]
    if arguments.mixed_plan:
        settings += mixed_plan(load_config(arguments.config, settings), arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        runs = make_runs(arguments, settings, arguments.runs or Path(folder))
        result = {
            **describe(arguments, settings),
            "steps": len(losses_of(runs["baseline"])),
            "test_auc_of_baseline": test_auc_of(runs["baseline"]),
            "compared_with_baseline": {
                name: compare(run, runs["baseline"]) for name, run in runs.items() if name != "baseline"
            },
            "losses_of_baseline": losses_of(runs["baseline"]),
        }
    write_results(arguments.output, result)
    print(show(result))


if __name__ == "__main__":
    main()
