"""The update of embedding tables on one GPU: dlrm_fused.ops.embedding_all_to_all.update against the backward pass of FBGEMM's
TBE.

    python -m benchmarks.embedding_all_to_all.update --output results.json [--optimizer adam] [--match REGEX] [--sweep]
        [--without-fbgemm] [--seconds-budget 100]

Both update the same tables with the same optimizer, exact rowwise Adagrad unless told otherwise. Before a cell is timed, what
both make of the touched rows and their states, from the same start, is compared. Times are medians of the device's time, in
microseconds; indices change from call to call, so that the tables' rows come from memory and not from the cache. The floor is
the time that a plain copy in the GPU's memory needs for as many bytes: touched rows and states in and out, gradients and
indices in.

Builds of FBGEMM leave out backward passes, such as that of Adam: ``--without-fbgemm`` times ours alone.

``--sweep`` also times the update in other shapes (elements of a tile, chunks a multiprocessor, registers of a thread), and each
kernel alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from benchmarks.common.environment import command_line
from benchmarks.common.harness import geometric_mean
from benchmarks.common.results import write_results
from benchmarks.embedding_all_to_all.cells import ROWS, Cell, Lookup, LookupDrawer, table_rows
from dlrm_fused.compat.fbgemm import storage
from dlrm_fused.ops.embedding_all_to_all import update as embedding_update
from dlrm_fused.ops.embedding_all_to_all.update import SortedLookup, apply_gradients, sort_lookup
from dlrm_fused.sharding.fbgemm_tables import local_tables

DEVICE = torch.device("cuda")
EPS = 1e-8
# The host must have enqueued what is timed before the device begins with it.
SLEEP_CYCLES = 6_000_000
# Bytes that the calls of a cell touch together, so that nothing is left in the cache from one turn to the next.
ROTATED_BYTES = 4e8
# Of each optimizer FBGEMM's name, and the states that it keeps of elements and of rows.
OPTIMIZERS = {
    "rowwise_adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 0, 1),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, 1, 0),
    "sgd": (EmbOptimType.EXACT_SGD, 0, 0),
    "adam": (EmbOptimType.ADAM, 2, 0),
    "rowwise_adam": (EmbOptimType.PARTIAL_ROWWISE_ADAM, 1, 1),
}
# What a row's state of one number is read and written in.
SECTOR_BYTES = 32
SHAPE = ("_TILE_ELEMENTS", "_TILE_ELEMENTS_WITH_STATES", "_CHUNKS_PER_MULTIPROCESSOR", "_REGISTERS")
SWEEP = [
    (1024, 512, 128, None),
    (1024, 512, 128, 144),
    (512, 256, 128, None),
    (2048, 1024, 128, None),
    (1024, 1024, 128, 128),
    (1024, 512, 32, 128),
    (1024, 512, 64, 128),
    (1024, 512, 256, 128),
]


@dataclass(frozen=True)
class Case:
    """A cell, and the dtype of the gradients."""

    cell: Cell
    gradients: torch.dtype

    @property
    def name(self) -> str:
        return self.cell.name + ("" if self.gradients == torch.float32 else " bf16 gradients")


def cases(optimizer: str) -> list[Case]:
    """Tables and states together take about as much memory whatever the optimizer."""
    shapes = [
        (16, 8192, 8, 128),
        (8, 2048, 32, 64),
        (64, 8192, 1, 128),
        (16, 8192, 100, 32),
        (8, 512, 1, 128),
        (16, 2048, 8, 256),
    ]
    rows = ROWS // (1 + OPTIMIZERS[optimizer][1])
    cells = [
        Cell(tables, bags, pooling, dim, "fp32", indices, largest_rows=rows)
        for (tables, bags, pooling, dim), indices in itertools.product(shapes, ("uniform", "zipf"))
    ]
    return [Case(cell, torch.float32) for cell in cells] + [
        Case(cells[0], torch.bfloat16),
        Case(Cell(16, 8192, 8, 128, "fp16", "uniform", largest_rows=rows), torch.float32),
    ]


class Subject:
    """FBGEMM's embeddings, and the same memory as our kernels see it."""

    def __init__(self, case: Case, optimizer: str) -> None:
        cell = case.cell
        self.fbgemm = SplitTableBatchedEmbeddingBagsCodegen(
            [(cell.rows, cell.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * cell.tables,
            weights_precision=SparseType.from_dtype(cell.torch_dtype),
            output_dtype=SparseType.from_dtype(case.gradients),
            optimizer=OPTIMIZERS[optimizer][0],
            learning_rate=0.01,
            eps=EPS,
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=DEVICE,
        )
        self.weights: Tensor = self.fbgemm.weights_dev.data
        self.weights.uniform_(-0.1, 0.1)
        self.tables = local_tables(self.fbgemm)
        stored = storage(self.fbgemm)
        # As after some steps.
        _, *counts = OPTIMIZERS[optimizer]
        states = [state.uniform_(0.5, 1.0) for state in (stored.momentum1, stored.momentum2)[: sum(counts)]]
        self.by_row = [tensor.view(self.tables.total_rows, -1) for tensor in (self.weights, *states)]
        self.steps = stored.steps

    def sort(self, lookup: Lookup) -> SortedLookup:
        return sort_lookup(self.tables, lookup.indices, lookup.offsets)

    def update(self, lookup: Lookup, order: SortedLookup, gradients: Tensor) -> None:
        apply_gradients(self.tables, order, gradients, lookup.indices, lookup.offsets)


def device_microseconds(prepare: Callable[[], Callable[[], object]], calls: int) -> float:
    """Median of the device's time for what ``prepare`` returns; what ``prepare`` itself does is not counted."""
    events = []
    for _ in range(calls + 2):
        call = prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        events.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(events[2:])


def largest_difference(case: Case, subject: Subject, lookup: Lookup, gradients: Tensor) -> float:
    """Between what both make of the touched rows and their states, relative to the typical change of a weight or state."""
    cell = case.cell
    rows = table_rows(cell, lookup)
    before, steps = [tensor[rows] for tensor in subject.by_row], subject.steps.clone()
    subject.fbgemm(lookup.indices, lookup.offsets).backward(gradients)
    expected = [tensor[rows] for tensor in subject.by_row]
    for tensor, start in zip(subject.by_row, before, strict=True):
        tensor[rows] = start
    subject.steps.copy_(steps)
    subject.update(lookup, subject.sort(lookup), gradients)
    differences = []
    for tensor, wanted, start in zip(subject.by_row, expected, before, strict=True):
        change = (wanted.float() - start.float()).abs().mean()
        differences.append(((tensor[rows].float() - wanted.float()).abs().max() / change).item())
    return max(differences)


def measure(case: Case, optimizer: str, sweep: bool, bandwidth: float, calls: int, with_fbgemm: bool = True) -> dict[str, Any]:
    """One row of the report; bandwidth in bytes a second."""
    cell = case.cell
    subject = Subject(case, optimizer)
    drawer = LookupDrawer(cell, 0, 1, DEVICE)
    lookup = drawer.draw()
    row_bytes = cell.dim * cell.torch_dtype.itemsize
    touched = table_rows(cell, lookup).numel()
    gradients = torch.randn(cell.bags, cell.width, device=DEVICE).to(case.gradients)
    difference = largest_difference(case, subject, lookup, gradients) if with_fbgemm else math.nan

    sets = max(2, min(24, int(ROTATED_BYTES / (touched * row_bytes))))
    lookups = itertools.cycle([lookup, *(drawer.draw() for _ in range(sets - 1))])

    def prepare_backward() -> Callable[[], object]:
        own = next(lookups)
        output = subject.fbgemm(own.indices, own.offsets)
        return lambda: output.backward(gradients)

    def prepare_forward() -> Callable[[], object]:
        own = next(lookups)
        return lambda: subject.fbgemm(own.indices, own.offsets)

    def prepare_sort() -> Callable[[], object]:
        own = next(lookups)
        return lambda: subject.sort(own)

    def prepare_torch_sort() -> Callable[[], object]:
        keys, _ = embedding_update._label(subject.tables, (own := next(lookups)).indices, own.offsets, cell.bags)
        return lambda: torch.sort(keys, stable=True)

    def prepare_update() -> Callable[[], object]:
        own = next(lookups)
        order = subject.sort(own)
        return lambda: subject.update(own, order, gradients)

    def prepare_both() -> Callable[[], object]:
        own = next(lookups)
        return lambda: subject.update(own, subject.sort(own), gradients)

    _, of_elements, of_rows = OPTIMIZERS[optimizer]
    state_bytes = 4 * cell.dim * of_elements + SECTOR_BYTES * of_rows
    floor = 2 * touched * (row_bytes + state_bytes) + gradients.numel() * gradients.itemsize + 8 * lookup.indices.numel()
    row: dict[str, Any] = {
        "case": case.name,
        "optimizer": optimizer,
        "cell": asdict(cell),
        "gradients": str(case.gradients),
        "lookups": lookup.indices.numel(),
        "touched_rows": touched,
        "largest_difference": difference,
        "floor_us": floor / bandwidth * 1e6,
        "fbgemm_forward_us": device_microseconds(prepare_forward, calls) if with_fbgemm else math.nan,
        "fbgemm_backward_us": device_microseconds(prepare_backward, calls) if with_fbgemm else math.nan,
        "torch_sort_us": device_microseconds(prepare_torch_sort, calls),
        "sort_us": device_microseconds(prepare_sort, calls),
        "update_us": device_microseconds(prepare_update, calls),
        "sort_and_update_us": device_microseconds(prepare_both, calls),
    }
    if sweep:
        row["sweep"] = {}
        chosen = tuple(getattr(embedding_update, name) for name in SHAPE)
        for shape in (chosen, *SWEEP):
            for name, value in zip(SHAPE, shape, strict=True):
                setattr(embedding_update, name, value)
            row["sweep"][str(shape)] = device_microseconds(prepare_update, calls)
        for name, value in zip(SHAPE, chosen, strict=True):
            setattr(embedding_update, name, value)
        row["kernels_us"] = kernel_microseconds(prepare_both, calls)
    return row


def kernel_microseconds(prepare: Callable[[], Callable[[], object]], calls: int) -> dict[str, float]:
    """Mean time of each kernel."""
    chosen = [prepare() for _ in range(calls)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in chosen:
            call()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return {event.key[:60]: event.self_device_time_total / calls for event in events if event.self_device_time_total > 0}


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy in the GPU's memory."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / device_microseconds(lambda: lambda: target.copy_(source), 10) * 1e6


def report(row: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{row['case']:<52} {row['fbgemm_forward_us']:8.0f} {row['fbgemm_backward_us']:8.0f} {row['torch_sort_us']:8.0f} "
        f"{row['sort_us']:8.0f} {row['update_us']:8.0f} {row['sort_and_update_us']:8.0f} {row['floor_us']:8.0f} "
        f"{row['sort_and_update_us'] / row['fbgemm_backward_us']:8.2f} {row['update_us'] / row['floor_us']:8.2f} "
        f"{row['largest_difference']:9.1e}"
    )
    if "sweep" in row:
        yield "      " + ", ".join(f"{shape} {microseconds:.0f}" for shape, microseconds in row["sweep"].items())
        yield "      " + ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in row["kernels_us"].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="rowwise_adagrad")
    parser.add_argument("--without-fbgemm", action="store_true", help="time ours alone")
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--sweep", action="store_true", help="other shapes of the kernels too")
    parser.add_argument("--calls", type=int, default=15, help="of which the median is taken")
    parser.add_argument("--seconds-budget", type=float, default=600, help="begin no case after this time")
    arguments = parser.parse_args()

    began = time.monotonic()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copies at {bandwidth / 1e12:.2f} TB/s; times in microseconds")
    heads = ["FBGEMM", "FBGEMM", "torch", "", "", "sort +", "", "ratio to", "update", "largest"]
    units = ["forward", "backward", "sort", "sort", "update", "update", "floor", "backward", "/floor", "diff."]
    for line in (heads, units):
        print(f"{'':<52} " + " ".join(f"{word:>8}" for word in line))
    rows: list[dict[str, Any]] = []
    summary = {
        "device": torch.cuda.get_device_name(),
        "versions": {package: importlib.metadata.version(package) for package in ("torch", "triton")},
        "command": command_line(),
        "copy_bytes_per_second": bandwidth,
        "rows": rows,
    }
    for case in cases(arguments.optimizer):
        if arguments.match not in case.name or time.monotonic() - began > arguments.seconds_budget:
            continue
        with_fbgemm = not arguments.without_fbgemm
        rows.append(measure(case, arguments.optimizer, arguments.sweep, bandwidth, arguments.calls, with_fbgemm))
        print("\n".join(report(rows[-1])), flush=True)
        write_results(arguments.output, summary)
        torch.cuda.empty_cache()
    if arguments.without_fbgemm:
        return
    ratios = [row["sort_and_update_us"] / row["fbgemm_backward_us"] for row in rows]
    print(f"{len(rows)} cases, geometric mean of (sort + update) / FBGEMM's backward: {geometric_mean(ratios):.3f}")


if __name__ == "__main__":
    main()
