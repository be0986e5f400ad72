"""Does an operator give the same bits whatever the ranks' delays, and an error when a rank is killed?

Some pieces of work, all collective, are done once and checked. Then they are repeated in random order, the same on all ranks,
with random delays on the device before each, other ones on each rank, and compared with the first time, bit for bit. On GPUs
a piece is a CUDA graph if it can be one; the host reads the number of elements that differ at the end.

Where ranks are declared to be several hosts, the first results are also compared with those of all ranks on one host. No
bit may differ, but in sums over ranks or experts, which several hosts add up in another order and round in other places,
and in products of torch, whose bits may depend on the number of rows: there the relative difference must be within the
tolerance.

With ``--kill-rank`` that rank kills itself meanwhile; see killed_rank.py. Exit status 1 says that something was not as it must
be. ``--tiny`` is small enough for compute-sanitizer and the CPU, and has no graphs: memory that is allocated anew each time, in
which a sanitizer finds what is out of bounds, cannot be captured.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.harness import World, captured, compile_ahead, describe_run, open_world, relative_error, synchronize
from benchmarks.common.results import write_results
from benchmarks.operators import killed_rank, load
from dlrm_fused.compat.torch import sleep_on_device

# The longest usual delay, in microseconds.
_DELAY, _DELAY_OF_TINY = 20.0, 200.0
# The longest delays are rare, and so many times as long.
_LONG_DELAY_EVERY, _LONG_DELAY = 200, 50
# Results that are held at once.
_HELD = 3
# Between two looks at what the kernels have reported.
_REPLAYS_OF_A_LOOK = 1_000


class RandomDelays:
    """Delays of up to ``usual`` microseconds on this rank's device, and now and then a longer one."""

    def __init__(self, device: torch.device, seed: int, usual: float) -> None:
        self._device, self._random, self._usual = device, random.Random(seed), usual
        self.longest = usual * _LONG_DELAY

    def delay(self) -> None:
        """Delay what the device is given from now on. The host does not wait for a GPU."""
        microseconds = self._random.uniform(0, self._usual)
        if self._random.randrange(_LONG_DELAY_EVERY) == 0:
            microseconds *= _LONG_DELAY
        if self._device.type == "cuda":
            sleep_on_device(microseconds * 1e-6)
        else:
            time.sleep(microseconds / 1e6)


class Workspace(Protocol):
    """The members of an operator's workspace that a stress test uses."""

    def raise_fault(self) -> None: ...


@dataclass
class Work:
    """A piece of work with always the same results. Collective.

    Attributes:
        name: for messages.
        workspace: whose faults are looked at.
        compute: gives the results; is given what delays this rank's device.
        check: of the first results, their largest relative error on this rank, and whether they are right.
        description: for the report.
        in_graph: whether it is to be a CUDA graph.
        is_compiled_ahead: whether its kernels are compiled before it is done, all in parallel.
        tolerance_to_one_host: None where no bit may differ from what one host gives; else the largest relative difference.
        as_between_hosts: on one host, what ``compute`` must give on several: by the schedule whose products those make.
        is_held: whether the first result of each repetition is kept, and compared once more after some others.
    """

    name: str
    workspace: Workspace
    compute: Callable[[Callable[[], None]], Sequence[Tensor]]
    check: Callable[[Sequence[Tensor]], tuple[float, bool]]
    description: Mapping[str, Any]
    in_graph: bool = True
    is_compiled_ahead: bool = True
    tolerance_to_one_host: float | None = None
    as_between_hosts: Callable[[], Sequence[Tensor]] | None = None
    is_held: bool = False
    first: list[Tensor] = field(default_factory=list)

    def on_one_host(self) -> Sequence[Tensor]:
        return self.compute(_no_delay) if self.as_between_hosts is None else self.as_between_hosts()


def _no_delay() -> None:
    pass


