"""Table and picture of the embedding benchmark: benchmarks/common/report.py shows it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import Result, draw_mean, figure, mean, picture, summarize_groups, worst

STAGES = {
    "forward": "forward",
    "training": "forward + backward + rowwise Adagrad",
    "row_wise_forward": "row-wise, forward",
    "row_wise_training": "row-wise, forward + backward + rowwise Adagrad",
}
# The overlap is judged in cells whose fused time exceeds this.
_LONG_CELL_MICROSECONDS = 100.0
_COLOURS = {"faster": "tab:blue", "slower": "tab:red", "failed": "black"}


def of_stage(cells: Sequence[Result], stage: str) -> list[Result]:
    return [cell for cell in cells if cell["stage"] == stage]


def summarize(cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """By stage: geometric means (None of no cells) and worst cells of those that passed, and the names of those that failed."""

    def figures(_: str, passed: Sequence[Result]) -> dict[str, Any]:
        long_cells = [cell for cell in passed if cell["fused_us"] > _LONG_CELL_MICROSECONDS]
        return {
            "ratio_to_defaults": mean(passed, "ratio_to_defaults"),
            "ratio_to_copy": mean(passed, "ratio_to_copy"),
            "slower_than_baseline": sum(cell["ratio"] >= 1 for cell in passed),
            "worst": worst(passed),
            "fused_over_floor": mean(passed, "fused_over_floor"),
            "overlap": mean(long_cells, "overlap"),
            "overlap_of_stores": mean(long_cells, "overlap_of_stores"),
            "overlap_cells": len(long_cells),
        }

    return summarize_groups(cells, "stage", list(STAGES), figures)


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
            f"fused / baseline {figure(figures['ratio'])}, fused / baseline of TorchRec's defaults "
            f"{figure(figures['ratio_to_defaults'])}, fused / TBE+copy {figure(figures['ratio_to_copy'])}, "
            f"fused / floor {figure(figures['fused_over_floor'])}",
            f"overlap {figure(figures['overlap'])} (against the speed of stores {figure(figures['overlap_of_stores'])}): "
            f"geometric mean of the {figures['overlap_cells']} cells above {_LONG_CELL_MICROSECONDS:.0f} us",
        ]
        lines += [f"worst: {cell['ratio']:.3f} {cell['name']}" for cell in figures["worst"]]
        lines.append(f"slower than the baseline: {figures['slower_than_baseline']}; failed: {len(figures['failed'])}")
    for name in report["not_run"]:
        lines.append(f"not run: {name}")
    return "\n".join(lines)


def plot(report: Mapping[str, Any], output: Path) -> None:
    """Fused / baseline of every cell, by stage, worst on top; cells that lose are red, failed ones black."""
    cells = report["cells"]
    summary = summarize(cells)
    stages = list(summary)
    heights = [
        1.2 + 0.17 * max(summary[stage]["cells"] for stage in pair)
        for pair in (stages[i : i + 2] for i in range(0, len(stages), 2))
    ]
    columns = min(2, len(stages))
    size = (7 * columns, 0.5 + sum(heights))
    with picture(report, output, len(heights), columns, figsize=size, height_ratios=heights) as axes:
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
            draw_mean(axis, figures["ratio"])
            axis.set_xlabel("time of fused / time of FBGEMM + NCCL (TorchRec)")
            axis.set_title(STAGES[stage], fontsize=10)
            axis.grid(axis="x", alpha=0.3)
