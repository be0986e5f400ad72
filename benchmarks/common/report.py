"""Tables and pictures of the operators' benchmarks, from their results; each operator's own report.py has its columns.

python -m benchmarks.common.report results.json [--plot plot.png]
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.harness import geometric_mean

Result = Mapping[str, Any]

# Whose results they are, by the first of these keys that their cells have.
_OPERATORS = {"pooling": "embedding_all_to_all", "size": "gemv_all_reduce", "pair": "all_gather_gemm", "us": "gemm_all_to_all"}
_WORST_CELLS = 3


def mean(cells: Sequence[Result], key: str) -> float | None:
    """Geometric mean over the cells that have the figure; None of no cells."""
    values = [cell[key] for cell in cells if cell[key] is not None]
    return geometric_mean(values) if values else None


def worst(cells: Sequence[Result], key: str = "ratio") -> list[dict[str, Any]]:
    """The cells with the largest figures: their names and the figure."""
    known = sorted((cell for cell in cells if cell[key] is not None), key=lambda cell: cell[key], reverse=True)
    return [{"name": cell["name"], key: cell[key]} for cell in known[:_WORST_CELLS]]


def summarize_groups(
    cells: Sequence[Result], key: str, groups: Sequence[str], figures: Callable[[str, Sequence[Result]], Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """By group: how many cells, the names of those that failed, and the figures of those that passed.

    Args:
        key: of a cell, whose value is its group.
        figures: of a group and its cells that passed.
    """
    summary: dict[str, dict[str, Any]] = {}
    for group in groups:
        own = [cell for cell in cells if cell[key] == group]
        if own:
            passed, failed = ([cell for cell in own if bool(cell["passed"]) is kind] for kind in (True, False))
            names = [cell["name"] for cell in failed]
            summary[group] = {"cells": len(own), "failed": names, "ratio": mean(passed, "ratio"), **figures(group, passed)}
    return summary


def figure(value: float | None) -> str:
    """As a table shows it."""
    return "-" if value is None else f"{value:.3f}"


@contextmanager
def picture(report: Mapping[str, Any], output: Path, rows: int, columns: int, **layout: Any) -> Iterator[Any]:
    """Axes [rows, columns] of matplotlib to draw on, under a title that says where the results come from; then written."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(rows, columns, layout="constrained", squeeze=False, **layout)
    yield axes
    ranks = report["machine"]["ranks"]
    dtype = f"{report['dtype']}, " if "dtype" in report else ""
    canvas.suptitle(f"{len(ranks)} x {ranks[0]}, {dtype}commit {report['commit']}", fontsize=10)
    canvas.savefig(output, dpi=110)


def draw_mean(axis: Any, ratio: float | None) -> None:
    """A line at 1, and one at the geometric mean, if there is one."""
    axis.axvline(1.0, color="black", linewidth=1)
    if ratio is not None:
        axis.axvline(ratio, color="tab:green", linestyle="--", label=f"geometric mean {ratio:.2f}")
        axis.legend(loc="lower right", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON of an operator's benchmark")
    parser.add_argument("--plot", type=Path, help="the picture, such as plot.png or plot.svg")
    options = parser.parse_args()
    report = json.loads(options.results.read_text())
    keys = {key for cell in report.get("cells", []) for key in cell}
    operator = next((operator for key, operator in _OPERATORS.items() if key in keys), None)
    if operator is None:
        parser.error(f"{options.results} has no cells of an operator's benchmark: one of {', '.join(_OPERATORS.values())}")
    own = importlib.import_module(f"benchmarks.{operator}.report")
    print(own.table(report))
    if options.plot:
        own.plot(report, options.plot)


if __name__ == "__main__":
    main()
