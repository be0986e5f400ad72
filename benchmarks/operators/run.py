"""The benchmark of an operator: its cells one by one, contestants in turns, the check of each, the floor beside each time."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks.common.harness import (
    Ceilings,
    Report,
    Timing,
    World,
    captured,
    compile_ahead,
    describe_run,
    measure_ceilings,
    measure_teraflops,
    open_world,
    time_interleaved,
)
from benchmarks.operators.case import DTYPE, Case, Operator, Pass
from benchmarks.operators.report import line, summarize, table
from dlrm_fused.errors import UsageError

# Shorter calls are timed in CUDA graphs where these are asked for, so that launches do not count.
GRAPH_MICROSECONDS = 50.0
# Prefixes of the variables that set the libraries with which operators are compared.
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "FBGEMM_")


def in_graphs(world: World, passes: Mapping[str, Pass], needed: Sequence[str]) -> tuple[dict[str, Pass], dict[str, str]]:
    """Passes as CUDA graphs, and why some could not be captured; no graphs if one of the needed is among these. Collective."""
    replays: dict[str, Pass] = {}
    problems: dict[str, str] = {}
    for name, call in passes.items():
        replay, problem = captured(world, call)
        if replay is not None:
            replays[name] = replay
        else:
            problems[name] = problem
    return ({} if any(name in problems for name in needed) else replays), problems


def time_passes(world: World, case: Case, passes: Mapping[str, Pass], seconds: float, graphs: bool) -> dict[str, Any]:
    """Timings of the passes, by contestant, how they were taken, and the host's without graphs. Collective."""
    timings = time_interleaved(world, passes, seconds)
    hosts = {"host_us": {name: timing.host / case.calls for name, timing in timings.items()}}
    first = next(iter(passes))
    is_short = timings[first].microseconds / case.calls < GRAPH_MICROSECONDS
    if not (graphs and world.device.type == "cuda" and case.can_be_captured and is_short):
        return {"timings": timings, "timed": "bursts", **hosts}
    replays, problems = in_graphs(world, passes, (first, case.baseline))
    if not replays:
        return {"timings": timings, "timed": "bursts", "without_graph": problems, **hosts}
    return {"timings": time_interleaved(world, replays, seconds), "timed": "graphs", "without_graph": problems, **hosts}


def least_work(world: World, case: Case, stage: str, ceilings: Ceilings, teraflops: float) -> dict[str, float]:
    """The floor of the slowest rank, and what it is made of: the most of any rank. Collective."""
    phases = case.phases(stage)
    link_bytes = sum(work.link_bytes for work in phases)
    own = {
        "flops": sum(work.flops for work in phases),
        "memory_bytes": sum(work.memory_bytes for work in phases),
        "link_bytes": link_bytes,
        "link_us": ceilings.transfer_microseconds(0, link_bytes),
        "floor_us": sum(work.least_microseconds(ceilings, teraflops) for work in phases),
    }
    every_rank = world.gather(own)
    return {key: max(rank[key] for rank in every_rank) for key in own}


class Run:
    """All cells, and the report that is written after each. Collective."""

    def __init__(self, world: World, operator: Operator, options: argparse.Namespace) -> None:
        self.world, self.operator, self.options = world, operator, options
        self.ceilings, self.teraflops = measure_ceilings(world), measure_teraflops(world, DTYPE)
        head = {
            **describe_run(world, options.commit),
            "ceilings": {"unit": "GB/s of a rank", **asdict(self.ceilings), "teraflops": self.teraflops},
            "operator": options.operator,
            "dtype": str(DTYPE).removeprefix("torch."),
            "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(_VARIABLES)},
        }
        world.log(json.dumps(head, indent=2))
        self.report = Report(world, options.output, head, summarize=summarize, line=line, seconds_budget=options.seconds_budget)

    def work(self) -> None:
        cells = self.operator.cells(self.options.cells, self.options.match)
        if self.world.device.type == "cuda" and cells:
            compile_ahead(self.world, self.operator.to_compile(self.world, cells))
            self.world.free_memory()
        for cell in cells:
            if self.report.has_time(cell.name):
                self.measure(cell)
                self.world.free_memory()
        self.report.write()
        self.world.log(table(self.report.content))

    def measure(self, cell: Any) -> None:
        """The stages of a cell; one of them fails by itself."""
        stages = [stage for stage in self.operator.stages(cell) if re.search(self.options.stages, stage)]
        case: Case | None = None
        for stage in stages:
            entry = self.operator.entry(cell, stage)
            case = case or self.report.attempt(entry, partial(self.operator.open, self.world, cell))
            if case is None:
                return
            result = self.report.attempt(entry, partial(self.result, case, stage))
            if result is not None:
                self.report.add({**entry, **result})

    def result(self, case: Case, stage: str) -> dict[str, Any]:
        """Return the record of a cell's stage."""
        passes, only = case.passes(stage), self.options.contestants
        if only:
            if not passes.keys() & set(only):
                raise UsageError(f"--contestants {' '.join(only)}: allowed for {stage}: {', '.join(passes)}")
            kept = {*only, *case.rivals}
            passes = {name: call for name, call in passes.items() if name in kept}
        timed = time_passes(self.world, case, passes, self.options.seconds_per_cell, self.options.graphs)
        timings: Mapping[str, Timing] = timed.pop("timings")
        us = {name: timing.microseconds / case.calls for name, timing in timings.items()}
        least = least_work(self.world, case, stage, self.ceilings, self.teraflops)
        fused_us = us[case.fastest(us)]
        return {
            **case.check(stage),
            "hosts": self.world.symmetric.hosts.ranks,
            "us": us,
            "ratio": fused_us / us[case.baseline],
            **least,
            "over_floor": fused_us / least["floor_us"],
            "overlap": fused_us / max(us[case.alone], least["link_us"]) if case.alone in us else None,
            **case.remarks(us),
            "calls": case.calls,
            **timed,
            "spread": {name: timing.spread for name, timing in timings.items()},
            "by_rank_us": {name: [own / case.calls for own in timing.by_rank] for name, timing in timings.items()},
        }


def run(operator: Operator, options: argparse.Namespace) -> int:
    """Measure all cells on the ranks that torchrun has started; the exit status."""
    with open_world(options.ranks_per_host) as world:
        Run(world, operator, options).work()
    return 0
