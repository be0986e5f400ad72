"""Samples/s of the trainer, logging and checkpointing on, against a bare TorchRec loop on the same GPUs.

    python -m benchmarks.training.trainer_throughput --config configs/criteo_1tb_dcnv2_synthetic.yaml --gpus 4 \
        --output results.json

The two take turns, ``--rounds`` times. The trainer's rate is taken from the lines of its metrics.jsonl after the warm-up: steps
over the seconds in which they were made, so that the time a checkpoint holds training up counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.results import write_results
from benchmarks.training.trainer_runs import launch, train


def bare_rate(options: argparse.Namespace, data: str) -> float:
    arguments = ["--config", options.config, "--data", data, "--warmup", str(options.warmup), "--steps", str(options.steps)]
    output = launch(options.gpus, ["-m", "benchmarks.training.bare_torchrec_loop"], [*arguments, *options.overrides])
    return float(json.loads(output.strip().splitlines()[-1])["samples_per_second"])


def trainer_run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    steps = options.warmup + options.steps
    settings = [
        f"training.max_steps={steps}",
        f"checkpoint.every_steps={options.warmup + options.steps // 2}",
        "data.synthetic.test_samples=65536",
        "checkpoint.resume=false",
        *options.overrides,
    ]
    measured = train(options.config, settings, options.gpus, folder / "throughput", options.warmup)
    run = folder / "throughput" / "run"
    checkpoints = sorted(p.name for p in (run / "checkpoints").iterdir())
    return {**measured, "checkpoints": checkpoints, "plan": (run / "plan.txt").read_text()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--scratch", help="folder for the runs; a temporary one by default")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", help="settings of both, such as training.precision=bf16")
    options = parser.parse_intermixed_args(arguments)
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            rounds.append(
                {
                    "bare_generated": bare_rate(options, "generated"),
                    "trainer": trainer_run(options, Path(folder)),
                    "bare_resident": bare_rate(options, "resident"),
                }
            )
        print(json.dumps(rounds[-1]["trainer"]["median_parts"]), flush=True)
    medians = {key: statistics.median(r[key] for r in rounds) for key in ("bare_generated", "bare_resident")}
    trainer = statistics.median(r["trainer"]["samples_per_second"] for r in rounds)
    result = {
        "config": options.config,
        "overrides": options.overrides,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())][: options.gpus],
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "samples_per_second": {"trainer": trainer, **medians},
        "trainer_over_bare_generated": trainer / medians["bare_generated"],
        "trainer_over_bare_resident": trainer / medians["bare_resident"],
        "rounds": rounds,
    }
    write_results(options.output, result)
    print(f"{'':<34}{'M samples/s':>12}{'trainer / it':>14}")
    print(f"{'trainer, logging + checkpoint':<34}{trainer / 1e6:>12.3f}{'':>14}")
    for key, rate in medians.items():
        print(f"{key.replace('_', ' loop, ') + ' batches':<34}{rate / 1e6:>12.3f}{trainer / rate:>14.3f}")


if __name__ == "__main__":
    main()