def count_differing(found: Tensor, expected: Tensor) -> Tensor:
    """Number of elements whose bits differ."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[found.element_size()]
    return (found.detach().view(bits) != expected.detach().view(bits)).sum()


class Repeated:
    """A piece of work that is done again and again.

    Attributes:
        differing, held_differing: int64 on the device: elements whose bits differed, and those of results that were held.
    """

    def __init__(self, world: World, work: Work, delay: Callable[[], None], held: deque[tuple[Repeated, Tensor]]) -> None:
        """Args:
        held: results of all pieces that are held.
        """
        self.world, self.work, self.delay, self.held = world, work, delay, held
        self.differing, self.held_differing = torch.zeros(2, dtype=torch.int64, device=world.device)

    def begin(self) -> float:
        """The first time; the largest relative error of the results on any rank. Raises SystemExit if they are wrong."""
        work = self.work
        work.first = [result.detach().clone() for result in work.compute(self.delay)]
        synchronize(self.world.device)
        work.workspace.raise_fault()
        by_rank = self.world.gather(work.check(work.first))
        if not all(is_right for _, is_right in by_rank):
            raise SystemExit(f"{work.name}: (relative error, whether it is right) by rank: {by_rank}")
        return max(error for error, _ in by_rank)

    def again(self) -> None:
        """Once more, compared with the first time; the host does not wait for the device."""
        results = self.work.compute(self.delay)
        for pair in zip(results, self.work.first, strict=True):
            self.differing += count_differing(*pair)
        if self.work.is_held:
            self.held.append((self, results[0]))
            if len(self.held) > _HELD:
                earlier, result = self.held.popleft()
                earlier.held_differing += count_differing(result, earlier.work.first[0])

    def prepared(self) -> Callable[[], None]:
        """Return the function that repeats it: a graph's replay, but for messages and work that is not captured."""
        if self.world.device.type != "cuda" or not self.work.in_graph or self.world.symmetric.hosts.are_many:
            return self.again
        replay, problem = captured(self.world, self.again)
        if replay is None:
            raise SystemExit(f"{self.work.name} cannot be captured in a CUDA graph: {problem}")
        return replay


class Replays:
    """All pieces of work, ready to be repeated. Collective."""

    def __init__(self, world: World, works: Sequence[Work], options: argparse.Namespace) -> None:
        """Args:
        options: ``tiny`` and ``seed`` count.
        """
        self.world, self.works, seed = world, works, options.seed
        self.delays = RandomDelays(world.device, seed + 1 + world.rank, _DELAY_OF_TINY if options.tiny else _DELAY)
        compile_ahead(world, [partial(work.compute, _no_delay) for work in works if work.is_compiled_ahead])
        held: deque[tuple[Repeated, Tensor]] = deque()
        self.repeated = [Repeated(world, work, self.delays.delay, held) for work in works]
        self.errors = [repeated.begin() for repeated in self.repeated]
        self.repeats = [repeated.again if options.tiny else repeated.prepared() for repeated in self.repeated]
        self.order = random.Random(seed)

    def repeat(self) -> None:
        """A delay, then one of the pieces. The host does not wait for the device."""
        self.delays.delay()
        self.repeats[self.order.randrange(len(self.repeats))]()

    def repeat_and_look(self, _: int) -> None:
        self.repeat()
        self.raise_faults()

    def raise_faults(self) -> None:
        """Raise the faults of the device since the last call."""
        for workspace in {id(work.workspace): work.workspace for work in self.works}.values():
            workspace.raise_fault()

    def run(self, count: int) -> float:
        """So many repetitions; the seconds that they took."""
        dist.barrier()
        began = time.perf_counter()
        for number in range(count):
            self.repeat()
            if number % _REPLAYS_OF_A_LOOK == 0:
                self.raise_faults()
        synchronize(self.world.device)
        seconds = time.perf_counter() - began
        self.raise_faults()
        return seconds


