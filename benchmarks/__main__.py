"""Benchmarks of operators: times, tuning, stress tests, and comparisons of checkouts.

torchrun --standalone --nproc-per-node=4 -m benchmarks run gemv_all_reduce --cells small --graphs --output results.json
python -m benchmarks report results.json --plot plot.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.common.harness import add_host_options
from benchmarks.common.results import add_report_arguments
from benchmarks.operators import OPERATORS, compare, load, report, run, stress, tune
from benchmarks.operators.blocks import TUNABLE
from benchmarks.operators.compare import COMPARABLE
from benchmarks.operators.killed_rank import add_kill_options


def add_cell_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which cells are run, and for how long."""
    parser.add_argument("--cells", help="a set of the operator's, such as tiny, small, all")
    parser.add_argument("--match", default="", help="only cells in whose name this regular expression is found")
    parser.add_argument("--seconds-budget", type=float, help="no cell is begun later; the others are listed as not run")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    add_cell_options(parser)
    parser.add_argument("--graphs", action="store_true", help="time calls below 50 us in CUDA graphs")
    parser.add_argument("--stages", default="", help="only stages in whose name this regular expression is found")
    parser.add_argument("--contestants", nargs="+", help="only these, beside the baselines")
    parser.add_argument("--seconds-per-cell", type=float, default=0.3, help="of timing, for each stage of a cell")
    add_host_options(parser)


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    add_cell_options(parser)
    parser.add_argument("--graphs", action="store_true", help="time all calls in CUDA graphs")
    parser.add_argument("--stages", help="the stage that is tuned; gemm of gemm_all_to_all: without communication")
    parser.add_argument("--most", type=int, help="so many blocks of each cell at most, drawn by chance; default: all")


def add_stress_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--tiny", action="store_true", help="small enough for compute-sanitizer and the CPU")
    parser.add_argument("--seed", type=int, default=1)
    add_host_options(parser)
    add_kill_options(parser)


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    add_cell_options(parser)
    parser.add_argument("--against", type=Path, required=True, help="folder of the other checkout; the report has its name")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rounds", type=int, default=9, help="of each cell")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, operators: Sequence[str], help_: str) -> argparse.ArgumentParser:
        own = commands.add_parser(name, help=help_)
        own.add_argument("operator", choices=operators)
        add_report_arguments(own)
        return own

    add_run_options(command("run", OPERATORS, "times, checks and floors, on the ranks of torchrun"))
    add_tune_options(
        command("tune", list(TUNABLE), "the fastest blocks of a kernel, on the ranks of torchrun; prints the table")
    )
    add_stress_options(command("stress", OPERATORS, "the same bits after random delays; errors when a rank is killed"))
    add_compare_options(command("compare", COMPARABLE, "this checkout and an older one in turns; starts the ranks itself"))
    shown = commands.add_parser("report", help="tables and a picture of recorded results")
    shown.add_argument("results", type=Path, help="JSON")
    shown.add_argument("--plot", type=Path, help="the picture, such as plot.png or plot.svg")
    options = parser.parse_args(arguments)
    if "cells" in options:
        options.cells = options.cells or default_cells(options)
        if options.cells not in load(options.operator).sets:
            parser.error(f"--cells {options.cells}: {options.operator} has {', '.join(load(options.operator).sets)}")
    return options


def default_cells(options: argparse.Namespace) -> str:
    if options.command == "tune":
        return TUNABLE[options.operator].cells
    return "small" if options.command == "compare" else "all"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.command == "report":
        return report.report(options.results, options.plot)
    if options.command == "stress":
        return stress.stress(options)
    command = {"run": run.run, "tune": tune.tune, "compare": compare.compare}[options.command]
    return command(load(options.operator), options)


if __name__ == "__main__":
    sys.exit(main())
