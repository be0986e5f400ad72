"""Samples/s of the trainer with several settings of one config, which take turns, at one or more batch sizes.

    python -m benchmarks.training.compare_settings --config configs/criteo_1tb_dcnv2_synthetic.yaml --gpus 2 \
        --batches 16384 65536 --output results.json \
        "comm=fused" "comm=baseline" "comm=baseline training.compile=never embedding.output_dtype=fp32"

Each argument is one contestant's settings, divided by spaces; the others are compared with the first. A run's rate is that of
all steps after the warm-up; the median over rounds counts. That the same is trained, losses tell, each the mean of an interval:
``loss off`` is how far any of them is from that of the first contestant's first run. ``floor`` is the time that the step's work
takes at the rates of the GPU's data sheet (docs/training.md, "Efficiency").
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.training.trainer_runs import add_turns, report_of_runs, turns_of


@dataclass(frozen=True)
class Contestant:
    """Settings at a batch size; None is that of the config."""

    batch: int | None
    settings: str

    def all_settings(self) -> list[str]:
        own = [] if self.batch is None else [f"training.global_batch_size={self.batch}"]
        return [*own, *self.settings.split()]


def summarize(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """By batch and settings, in the order of their first runs: medians over rounds, how many times the first is as fast, and
    the largest difference of a loss from that of the first, relative to it."""
    by_contestant: dict[tuple[int | None, str], list[dict[str, Any]]] = {}
    for one in runs:
        by_contestant.setdefault((one["batch"], one["settings"]), []).append(one)
    rows: list[dict[str, Any]] = []
    first: dict[int | None, float] = {}
    first_losses: dict[int | None, dict[int, float]] = {}
    for (batch, settings), own in by_contestant.items():
        rate = statistics.median(one["samples_per_second"] for one in own)
        first.setdefault(batch, rate)
        losses = [(step, loss) for one in own for step, loss in one["losses"]]
        expected = first_losses.setdefault(batch, dict(own[0]["losses"]))
        peaks = [one["peak_memory_gib"] for one in own if one["peak_memory_gib"] is not None]
        rows.append(
            {
                "batch": batch,
                "settings": settings,
                "rounds": len(own),
                "samples_per_second": rate,
                "step_ms": statistics.median(one["median_parts"]["step_ms"] for one in own),
                "floor_ms": own[0]["median_parts"].get("floor_ms"),
                "peak_memory_gib": max(peaks, default=None),
                "first_over_this": first[batch] / rate,
                "loss": losses[-1][1],
                "loss_off": max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in losses),
            }
        )
    return rows


def table(rows: Iterable[dict[str, Any]]) -> str:
    titles = (
        f"{'batch':>8}{'M samples/s':>13}{'step ms':>9}{'floor':>7}{'GiB':>7}{'first / it':>12}{'loss':>10}{'loss off':>10}"
    )
    lines = [f"{titles}  settings"]
    for row in rows:
        floor, peak = ("-" if row[key] is None else f"{row[key]:.2f}" for key in ("floor_ms", "peak_memory_gib"))
        lines.append(
            f"{row['batch'] or 'config':>8}{row['samples_per_second'] / 1e6:>13.3f}{row['step_ms']:>9.2f}{floor:>7}{peak:>7}"
            f"{row['first_over_this']:>12.2f}{row['loss']:>10.5f}{row['loss_off']:>10.1e}  {row['settings']}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Draw samples/s by batch size, a line for each contestant; the format follows from the file's suffix."""
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    batches = sorted({row["batch"] or 0 for row in rows})
    for settings in dict.fromkeys(row["settings"] for row in rows):
        own = [row for row in rows if row["settings"] == settings]
        places = [batches.index(row["batch"] or 0) for row in own]
        axis.plot(places, [row["samples_per_second"] / 1e6 for row in own], marker="o", label=settings)
    axis.set_xticks(range(len(batches)), [f"{batch:,}" if batch else "of the config" for batch in batches])
    axis.set_xlabel("global batch size")
    axis.set_ylabel("million samples/s")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="small")
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpus", type=int, default=2, help="ranks, also on a machine without GPUs")
    parser.add_argument("--batches", type=int, nargs="+", help="global batch sizes; by default that of the config")
    parser.add_argument("--rounds", type=int, default=2)
    add_turns(parser, warmup=50, steps=200, at_once=6)
    add_report_arguments(parser)
    parser.add_argument("--plot", type=Path, help="a picture, such as throughput.png")
    parser.add_argument("settings", nargs="+", help="settings of a contestant, such as 'comm=fused training.precision=bf16'")
    options = parser.parse_intermixed_args(arguments)
    turns = turns_of(parser, options)

    report = report_of_runs(options.gpus, options.commit)
    contestants = [
        Contestant(batch, settings)
        for batch in options.batches or [None]
        for _ in range(options.rounds)
        for settings in options.settings
    ]
    runs = [(options.config, contestant.all_settings(), options.gpus) for contestant in contestants]
    for contestant, measured in zip(contestants, turns.train(runs), strict=True):
        report["runs"].append({**asdict(contestant), **measured})
        report["summary"] = summarize(report["runs"])
        # After each run, so that what was measured is there if a later one fails.
        write_results(options.output, report)
    print(table(report["summary"]))
    if options.plot:
        plot(report["summary"], options.plot)


if __name__ == "__main__":
    main()
