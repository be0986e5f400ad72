"""Table and picture of the benchmark of AllGather + GEMM and GEMM + ReduceScatter: benchmarks/common/report.py shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.all_gather_gemm.layers import schedules_of
from benchmarks.common.report import Result, draw_mean, figure, mean, picture, summarize_groups, worst
from dlrm_fused.ops.schedules import Pair

PAIRS = (Pair.all_gather_gemm, Pair.gemm_reduce_scatter)
_NAME_WIDTH = 20


def of_pair(cells: Sequence[Result], pair: Pair) -> list[Result]:
    return [cell for cell in cells if cell["pair"] == pair]


def summarize(cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """By pair: geometric means (None of no cells) and worst cells of those that passed, and the names of those that failed."""

    def figures(_: str, passed: Sequence[Result]) -> dict[str, Any]:
        return {
            "slower": sum(cell["ratio"] > 1 for cell in passed),
            "worst": worst(passed),
            "overlap": mean(passed, "overlap"),
            "over_floor": mean(passed, "over_floor"),
        }

    return summarize_groups(cells, "pair", list(PAIRS), figures)


def contestants(pair: Pair) -> list[str]:
    return ["nccl", *schedules_of(pair), "gemm"]


def header(pair: Pair) -> str:
    times = "".join(f"{name:>11}" for name in contestants(pair))
    return f"{'M x N x K':<{_NAME_WIDTH}}{times}{'link':>9}{'floor':>9}{'ratio':>8}{'overlap':>9}{'/floor':>8}  best"


def line(cell: Result) -> str:
    """A line of the table: times in microseconds."""
    if "error" in cell:
        return f"{cell['name']:<{_NAME_WIDTH}}FAILED {cell['error']}"
    us = cell["us"]
    times = "".join(f"{us[name]:>11.1f}" if name in us else f"{'-':>11}" for name in contestants(Pair(cell["pair"])))
    text = (
        f"{cell['name']:<{_NAME_WIDTH}}{times}{cell['link_us']:>9.1f}{cell['floor_us']:>9.1f}{cell['ratio']:>8.3f}"
        f"{cell['overlap']:>9.3f}{cell['over_floor']:>8.2f}  {cell['best']}"
    )
    return text if cell["passed"] else f"{text}  FAILED {cell['errors']}"


def table(report: Mapping[str, Any]) -> str:
    """All cells, then geometric means and worst cells, by pair."""
    cells, lines = report["cells"], []
    for name, figures in summarize(cells).items():
        pair = Pair(name)
        lines += ["", f"{pair} (us)", header(pair), *(line(cell) for cell in of_pair(cells, pair))]
        lines.append(
            f"geometric means of {figures['cells'] - len(figures['failed'])} cells: best schedule / (cuBLAS + NCCL) "
            f"{figure(figures['ratio'])}, over the longer of cuBLAS and links {figure(figures['overlap'])}, over floor "
            f"{figure(figures['over_floor'])}"
        )
        lines += [f"worst: {cell['ratio']:.3f} {cell['name']}" for cell in figures["worst"]]
        lines.append(f"slower: {figures['slower']}; failed: {len(figures['failed'])}")
    for name in report["not_run"]:
        lines.append(f"not run: {name}")
    return "\n".join(lines)


def plot(report: Mapping[str, Any], output: Path) -> None:
    """The ratio of every cell, by pair, in the order of the cells; cells that failed are left out."""
    summary = summarize(report["cells"])
    rows = max(len(of_pair(report["cells"], Pair(pair))) for pair in summary)
    with picture(report, output, 1, len(summary), figsize=(6.5 * len(summary), 1.5 + 0.2 * rows)) as axes:
        for axis, (pair, figures) in zip(axes.flat, summary.items(), strict=True):
            passed = [cell for cell in of_pair(report["cells"], Pair(pair)) if cell["passed"]][::-1]
            colours = ["tab:red" if cell["ratio"] >= 1 else "tab:blue" for cell in passed]
            axis.barh(range(len(passed)), [cell["ratio"] for cell in passed], color=colours, height=0.7)
            axis.set_yticks(range(len(passed)), [f"{cell['name']} {cell['best']}" for cell in passed], fontsize=7)
            draw_mean(axis, figures["ratio"])
            axis.set_xlabel("time of the best schedule / (cuBLAS + NCCL)")
            axis.set_title(pair, fontsize=10)
            axis.grid(axis="x", alpha=0.3)
