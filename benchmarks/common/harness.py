"""The parts that benchmarks of fused computation and communication share: processes, timing across ranks, ceilings, report.

How time is taken on GPUs: before each burst of calls all ranks are put to sleep on the device, long enough for the host to
enqueue the whole burst, and then meet at a barrier. So the events around the burst see the device's time, not that of
launches, and all ranks begin together. Candidates take turns, round by round; of each rank the median over rounds counts, and
of the ranks the slowest.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import itertools
import logging
import math
import multiprocessing
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from triton.compiler import ASTSource

from benchmarks.common.environment import describe_environment, device_name
from benchmarks.common.results import write_results
from dlrm_fused.compat.torch import sleep_on_device
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.symmetric.launches import Launches

T = TypeVar("T")

# The dtype of products' operands. Triton's interpreter has no products of bf16.
HALF = torch.float16 if triton.knobs.runtime.interpret else torch.bfloat16

# A rank may compile kernels while the others wait.
_COLLECTIVE_LIMIT = timedelta(minutes=2)
_LONGEST_SLEEP_SECONDS = 0.02
_SHORTEST_BURST_SECONDS = 2e-4
_MAX_CALLS_IN_A_BURST = 8
_CALLS_IN_A_GRAPH = 20


@dataclass
class World:
    """The ranks of a run, and what they talk through.

    Attributes:
        symmetric: of the operators.
        one_host: whose ranks reach each other's memory, whatever ``symmetric`` takes for a host.
    """

    rank: int
    size: int
    device: torch.device
    symmetric: SymmetricGroup
    one_host: SymmetricGroup

    @property
    def group(self) -> dist.ProcessGroup:
        """NCCL for CUDA tensors, gloo for those on the CPU."""
        group = dist.group.WORLD
        assert group is not None
        return group

    def gather(self, value: T) -> list[T]:
        """The value of each rank. Collective."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def free_symmetric_memory(self) -> None:
        """Close :attr:`symmetric`, which frees what its memory is not needed for any more, and make it anew. Collective."""
        synchronize(self.device)
        dist.barrier()  # no rank stores there any more
        process_group = self.symmetric.process_group  # which a closed group has let go of
        self.symmetric.close()
        self.symmetric = symmetric_group(process_group, self.device)

    def free_memory(self) -> None:
        """Free what nothing refers to any more; of symmetric memory see :meth:`free_symmetric_memory`. Collective."""
        gc.collect()  # those who refer to memory may refer to each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.free_symmetric_memory()

    def log(self, line: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(line, flush=True)


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`open_world` reads."""
    parser.add_argument(
        "--ranks-per-host",
        type=int,
        help="so many neighbouring ranks are a host, between which slices go as messages; default: all ranks are one host",
    )


@contextmanager
def open_world(ranks_per_host: int | None = None, *, on_gpus: bool = torch.cuda.is_available()) -> Iterator[World]:
    """The ranks that torchrun has started, each with its GPU, or all on the CPU; a process that it has not started is alone.

    Args:
        ranks_per_host: so many neighbouring ranks are a host, of the last one what is left; None: all ranks are one host.

    Raises:
        SystemExit: if so many ranks a host make no several hosts.
    """
    is_alone = "RANK" not in os.environ
    rank, size, local_rank = (0, 1, 0) if is_alone else (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_alone else None
    meeting: dict[str, Any] = {"store": store, "rank": 0, "world_size": 1} if is_alone else {}
    if ranks_per_host is not None and not 1 <= ranks_per_host < size:
        raise SystemExit(f"--ranks-per-host {ranks_per_host}: the {size} ranks would not be several hosts")
    if on_gpus:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=_COLLECTIVE_LIMIT, **meeting)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=_COLLECTIVE_LIMIT, **meeting)
    symmetric = one_host = symmetric_group(dist.group.WORLD, device)
    if ranks_per_host is not None:
        os.environ["DLRM_FUSED_HOST"] = f"host {rank // ranks_per_host}"
        symmetric = symmetric_group(cast(dist.ProcessGroup, dist.new_group(range(size))), device)
    world = World(rank, size, device, symmetric, one_host)
    try:
        yield world
    finally:
        world.symmetric.close()
        if one_host is not symmetric:
            one_host.close()
        dist.destroy_process_group()


def start_ranks(command: Sequence[str], ranks: int, store: dist.TCPStore, **options: Any) -> list[subprocess.Popen[str]]:
    """Start the command once for each rank, with what torchrun would put into its environment: that ends all when one is lost.

    Args:
        store: through which the ranks find each other; a master of the caller's, so that it outlives any rank.
        options: of :class:`subprocess.Popen`; ``env`` replaces the environment of the caller.
    """
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks are clients of the store
    given = options.pop("env", os.environ)
    own = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks))
    return [subprocess.Popen(command, env={**given, **shared, **of_rank}, text=True, **options) for of_rank in own]


@dataclass(frozen=True)
class Timing:
    """Time of one call.

    Attributes:
        microseconds: of the slowest rank.
        by_rank: the median over rounds of each rank, in microseconds.
        spread: interquartile range over median, on the slowest rank.
        host: microseconds in which the host enqueues the call, on the rank where that takes longest; on the CPU of the whole.
    """

    microseconds: float
    by_rank: tuple[float, ...]
    spread: float
    host: float


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    torch.get_device_module(device).synchronize(device)


class _Clock:
    """Times bursts of calls that begin on all ranks together.

    Attributes:
        enqueued: seconds in which the host has enqueued the last burst.
    """

    def __init__(self, world: World, before: Callable[[], object]) -> None:
        self._world, self._before = world, before
        self._on_gpu = world.device.type == "cuda"
        self._token = torch.zeros(1, device=world.device)

    def seconds(self, call: Callable[[], object], calls: int, host_seconds: float = 0.0) -> float:
        """Time of so many calls, which the host enqueues in about ``host_seconds``. Collective."""
        self._before()
        if not self._on_gpu:
            dist.barrier()
            return self._enqueue(call, calls)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        sleep = min(1.5 * host_seconds + 2e-4, _LONGEST_SLEEP_SECONDS)
        sleep_on_device(sleep)
        dist.all_reduce(self._token)
        start.record()
        self._enqueue(call, calls)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def _enqueue(self, call: Callable[[], object], calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        self.enqueued = time.perf_counter() - began
        return self.enqueued

    def host_seconds(self, call: Callable[[], object]) -> float:
        """Time that the host needs to enqueue a call."""
        self._before()
        synchronize(self._world.device)
        began = time.perf_counter()
        call()
        seconds = time.perf_counter() - began
        synchronize(self._world.device)
        return seconds


def time_interleaved(
    world: World,
    candidates: Mapping[str, Callable[[], object]],
    seconds: float,
    rounds: tuple[int, int] = (8, 30),
    before: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Time each candidate's call on all ranks at once, in turns. Collective.

    Args:
        candidates: by name; equal names on all ranks, in one order. Each call is made several times before it is timed.
        seconds: to spend, about.
        rounds: the fewest and the most rounds, whatever the seconds.
        before: prepares each call, outside of the time.
    """
    clock = _Clock(world, before or (lambda: None))
    for call in candidates.values():
        for _ in range(2):
            clock.host_seconds(call)
    hosts = {name: clock.host_seconds(call) for name, call in candidates.items()}
    # All ranks must make the same calls: their own measurements would not tell them the same.
    estimates = world.gather({name: clock.seconds(call, 1, hosts[name]) for name, call in candidates.items()})
    longest = {name: max(estimate[name] for estimate in estimates) for name in candidates}
    slowest_host = {name: max(world.gather(hosts[name])) for name in candidates}
    most_calls = 1 if before else _MAX_CALLS_IN_A_BURST
    calls = {name: min(most_calls, max(1, round(_SHORTEST_BURST_SECONDS / longest[name]))) for name in candidates}
    a_round = sum(calls[name] * (longest[name] + 2 * slowest_host[name]) for name in candidates)
    count = max(rounds[0], min(rounds[1], int(seconds / a_round)))

    times: dict[str, list[float]] = {name: [] for name in candidates}
    enqueued: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for _ in range(count):
        for name in order:
            burst = clock.seconds(candidates[name], calls[name], calls[name] * slowest_host[name])
            times[name].append(burst / calls[name] * 1e6)
            enqueued[name].append(clock.enqueued / calls[name] * 1e6)
        order.append(order.pop(0))
    of_hosts = {name: max(world.gather(statistics.median(enqueued[name]))) for name in candidates}
    return {name: _over_ranks(world.gather(times[name]), of_hosts[name]) for name in candidates}


def time_finalists(world: World, candidates: Mapping[str, Callable[[], object]], finalists: int) -> dict[str, float]:
    """Microseconds of each candidate's call, the fastest first; so many of the fastest are timed twice. Collective."""
    first = time_interleaved(world, candidates, seconds=0.0, rounds=(3, 3))
    order = sorted(candidates, key=lambda name: first[name].microseconds)
    last = time_interleaved(world, {name: candidates[name] for name in order[:finalists]}, seconds=0.1, rounds=(8, 20))
    times = {name: (last.get(name) or first[name]).microseconds for name in order}
    return dict(sorted(times.items(), key=lambda entry: entry[1]))


def _over_ranks(times: Sequence[Sequence[float]], host: float) -> Timing:
    medians = tuple(statistics.median(own) for own in times)
    slowest = max(range(len(medians)), key=lambda rank: medians[rank])
    low, _, high = statistics.quantiles(times[slowest], n=4, method="inclusive")
    return Timing(medians[slowest], medians, (high - low) / medians[slowest], host)


def captured(world: World, call: Callable[[], object]) -> tuple[Callable[[], None] | None, str]:
    """A CUDA graph that replays the call, or None and the reason, on all ranks alike. Collective."""
    error = ""
    graph = torch.cuda.CUDAGraph()
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        # Other threads (NCCL's watchdog) may use CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except Exception as raised:
        error = f"rank {world.rank}: {type(raised).__name__}: {str(raised).splitlines()[0] if str(raised) else ''}"
    errors = [other for other in world.gather(error) if other]
    return (None, errors[0]) if errors else (graph.replay, "")


def seconds_of(
    world: World, call: Callable[[], object], *, in_graph: bool = False, before: Callable[[], object] | None = None
) -> float:
    """Seconds of one call. Collective.

    Args:
        in_graph: on GPUs, many calls are replayed from a CUDA graph.
        before: as :func:`time_interleaved` has it.
    """
    calls = 1
    if in_graph and world.device.type == "cuda":
        calls, single = _CALLS_IN_A_GRAPH, call
        replay, problem = captured(world, lambda: [single() for _ in range(calls)])
        if replay is None:
            raise RuntimeError(problem)
        call = replay
    return time_interleaved(world, {"": call}, 0.1, before=before)[""].microseconds / calls / 1e6


def compile_ahead(world: World, calls: Sequence[Callable[[], object]]) -> None:
    """Compile the Triton kernels that the calls would launch, in parallel, without launching any. Collective.

    They end in Triton's cache on disk. A kernel that all ranks need is compiled by one of them. One that cannot be compiled is
    left out; its launch will say why. Without GPUs there is nothing to compile. Between hosts nothing is compiled ahead:
    messages would really be sent, of sizes that no kernel has computed.

    Args:
        calls: the same on all ranks; not made before.
    """
    if world.device.type == "cuda" and not world.symmetric.hosts.are_many:
        kernels = _kernels_of(calls)
        needed_by: dict[str, list[int]] = {}
        for rank, keys in enumerate(world.gather(list(kernels))):
            for key in keys:
                needed_by.setdefault(key, []).append(rank)
        own = [kernels[key] for i, (key, ranks) in enumerate(needed_by.items()) if ranks[i % len(ranks)] == world.rank]
        if own:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(sorted({kernel.module for kernel in own}))
            with ProcessPoolExecutor(min(len(own), max(1, (os.cpu_count() or 1) // world.size)), context) as pool:
                list(pool.map(_compile, own))
    dist.barrier()


@dataclass(frozen=True)
class _Kernel:
    """A Triton kernel as it is to be compiled: what :class:`triton.compiler.ASTSource` wants to know, and how."""

    module: str
    name: str
    source: tuple[Any, ...]  # signature, constants, attributes
    options: dict[str, Any]
    target: Any


def _kernels_of(calls: Sequence[Callable[[], object]]) -> dict[str, _Kernel]:
    """The kernels that the calls would launch, by all that they are compiled from."""
    kernels: dict[str, _Kernel] = {}
    run = triton.JITFunction.run

    def run_without_launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    def collect(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attributes: Any, *_: Any
    ) -> None:
        target = self.device_caches[device][2]
        kernel = _Kernel(self.module, self.__name__, (signature, constants, attributes), options.__dict__, target)
        kernels[repr(kernel)] = kernel

    def launch_by_triton(self: Any, layout: Any, kernel: Any, programs: Any, *args: Any, **options: Any) -> None:
        kernel[programs](*args, **options)

    # A kernel that was launched before would run, on what others, which do not, leave in memory.
    with (
        patch.object(triton.JITFunction, "run", run_without_launch),
        patch.object(triton.JITFunction, "_do_compile", collect),
        patch.object(Launches, "__call__", launch_by_triton),
    ):
        for call in calls:
            call()
    return kernels


def _compile(kernel: _Kernel) -> None:
    """In a process that has nothing to do with the GPU."""
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    with suppress(Exception):
        triton.compile(ASTSource(function, *kernel.source), target=kernel.target, options=kernel.options)


@dataclass(frozen=True)
class Ceilings:
    """The most that the machine can do, as measured; GB/s (1e9 bytes) of one rank, the slowest.

    Attributes:
        copy: within a GPU, bytes read plus bytes written.
        peer_stores: to all peers at once, sent by stores of a kernel.
        peer_copies: the same by the copy engines.
    """

    copy: float
    peer_stores: float
    peer_copies: float

    def transfer_microseconds(self, memory_bytes: float, link_bytes: float) -> float:
        """The least time in which a rank can move so many bytes of its memory, and send so many to its peers meanwhile."""
        peers = max(self.peer_stores, self.peer_copies)
        return max(memory_bytes / self.copy, link_bytes / peers if link_bytes else 0.0) / 1e3


def measure_ceilings(world: World) -> Ceilings:
    """Collective; allocates symmetric memory."""
    on_gpu = world.device.type == "cuda"
    size = 1 << (30 if on_gpu else 22)
    source, target = (torch.empty(size // 4, device=world.device).normal_() for _ in range(2))
    copy = time_interleaved(world, {"copy": lambda: target.copy_(source)}, seconds=0.1)["copy"]
    part = size // 8
    memory = world.one_host.allocate("benchmark: bandwidth to the peers", part * world.size)
    peers = [(world.rank + 1 + i) % world.size for i in range(world.size - 1)]
    pieces = [memory.peer(peer)[world.rank * part :][:part].view(torch.float32) for peer in peers]
    own = source[: part // 4]
    streams = [torch.cuda.Stream() for _ in peers] if on_gpu else []

    def to_all(send: Callable[[Tensor], object]) -> Callable[[], None]:
        def call() -> None:
            for piece, stream in itertools.zip_longest(pieces, streams):
                if stream is None:
                    send(piece)
                    continue
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    send(piece)
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)

        return call

    stores, copies = (lambda piece: torch.add(own, 1.0, out=piece)), (lambda piece: piece.copy_(own))
    sent = time_interleaved(world, {"stores": to_all(stores), "copies": to_all(copies)}, seconds=0.2)
    sent_kilobytes = part * len(peers) / 1e3
    return Ceilings(
        copy=2 * size / 1e3 / copy.microseconds,
        peer_stores=sent_kilobytes / sent["stores"].microseconds,
        peer_copies=sent_kilobytes / sent["copies"].microseconds,
    )


@dataclass(frozen=True)
class Work:
    """The least work of a rank.

    Attributes:
        flops: multiplications and additions.
        memory_bytes: that its memory carries.
        link_bytes: that it sends to its peers.
    """

    flops: float
    memory_bytes: float
    link_bytes: float

    def least_microseconds(self, ceilings: Ceilings, teraflops: float) -> float:
        """If all of it goes on at once, each at its best speed."""
        return max(self.flops / teraflops / 1e6, ceilings.transfer_microseconds(self.memory_bytes, self.link_bytes))


def measure_teraflops(world: World, dtype: torch.dtype) -> float:
    """10^12 flops a second of the library's product of two large matrices, on the slowest rank. Collective."""
    size = 8192 if world.device.type == "cuda" else 256
    x, weight = (torch.empty(size, size, dtype=dtype, device=world.device).normal_() for _ in range(2))
    timing = time_interleaved(world, {"product": lambda: x @ weight.t()}, seconds=0.1)["product"]
    return 2 * size**3 / timing.microseconds / 1e6


class Report:
    """The JSON of a benchmark of many cells, written anew after each. The methods are collective.

    Attributes:
        content: what is written: the head, ``cells``, ``not_run``, ``seconds`` and ``summary``.
    """

    def __init__(
        self,
        world: World,
        output: Path,
        head: Mapping[str, Any],
        *,
        summarize: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]],
        line: Callable[[Mapping[str, Any]], str],
        seconds_budget: float | None = None,
    ) -> None:
        """Args:
        summarize: makes the summary of the cells.
        line: of the log, about a cell.
        seconds_budget: after so many seconds no cell is begun; None for no limit.
        """
        self.content: dict[str, Any] = {**head, "cells": [], "not_run": []}
        self._world, self._output = world, output
        self._summarize, self._line, self._budget = summarize, line, seconds_budget
        self._began = time.monotonic()

    def has_time(self, name: str) -> bool:
        """Whether a cell may begin; if the time is up on any rank, it is listed as not run."""
        if self._budget is None or max(self._world.gather(time.monotonic() - self._began)) <= self._budget:
            return True
        self.content["not_run"].append(name)
        return False

    def attempt(self, cell: Mapping[str, Any], work: Callable[[], T]) -> T | None:
        """Return the result of ``work()``; if it raises on some rank, report the cell as failed and return None.

        Args:
            cell: its name, and whatever else its entry begins with.
        """
        result, error = None, ""
        try:
            result = work()
        except Exception as raised:
            logging.exception("rank %d: %s", self._world.rank, cell["name"])
            error = f"rank {self._world.rank}: {type(raised).__name__}: {raised}"
        errors = [other for other in self._world.gather(error) if other]
        if errors:
            self.add({**cell, "passed": False, "error": errors[0]})
            return None
        return result

    def add(self, cell: Mapping[str, Any]) -> None:
        """Report a cell."""
        self.content["cells"].append(cell)
        self.write()
        self._world.log(f"{time.monotonic() - self._began:5.0f} s {self._line(cell)}")

    def write(self) -> None:
        """On rank 0."""
        if self._world.rank:
            return
        self.content["seconds"] = time.monotonic() - self._began
        self.content["summary"] = self._summarize(self.content["cells"])
        write_results(self._output, self.content)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest |actual - expected| / (|expected| + typical |expected|), the latter the median over a sample; NaN is infinite."""
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.flatten().float(), expected.flatten().float()
    typical = expected[:: max(1, expected.numel() >> 20)].abs().median().clamp(min=1e-30)
    error = ((actual - expected).abs() / (expected.abs() + typical)).max().item()
    return error if math.isfinite(error) else math.inf


def describe_run(world: World, commit: str | None) -> dict[str, Any]:
    """Machine, versions, commit and command, for the head of a report. Collective."""
    return describe_environment(world.gather(device_name(world.device)), commit)
