"""Table, means and picture of operators' results, of this run or recorded."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.operators import OPERATORS
from benchmarks.operators.blocks import TUNABLE

Result = Mapping[str, Any]

# Keys of records that say which stage a record is of.
_KEYS = ("stage", "pair", "size")
# By what a ratio compares, and by stage: the title of its table.
_TITLES = {
    "fused / (FBGEMM + NCCL, as TorchRec runs them)": {
        "forward": "pooled lookup + All-to-All, forward",
        "training": "the same with backward and rowwise Adagrad",
        "row_wise_forward": "row-wise tables, forward",
        "row_wise_training": "the same with backward and rowwise Adagrad",
        "sequence_forward": "unpooled lookup + All-to-All, forward",
        "sequence_training": "the same with backward and rowwise Adagrad",
    },
    "fused / (cuBLAS + NCCL)": {"small": "GEMV + AllReduce", "large": "GEMM + AllReduce", "op": "GEMM + All-to-All"},
    "kernel / cuBLAS": {"gemm": "GEMM alone"},
    "fused / FlashAttention": {
        "attention_forward": "HSTU's attention, forward",
        "attention_training": "HSTU's attention, forward + backward",
    },
    "fused / unfused": {"layer_forward": "expert layer, forward", "layer_training": "expert layer, forward + backward"},
    "best schedule / (cuBLAS + NCCL)": {
        "all_gather_gemm": "AllGather + GEMM",
        "gemm_reduce_scatter": "GEMM + ReduceScatter",
    },
}
# By stage: the title of its table, and what the ratio compares.
STAGES = {stage: (title, ratio) for ratio, titles in _TITLES.items() for stage, title in titles.items()}
# Figures of a record, after the times: head and decimals.
_FIGURES = {
    "floor_us": ("floor", 1),
    "ratio": ("ratio", 3),
    "over_floor": ("/floor", 2),
    "overlap": ("overlap", 3),
    "ratio_to_symmetric": ("/symm", 3),
    "ratio_to_copy": ("/copy", 3),
    "ratio_to_defaults": ("/defaults", 3),
}
_MEANS = [key for key in _FIGURES if key != "floor_us"]
# As in the scoring of few candidates.
FEW_ROWS = 16
_WORST_CELLS = 3
_COLOURS = {"failed": "black", "slower": "tab:red", "faster": "tab:blue"}


def stage_of(cell: Result) -> str:
    return next(str(cell[key]) for key in _KEYS if key in cell)


def mean(cells: Sequence[Result], key: str) -> float | None:
    """The geometric mean over the cells that have the figure; None if there are none."""
    values = [cell[key] for cell in cells if cell.get(key) is not None]
    return statistics.geometric_mean(values) if values else None


def by_stage(cells: Sequence[Result]) -> dict[str, list[Result]]:
    stages: dict[str, list[Result]] = {}
    for cell in cells:
        stages.setdefault(stage_of(cell), []).append(cell)
    return stages


def summarize(cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """By stage: means (None of no cells) and worst cells of those that passed, names of those that failed."""
    summary: dict[str, dict[str, Any]] = {}
    for stage, own in by_stage(cells).items():
        passed = [cell for cell in own if cell["passed"]]
        worst = sorted(passed, key=lambda cell: float(cell["ratio"]), reverse=True)[:_WORST_CELLS]
        means = {key: mean(passed, key) for key in _MEANS if key == "ratio" or any(key in cell for cell in own)}
        if stage == "small":
            means["ratio_of_few_rows"] = mean([cell for cell in passed if cell["m"] <= FEW_ROWS], "ratio")
        summary[stage] = {
            "cells": len(own),
            "failed": [cell["name"] for cell in own if not cell["passed"]],
            **means,
            "slower": sum(cell["ratio"] >= 1 for cell in passed),
            "worst": [{"name": cell["name"], "ratio": cell["ratio"]} for cell in worst],
        }
    return summary


def figure(value: float | None, decimals: int = 3) -> str:
    """The figure as tables show it."""
    return "-" if value is None else f"{value:.{decimals}f}"


def row(cell: Result, contestants: Sequence[str], width: int) -> str:
    """A cell's line in the table."""
    name = f"{cell['name']:<{width}}"
    if "error" in cell:
        return f"{name}FAILED {cell['error']}"
    times = "".join(f"{figure(cell['us'].get(contestant), 1):>11}" for contestant in contestants)
    others = "".join(f"{figure(cell[key], decimals):>10}" for key, (_, decimals) in _FIGURES.items() if key in cell)
    text = f"{name}{times}{others}  {cell.get('best', cell.get('schedule', ''))}".rstrip()
    return text if cell["passed"] else f"{text}  FAILED {_failure(cell)}"