def equal_within(tolerance: float, expected: Callable[[], Tensor]) -> Callable[[Sequence[Tensor]], tuple[float, bool]]:
    """A check of the one tensor that a piece gives, by its largest relative error."""

    def check(first: Sequence[Tensor]) -> tuple[float, bool]:
        with torch.no_grad():
            error = relative_error(first[0], expected())
        return error, error <= tolerance

    return check


def works_of(world: World, options: argparse.Namespace) -> Sequence[Work]:
    """All pieces of a run, with the same inputs whichever ranks are a host. Collective."""
    return load(options.operator).works(world, tiny=options.tiny)


def results_on_one_host(world: World, options: argparse.Namespace) -> list[list[Tensor]]:
    """Return the results that each piece must give, whichever ranks are a host. Collective."""
    works = works_of(replace(world, symmetric=world.one_host), options)
    results = [[result.detach().clone() for result in work.on_one_host()] for work in works]
    synchronize(world.device)
    for work in works:
        work.workspace.raise_fault()
    return results


def compared_with_one_host(world: World, work: Work, expected: Sequence[Tensor]) -> tuple[bool, dict[str, float]]:
    """Whether the first results differ as they may from those on one host, and how, for the report. Collective."""
    pairs = list(zip(work.first, expected, strict=True))
    if work.tolerance_to_one_host is None:
        count = sum(world.gather(sum(int(count_differing(*pair)) for pair in pairs)))
        return count == 0, {"elements_unlike_one_host": count}
    error = max(world.gather(max(relative_error(*pair) for pair in pairs)))
    return error <= work.tolerance_to_one_host, {"relative_error_to_one_host": error}


def stress_on(world: World, options: argparse.Namespace) -> bool:
    """All repetitions, and the report; whether no element differed. Collective."""
    on_one_host = results_on_one_host(world, options) if world.symmetric.hosts.are_many else None
    works = works_of(world, options)
    replays = Replays(world, works, options)
    world.log(f"{len(works)} pieces of work are right; largest relative error {max(replays.errors):.1e}")
    compared: list[tuple[bool, dict[str, float]]] = [(True, {}) for _ in works]
    if on_one_host is not None:
        compared = [compared_with_one_host(world, *pair) for pair in zip(works, on_one_host, strict=True)]
    seconds = replays.run(options.replays)
    counts = torch.stack([torch.stack([own.differing, own.held_differing]) for own in replays.repeated])
    differing = torch.tensor(world.gather(counts.tolist())).sum(0).tolist()
    passed = not any(map(any, differing)) and all(is_as_on_one_host for is_as_on_one_host, _ in compared)
    report = {
        **describe_run(world, options.commit),
        "operator": options.operator,
        "hosts": world.symmetric.hosts.ranks,
        "replays": options.replays,
        "seconds": round(seconds, 2),
        "mean_microseconds": round(1e6 * seconds / max(1, options.replays), 1),
        "longest_delay_microseconds": replays.delays.longest,
        "works": [
            {
                **{"name": work.name, **work.description, "relative_error": error, **unlike},
                **{"elements_that_differ": count, "held_elements_that_differ": held},
            }
            for work, error, (count, held), (_, unlike) in zip(works, replays.errors, differing, compared, strict=True)
        ],
        "passed": passed,
    }
    if world.rank == 0:
        write_results(options.output, report)
    world.log(
        f"{options.replays} replays in {seconds:.1f} s, elements that differ: {sum(map(sum, differing))}; passed: {passed}"
    )
    return passed


def stress(options: argparse.Namespace) -> int:
    """The test on a rank of torchrun or alone, or the start of ranks of which ``--kill-rank`` dies; the exit status."""
    options.output = options.output.absolute()
    if options.kill_rank is not None and "RANK" not in os.environ:
        return 0 if killed_rank.kill_and_judge(options) else 1
    with open_world(options.ranks_per_host) as world:
        if options.kill_rank is not None:
            killed_rank.survive(world, options, Replays(world, works_of(world, options), options).repeat_and_look)
        return 0 if stress_on(world, options) else 1
