"""The command line of a benchmark's report: ``python -m benchmarks.<operator>.report results.json [--plot plot.png]``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def show_report(
    description: str | None, table: Callable[[Mapping[str, Any]], str], plot: Callable[[Mapping[str, Any], Path], None]
) -> None:
    """Print the table of the results that the command line names, and draw them if it asks for that."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON of the benchmark")
    parser.add_argument("--plot", type=Path, help="the picture, such as plot.png or plot.svg")
    arguments = parser.parse_args()
    report = json.loads(arguments.results.read_text())
    print(table(report))
    if arguments.plot:
        plot(report, arguments.plot)