def _failure(cell: Result) -> str:
    same = cell.get("same_bits_on_all_ranks", {"fused": True})["fused"]
    return f"{cell['errors']}" + ("" if same else ", not the same bits on all ranks")


def line(cell: Result) -> str:
    """A line of the log, about a cell that has just been measured."""
    head = f"{stage_of(cell):<20} {cell['name']:<44} "
    if "error" in cell:
        return f"{head}FAILED {cell['error']}"
    times = ", ".join(f"{name} {us:.1f}" for name, us in cell["us"].items())
    failure = "" if cell["passed"] else f"  FAILED {_failure(cell)}"
    return f"{head}ratio {cell['ratio']:.3f}: {times}; floor {cell['floor_us']:.1f}{failure}"


def table(report: Result) -> str:
    """All cells, by stage, then means and worst cells."""
    lines: list[str] = []
    stages, summary = by_stage(report["cells"]), summarize(report["cells"])
    for stage, cells in stages.items():
        figures = summary[stage]
        contestants = list(dict.fromkeys(name for cell in cells for name in cell.get("us", {})))
        width = 2 + max(len(cell["name"]) for cell in cells)
        heads = [head for key, (head, _) in _FIGURES.items() if any(key in cell for cell in cells)]
        lines += ["", "{} (us); ratio: {}".format(*STAGES[stage])]
        lines.append(" " * width + "".join(f"{name:>11}" for name in contestants) + "".join(f"{head:>10}" for head in heads))
        lines += [row(cell, contestants, width) for cell in cells]
        means = ", ".join(f"{key} {figure(figures[key])}" for key in (*_MEANS, "ratio_of_few_rows") if key in figures)
        lines.append(f"geometric means of {figures['cells'] - len(figures['failed'])} cells: {means}")
        lines += [f"worst: {cell['ratio']:.3f} {cell['name']}" for cell in figures["worst"]]
        lines.append(f"slower: {figures['slower']}; failed: {len(figures['failed'])}")
    return "\n".join([*lines, *(f"not run: {name}" for name in report["not_run"])])


def plot(report: Result, output: Path) -> None:
    """Draw the ratio of every cell, a picture for each stage; cells that lose are red, failed ones black."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    stages, summary = by_stage(report["cells"]), summarize(report["cells"])
    heights = [1.2 + 0.17 * len(cells) for cells in stages.values()]
    size = (9, 0.5 + sum(heights))
    canvas, axes = plt.subplots(len(stages), figsize=size, height_ratios=heights, layout="constrained", squeeze=False)
    for axis, (stage, cells) in zip(axes.flat, stages.items(), strict=True):
        kinds = ["failed" if not cell["passed"] else "slower" if cell["ratio"] >= 1 else "faster" for cell in cells]
        ratios = [cell["ratio"] if cell["passed"] else 1.0 for cell in cells]
        axis.barh(range(len(cells)), ratios, color=[_COLOURS[kind] for kind in kinds], height=0.7)
        axis.set_yticks(range(len(cells)), [cell["name"] for cell in cells], fontsize=6, family="monospace")
        axis.set_ylim(len(cells) - 0.4, -0.6)
        axis.axvline(1.0, color="black", linewidth=1)
        if (ratio := summary[stage]["ratio"]) is not None:
            axis.axvline(ratio, color="tab:green", linestyle="--", label=f"geometric mean {ratio:.2f}")
            axis.legend(loc="lower right", fontsize=8)
        axis.grid(axis="x", alpha=0.3)
        axis.set_xlabel(f"time of {STAGES[stage][1]}")
        axis.set_title(STAGES[stage][0], fontsize=10)
    ranks = report["machine"]["ranks"]
    canvas.suptitle(f"{len(ranks)} x {ranks[0]}, commit {report['commit']}", fontsize=10)
    canvas.savefig(output, dpi=110)
    plt.close(canvas)


def report(file: Path, picture: Path | None) -> int:
    """Print the tables of recorded results, and draw them; the exit status."""
    content = json.loads(file.read_text())
    if all("times" in cell for cell in content.get("cells", [{}])):
        print(TUNABLE[content["operator"]].table(content["cells"]))
        return 0
    if not any(key in cell for cell in content.get("cells", []) for key in _KEYS):
        raise SystemExit(f"{file} has no cells of an operator's benchmark: one of {', '.join(OPERATORS)}")
    print(table(content))
    if picture is not None:
        plot(content, picture)
    return 0
