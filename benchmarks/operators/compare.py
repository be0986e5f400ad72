"""An operator of this checkout against that of an older one, in turns on the same GPUs.

    git worktree add ../64e6758 64e6758
    python -m benchmarks compare embedding_all_to_all --against ../64e6758 --ranks 2 --output comparison.json

Both checkouts have a process on each GPU, with the same inputs, and take turns: each round times both, one after the other,
today's first in every second round. The benchmark is today's; only the package is the checkout's own. Of each cell, forward
and forward + backward, these are compared:

* the device's time, measured like that of the benchmark itself;
* launch: the host's time until the calls are enqueued, the median over many of the slowest rank.

A ratio is the median over rounds of today's time / the other's in the same round. Cells in which a checkout's results are wrong
are reported as failed and not timed. Without GPUs the kernels run under Triton's interpreter: that tests this script, not the
speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common.environment import ROOT, describe_environment, device_name
from benchmarks.common.harness import start_ranks
from benchmarks.common.results import write_results
from benchmarks.operators.case import Operator

COMPARABLE = ("embedding_all_to_all", "gemm_all_to_all", "expert_layer")
SIDES = ("today", "then")
# By figure, the worker's method that measures it, and its argument.
FIGURES: dict[str, tuple[str, bool]] = {
    "forward": ("time", False),
    "training": ("time", True),
    "launch_forward": ("time_launch", False),
    "launch_training": ("time_launch", True),
}
_WORKER = Path(__file__).with_name("compare_worker.py")


class Checkout:
    """The worker processes of a checkout, one for each rank."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # Processes that compile ahead import kernels before the worker has said from where.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        if not torch.cuda.is_available():
            environment["TRITON_INTERPRET"] = "1"
        # -P: the folder of the worker's file is not searched for modules.
        command = [sys.executable, "-P", str(_WORKER), str(folder), str(ROOT)]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.workers = start_ranks(command, ranks, self._store, cwd=folder, env=environment, **streams)

    def tell(self, name: str, *arguments: Any) -> None:
        """Tell all ranks to do something; :meth:`answers` waits for it."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps([name, *arguments]) + "\n")
            worker.stdin.flush()

    def answers(self) -> list[Any]:
        """Return the answers of all ranks.

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

    def slowest(self, name: str, training: bool) -> float:
        """Microseconds of the slowest rank."""
        self.tell(name, training)
        return max(self.answers())

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


def compare_cell(checkouts: dict[str, Checkout], options: argparse.Namespace, name: str) -> dict[str, Any]:
    """A record of the report: times of both in microseconds, and ratios."""
    for checkout in checkouts.values():
        checkout.tell("prepare", options.operator, options.cells, name)
    checks = {side: checkout.answers()[0] for side, checkout in checkouts.items()}
    record = {"name": name, "passed": all(check["passed"] for check in checks.values())}
    if not record["passed"]:
        return {**record, "errors": {side: check["errors"] for side, check in checks.items()}}
    times: dict[str, dict[str, list[float]]] = {figure: {side: [] for side in SIDES} for figure in FIGURES}
    for number in range(options.rounds):
        for figure, measured in FIGURES.items():
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                times[figure][side].append(checkouts[side].slowest(*measured))
    return {**record, **{figure: summarize(own) for figure, own in times.items()}}


def summarize(times: dict[str, list[float]]) -> dict[str, float]:
    """Medians over rounds, and the median and the interquartile range of the rounds' ratios."""
    ratios = [today / then for today, then in zip(*(times[side] for side in SIDES), strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (ratios[0],) * 3
    medians = {f"{side}_us": statistics.median(own) for side, own in times.items()}
    return {**medians, "ratio": statistics.median(ratios), "spread": high - low}


def geometric_means(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return by figure the geometric mean of the ratios of the cells that passed."""
    passed = [record for record in records if record["passed"]]
    return {figure: statistics.geometric_mean([record[figure]["ratio"] for record in passed]) for figure in FIGURES if passed}


def line(record: dict[str, Any]) -> str:
    """For each figure then, today, and the ratio."""
    if not record["passed"]:
        return f"{record['name']:<44}FAILED {record['errors']}"
    figures = (record[figure] for figure in FIGURES)
    return f"{record['name']:<44}" + "  ".join(
        f"{own['then_us']:9.1f} {own['today_us']:9.1f} {own['ratio']:7.3f}" for own in figures
    )


def compare(operator: Operator, options: argparse.Namespace) -> int:
    """Compare all cells, and write the report after each; the exit status."""
    on_gpus, against = torch.cuda.is_available(), options.against.resolve()
    devices = [torch.device("cuda", rank) if on_gpus else torch.device("cpu") for rank in range(options.ranks)]
    report: dict[str, Any] = {
        **describe_environment([device_name(device) for device in devices], options.commit),
        "against": against.name,
        "rounds": options.rounds,
        "geometric_means": {},
        "cells": [],
        "not_run": [],
    }
    print(f"{'microseconds: then, today, today / then':<44}" + "  ".join(f"{figure:>27}" for figure in FIGURES), flush=True)
    began = time.monotonic()
    with open_checkouts(against, options.ranks) as checkouts:
        for cell in operator.cells(options.cells, options.match):
            if options.seconds_budget is not None and time.monotonic() - began > options.seconds_budget:
                report["not_run"].append(cell.name)
                continue
            report["cells"].append(compare_cell(checkouts, options, cell.name))
            report["geometric_means"] = geometric_means(report["cells"])
            write_results(options.output, report)
            print(line(report["cells"][-1]), flush=True)
    write_results(options.output, report)
    for figure, mean in report["geometric_means"].items():
        print(f"{figure}: geometric mean of today / {report['against']} {mean:.3f}")
    failed = [record["name"] for record in report["cells"] if not record["passed"]]
    print(f"{len(report['cells'])} cells, failed: {failed or 'none'}, not run: {len(report['not_run'])}")
    return 1 if failed else 0
