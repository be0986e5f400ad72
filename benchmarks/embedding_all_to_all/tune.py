"""Which block shapes make the fused lookup fastest on one GPU, and how it compares with FBGEMM's lookup.

    python -m benchmarks.embedding_all_to_all.tune --dtype fp32 --size large --output tuning.json

The figures behind dlrm_fused/ops/embedding_all_to_all/tuning.py. One rank, so that stores stay in the GPU: the shape of the
lookup is what is
tuned. Indices are uniform over tables much larger than the L2 cache, and rotate among three sets. With ``--table`` it prints
the source of the tuning table from such files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.environment import command_line
from benchmarks.common.results import write_results
from dlrm_fused.ops.common.gpus import GPUS
from dlrm_fused.ops.embedding_all_to_all import (
    EmbeddingWorkspace,
    ExchangeLayout,
    LocalTables,
    LookupLayout,
    embedding_all_to_all,
)
from dlrm_fused.ops.embedding_all_to_all import tuning as lookup_tuning
from dlrm_fused.ops.embedding_all_to_all.tuning import ALL, Blocks
from dlrm_fused.symmetric import symmetric_group

# Tables and bags of each.
SIZES = {"small": (8, 2048), "large": (16, 8192)}
ROWS = 1_000_000
DIMS = (32, 64, 128, 256)
POOLINGS = (1, 8, 32, 100)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
LOOKUPS = 3
# The table is that of this GPU.
_MULTIPROCESSORS = GPUS["NVIDIA H200"].multiprocessors
GRID = _MULTIPROCESSORS * 32
OTHER_GRIDS = (_MULTIPROCESSORS * 8, _MULTIPROCESSORS * 16, _MULTIPROCESSORS * 64, ALL)


def candidates(dim: int, element_bytes: int, pooling: int) -> Iterator[Blocks]:
    """Block shapes worth a measurement.

    A thread loads 1 to 8 times 16 bytes of each of its rows, 16 times in all at most. The rows that a warp loads at once are of
    as many bags, or of one.
    """
    rows_of_warp = max(1, 32 * 16 // (dim * element_bytes))
    for warps, loads, rows, split in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16), {1, rows_of_warp}):
        blocks = Blocks(32 * warps * 16 * loads // (dim * element_bytes * split), rows, warps, GRID, split)
        useful = rows * split <= pooling and (rows * split > 1 or pooling < 8)
        if blocks.bags >= 1 and loads * rows <= 16 and useful and blocks.can_be_compiled:
            yield blocks


class Case:
    """Tables of one dim and dtype, read by our lookup and by FBGEMM's."""

    def __init__(self, size: str, dim: int, dtype: str, rows: int = ROWS) -> None:
        self.tables, self.bags = SIZES[size]
        width = rows * dim
        layout = ExchangeLayout(
            ((LookupLayout(tuple(range(0, self.tables * dim, dim)), (dim,) * self.tables),),), self.tables * dim
        )
        self.workspace = EmbeddingWorkspace(symmetric_group(None, "cuda"), layout, name=f"tuning {size} {dim} {dtype} {rows}")
        self.weights = torch.empty(self.tables * width, dtype=DTYPES[dtype], device="cuda").uniform_(-1, 1)
        offsets = tuple(range(0, self.tables * width, width))
        numbers = tuple(range(self.tables))
        shape = ((rows,) * self.tables, (dim,) * self.tables)
        self.workspace.attach_tables([LocalTables(self.weights, offsets, *shape, numbers, False, None, False)])

    def look_up(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return embedding_all_to_all(self.workspace, [indices], [offsets], [], [(offsets.numel() - 1) // self.tables])

    def fbgemm(self, dim: int) -> Any:
        """FBGEMM's module over the same memory."""
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(128, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * self.tables,
            weights_precision=SparseType.FP32 if self.weights.dtype == torch.float32 else SparseType.FP16,
            device="cuda",
        )
        module.weights_dev.data = self.weights
        module.rows_per_table.fill_(ROWS)
        module.weights_offsets.copy_(torch.arange(self.tables, device="cuda") * (self.weights.numel() // self.tables))
        return module


def precompile(job: tuple[str, int, str, list[Blocks]]) -> None:
    """Fill Triton's cache on disk, in a process beside others."""
    size, dim, dtype, shapes = job
    case = Case(size, dim, dtype, rows=100)
    count = case.tables * 64
    offsets, indices = torch.arange(count + 1, device="cuda"), torch.zeros(count, dtype=torch.int64, device="cuda")
    for blocks in shapes:
        lookup_tuning.override(blocks)
        case.look_up(indices, offsets)
    torch.cuda.synchronize()


def median_us(run: Callable[[int], object], repetitions: int) -> float:
    for i in range(2):
        run(i)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repetitions)]
    for i, (begin, end) in enumerate(events):
        torch.cuda._sleep(1_000_000)  # the host is ahead of the device when the clock starts
        begin.record()
        run(i)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def measure(case: Case, baseline: Any, dim: int, pooling: int, repetitions: int) -> dict[str, Any]:
    """Times of all candidates on one shape, fastest first."""
    count = case.tables * case.bags * pooling
    sets = [torch.randint(0, ROWS, (count,), device="cuda") for _ in range(LOOKUPS)]
    offsets = torch.arange(0, count + 1, pooling, device="cuda")
    lookup_tuning.override(None)
    fused, expected = case.look_up(sets[0], offsets), baseline(sets[0], offsets)
    error = ((fused - expected).norm() / expected.norm()).item()
    assert error < 1e-6, f"dim {dim} pooling {pooling}: error {error}"
    del fused, expected

    fbgemm_us = {}
    for name, experimental in (("default", False), ("experimental", True)):
        baseline.is_experimental = experimental
        fbgemm_us[name] = median_us(lambda i: baseline(sets[i % LOOKUPS], offsets), repetitions)

    def time_of(blocks: Blocks) -> tuple[float, Blocks]:
        lookup_tuning.override(blocks)
        return median_us(lambda i: case.look_up(sets[i % LOOKUPS], offsets), repetitions), blocks

    element = case.weights.element_size()
    times = sorted((time_of(blocks) for blocks in candidates(dim, element, pooling)), key=lambda entry: entry[0])
    times += [time_of(replace(blocks, programs=programs)) for _, blocks in times[:3] for programs in OTHER_GRIDS]
    times.sort(key=lambda entry: entry[0])
    return {
        "dim": dim,
        "pooling": pooling,
        "element_bytes": element,
        "bytes": count * (dim * element + 8) + case.tables * case.bags * dim * 4,
        "fbgemm_us": fbgemm_us,
        "times": [{"us": us, **asdict(blocks)} for us, blocks in times],
    }


def print_table(files: list[Path]) -> None:
    """The fastest of each shape as source of tuning.py, with programs of a multiprocessor."""
    for file in files:
        result = json.loads(file.read_text())
        best: dict[int, list[str]] = {}
        for cell in result["cells"]:
            fastest = Blocks(**{key: value for key, value in cell["times"][0].items() if key != "us"})
            programs = "ALL" if fastest.programs == ALL else fastest.programs // _MULTIPROCESSORS
            shape = (fastest.bags, fastest.rows, fastest.warps, programs, fastest.split)
            best.setdefault(cell["dim"], []).append("Blocks(" + ", ".join(map(str, shape)) + ")")
        print(f'    ("{result["size"]}", {result["cells"][0]["element_bytes"]}): {{')
        for dim, shapes in best.items():
            print(f"        {dim}: ({', '.join(shapes)}),")
        print("    },")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--commit", default="")
    parser.add_argument("--table", type=Path, nargs="+", help="print the tuning table from these results")
    arguments = parser.parse_args()
    if arguments.table:
        return print_table(arguments.table)
    element_bytes = DTYPES[arguments.dtype].itemsize
    unique = {dim: sorted({b for p in POOLINGS for b in candidates(dim, element_bytes, p)}, key=str) for dim in DIMS}
    jobs = [(arguments.size, dim, arguments.dtype, unique[dim][i::4]) for dim in DIMS for i in range(4)]
    with multiprocessing.get_context("spawn").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.map(precompile, jobs, chunksize=1)
    cells = []
    for dim in DIMS:
        case = Case(arguments.size, dim, arguments.dtype)
        baseline = case.fbgemm(dim)
        for pooling in POOLINGS:
            cell = measure(case, baseline, dim, pooling, arguments.repetitions)
            cells.append(cell)
            best, us = cell["times"][:4], cell["fbgemm_us"]
            shown = "  ".join(f"{b['us']:.1f} " + "/".join(str(v) for v in list(b.values())[1:] if v != ALL) for b in best)
            rate = cell["bytes"] / best[0]["us"] / 1e6
            theirs = f"{us['default']:7.1f} {us['experimental']:7.1f}"
            print(f"dim {dim:3} pooling {pooling:3}: fbgemm {theirs}  {rate:.2f} TB/s | {shown}", flush=True)
            head = {"gpu": torch.cuda.get_device_name(), "command": command_line(), "commit": arguments.commit}
            write_results(arguments.output, {**head, "size": arguments.size, "cells": cells})
        del case, baseline
        torch.cuda.empty_cache()
    return None


if __name__ == "__main__":
    main()
