"""Which block shapes make the fused lookup fastest on one GPU, and how it compares with FBGEMM's lookup.

    python benchmarks/tune_lookup.py --output tuning.json

The figures behind dlrm_fused/ops/lookup_tuning.py. One rank, so that stores stay in the GPU: the shape of the lookup is what is
tuned. Indices are uniform over tables much larger than the L2 cache, and rotate among three sets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops import lookup_tuning
from dlrm_fused.ops.lookup_tuning import Blocks

TABLES, BAGS, ROWS = 16, 8192, 1_000_000
DIMS = (32, 64, 128, 256)
POOLINGS = (1, 8, 32, 100)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
EVERY = 1 << 30
INDEX_SETS = 3


def candidates(dim: int, pooling: int) -> Iterator[Blocks]:
    """Block shapes worth a measurement."""
    for slots, warps in itertools.product((2, 4, 8, 16, 32, 64), (1, 2, 4)):
        if not 8 <= slots * dim / (32 * warps) <= 64:
            continue
        for rows in (1, 2, 4, 8, 16, 32):
            if rows <= slots and rows <= max(1, 2 * pooling) and slots // rows <= 32:
                if pooling >= 32 and rows < 2:
                    continue
                yield Blocks(slots // rows, rows, warps, EVERY)


def make_exchange(dim: int, dtype: torch.dtype, rows: int) -> tuple[Any, Tensor]:
    from dlrm_fused.ops.exchange import EmbeddingExchange, ExchangeLayout, LookupLayout
    from dlrm_fused.ops.tables import LocalTables
    from dlrm_fused.symmetric import symmetric_group

    columns = tuple(range(0, TABLES * dim, dim))
    layout = ExchangeLayout(((LookupLayout(columns, (dim,) * TABLES),),), TABLES * dim)
    exchange = EmbeddingExchange(symmetric_group(None, "cuda"), layout, name=f"tuning {dim} {dtype} {rows}")
    weights = torch.empty(TABLES * rows * dim, dtype=dtype, device="cuda").uniform_(-1, 1)
    offsets = tuple(range(0, TABLES * rows * dim, rows * dim))
    exchange.attach_tables(
        [LocalTables(weights, offsets, (rows,) * TABLES, (dim,) * TABLES, tuple(range(TABLES)), False, None, False)]
    )
    return exchange, weights


def look_up(exchange: Any, indices: Tensor, offsets: Tensor) -> Tensor:
    from dlrm_fused.ops.embedding_all_to_all import embedding_all_to_all

    return embedding_all_to_all(exchange, [indices], [offsets], [], [(offsets.numel() - 1) // TABLES])


def precompile(job: tuple[int, str, list[Blocks]]) -> None:
    """Fill Triton's cache on disk, in a process beside others."""
    dim, dtype, blocks = job
    exchange, _ = make_exchange(dim, DTYPES[dtype], 100)
    offsets = torch.arange(0, TABLES * 64 + 1, device="cuda")
    indices = torch.zeros(TABLES * 64, dtype=torch.int64, device="cuda")
    for each in blocks:
        lookup_tuning.override(each)
        look_up(exchange, indices, offsets)
    torch.cuda.synchronize()


def median_us(run: Any, repetitions: int) -> float:
    for i in range(2):
        run(i)
    times = []
    for i in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # 1 ms, so that the host is ahead of the device when the clock starts
        begin.record()
        run(i)
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times) * 1e3


def fbgemm_lookup(dim: int, weights: Tensor) -> Any:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    precision = SparseType.FP32 if weights.dtype == torch.float32 else SparseType.FP16
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(128, dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * TABLES, weights_precision=precision, cache_precision=SparseType.FP32, device="cuda"
    )
    # The same tables, without a second copy of them.
    module.weights_dev.data = weights
    module.rows_per_table.fill_(ROWS)
    module.weights_offsets.copy_(torch.arange(TABLES, device="cuda") * (weights.numel() // TABLES))
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    arguments = parser.parse_args()
    shapes = [(dim, dtype) for dtype in arguments.dtypes for dim in DIMS]
    jobs = []
    for dim, dtype in shapes:
        unique = sorted({blocks for pooling in POOLINGS for blocks in candidates(dim, pooling)}, key=str)
        jobs += [(dim, dtype, unique[i::4]) for i in range(4)]
    with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
        pool.map(precompile, jobs, chunksize=1)
    print("compiled", flush=True)
    results = []
    for dim, dtype in shapes:
        exchange, weights = make_exchange(dim, DTYPES[dtype], ROWS)
        baseline = fbgemm_lookup(dim, weights)
        for pooling in POOLINGS:
            count = TABLES * BAGS * pooling
            sets = [torch.randint(0, ROWS, (count,), device="cuda") for _ in range(INDEX_SETS)]
            offsets = torch.arange(0, count + 1, pooling, device="cuda")
            lookup_tuning.override(None)
            fused, expected = look_up(exchange, sets[0], offsets), baseline(sets[0], offsets)
            error = ((fused - expected).norm() / expected.norm()).item()
            assert error < 1e-6, f"dim {dim} {dtype} pooling {pooling}: error {error}"
            del fused, expected
            reference_us = median_us(lambda i, s=sets, o=offsets: baseline(s[i % 3], o), arguments.repetitions)
            times = []
            for blocks in candidates(dim, pooling):
                lookup_tuning.override(blocks)
                times.append(
                    (median_us(lambda i, s=sets, o=offsets: look_up(exchange, s[i % 3], o), arguments.repetitions), blocks)
                )
            times.sort(key=lambda entry: entry[0])
            best, blocks = times[0]
            for programs in (132 * 8, 132 * 16, 132 * 32, 132 * 64):
                persistent = Blocks(blocks.bags, blocks.rows, blocks.warps, programs)
                lookup_tuning.override(persistent)
                times.append(
                    (median_us(lambda i, s=sets, o=offsets: look_up(exchange, s[i % 3], o), arguments.repetitions), persistent)
                )
            times.sort(key=lambda entry: entry[0])
            moved = count * dim * weights.element_size() + TABLES * BAGS * dim * 4 + count * 8
            line = {
                "dim": dim,
                "dtype": dtype,
                "pooling": pooling,
                "fbgemm_us": reference_us,
                "bytes": moved,
                "times": [{"us": us, **vars(b)} for us, b in times],
            }
            results.append(line)
            shown = "  ".join(
                f"{us:.1f}us {b.bags}x{b.rows}w{b.warps}{'' if b.programs == EVERY else f'p{b.programs}'}"
                for us, b in times[:5]
            )
            print(
                f"{dtype} dim {dim:3} pooling {pooling:3}: fbgemm {reference_us:8.1f}  {moved / times[0][0] / 1e6:.2f} TB/s | {shown}",
                flush=True,
            )
            arguments.output.write_text(
                json.dumps({"gpu": torch.cuda.get_device_name(), "command": sys.argv, "cells": results}, indent=1)
            )
        del exchange, weights, baseline
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
