"""One product of the GEMM + All-to-All benchmark: contestants, times, checks. See gemm_all_to_all.py."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.harness import Ceilings, Timing, World, captured, relative_error, time_interleaved
from benchmarks.gemm_all_to_all.cells import DTYPE, TOLERANCE
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all, schedule_of
from dlrm_fused.ops.gemm_all_to_all.kernel import gemm
from dlrm_fused.ops.gemm_all_to_all.split import Arrivals

TIMEOUT_SECONDS = 60.0
SCHEDULES = ("kernel", "chunks", "chunks_2", "chunks_4", "tapered", "library")
# Shorter calls are timed in CUDA graphs, so that launches do not count.
GRAPH_MICROSECONDS = 50.0
# Results of a workspace that may be held. Those of a graph are held for ever.
_HELD_RESULTS = 2

# The product of the operands of a number, [M, N].
Multiply = Callable[[int], Tensor]


class ProductRun(abc.ABC):
    """One cell on this rank. Everything is collective.

    Attributes:
        tolerance: largest relative error of a result.
    """

    tolerance = TOLERANCE

    def __init__(self, world: World, cell: Any, seconds: float) -> None:
        """Args:
        seconds: of timing.
        """
        self.world, self.cell, self.seconds = world, cell, seconds
        self.operands: list[tuple[Tensor, Tensor]] = cell.draw(world.rank, world.size, world.device, count=cell.operands)
        self.buffer = self.new_result()
        self.last_results: dict[str, Tensor] = {}
        self.contestants = self.choose_contestants()

    @abc.abstractmethod
    def choose_contestants(self) -> dict[str, Multiply]:
        """By name; the one whose time decides about graphs comes first."""

    @abc.abstractmethod
    def expected(self) -> Tensor:
        """fp64 [M, N], of the last operands."""

    @abc.abstractmethod
    def compared(self, us: Mapping[str, float], ceilings: Ceilings, teraflops: float) -> dict[str, Any]:
        """What the report says of the times besides."""

    def new_result(self) -> Tensor:
        return torch.empty(self.cell.m, self.cell.n, dtype=DTYPE, device=self.world.device)

    def gemm(self, number: int) -> Tensor:
        """cuBLAS alone."""
        x, weight = self.operands[number]
        return torch.mm(x, weight.t(), out=self.buffer)

    def run_of(self, name: str) -> Callable[[], None]:
        """A call of one contestant for each of the operands."""

        def run() -> None:
            for number in range(len(self.operands)):
                self.last_results[name] = self.contestants[name](number)

        return run

    def times(self) -> tuple[dict[str, Timing], str]:
        """Timings of the calls for all operands together, and how they were taken."""
        runs = {name: self.run_of(name) for name in self.contestants}
        timings = time_interleaved(self.world, runs, self.seconds, rounds=(8, 20))
        shortest = timings[next(iter(runs))].microseconds / len(self.operands)
        if self.world.device.type != "cuda" or shortest > GRAPH_MICROSECONDS:
            return timings, "bursts"
        graphs = {name: self.graph_of(name, run) for name, run in runs.items()}
        return time_interleaved(self.world, graphs, self.seconds, rounds=(8, 20)), "graphs"

    def graph_of(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        replay, problem = captured(self.world, run)
        if replay is None:
            raise RuntimeError(f"{name} cannot be captured in a CUDA graph: {problem}")
        return replay

    @torch.no_grad()
    def result(self, ceilings: Ceilings, teraflops: float) -> dict[str, Any]:
        """What the report says of the cell."""
        timings, timed = self.times()
        us = {name: timing.microseconds / len(self.operands) for name, timing in timings.items()}
        expected = self.expected()
        own_errors = {name: relative_error(self.last_results[name], expected) for name in us if name != "gemm"}
        every_rank = self.world.gather(own_errors)
        errors = {name: max(own[name] for own in every_rank) for name in own_errors}
        return {
            "passed": max(errors.values()) <= self.tolerance,
            "errors": errors,
            "us": us,
            **self.compared(us, ceilings, teraflops),
            "different_operands": len(self.operands),
            "timed": timed,
            "spread": {name: timing.spread for name, timing in timings.items()},
            "by_rank_us": {name: [own / len(self.operands) for own in timing.by_rank] for name, timing in timings.items()},
        }


class FusedProduct(ProductRun):
    """The fused operator against cuBLAS + NCCL."""

    def choose_contestants(self) -> dict[str, Multiply]:
        received = self.new_result()
        self.workspaces = [
            new_workspace(self.world, f"benchmark {number}", self.cell.m, self.cell.n)
            for number in range(-(-len(self.operands) // _HELD_RESULTS))
        ]
        self.schedule = self.choose_schedule()

        def nccl(number: int) -> Tensor:
            dist.all_to_all_single(received, self.gemm(number))
            return received

        def fused(schedule: str) -> Multiply:
            return lambda number: gemm_all_to_all(
                self.workspaces[number // _HELD_RESULTS], *self.operands[number], schedule=schedule
            )

        others = {name: fused(name) for name in SCHEDULES if name != self.schedule and self.world.device.type == "cuda"}
        return {"fused": fused("auto"), **others, "nccl": nccl, "gemm": self.gemm}

    @torch.no_grad()
    def choose_schedule(self) -> str:
        """What ``auto`` takes in all workspaces; a shape that is not in the table it measures in the first one."""
        first, *others = self.workspaces
        gemm_all_to_all(first, *self.operands[0])
        for workspace in others:
            workspace.schedules.measured_here.update(first.schedules.measured_here)
        return schedule_of(first, self.cell.m, self.cell.n, self.cell.k)

    def times(self) -> tuple[dict[str, Timing], str]:
        times = super().times()
        for workspace in self.workspaces:
            workspace.raise_fault()
        return times

    def expected(self) -> Tensor:
        x, weight = self.operands[-1]
        product = x.double() @ weight.double().t()
        received = torch.empty_like(product)
        dist.all_to_all_single(received, product)
        return received

    def compared(self, us: Mapping[str, float], ceilings: Ceilings, teraflops: float) -> dict[str, Any]:
        work = self.cell.work(self.world.size)
        link_us, floor_us = ceilings.transfer_microseconds(0, work.link_bytes), work.least_microseconds(ceilings, teraflops)
        return {
            "us": {**us, self.schedule: us["fused"]},
            "schedule": self.schedule,
            "ratio": us["fused"] / us["nccl"],
            "link_bytes": work.link_bytes,
            "link_us": link_us,
            "overlap": us["fused"] / max(us["gemm"], link_us),
            "floor_us": floor_us,
            "over_floor": us["fused"] / floor_us,
        }


def new_workspace(world: World, name: str, max_rows: int, max_columns: int) -> GemmWorkspace:
    """Collective."""
    return GemmWorkspace(
        world.symmetric,
        name=name,
        max_rows=max_rows,
        max_columns=max_columns,
        dtype=DTYPE,
        timeout_seconds=TIMEOUT_SECONDS,
    )


class ProductAlone(ProductRun):
    """The kernel of the operator against cuBLAS, each rank for itself."""

    def choose_contestants(self) -> dict[str, Multiply]:
        result, arrivals = self.new_result(), Arrivals(self.world.device)

        def kernel(number: int) -> Tensor:
            gemm(*self.operands[number], out=result, arrivals=arrivals)
            return result

        return {"kernel": kernel, "gemm": self.gemm}

    def expected(self) -> Tensor:
        x, weight = self.operands[-1]
        return x.double() @ weight.double().t()

    def compared(self, us: Mapping[str, float], ceilings: Ceilings, teraflops: float) -> dict[str, Any]:
        floor_us = self.cell.work(ranks=1).least_microseconds(ceilings, teraflops)
        return {"ratio": us["kernel"] / us["gemm"], "floor_us": floor_us, "over_floor": us["kernel"] / floor_us}
