"""What the stress tests of products share: the same work again and again, after random delays, must give the same bits.

Some pieces of work, all collective, are done once and checked. Then they are repeated in random order, the same on all ranks,
with random delays on the device before each, other ones on each rank, and compared with the first time, bit for bit. On GPUs
a piece is a CUDA graph if it can be one; the host reads the number of elements that differ at the end.

Where ranks are declared to be several hosts, the first results are also compared with those of all ranks on one host. No bit
may differ, but in sums over ranks, which several hosts add up in another order and round in other places, and in products of
torch, whose bits may depend on the number of rows: there the relative difference must be within the tolerance.
"""

from __future__ import annotations

import abc
import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import killed_rank
from benchmarks.common.harness import World, captured, compile_ahead, describe_run, relative_error, synchronize
from benchmarks.common.random_delays import RandomDelays
from benchmarks.common.results import add_report_arguments, write_results

# The longest usual delay, in microseconds.
DELAY, DELAY_OF_TINY = 20.0, 200.0
# The longest delays are rare.
LONG_DELAY_EVERY, LONG_DELAY = 200, 50
# Between two looks at what the kernels have reported.
REPLAYS_OF_A_LOOK = 1_000


class Workspace(Protocol):
    """Of any operator."""

    def raise_fault(self) -> None: ...


class Work(abc.ABC):
    """A piece of work with always the same results, and what it gave the first time. Collective.

    Attributes:
        name: for messages.
        in_graph: whether it is to be a CUDA graph.
        tolerance_to_one_host: None where no bit may differ from what one host gives; else the largest relative difference.
        differing: int64 on the device: elements whose bits differed later.
    """

    in_graph = True
    tolerance_to_one_host: float | None = None

    def __init__(self, world: World, workspace: Workspace, name: str) -> None:
        self.world, self.workspace, self.name = world, workspace, name
        self.differing = torch.zeros((), dtype=torch.int64, device=world.device)
        self.first: list[Tensor] = []

    @abc.abstractmethod
    def compute(self) -> Sequence[Tensor]:
        """The results."""

    def compute_as_between_hosts(self) -> Sequence[Tensor]:
        """On one host, what :meth:`compute` must give on several: by the schedule whose products those make."""
        return self.compute()

    @abc.abstractmethod
    def check(self) -> float:
        """The largest relative error of the first results on any rank. Raises SystemExit if they are wrong."""

    @abc.abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """For the report."""

    def begin(self) -> float:
        """The first time; what :meth:`check` says of it."""
        self.first = [result.clone() for result in self.compute()]
        synchronize(self.world.device)
        self.workspace.raise_fault()
        return self.check()

    def again(self) -> None:
        """Once more, compared with the first time; the host does not wait for the device."""
        for pair in zip(self.compute(), self.first, strict=True):
            self.differing += count_differing(*pair)


def count_differing(found: Tensor, expected: Tensor) -> Tensor:
    """Number of elements whose bits differ."""
    bits = torch.int16 if found.element_size() == 2 else torch.int32
    return (found.view(bits) != expected.view(bits)).sum()


class Replays:
    """All pieces of work, ready to be repeated. Collective."""

    def __init__(self, world: World, works: Sequence[Work], options: argparse.Namespace) -> None:
        """Args:
        options: ``tiny`` and ``seed`` count.
        """
        self.world, self.works, seed = world, works, options.seed
        compile_ahead(world, [work.compute for work in works])
        self.errors = [work.begin() for work in works]
        self.repeats = [self._repeated(work) for work in works]
        self.order = random.Random(seed)
        self.delays = RandomDelays(
            world.device,
            seed + 1 + world.rank,
            DELAY_OF_TINY if options.tiny else DELAY,
            long_every=LONG_DELAY_EVERY,
            long_factor=LONG_DELAY,
        )

    def _repeated(self, work: Work) -> Callable[[], None]:
        # A graph cannot have messages.
        if self.world.device.type != "cuda" or not work.in_graph or self.world.symmetric.hosts.are_many:
            return work.again
        replay, problem = captured(self.world, work.again)
        if replay is None:
            raise SystemExit(f"{work.name} cannot be captured in a CUDA graph: {problem}")
        return replay

    def repeat(self) -> None:
        """A delay, then one of the pieces. The host does not wait for the device."""
        self.delays.delay()
        self.repeats[self.order.randrange(len(self.repeats))]()

    def raise_fault(self) -> None:
        """What has gone wrong on the device since."""
        raise_faults(self.works)

    def run(self, count: int) -> float:
        """So many repetitions; the seconds that they took."""
        dist.barrier()
        began = time.perf_counter()
        for number in range(count):
            self.repeat()
            if number % REPLAYS_OF_A_LOOK == 0:
                self.raise_fault()
        synchronize(self.world.device)
        seconds = time.perf_counter() - began
        self.raise_fault()
        return seconds


