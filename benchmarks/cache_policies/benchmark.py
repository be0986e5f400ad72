"""Cache policies of the kernels on one GPU: every static policy and the selector, against the hardware's defaults.

    python -m benchmarks.cache_policies.benchmark --output results.json [--workloads full|tiny] [--match REGEX]
        [--seconds-per-workload 1.2]

Each workload is a kernel family with data that the L2 cache does not hold, or with several sets of data in turn; tables are the
exception where the name of the workload says so. For each, these take turns:

* ``off``: as the kernels run by default, which is the hardware's choice for every stream but the rows of an update;
* ``no hints``: the hardware's choice there, too;
* the other static policies of :data:`~dlrm_fused.ops.common.cache_hints.STATIC`: one choice for all loads or all stores;
* ``selected``: the hints that :func:`~dlrm_fused.ops.common.cache_policy.select` gives each stream;
* for evidence, hints for each stream alone (``python -m benchmarks.cache_policies.replay`` asks the selector again later).

Policies that give the workload's streams the same hints are the same compiled kernels, and are timed once. Before each burst
the L2 cache is filled with other data. ``off``, ``no hints``, the selected and the best static policy are then timed once more,
longer, and the ratios are of these times: the best of many measured ones is otherwise partly luck. ``off`` has two turns there,
and the ratio of its own times says how far equal policies are apart.

The results of every policy are compared bit for bit with those of ``off``. Without a GPU, which needs ``TRITON_INTERPRET=1``,
the tiny workloads try the script; the times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor

from benchmarks.cache_policies.report import line, summarize, text
from benchmarks.cache_policies.workloads import WORKLOADS, Run, Workload
from benchmarks.common.harness import Report, Timing, World, captured, compile_ahead, describe_run, open_world, time_interleaved
from benchmarks.common.results import add_report_arguments
from dlrm_fused.ops.common import cache_policy
from dlrm_fused.ops.common.cache_hints import LOAD_HINTS, OFF, STATIC, STORE_HINTS, STORES, CachePolicy, Hint, with_hints
from dlrm_fused.ops.common.cache_policy import Stream

OFF_AGAIN = "off again"
# Calls that are shorter run as CUDA graphs, which go through the sets of data until they have lasted so long.
_GRAPH_MICROSECONDS, _SHORTEST_GRAPH_MICROSECONDS = 50.0, 300.0
# What each stream is tried with, alone.
_TRIED_LOADS, _TRIED_STORES = ("evict_first", "evict_last"), (".cg", ".cs", ".wt", "evict_first")

Hints = tuple[str, ...]
Pass = Callable[[], object]


@dataclass
class Candidate:
    """Policies that are the same for a workload.

    Attributes:
        names: in the order of :data:`STATIC`, then those of evidence.
    """

    policy: CachePolicy
    names: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]


class Clock:
    """Times passes over a workload's sets of data, each burst with an L2 cache full of other data."""

    def __init__(self, world: World) -> None:
        self.world, self.on_gpu = world, world.device.type == "cuda"
        self.l2_bytes = torch.cuda.get_device_properties(world.device).L2_cache_size if self.on_gpu else 0
        self._other_data = torch.zeros(self.l2_bytes // 2, device=world.device)  # twice as many bytes

    def times(self, passes: Mapping[str, Pass], seconds: float, most_rounds: int) -> dict[str, Timing]:
        fewest = 10 if self.on_gpu else 2
        return time_interleaved(self.world, passes, seconds, (fewest, most_rounds), before=self._fill_cache)

    def _fill_cache(self) -> None:
        self._other_data.sum()


def selected(workload: Workload, run: Run) -> tuple[CachePolicy, dict[str, Any]]:
    """What the selector gives a workload, and what it knows of the streams; launches a call."""
    known: dict[str, Any] = {}
    hints: dict[str, Hint] = {}
    select = cache_policy.select

    def listen(streams: Mapping[str, Stream], l2_bytes: float) -> CachePolicy:
        policy = select(streams, l2_bytes)
        for name, stream in streams.items():
            known[name] = {"distinct_bytes": stream.distinct, "passes": stream.passes}
            hint = getattr(policy, name)
            assert hints.setdefault(name, hint) == hint, f"{workload.name}: its launches have different hints for {name}"
        return policy

    with mock.patch.object(cache_policy, "select", listen):
        cache_policy.use("selected", workload.zipf_exponent)
        run.calls[0]()
        cache_policy.use(OFF)
    return with_hints(**hints), known


def hints_of(workload: Workload, policy: CachePolicy) -> Hints:
    return tuple(str(getattr(policy, stream)) for stream in workload.streams)


def candidates(workload: Workload, of_selector: CachePolicy) -> dict[Hints, Candidate]:
    """What is timed: by the hints of the workload's streams."""
    tried = {
        f"{stream} {hint}": with_hints(**{stream: (STORE_HINTS if stream in STORES else LOAD_HINTS)[hint]})
        for stream in workload.streams
        for hint in (_TRIED_STORES if stream in STORES else _TRIED_LOADS)
    }
    found: dict[Hints, Candidate] = {}
    for name, policy in {**STATIC, "selected": of_selector, **tried}.items():
        found.setdefault(hints_of(workload, policy), Candidate(policy)).names.append(name)
    return found


class WorkloadRun:
    """One workload: its candidates, their passes and results."""

    def __init__(self, clock: Clock, workload: Workload) -> None:
        self.clock, self.workload = clock, workload
        self.run = workload.make(clock.world)
        self.selected = OFF
        self.streams: dict[str, Any] = {}
        self.candidates: dict[Hints, Candidate] = {}
        self._graphs, self._without_graphs = False, "calls are long enough"
        self._turns = 1

    def find_candidates(self) -> Self:
        """Makes a call."""
        self.selected, self.streams = selected(self.workload, self.run)
        self.candidates = candidates(self.workload, self.selected)
        return self

    def call_with_each(self) -> None:
        for candidate in self.candidates.values():
            cache_policy.use(candidate.policy)
            self.run.calls[0]()

    def go_through(self, policy: CachePolicy) -> None:
        """A pass."""
        cache_policy.use(policy)
        for _ in range(self._turns):
            for call in self.run.calls:
                call()

    def choose_graphs(self) -> None:
        """Whether calls are so short that launches would be timed."""
        if not self.clock.on_gpu:
            return
        off = self.clock.times({"off": lambda: self.go_through(OFF)}, 0.0, 10)["off"].microseconds
        self._graphs = off / len(self.run.calls) < _GRAPH_MICROSECONDS
        if self._graphs:
            replay, self._without_graphs = captured(self.clock.world, lambda: self.go_through(OFF))
            self._graphs = replay is not None
            self._turns = max(1, round(_SHORTEST_GRAPH_MICROSECONDS / off))

    @property
    def calls_of_pass(self) -> int:
        return self._turns * len(self.run.calls)

    def pass_of(self, go_through: Pass) -> Pass:
        """As it is timed."""
        if not self._graphs:
            return go_through
        replay, error = captured(self.clock.world, go_through)
        if replay is None:
            raise RuntimeError(f"cannot be captured in a CUDA graph: {error}")
        return replay

    def results(self, policy: CachePolicy | str) -> list[Tensor]:
        cache_policy.use(policy, self.workload.zipf_exponent)
        return self.run.results()

    def differing(self) -> list[str]:
        """Names of the candidates whose results have other bits than those of off."""
        expected = self.results(OFF)
        wrong = [] if all(bool(own.any()) for own in expected) else ["off: nothing but zeros"]
        policies: dict[str, CachePolicy | str] = {own.name: own.policy for own in self.candidates.values()}
        for name, policy in {**policies, "selected": "selected"}.items():
            if not _have_same_bits(self.results(policy), expected):
                wrong.append(name)
        return wrong

    def measure(self, seconds: float) -> dict[str, Any]:
        """What the report says of the workload."""
        differ = self.differing()
        self.choose_graphs()
        passes = {own.name: self.pass_of(partial(self.go_through, own.policy)) for own in self.candidates.values()}
        first = self.clock.times(passes, 0.6 * seconds, 40)
        us = {name: timing.microseconds / self.calls_of_pass for name, timing in first.items()}
        off, hardware, chosen = map(self.name_of, (OFF, STATIC["no hints"], self.selected))
        best = min((own.name for own in self.candidates.values() if own.name in STATIC), key=lambda name: us[name])
        finalists = {name: passes[name] for name in dict.fromkeys((off, hardware, chosen, best))}
        last = self.clock.times({**finalists, OFF_AGAIN: passes[off]}, 0.4 * seconds, 120)
        final_us = {name: timing.microseconds / self.calls_of_pass for name, timing in last.items()}
        return {
            "passed": not differ,
            "differ": differ,
            "zipf_exponent": self.workload.zipf_exponent,
            "streams": self.streams,
            "off": dict(zip(self.workload.streams, hints_of(self.workload, OFF), strict=True)),
            "selected": dict(zip(self.workload.streams, hints_of(self.workload, self.selected), strict=True)),
            "best": best,
            "selected_over_best": final_us[chosen] / final_us[best],
            "selected_over_off": final_us[chosen] / final_us[off],
            "selected_over_hardware": final_us[chosen] / final_us[hardware],
            "best_over_off": final_us[best] / final_us[off],
            "off_over_off": final_us[OFF_AGAIN] / final_us[off],
            "us": us,
            "final_us": final_us,
            "spread": {name: timing.spread for name, timing in first.items()},
            "final_spread": {name: timing.spread for name, timing in last.items()},
            "same_kernels": {own.name: own.names[1:] for own in self.candidates.values() if own.names[1:]},
            "calls": self.calls_of_pass,
            "timed": "graphs" if self._graphs else f"bursts: {self._without_graphs}",
        }

    def name_of(self, policy: CachePolicy) -> str:
        return self.candidates[hints_of(self.workload, policy)].name


def _have_same_bits(results: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    pairs = zip(results, expected, strict=True)
    return all(torch.equal(own.view(torch.uint8), other.view(torch.uint8)) for own, other in pairs)


def alone() -> None:
    """The environment of a run of one rank, unless torchrun has given one."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT=str(port))


def _quietly(call: Pass) -> None:
    """What cannot be compiled says why when it is launched."""
    with suppress(Exception):
        call()


@torch.no_grad()
def work(world: World, options: argparse.Namespace) -> None:
    clock = Clock(world)
    head = {
        **describe_run(world, options.commit),
        "l2_bytes": clock.l2_bytes,
        "static_policies": {name: policy.hints() for name, policy in STATIC.items()},
    }
    report = Report(world, options.output, head, summarize=summarize, line=line)
    chosen = [own for own in WORKLOADS[options.workloads]() if re.search(options.match, own.name)]
    made = [report.attempt({"name": own.name}, partial(WorkloadRun, clock, own)) for own in chosen]
    runs = [run for run in made if run is not None]
    # What is called to be compiled is not launched: on GPUs the selector is asked so.
    compile_ahead(world, [partial(_quietly, run.find_candidates) for run in runs])
    ready = [
        run for run in runs if run.candidates or report.attempt({"name": run.workload.name}, run.find_candidates) is not None
    ]
    gc.freeze()  # every capture of a CUDA graph collects garbage
    world.log(f"{len(ready)} workloads, {sum(len(run.candidates) for run in ready)} candidates: compile")
    compile_ahead(world, [partial(_quietly, run.call_with_each) for run in ready])
    for run in ready:
        entry = {"name": run.workload.name}
        result = report.attempt(entry, partial(run.measure, options.seconds_per_workload))
        if result is not None:
            report.add({**entry, **result})
    cache_policy.use(OFF)
    report.write()
    world.log(text(report.content))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_report_arguments(parser)
    parser.add_argument("--workloads", choices=list(WORKLOADS), default="full")
    parser.add_argument("--match", default="", help="only workloads in whose name this regular expression is found")
    parser.add_argument("--seconds-per-workload", type=float, default=1.2, help="of timing, about")
    options = parser.parse_args(arguments)
    alone()
    with open_world() as world:
        if world.size > 1:
            parser.error(f"{world.size} ranks: this benchmark is of one GPU")
        work(world, options)


if __name__ == "__main__":
    main()
