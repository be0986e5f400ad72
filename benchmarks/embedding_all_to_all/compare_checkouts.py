"""The fused embedding stage of this checkout against that of another one, in turns on the same GPUs.

    git worktree add ../4d608c8 4d608c8
    python -m benchmarks.embedding_all_to_all.compare_checkouts --against ../4d608c8 --ranks 1 --output comparison.json
        [--cells tiny|small|full] [--match REGEX] [--rounds 9] [--seconds-budget 400]

Both checkouts have a process on each GPU, with tables of the same size, and take turns: each round times both, one after the
other, today's first in every second round. Of each cell these are compared:

* forward, and forward with backward and rowwise Adagrad: the device's time, measured like that of the benchmark itself;
* launch: the host's time until a forward or backward pass is enqueued, the median over many calls of the slowest rank.

A ratio is the median over rounds of today's time / the other's in the same round. Cells in which a checkout's results are wrong
are reported as failed and not timed. Without GPUs the kernels run under Triton's interpreter: that tests this script, not the
speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.environment import ROOT, describe_environment, device_name
from benchmarks.common.harness import geometric_mean
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.common.start_ranks import start_ranks
from benchmarks.embedding_all_to_all.cells import CELLS, Cell, row_wise_cells

SIDES = ("today", "then")
FIGURES = ("forward", "training", "launch_forward", "launch_backward")
# Of a rank's tables, which exist once for each checkout.
_LARGEST_TABLES = 20e9
_WORKER = Path(__file__).with_name("checkout_worker.py")


class Checkout:
    """The worker processes of a checkout, one for each rank."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        if not torch.cuda.is_available():
            environment["TRITON_INTERPRET"] = "1"
        # -P: the folder of the worker's file is not searched for modules.
        command = [sys.executable, "-P", str(_WORKER)]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.workers = start_ranks(command, ranks, self._store, cwd=folder, env=environment, **streams)

    def tell(self, name: str, *arguments: Any) -> None:
        """Tell all ranks to do something; :meth:`answers` waits for it."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([name, *arguments]) + "\n")
            worker.stdin.flush()

    def answers(self) -> list[Any]:
        """Of all ranks.

        Raises:
            SystemExit: if a rank has ended instead.
        """
        answers = []
        for rank, worker in enumerate(self.workers):
            assert worker.stdout is not None
            line = worker.stdout.readline()
            if not line:
                raise SystemExit(f"rank {rank} of the checkout {self.folder} ended; its error stands above")
            answers.append(json.loads(line))
        return answers

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        self.tell(name, *arguments)
        return self.answers()

    def close(self, *, kill: bool) -> None:
        for worker in self.workers:
            if kill:
                worker.kill()
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self.workers:
            worker.wait()


@contextmanager
def open_checkouts(against: Path, ranks: int) -> Iterator[dict[str, Checkout]]:
    """Both, by the names of :data:`SIDES`, with workers that wait for the first cell."""
    checkouts: dict[str, Checkout] = {}
    failed = True
    try:
        for side, folder in zip(SIDES, (ROOT, against), strict=True):
            checkouts[side] = Checkout(folder, ranks)
        yield checkouts
        failed = False
    finally:
        for checkout in checkouts.values():
            checkout.close(kill=failed)


def compare(checkouts: dict[str, Checkout], cell: Cell, rounds: int) -> dict[str, Any]:
    """A record of the report: times of both in microseconds, and ratios."""
    for checkout in checkouts.values():
        checkout.tell("prepare", asdict(cell))
    checks = {side: checkout.answers()[0] for side, checkout in checkouts.items()}
    record = {"name": cell.name, "rows": cell.rows, "passed": all(check["passed"] for check in checks.values())}
    if not record["passed"]:
        return {**record, "errors": {side: check["errors"] for side, check in checks.items()}}
    times: dict[str, dict[str, list[float]]] = {figure: {side: [] for side in SIDES} for figure in FIGURES}
    for number in range(rounds):
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        for figure, ask in MEASUREMENTS.items():
            for side in order:
                for name, microseconds in ask(checkouts[side]).items():
                    times[figure + name][side].append(microseconds)
    return {**record, **{figure: summarize(own) for figure, own in times.items()}}


def _device_times(training: bool) -> Callable[[Checkout], dict[str, float]]:
    return lambda checkout: {"": checkout.ask("time", training)[0]}


def _launch_times(checkout: Checkout) -> dict[str, float]:
    by_rank = checkout.ask("time_launch")
    return {f"_{name}": max(own[name] for own in by_rank) for name in by_rank[0]}


# What is timed in a round; a measurement may give several figures, named by what follows its own name.
MEASUREMENTS: dict[str, Callable[[Checkout], dict[str, float]]] = {
    "forward": _device_times(False),
    "training": _device_times(True),
    "launch": _launch_times,
}


def summarize(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians over rounds, and the median and the interquartile range of the rounds' ratios."""
    ratios = [today / then for today, then in zip(*(times[side] for side in SIDES), strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    medians = {f"{side}_us": statistics.median(own) for side, own in times.items()}
    return {**medians, "ratio": statistics.median(ratios), "spread": high - low}


def geometric_means(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the ratios of the cells that passed, by figure."""
    passed = [record for record in records if record["passed"]]
    return {figure: geometric_mean([record[figure]["ratio"] for record in passed]) for figure in FIGURES if passed}


def line(record: dict[str, Any]) -> str:
    """For each figure then, today, and the ratio."""
    if not record["passed"]:
        return f"{record['name']:<44}FAILED {record['errors']}"
    figures = (record[figure] for figure in FIGURES)
    return f"{record['name']:<44}" + "  ".join(
        f"{own['then_us']:9.1f} {own['today_us']:9.1f} {own['ratio']:7.3f}" for own in figures
    )


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Table-wise and row-wise, with tables that fit twice."""
    chosen = CELLS[options.cells]()
    fitting = []
    for cell in [*chosen, *row_wise_cells(chosen)]:
        rows = int(_LARGEST_TABLES / (cell.tables * cell.dim * cell.torch_dtype.itemsize))
        fitting.append(replace(cell, largest_rows=min(cell.largest_rows, rows)))
    return [cell for cell in fitting if re.search(options.match, cell.name)]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All cells; the report."""
    on_gpus = torch.cuda.is_available()
    devices = [torch.device("cuda", rank) if on_gpus else torch.device("cpu") for rank in range(options.ranks)]
    report: dict[str, Any] = {
        **describe_environment([device_name(device) for device in devices], options.commit),
        "against": options.against.name,
        "rounds": options.rounds,
        "geometric_means": {},
        "cells": [],
        "not_run": [],
    }
    print(f"{'microseconds: then, today, today / then':<44}" + "  ".join(f"{figure:>27}" for figure in FIGURES), flush=True)
    began = time.monotonic()
    with open_checkouts(options.against, options.ranks) as checkouts:
        for cell in cells_of(options):
            if options.seconds_budget is not None and time.monotonic() - began > options.seconds_budget:
                report["not_run"].append(cell.name)
                continue
            report["cells"].append(compare(checkouts, cell, options.rounds))
            report["geometric_means"] = geometric_means(report["cells"])
            write_results(options.output, report)
            print(line(report["cells"][-1]), flush=True)
    write_results(options.output, report)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, help="folder of the other checkout; the report has its name")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 2)
    add_report_arguments(parser)
    parser.add_argument("--cells", choices=list(CELLS), default="small")
    parser.add_argument("--match", default="", help="only cells in whose name this regular expression is found")
    parser.add_argument("--rounds", type=int, default=9, help="of each cell")
    parser.add_argument("--seconds-budget", type=float, help="no cell is begun later; the others are listed as not run")
    options = parser.parse_args(arguments)
    options.against = options.against.resolve()
    report = run(options)
    for figure, mean in report["geometric_means"].items():
        print(f"{figure}: geometric mean of today / {report['against']} {mean:.3f}")
    failed = [record["name"] for record in report["cells"] if not record["passed"]]
    print(f"{len(report['cells'])} cells, failed: {failed or 'none'}, not run: {len(report['not_run'])}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
