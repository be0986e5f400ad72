"""Tables and pictures of the operators' benchmarks, from their results; each operator's own report.py declares its columns.

python -m benchmarks.common.report results.json [--plot plot.png]
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import geometric_mean

Result = Mapping[str, Any]

# The keys by which the cells of an operator's results are known.
_OPERATORS = {
    "embedding_all_to_all": {"stage", "pooling"},
    "gemv_all_reduce": {"size"},
    "all_gather_gemm": {"pair"},
    "gemm_all_to_all": {"stage", "us"},
}
_WORST_CELLS = 3
_COLOURS = {"faster": "tab:blue", "slower": "tab:red", "failed": "black"}


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        value: returns the number of a cell, or None for a dash, or text, which stands two blanks to the right.
    """

    head: str
    value: Callable[[Result], float | str | None]
    width: int = 10
    decimals: int = 1

    def show(self, cell: Result) -> str:
        value = self.value(cell)
        if isinstance(value, str):
            return f"  {value}"
        return f"{'-':>{self.width}}" if value is None else f"{value:>{self.width}.{self.decimals}f}"


def field(key: str, head: str, width: int = 10, decimals: int = 1) -> Column:
    """Return the column of a figure of the cell."""
    return Column(head, lambda cell: cell[key], width, decimals)


def times(names: Sequence[str], width: int = 10) -> list[Column]:
    """Return a column for each contestant, in microseconds."""
    return [Column(name, lambda cell, name=name: cell["us"].get(name), width) for name in names]  # type: ignore[misc]


def mean(cells: Sequence[Result], key: str) -> float | None:
    """Return the geometric mean over the cells that have the figure; None if there are none."""
    values = [cell[key] for cell in cells if cell.get(key) is not None]
    return geometric_mean(values) if values else None


def worst(cells: Sequence[Result], key: str = "ratio") -> list[dict[str, Any]]:
    """Return names and figures of the cells with the largest figures."""
    known = sorted((cell for cell in cells if cell[key] is not None), key=lambda cell: cell[key], reverse=True)
    return [{"name": cell["name"], key: cell[key]} for cell in known[:_WORST_CELLS]]


def figure(value: float | None) -> str:
    """Return the figure as a table shows it."""
    return "-" if value is None else f"{value:.3f}"