def raise_faults(works: Sequence[Work]) -> None:
    """What has gone wrong on the device."""
    for workspace in {id(work.workspace): work.workspace for work in works}.values():
        workspace.raise_fault()


# All pieces of a run, with the same inputs whichever ranks are a host. Collective.
MakeWorks = Callable[[World, argparse.Namespace], Sequence[Work]]


def results_on_one_host(make: MakeWorks, world: World, options: argparse.Namespace) -> list[list[Tensor]]:
    """What each piece must give, whichever ranks are a host. Collective."""
    on_one_host = replace(world, symmetric=world.one_host)
    works = make(on_one_host, options)
    compile_ahead(on_one_host, [work.compute_as_between_hosts for work in works])
    results = [[result.clone() for result in work.compute_as_between_hosts()] for work in works]
    synchronize(world.device)
    raise_faults(works)
    return results


def compared_with_one_host(work: Work, expected: Sequence[Tensor]) -> dict[str, float]:
    """How the first results differ from those on one host, for the report. Collective."""
    pairs = list(zip(work.first, expected, strict=True))
    if work.tolerance_to_one_host is None:
        own = sum(int(count_differing(*pair)) for pair in pairs)
        return {"elements_unlike_one_host": sum(work.world.gather(own))}
    return {"relative_error_to_one_host": max(work.world.gather(max(relative_error(*pair) for pair in pairs)))}


def is_as_on_one_host(work: Work, compared: Mapping[str, float]) -> bool:
    """Whether the differences are allowed ones."""
    limits = {"elements_unlike_one_host": 0.0, "relative_error_to_one_host": work.tolerance_to_one_host or 0.0}
    return all(value <= limits[key] for key, value in compared.items())


def largest_differences(compared: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of all pieces, by kind of difference."""
    kinds = {kind: None for own in compared for kind in own}
    return {kind: max(own[kind] for own in compared if kind in own) for kind in kinds}


def stress(make: MakeWorks, world: World, options: argparse.Namespace) -> bool:
    """All repetitions, and the report; whether no element differed. Collective."""
    on_one_host = results_on_one_host(make, world, options) if world.symmetric.hosts.are_many else None
    works = make(world, options)
    replays = Replays(world, works, options)
    world.log(f"{len(works)} pieces of work are right; largest relative error {max(replays.errors):.1e}")
    compared: list[dict[str, float]] = [{} for _ in works]
    if on_one_host is not None:
        compared = [compared_with_one_host(*pair) for pair in zip(works, on_one_host, strict=True)]
        world.log(f"largest differences from all ranks on one host: {largest_differences(compared)}")
    seconds = replays.run(options.replays)
    by_rank = world.gather([int(work.differing) for work in works])
    differing = [sum(own) for own in zip(*by_rank, strict=True)]
    passed = not any(differing) and all(is_as_on_one_host(*pair) for pair in zip(works, compared, strict=True))
    report = {
        **describe_run(world, options.commit),
        "hosts": world.symmetric.hosts.ranks,
        "replays": options.replays,
        "seconds": round(seconds, 2),
        "mean_microseconds": round(1e6 * seconds / max(1, options.replays), 1),
        "longest_delay_microseconds": replays.delays.longest,
        **largest_differences(compared),
        "works": [
            {**work.describe(), "relative_error": error, "elements_that_differ": count, **unlike}
            for work, error, count, unlike in zip(works, replays.errors, differing, compared, strict=True)
        ],
        "passed": passed,
    }
    if world.rank == 0:
        write_results(options.output, report)
    world.log(f"{options.replays} replays in {seconds:.1f} s, elements that differ: {sum(differing)}; passed: {passed}")
    return passed


def step(make: MakeWorks, world: World, options: argparse.Namespace) -> Callable[[int], None]:
    """What is done again and again until a rank is lost. Collective."""
    replays = Replays(world, make(world, options), options)

    def repeat(_: int) -> None:
        replays.repeat()
        replays.raise_fault()

    return repeat


def main(description: str | None, make: MakeWorks, *, replays: int, arguments: Sequence[str] | None) -> int:
    """The command line of a stress test; its exit status.

    Args:
        make: the work; ``options.tiny`` says whether it must be small.
        replays: so many, unless the command line says otherwise.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=replays)
    add_report_arguments(parser)
    parser.add_argument("--tiny", action="store_true", help="small enough for compute-sanitizer and the CPU")
    parser.add_argument("--seed", type=int, default=1)
    killed_rank.add_options(parser)
    options = parser.parse_args(arguments)
    options.output = options.output.absolute()
    return killed_rank.run(
        options,
        lambda world, options: stress(make, world, options),
        lambda world, options: step(make, world, options),
    )
