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
# Interquartile range over median, from which on a time was disturbed.
_NOT_STEADY = 0.5


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
    """Return the steady times of all cells that passed, in the order of the files.

    Of cells that several files have, the shorter time of each schedule counts: what disturbs a run takes time.
    """
    calls: dict[Size, Call] = {}
    for file in files:
        for call in _calls_of(json.loads(file.read_text())):
            before = calls[call.size].microseconds if call.size in calls else {}
            shorter = {name: min(us, before.get(name, us)) for name, us in call.microseconds.items()}
            calls[call.size] = Call(call.size, {**before, **shorter})
    return list(calls.values())


def read_ceilings(file: Path) -> tuple[str, Ceilings, float, float]:
    """Read a report of ``python -m benchmarks run all_gather_gemm``: its GPU, ceilings, 10^12 operations/s, contention."""
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
        if "size" in cell:
            yield from _sum(cell, ranks)
        else:
            yield _product(cell, ranks)


def _product(cell: Mapping[str, Any], ranks: int) -> Call:
    """Read a call of GEMM + All-to-All, AllGather + GEMM, or GEMM + ReduceScatter."""
    pair = Pair(cell.get("pair", Pair.gemm_all_to_all))
    names = {name: name for name in cell["us"] if name not in ("gemm", "fused", "nccl", "library")}
    times = _steady(cell, cell["us"], {**names, "library": "nccl"})
    return Call(Size(pair, ranks, cell["m"], cell["n"], cell["k"]), times)


def _sum(cell: Mapping[str, Any], ranks: int) -> Iterator[Call]:
    """Read the calls of GEMV + AllReduce; ``fused`` is what auto took, for many rows the one not listed besides."""
    us, size = cell["us"], Size(Pair.gemm_all_reduce, ranks, cell["m"], cell["n"], cell["k"] // ranks)
    if cell["size"] == "small":
        if cell["m"] <= _ROWS_OF_THE_KERNEL:
            yield Call(size, _steady(cell, us, {"kernel": "fused", "library": "nccl"}))
        return
    listed = {"sums_beside": "chunks", "kernel": "scatter"}
    names = {name: key if key in us else "fused" for name, key in listed.items()}
    yield Call(size, _steady(cell, us, {**names, "library": "nccl"}))


def _steady(cell: Mapping[str, Any], us: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """Times by schedule, without those that were disturbed; ``names``: of each schedule in the cell."""
    spread = cell["spread"]  # the schedule that auto took may stand there as ``fused`` alone
    return {name: us[key] for name, key in names.items() if spread.get(key, spread.get("fused")) < _NOT_STEADY}
