"""Runs of the trainer in processes of their own, and what they write of themselves."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.environment import ROOT
from dlrm_fused.config import load_config


def launch(ranks: int, script: Sequence[str], arguments: Sequence[str]) -> str:
    """What a program prints that so many ranks run; ends this one if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.run([*command, *script, *arguments], cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(script)} failed:\n{process.stdout[-2000:]}\n{process.stderr[-6000:]}")
    return process.stdout


def train(config: str, overrides: Sequence[str], ranks: int, folder: Path, warmup: int) -> dict[str, Any]:
    """Train into a new folder; what metrics.jsonl says of the steps after ``warmup``, and summary.json of the end.

    The rate is that of all these steps: the time in which a checkpoint or an evaluation holds training up counts.
    """
    launch(ranks, ["train.py"], ["--config", config, *overrides, f"output_dir={folder.parent}", f"name={folder.name}"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["kind"] == "train" and line["step"] >= warmup]
    batch = load_config(config, overrides).training.global_batch_size
    samples = [(b["step"] - a["step"]) * batch for a, b in itertools.pairwise(timed)]
    seconds = [n / line["samples_per_second"] for n, line in zip(samples, timed[1:], strict=True)]
    after = timed[1:]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "samples_per_second": sum(samples) / sum(seconds),
        "intervals": [[line["step"], round(line["samples_per_second"])] for line in after],
        "median_parts": {
            key: statistics.median(line[key] for line in after if key in line) for key in after[-1] if key.endswith("_ms")
        },
        "peak_memory_gib": max((line["gpu_memory_gib"] for line in lines if "gpu_memory_gib" in line), default=None),
        "losses": [[line["step"], line["loss"]] for line in lines if line["kind"] == "train"],
        "test_auc": summary["test_auc"],
    }
