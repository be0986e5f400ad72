"""The command line of a tuner: ``-m benchmarks.<operator>.tune --output tuning.json``, or ``--table tuning.json``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.harness import World, open_world


def tuner_parser(description: str | None, cells: Sequence[str], default: str) -> argparse.ArgumentParser:
    """What every tuner of products takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON, written anew after every cell")
    parser.add_argument("--cells", choices=cells, default=default)
    parser.add_argument("--match", default="", help="only cells in whose name this regular expression is found")
    parser.add_argument("--most", type=int, help="so many choices of each cell at most, drawn by chance; default: all")
    parser.add_argument("--seconds-budget", type=float, help="no cell is begun later; the others are listed as not run")
    parser.add_argument("--commit", help="for the report, where there is no git repository")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tuning table from these results")
    return parser


def run_tuner(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    tune: Callable[[World, argparse.Namespace], None],
    print_table: Callable[[Sequence[Path]], None],
) -> None:
    """Measure, on all ranks of torchrun, or print the table of what was measured."""
    options = parser.parse_args(arguments)
    if options.table:
        print_table(options.table)
        return
    if options.output is None or "RANK" not in os.environ:
        parser.error("--output is needed, and torchrun")
    with open_world() as world:
        tune(world, options)
