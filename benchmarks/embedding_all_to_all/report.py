"""Table and picture of the embedding benchmark.

python -m benchmarks.embedding_all_to_all.report results.json --plot plot.png
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.harness import geometric_mean
from benchmarks.common.report_command import show_report

Result = Mapping[str, Any]

STAGES = {
    "forward": "forward",
    "training": "forward + backward + rowwise Adagrad",
    "row_wise_forward": "row-wise, forward",
    "row_wise_training": "row-wise, forward + backward + rowwise Adagrad",
}
# The overlap is judged in cells whose fused time exceeds this.
_LONG_CELL_MICROSECONDS = 100.0
_WORST_CELLS = 3
_COLOURS = {"faster": "tab:blue", "slower": "tab:red", "failed": "black"}


def of_stage(cells: Sequence[Result], stage: str) -> list[Result]:
    return [cell for cell in cells if cell["stage"] == stage]


def summarize(cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """By stage: geometric means (None of no cells) and worst cells of those that passed, and the names of those that failed."""
    summary: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        own = of_stage(cells, stage)
        passed = [cell for cell in own if cell["passed"]]
        long_cells = [cell for cell in passed if cell["fused_us"] > _LONG_CELL_MICROSECONDS]
        if own:
            worst = sorted(passed, key=lambda cell: cell["ratio"], reverse=True)[:_WORST_CELLS]
            summary[stage] = {
                "cells": len(own),
                "failed": [cell["name"] for cell in own if not cell["passed"]],
                "ratio": _mean(passed, "ratio"),
                "ratio_to_defaults": _mean(passed, "ratio_to_defaults"),
                "ratio_to_copy": _mean(passed, "ratio_to_copy"),
                "slower_than_baseline": sum(cell["ratio"] >= 1 for cell in passed),
                "worst": [{"name": cell["name"], "ratio": cell["ratio"]} for cell in worst],
                "fused_over_floor": _mean(passed, "fused_over_floor"),
                "overlap": _mean(long_cells, "overlap"),
                "overlap_of_stores": _mean(long_cells, "overlap_of_stores"),
                "overlap_cells": len(long_cells),
            }
    return summary


def _mean(cells: Sequence[Result], key: str) -> float | None:
    values = [cell[key] for cell in cells if cell[key] is not None]
    return geometric_mean(values) if values else None


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


_HEADER = (
    f"{'cell':<44}{'baseline':>10}{'TBE+copy':>10}{'fused':>10}{'ratio':>7}"
    f"{'floor':>9}{'fused/fl.':>10}{'overlap':>9}{'TBE':>9}"
)


def line(cell: Result) -> str:
    """A line of the table: times in microseconds."""
    if "error" in cell:
        return f"{cell['name']:<44}FAILED {cell['error']}"
    copy = f"{cell['copy_us']:>10.1f}" if cell["copy_us"] else f"{'-':>10}"
    text = (
        f"{cell['name']:<44}{cell['baseline_us']:>10.1f}{copy}{cell['fused_us']:>10.1f}{cell['ratio']:>7.3f}"
        f"{cell['floor_us']:>9.1f}{cell['fused_over_floor']:>10.2f}{cell['overlap']:>9.2f}{cell['lookup_us']:>9.1f}"
    )
    return text if cell["passed"] else f"{text}  FAILED {cell['errors']}"


def table(report: Mapping[str, Any]) -> str:
    """All cells, then geometric means and worst cells, by stage."""
    cells, lines = report["cells"], []
    for stage, figures in summarize(cells).items():
        lines += ["", f"{STAGES[stage]} (us)", _HEADER, *(line(cell) for cell in of_stage(cells, stage))]
        lines += [
            f"geometric means of {figures['cells'] - len(figures['failed'])} cells: "
            f"fused / baseline {_figure(figures['ratio'])}, fused / baseline of TorchRec's defaults "
            f"{_figure(figures['ratio_to_defaults'])}, fused / TBE+copy {_figure(figures['ratio_to_copy'])}, "
            f"fused / floor {_figure(figures['fused_over_floor'])}",
            f"overlap {_figure(figures['overlap'])} (against the speed of stores {_figure(figures['overlap_of_stores'])}): "
            f"geometric mean of the {figures['overlap_cells']} cells above {_LONG_CELL_MICROSECONDS:.0f} us",
        ]
        lines += [f"worst: {cell['ratio']:.3f} {cell['name']}" for cell in figures["worst"]]
        lines.append(f"slower than the baseline: {figures['slower_than_baseline']}; failed: {len(figures['failed'])}")
    for name in report["not_run"]:
        lines.append(f"not run: {name}")
    return "\n".join(lines)


def plot(report: Mapping[str, Any], output: Path) -> None:
    """Fused / baseline of every cell, by stage, worst on top; cells that lose are red, failed ones black."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    cells = report["cells"]
    summary = summarize(cells)
    stages = list(summary)
    heights = [
        1.2 + 0.17 * max(summary[stage]["cells"] for stage in pair)
        for pair in (stages[i : i + 2] for i in range(0, len(stages), 2))
    ]
    figure, axes = plt.subplots(
        len(heights),
        min(2, len(stages)),
        figsize=(7 * min(2, len(stages)), 0.5 + sum(heights)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for unused in axes.flat[len(stages) :]:
        unused.set_visible(False)
    for axis, (stage, figures) in zip(axes.flat, summary.items(), strict=False):
        own = sorted(of_stage(cells, stage), key=lambda cell: cell["ratio"] if cell["passed"] else math.inf)
        ratios = [cell["ratio"] if cell["passed"] else 1.0 for cell in own]
        kinds = ["failed" if not cell["passed"] else "slower" if cell["ratio"] >= 1 else "faster" for cell in own]
        places = range(len(own))
        axis.barh(places, ratios, color=[_COLOURS[kind] for kind in kinds], height=0.7)
        axis.set_yticks(places, [cell["name"].removeprefix("row-wise ") for cell in own], fontsize=6, family="monospace")
        axis.set_ylim(-0.6, len(own) - 0.4)
        axis.axvline(1.0, color="black", linewidth=1)
        if figures["ratio"] is not None:
            axis.axvline(figures["ratio"], color="tab:green", linestyle="--", label=f"geometric mean {figures['ratio']:.2f}")
            axis.legend(loc="lower right", fontsize=8)
        axis.set_xlabel("time of fused / time of FBGEMM + NCCL (TorchRec)")
        axis.set_title(STAGES[stage], fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    ranks = report["machine"]["ranks"]
    figure.suptitle(f"{len(ranks)} x {ranks[0]}, commit {report['commit']}", fontsize=10)
    figure.savefig(output, dpi=110)


if __name__ == "__main__":
    show_report(__doc__, table, plot)
