"""What can be measured of the kernel of GEMV + AllReduce on a machine with one GPU.

    python -m benchmarks.gemv_all_reduce.simulated_ranks --output results.json [--cells tiny|small] [--rows 1 16 64]
        [--match REGEX]

[m, K] x [N, K]^T in bf16 with K split over two ranks, as in benchmark.py, with weights that the L2 cache does not hold, in CUDA
graphs:

* one rank alone, whose sum has one summand, beside cuBLAS with the same operands;
* two ranks that are simulated: each has its memory and its stream, and both run on the one GPU at once. What goes over links
  otherwise stays in the GPU, and both share its bandwidth, so the floor is that of twice the weights. What is above the floor
  is what launch, sums and waits cost.

Every result is compared with a product in fp64, and between the ranks bit by bit. Without a GPU one rank runs, as it does
there: that tests this script, not the speed.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.common.environment import describe_environment, device_name
from benchmarks.common.harness import relative_error
from benchmarks.common.results import write_results
from benchmarks.gemv_all_reduce.cells import CELLS, TOLERANCE, Cell, draw_inputs, draw_weights, weight_copies
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.gemv_all_reduce.kernel import ReceiveBuffer
from dlrm_fused.ops.gemv_all_reduce.op import Inputs, run_kernel
from dlrm_fused.ops.gemv_all_reduce.tuning import MIN_COLUMNS
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace, split_buffer
from dlrm_fused.symmetric.device import FAULT, channel_args

# K is split over so many ranks, whether they are simulated or not.
SPLIT_OVER = 2
CALLS_OF_A_GRAPH = 48
_REPLAYS = 9
# Looks at a word until a wait is given up: about a second.
_POLL_LIMIT = 2_000_000


class SimulatedRanks:
    """Ranks whose memory is that of one device: ``workspaces`` are what the kernel's launch wants to know of each."""

    def __init__(self, ranks: int, device: torch.device, rows: int, columns: int, poll_limit: int = _POLL_LIMIT) -> None:
        def words(count: int) -> list[Tensor]:
            return [torch.zeros(count, dtype=torch.int64, device=device) for _ in range(ranks)]

        def addresses(tensors: Sequence[Tensor]) -> Tensor:
            return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)

        slot, tiles = rows * columns, -(-columns // MIN_COLUMNS)
        flags_at = 2 * (ranks + 1) * slot
        half = flags_at + (ranks + 1) * tiles + ranks
        buffers, flags, self._states = words(2 * half), words(3 * ranks), words(8)
        buffer_addresses, flag_addresses = addresses(buffers), addresses(flags)
        self._control = torch.zeros(8, dtype=torch.int64)
        if device.type == "cuda":
            self._control = self._control.pin_memory()

        def buffer_args(rank: int, flagged: bool) -> ReceiveBuffer:
            parts_at = (ranks + 1) * slot if flagged else 0
            return ReceiveBuffer(buffers[rank], buffer_addresses, half, parts_at, parts_at + ranks * slot, flags_at)

        def workspace(rank: int) -> GemvWorkspace:
            control = self._control.data_ptr()
            of_rank = SimpleNamespace(
                world_size=ranks,
                gpu=gpu_of(device),
                buffer_args=lambda flagged: buffer_args(rank, flagged),
                split_buffer=split_buffer(rows, columns, tiles, device),
                kernel_args=channel_args(flags[rank], flag_addresses, self._states[rank], control, poll_limit, rank, ranks),
                squares=torch.empty(slot, device=device),
            )
            return cast(GemvWorkspace, of_rank)

        self.workspaces = [workspace(rank) for rank in range(ranks)]

    def raise_fault(self) -> None:
        if any(int(state[FAULT.value]) for state in self._states):
            raise RuntimeError(f"a wait was given up; control words: {self._control.tolist()}")


def multiply(workspace: GemvWorkspace, x: Tensor, weight: Tensor) -> Tensor:
    return run_kernel(workspace, Inputs(x, weight, None, None, None, 0.0))[0]


class CellRun:
    """A cell by so many ranks at once."""

    def __init__(self, cell: Cell, ranks: int, device: torch.device) -> None:
        self.cell, self.ranks, self.device = cell, ranks, device
        copies = weight_copies(cell.n, ranks * cell.depth(SPLIT_OVER)) if device.type == "cuda" else 2
        self.turns = max(1, CALLS_OF_A_GRAPH // copies) if device.type == "cuda" else 1
        self.weights = [draw_weights(copies, cell.n, cell.k, rank, SPLIT_OVER, device) for rank in range(ranks)]
        self.inputs = [draw_inputs(copies, cell, rank, SPLIT_OVER, device) for rank in range(ranks)]
        self.calls = self.turns * copies
        self.results: list[Tensor] = []

    def fused_us(self) -> float:
        """Of a call; all results are right, or this raises."""
        streams = [torch.cuda.Stream(self.device) for _ in range(self.ranks)] if self.device.type == "cuda" else []
        if streams:
            # Kernels are loaded when they are launched first, and a GPU whose kernels wait for each other loads none.
            self._launch(SimulatedRanks(self.ranks, self.device, self.cell.m, self.cell.n, poll_limit=16), 1, [])
            torch.cuda.synchronize(self.device)
        simulated = SimulatedRanks(self.ranks, self.device, self.cell.m, self.cell.n)
        us = self._time(lambda: self._launch(simulated, self.turns, streams))
        simulated.raise_fault()
        self._check()
        return us

    def cublas_us(self) -> float:
        """Of the product of one rank."""

        def multiply_by_library() -> None:
            for _ in range(self.turns):
                for x, weight in zip(self.inputs[0], self.weights[0], strict=True):
                    torch.nn.functional.linear(x, weight)

        return self._time(multiply_by_library)

    def _launch(self, simulated: SimulatedRanks, turns: int, streams: Sequence[torch.cuda.Stream]) -> None:
        main = torch.cuda.current_stream(self.device) if streams else None
        for stream in streams:
            stream.wait_stream(cast(torch.cuda.Stream, main))
        self.results = [torch.empty(0)] * self.ranks
        for number in range(turns * len(self.weights[0])):
            for rank, workspace in enumerate(simulated.workspaces):
                copy = number % len(self.weights[rank])
                with torch.cuda.stream(streams[rank]) if streams else nullcontext():
                    self.results[rank] = multiply(workspace, self.inputs[rank][copy], self.weights[rank][copy])
        for stream in streams:
            cast(torch.cuda.Stream, main).wait_stream(stream)

    def _time(self, run: Callable[[], None]) -> float:
        if self.device.type != "cuda":
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) / self.calls * 1e6
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            run()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        times = []
        for _ in range(_REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times) / self.calls

    def _check(self) -> None:
        """The last results are those of the last operands."""
        last = zip(self.inputs, self.weights, strict=True)
        expected = sum((x[-1].double() @ weight[-1].double().T for x, weight in last), torch.zeros((), device=self.device))
        for result in self.results:
            error = relative_error(result, expected)
            if error > TOLERANCE["small"] or not torch.equal(result, self.results[0]):
                raise RuntimeError(f"{self.cell.name}, {self.ranks} ranks: relative error {error}, or ranks differ")


def copy_bandwidth(device: torch.device) -> float:
    """GB/s (1e9 bytes) read and written by a large copy within the device."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 20), dtype=torch.uint8, device=device)
    copy, seconds = torch.empty_like(source), []
    for _ in range(8):
        began = time.perf_counter()
        copy.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * source.numel() / statistics.median(seconds[2:]) / 1e9


@torch.no_grad()
def measure(cell: Cell, device: torch.device, bandwidth: float) -> dict[str, Any]:
    """What the report says of a cell."""
    floor = cell.memory_bytes(SPLIT_OVER) / bandwidth / 1e3
    alone = CellRun(cell, 1, device)
    result = {"name": cell.name, "floor_us": floor, "one_rank_us": alone.fused_us(), "cublas_us": alone.cublas_us()}
    if device.type == "cuda":
        two = CellRun(cell, SPLIT_OVER, device).fused_us()
        result |= {"two_ranks_us": two, "above_floor_us": two - SPLIT_OVER * floor}
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON")
    parser.add_argument("--cells", choices=["tiny", "small"], default="small")
    parser.add_argument("--rows", type=int, nargs="+", help="only cells of these numbers of rows, m")
    parser.add_argument("--match", default="", help="only cells in whose name this regular expression is found")
    parser.add_argument("--commit", help="for the report, where there is no git repository")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = copy_bandwidth(device)
    head = {**describe_environment([device_name(device)], options.commit), "copy_gb_per_second": bandwidth}
    cells = [
        cell
        for cell in CELLS[options.cells]()
        if not cell.is_large and re.search(options.match, cell.name) and (not options.rows or cell.m in options.rows)
    ]
    results = []
    for cell in cells:
        results.append(measure(cell, device, bandwidth))
        print("  ".join(f"{key} {value:.2f}" if isinstance(value, float) else value for key, value in results[-1].items()))
    write_results(options.output, {**head, "cells": results})


if __name__ == "__main__":
    main()
