"""Columns of the benchmark of AllGather + GEMM and GEMM + ReduceScatter: benchmarks/common/report.py shows them."""

from __future__ import annotations

from benchmarks.all_gather_gemm.layers import schedules_of
from benchmarks.common.report import Column, OperatorReport, Result, field, times
from dlrm_fused.ops.schedules import Pair

PAIRS = (Pair.all_gather_gemm, Pair.gemm_reduce_scatter)


def contestants(pair: Pair) -> list[str]:
    return ["nccl", *schedules_of(pair), "gemm"]


def columns(pair: str) -> list[Column]:
    return [
        *times(contestants(Pair(pair)), 11),
        field("link_us", "link", 9),
        field("floor_us", "floor", 9),
        field("ratio", "ratio", 8, 3),
        field("overlap", "overlap", 9, 3),
        field("over_floor", "/floor", 8, 2),
        field("best", "  best", 6),
    ]


class PairReport(OperatorReport):
    def label(self, cell: Result) -> str:
        return f"{cell['name']} {cell.get('best', '')}"


REPORT = PairReport(
    key="pair",
    titles={str(pair): str(pair) for pair in PAIRS},
    ratios={str(pair): "best schedule / (cuBLAS + NCCL)" for pair in PAIRS},
    columns=columns,
    means=("overlap", "over_floor"),
    name=("M x N x K", 20),
)
