"""The command line that the benchmarks of all operators share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from benchmarks.common.harness import add_host_options
from benchmarks.common.results import add_report_arguments


def benchmark_parser(
    description: str | None, cells: Iterable[str], default: str, seconds_per_cell: float
) -> argparse.ArgumentParser:
    """The options of every operator's benchmark; an operator adds its own.

    Args:
        cells: names of sets of cells.
        default: of those.
        seconds_per_cell: of timing, unless the command line says otherwise.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--cells", choices=list(cells), default=default)
    parser.add_argument("--match", default="", help="only cells in whose name this regular expression is found")
    parser.add_argument("--seconds-budget", type=float, help="no cell is begun later; the others are listed as not run")
    add_host_options(parser)
    parser.add_argument("--seconds-per-cell", type=float, default=seconds_per_cell, help="of timing, for each stage of a cell")
    return parser
