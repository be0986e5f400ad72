"""Table and picture of the GEMM + All-to-All benchmark: benchmarks/common/report.py shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.report import Result, draw_mean, figure, mean, picture, summarize_groups, worst


@dataclass(frozen=True)
class Stage:
    """What is measured of a cell.

    Attributes:
        title: of its table.
        ratio: what the ratio is of.
        contestants: columns of the table.
    """

    title: str
    ratio: str
    contestants: tuple[str, ...]


STAGES = {
    "op": Stage(
        "GEMM + All-to-All",
        "fused / (cuBLAS + NCCL)",
        ("fused", "kernel", "chunks", "chunks_2", "chunks_4", "tapered", "library", "nccl", "gemm"),
    ),
    "gemm": Stage("GEMM alone", "kernel / cuBLAS", ("kernel", "gemm")),
    "layer_forward": Stage("expert layer, forward", "fused / unfused", ("fused", "baseline")),
    "layer_training": Stage("expert layer, forward + backward", "fused / unfused", ("fused", "baseline")),
}
_NAME_WIDTH = 38


def of_stage(cells: Sequence[Result], stage: str) -> list[Result]:
    return [cell for cell in cells if cell["stage"] == stage]


def summarize(cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """By stage: geometric means (None of no cells) and worst cells of those that passed, and the names of those that failed."""

    def figures(stage: str, passed: Sequence[Result]) -> dict[str, Any]:
        overlap = {"overlap": mean(passed, "overlap")} if stage == "op" else {}
        return {
            "slower": sum(cell["ratio"] >= 1 for cell in passed),
            "worst": worst(passed),
            "over_floor": mean(passed, "over_floor"),
            **overlap,
        }

    return summarize_groups(cells, "stage", list(STAGES), figures)


def header(stage: str) -> str:
    times = "".join(f"{name:>10}" for name in STAGES[stage].contestants)
    overlap = f"{'overlap':>9}  schedule" if stage == "op" else ""
    return f"{'cell':<{_NAME_WIDTH}}{times}{'floor':>10}{'ratio':>8}{'/floor':>8}{overlap}"


def line(cell: Result) -> str:
    """A line of the table: times in microseconds."""
    if "error" in cell:
        return f"{cell['name']:<{_NAME_WIDTH}}FAILED {cell['error']}"
    times = "".join(
        f"{cell['us'][name]:>10.1f}" if name in cell["us"] else f"{'-':>10}" for name in STAGES[cell["stage"]].contestants
    )
    text = f"{cell['name']:<{_NAME_WIDTH}}{times}{cell['floor_us']:>10.1f}{cell['ratio']:>8.3f}{cell['over_floor']:>8.2f}"
    if cell["stage"] == "op":
        text += f"{cell['overlap']:>9.3f}  {cell['schedule']}"
    return text if cell["passed"] else f"{text}  FAILED {cell['errors']}"


def table(report: Mapping[str, Any]) -> str:
    """All cells, then geometric means and worst cells, by stage."""
    cells, lines = report["cells"], []
    for stage, figures in summarize(cells).items():
        lines += ["", f"{STAGES[stage].title} (us)", header(stage), *(line(cell) for cell in of_stage(cells, stage))]
        means = f"{STAGES[stage].ratio} {figure(figures['ratio'])}, over floor {figure(figures['over_floor'])}"
        if stage == "op":
            means += f", over the longer of cuBLAS and links {figure(figures['overlap'])}"
        lines.append(f"geometric means of {figures['cells'] - len(figures['failed'])} cells: {means}")
        lines += [f"worst: {cell['ratio']:.3f} {cell['name']}" for cell in figures["worst"]]
        lines.append(f"slower: {figures['slower']}; failed: {len(figures['failed'])}")
    for name in report["not_run"]:
        lines.append(f"not run: {name}")
    return "\n".join(lines)


def plot(report: Mapping[str, Any], output: Path) -> None:
    """The ratio of every cell, by stage, in the order of the cells; cells that failed are left out."""
    summary = summarize(report["cells"])
    rows = max(len(of_stage(report["cells"], stage)) for stage in summary)
    with picture(report, output, 1, len(summary), figsize=(6.5 * len(summary), 1.5 + 0.2 * rows)) as axes:
        for axis, (stage, figures) in zip(axes.flat, summary.items(), strict=True):
            passed = [cell for cell in of_stage(report["cells"], stage) if cell["passed"]][::-1]
            colours = ["tab:red" if cell["ratio"] >= 1 else "tab:blue" for cell in passed]
            axis.barh(range(len(passed)), [cell["ratio"] for cell in passed], color=colours, height=0.7)
            axis.set_yticks(range(len(passed)), [cell["name"] for cell in passed], fontsize=7, family="monospace")
            draw_mean(axis, figures["ratio"])
            axis.set_xlabel(f"time of {STAGES[stage].ratio}")
            axis.set_title(STAGES[stage].title, fontsize=10)
            axis.grid(axis="x", alpha=0.3)
