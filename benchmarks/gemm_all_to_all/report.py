"""Columns and figures of the GEMM + All-to-All benchmark: benchmarks/common/report.py shows them."""

from __future__ import annotations

from benchmarks.common.report import Column, OperatorReport, Result, field, figure, times

TITLES = {
    "op": "GEMM + All-to-All",
    "gemm": "GEMM alone",
    "layer_forward": "expert layer, forward",
    "layer_training": "expert layer, forward + backward",
}
RATIOS = {
    "op": "fused / (cuBLAS + NCCL)",
    "gemm": "kernel / cuBLAS",
    "layer_forward": "fused / unfused",
    "layer_training": "fused / unfused",
}
_CONTESTANTS = {
    "op": ("fused", "kernel", "chunks", "chunks_2", "chunks_4", "tapered", "library", "nccl", "gemm"),
    "gemm": ("kernel", "gemm"),
    "layer_forward": ("fused", "baseline"),
    "layer_training": ("fused", "baseline"),
}


def columns(stage: str) -> list[Column]:
    own = [field("floor_us", "floor"), field("ratio", "ratio", 8, 3), field("over_floor", "/floor", 8, 2)]
    if stage == "op":
        own += [field("overlap", "overlap", 9, 3), field("schedule", "  schedule")]
    return [*times(_CONTESTANTS[stage]), *own]


class GemmReport(OperatorReport):
    def describe_means(self, group: str, figures: Result) -> list[str]:
        means = f"{self.ratios[group]} {figure(figures['ratio'])}, over floor {figure(figures['over_floor'])}"
        overlap = f", over the longer of cuBLAS and links {figure(figures['overlap'])}" if group == "op" else ""
        return [means + overlap]


REPORT = GemmReport(
    key="stage", titles=TITLES, ratios=RATIOS, columns=columns, means=("over_floor", "overlap"), name=("cell", 38)
)
