"""Measured calls of the four pairs, as their benchmarks have written them: the size of each, and its time by every schedule."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Ceilings
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.estimate import Size

# Rows up to which auto always takes the kernel of GEMV + AllReduce.
_ROWS_OF_THE_KERNEL = 16
_BYTES = {"fp32": 4, "fp16": 2}


@dataclass(frozen=True)
class Call:
    """One cell of a benchmark.

    Attributes:
        microseconds: by name of the schedule.
    """

    size: Size
    microseconds: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.size.pair} {self.size.rows}x{self.size.columns}x{self.size.depth:g}"


def read_calls(files: Sequence[Path]) -> list[Call]:
    """Of all cells that passed, in the order of the files."""
    return [call for file in files for call in _calls_of(json.loads(file.read_text()))]


def read_ceilings(file: Path) -> tuple[str, Ceilings, float, float]:
    """Of a benchmark of :mod:`benchmarks.all_gather_gemm`: the GPU, bandwidths, 10^12 operations a second, and contention."""
    report = json.loads(file.read_text())
    ceilings = dict(report["ceilings"])
    del ceilings["unit"]
    teraflops = ceilings.pop("teraflops")
    return report["machine"]["ranks"][0], Ceilings(**ceilings), teraflops, report["contention"]["copy_engine"]


def _calls_of(report: Mapping[str, Any]) -> Iterator[Call]:
    ranks = len(report["machine"]["ranks"])
    for cell in report["cells"]:
        if not cell["passed"]:
            continue
        if "pooling" in cell:
            yield _lookup(cell, ranks)
        elif "size" in cell:
            yield from _sum(cell, ranks)
        else:
            yield _product(cell, ranks)


def _product(cell: Mapping[str, Any], ranks: int) -> Call:
    """Of GEMM + All-to-All, AllGather + GEMM, or GEMM + ReduceScatter."""
    pair = Pair(cell.get("pair", Pair.gemm_all_to_all))
    times = {name: time for name, time in cell["us"].items() if name not in ("gemm", "fused", "nccl")}
    return Call(Size(pair, ranks, cell["m"], cell["n"], cell["k"]), {**times, "library": cell["us"]["nccl"]})


def _sum(cell: Mapping[str, Any], ranks: int) -> Iterator[Call]:
    """Of GEMV + AllReduce; ``fused`` is what auto took, of many rows that which is not listed besides."""
    us, size = cell["us"], Size(Pair.gemm_all_reduce, ranks, cell["m"], cell["n"], cell["k"] // ranks)
    if cell["size"] == "small":
        if cell["m"] <= _ROWS_OF_THE_KERNEL:
            yield Call(size, {"kernel": us["fused"], "library": us["nccl"]})
        return
    names = {"chunks": "sums_beside", "scatter": "kernel"}
    times = {name: us[key] if key in us else us["fused"] for key, name in names.items()}
    yield Call(size, {**times, "library": us["nccl"]})


def _lookup(cell: Mapping[str, Any], ranks: int) -> Call:
    pooled = cell["lookups"] / (cell["tables"] * cell["bags"])
    columns = cell["tables"] * cell["dim"]
    distinct = cell["distinct_rows"] / cell["lookups"]
    size = Size(Pair.embedding_all_to_all, ranks, cell["bags"], columns, pooled, 4, _BYTES[cell["dtype"]], distinct)
    return Call(size, {"kernel": cell["fused_us"], "copied": cell["copy_us"], "library": cell["baseline_us"]})
