"""The fastest blocks of an operator's kernel: all choices of a cell are timed with its benchmark's own inputs.

All ranks take part in every call, with the same choice. The fastest are timed again, longer.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.common.harness import (
    Report,
    World,
    captured,
    compile_ahead,
    describe_run,
    open_world,
    time_finalists,
)
from benchmarks.operators.blocks import TUNABLE, Tunable, entry_of
from benchmarks.operators.case import DTYPE, Case, Operator, Pass

# Choices that are timed again, and those that the report has.
_FINALISTS, _REPORTED = 6, 10
_SEED = 4


@dataclass(frozen=True)
class Choice:
    """A contestant of a cell with blocks for its kernel, which are timed together."""

    contestant: str
    blocks: Any


def choices_of(tunable: Tunable, cell: Any, ranks: int, most: int | None = None) -> list[Any]:
    """Blocks to be timed: those of today, then others, in an order of chance but always the same."""
    today, *others = dict.fromkeys(tunable.choices(cell, ranks))
    random.Random(_SEED).shuffle(others)
    return [today, *others][:most]


class Tuning:
    """All cells. Everything is collective."""

    def __init__(self, world: World, operator: Operator, tunable: Tunable, options: argparse.Namespace) -> None:
        self.world, self.operator, self.tunable, self.options = world, operator, tunable, options
        self.stage = options.stages or next(iter(tunable.contestants))
        head = {**describe_run(world, options.commit), "operator": options.operator, "stage": self.stage}
        self.report = Report(world, options.output, head, summarize=summarize, line=line, seconds_budget=options.seconds_budget)

    @torch.no_grad()
    def work(self) -> None:
        for cell in self.operator.cells(self.options.cells, self.options.match):
            is_tuned = not self.tunable.contestants.keys().isdisjoint(self.operator.stages(cell))
            if is_tuned and self.report.has_time(cell.name):
                self.measure(cell)
                self.world.free_memory()
        self.report.write()
        self.world.log(self.tunable.table(self.report.content["cells"]))

    def measure(self, cell: Any) -> None:
        """A record of the report."""
        case = self.operator.open(self.world, cell)
        passes = case.passes(self.stage)
        contestant = self.tunable.contestants[self.stage]
        blocks = choices_of(self.tunable, cell, self.world.size, self.options.most)
        unlike = [Choice(name, None) for name in self.tunable.unlike if name in passes]
        times = self.times(case, passes, [*unlike, *(Choice(contestant, own) for own in blocks)])
        fastest = [choice.blocks for choice in times if choice.contestant == contestant]
        refined = [Choice(contestant, own) for own in self.tunable.refined(fastest)]
        times |= self.times(case, passes, [choice for choice in refined if choice not in times])
        times = dict(sorted(times.items(), key=lambda entry: entry[1]))
        self.report.add(
            {
                "name": cell.name,
                **asdict(cell),
                "element_size": DTYPE.itemsize,
                "ranks": self.world.size,
                "times": [{"us": us, **asdict(choice)} for choice, us in list(times.items())[:_REPORTED]],
                "chosen_us": times.get(Choice(contestant, blocks[0])),
                **{f"{choice.contestant}_us": times.get(choice) for choice in unlike},
                "timed": len(times),
            }
        )

    def times(self, case: Case, passes: Mapping[str, Pass], choices: Sequence[Choice]) -> dict[Choice, float]:
        """Microseconds of a call, the fastest first. What cannot be launched on some rank is left out."""
        calls = {str(choice): self.with_blocks(passes[choice.contestant], choice.blocks) for choice in choices}
        compile_ahead(self.world, [calls[str(choice)] for choice in choices if choice.blocks is not None])
        launched: dict[str, Pass] = {}
        for name, call in calls.items():
            replay, problem = self.launched(case, call)
            if replay is None:
                self.world.log(f"{case.cell.name}: {name}: {problem}")
            else:
                launched[name] = replay
        if not launched:
            return {}
        times = time_finalists(self.world, launched, _FINALISTS)
        by_name = {str(choice): choice for choice in choices}
        return {by_name[name]: us / case.calls for name, us in times.items()}

    def with_blocks(self, call: Pass, blocks: Any) -> Pass:
        def run() -> None:
            self.tunable.override(blocks)
            try:
                call()
            finally:
                self.tunable.override(None)

        return run

    def launched(self, case: Case, call: Pass) -> tuple[Pass | None, str]:
        """The call, as a graph if these are asked for, or None and why it cannot be made on some rank."""
        error = ""
        try:
            call()
        except Exception as raised:  # too little shared memory is seen before the launch
            error = f"{type(raised).__name__}: {raised}"
        problem = next((other for other in self.world.gather(error) if other), "")
        if problem:
            return None, problem
        if self.options.graphs and self.world.device.type == "cuda" and case.can_be_captured:
            return captured(self.world, call)
        return call, ""


def line(cell: Mapping[str, Any]) -> str:
    """A line of the log."""
    entries = [(time["us"], *entry_of(time)) for time in cell["times"][:4]]
    best = "  ".join(f"{us:.1f} {name} {'/'.join(map(str, blocks))}" for us, name, blocks in entries)
    chosen = "-" if cell["chosen_us"] is None else f"{cell['chosen_us']:.1f}"
    return f"{cell['name']:<30} chosen {chosen:>7} | best of {cell['timed']:>3}: {best}"


def summarize(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gains = [
        next(time["us"] for time in cell["times"] if entry_of(time)[1]) / cell["chosen_us"]
        for cell in cells
        if cell["chosen_us"]
    ]
    return {"best_over_chosen": statistics.geometric_mean(gains) if gains else None}


def tune(operator: Operator, options: argparse.Namespace) -> int:
    """Measure on the ranks that torchrun has started, and print the table; the exit status."""
    with open_world() as world:
        Tuning(world, operator, TUNABLE[options.operator], options).work()
    return 0