@dataclass(frozen=True)
class OperatorReport:
    """Table and picture of an operator's benchmark, a part for each group of cells.

    Attributes:
        key: of a cell, whose value is its group.
        titles: of the groups, in the order of the report.
        ratios: by group, what the ratio of a cell compares.
        columns: returns those of a group, after the cell's name.
        means: figures of which the summary has the geometric mean, besides ``ratio``.
        name: head and width of the first column.
        slower: key of the summary for the number of cells whose ratio is 1 or more.
        against: whom those cells are slower than, as the table says it.
    """

    key: str
    titles: Mapping[str, str]
    ratios: Mapping[str, str]
    columns: Callable[[str], Sequence[Column]]
    means: Sequence[str]
    name: tuple[str, int]
    slower: str = "slower"
    against: str = ""

    def figures(self, passed: Sequence[Result]) -> Mapping[str, Any]:
        """Return what the summary of a group has besides: from its cells that passed."""
        return {}

    def describe_means(self, group: str, figures: Result) -> list[str]:
        """Return the lines of the table about a group's means; the first goes on after ``geometric means of N cells:``."""
        overlap = f"over the longer of cuBLAS and links {figure(figures['overlap'])}"
        return [f"{self.ratios[group]} {figure(figures['ratio'])}, {overlap}, over floor {figure(figures['over_floor'])}"]

    def describe_worst(self, figures: Result) -> list[str]:
        return [f"worst: {cell['ratio']:.3f} {cell['name']}" for cell in figures["worst"]]

    def describe_failure(self, cell: Result) -> str:
        return str(cell["errors"])

    def of_group(self, cells: Sequence[Result], group: str) -> list[Result]:
        return [cell for cell in cells if cell[self.key] == group]

    def summarize(self, cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
        """Return by group: means (None of no cells) and worst cells of those that passed, names of those that failed."""
        summary: dict[str, dict[str, Any]] = {}
        for group in self.titles:
            if own := self.of_group(cells, group):
                passed = [cell for cell in own if cell["passed"]]
                summary[group] = {
                    "cells": len(own),
                    "failed": [cell["name"] for cell in own if not cell["passed"]],
                    **{key: mean(passed, key) for key in ("ratio", *self.means)},
                    self.slower: sum(cell["ratio"] >= 1 for cell in passed),
                    "worst": worst(passed),
                    **self.figures(passed),
                }
        return summary

    def line(self, cell: Result) -> str:
        """Return a line of the table: times in microseconds."""
        name = f"{cell['name']:<{self.name[1]}}"
        if "error" in cell:
            return f"{name}FAILED {cell['error']}"
        text = name + "".join(column.show(cell) for column in self.columns(cell[self.key]))
        return text if cell["passed"] else f"{text}  FAILED {self.describe_failure(cell)}"

    def header(self, group: str) -> str:
        return f"{self.name[0]:<{self.name[1]}}" + "".join(f"{own.head:>{own.width}}" for own in self.columns(group))

    def table(self, report: Result) -> str:
        """Return all cells, then geometric means and worst cells, by group."""
        lines: list[str] = []
        for group, figures in self.summarize(report["cells"]).items():
            first, *others = self.describe_means(group, figures)
            failed = len(figures["failed"])
            lines += ["", f"{self.titles[group]} (us)", self.header(group)]
            lines += map(self.line, self.of_group(report["cells"], group))
            lines += [f"geometric means of {figures['cells'] - failed} cells: {first}", *others]
            lines += self.describe_worst(figures)
            lines.append(f"slower{self.against}: {figures[self.slower]}; failed: {failed}")
        return "\n".join([*lines, *(f"not run: {name}" for name in report["not_run"])])

    def label(self, cell: Result) -> str:
        """Return the cell's name in the picture."""
        return str(cell["name"])

    def in_order(self, cells: Sequence[Result]) -> list[Result]:
        """Return the cells as the picture has them, from below."""
        return list(cells)[::-1]

    def draw(self, axis: Any, group: str, cells: Sequence[Result], ratio: float | None) -> None:
        """Draw the ratio of every cell; cells that lose are red, failed ones black."""
        own = self.in_order(cells)
        kinds = ["failed" if not cell["passed"] else "slower" if cell["ratio"] >= 1 else "faster" for cell in own]
        ratios = [cell["ratio"] if cell["passed"] else 1.0 for cell in own]
        axis.barh(range(len(own)), ratios, color=[_COLOURS[kind] for kind in kinds], height=0.7)
        axis.set_yticks(range(len(own)), [self.label(cell) for cell in own], fontsize=6, family="monospace")
        axis.set_ylim(-0.6, len(own) - 0.4)
        axis.axvline(1.0, color="black", linewidth=1)
        if ratio is not None:
            axis.axvline(ratio, color="tab:green", linestyle="--", label=f"geometric mean {ratio:.2f}")
            axis.legend(loc="lower right", fontsize=8)
        axis.set_xlabel(f"time of {self.ratios[group]}")
        axis.grid(axis="x", alpha=0.3)

    def height(self, cells: int) -> float:
        """Return the inches of a group's picture."""
        return 1.2 + 0.17 * cells

    def plot(self, report: Result, output: Path) -> None:
        """Draw the groups, two in a row, under a title that says where the results come from."""
        import matplotlib

        matplotlib.use("Agg")  # no display is needed
        import matplotlib.pyplot as plt

        summary = self.summarize(report["cells"])
        columns, numbers = min(2, len(summary)), [figures["cells"] for figures in summary.values()]
        heights = [self.height(max(numbers[i : i + columns])) for i in range(0, len(numbers), columns)]
        size = (7 * columns, 0.5 + math.fsum(heights))
        canvas, axes = plt.subplots(
            len(heights), columns, figsize=size, height_ratios=heights, layout="constrained", squeeze=False
        )
        for unused in axes.flat[len(summary) :]:
            unused.set_visible(False)
        for axis, (group, figures) in zip(axes.flat, summary.items(), strict=False):
            self.draw(axis, group, self.of_group(report["cells"], group), figures["ratio"])
            axis.set_title(self.titles[group], fontsize=10)
        ranks = report["machine"]["ranks"]
        dtype = f"{report['dtype']}, " if "dtype" in report else ""
        canvas.suptitle(f"{len(ranks)} x {ranks[0]}, {dtype}commit {report['commit']}", fontsize=10)
        canvas.savefig(output, dpi=110)
        plt.close(canvas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON of an operator's benchmark")
    parser.add_argument("--plot", type=Path, help="the picture, such as plot.png or plot.svg")
    options = parser.parse_args()
    report = json.loads(options.results.read_text())
    keys = {key for cell in report.get("cells", []) for key in cell}
    operator = next((operator for operator, own in _OPERATORS.items() if own <= keys), None)
    if operator is None:
        parser.error(f"{options.results} has no cells of an operator's benchmark: one of {', '.join(_OPERATORS)}")
    own: OperatorReport = importlib.import_module(f"benchmarks.{operator}.report").REPORT
    print(own.table(report))
    if options.plot:
        own.plot(report, options.plot)


if __name__ == "__main__":
    main()
