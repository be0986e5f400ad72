"""Columns and figures of the embedding benchmark: benchmarks/common/report.py shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.report import Column, OperatorReport, Result, field, figure, mean

STAGES = {
    "forward": "forward",
    "training": "forward + backward + rowwise Adagrad",
    "row_wise_forward": "row-wise, forward",
    "row_wise_training": "row-wise, forward + backward + rowwise Adagrad",
}
# The overlap is judged in cells whose fused time exceeds this.
_LONG_CELL_MICROSECONDS = 100.0
_COLUMNS = (
    field("baseline_us", "baseline"),
    Column("TBE+copy", lambda cell: cell["copy_us"] or None),
    field("fused_us", "fused"),
    field("ratio", "ratio", 7, 3),
    field("floor_us", "floor", 9),
    field("fused_over_floor", "fused/fl.", 10, 2),
    field("overlap", "overlap", 9, 2),
    field("lookup_us", "TBE", 9),
)


class EmbeddingReport(OperatorReport):
    def figures(self, passed: Sequence[Result]) -> Mapping[str, Any]:
        long_cells = [cell for cell in passed if cell["fused_us"] > _LONG_CELL_MICROSECONDS]
        overlap = {key: mean(long_cells, key) for key in ("overlap", "overlap_of_stores")}
        return {**overlap, "overlap_cells": len(long_cells)}

    def describe_means(self, group: str, figures: Result) -> list[str]:
        return [
            f"fused / baseline {figure(figures['ratio'])}, fused / baseline of TorchRec's defaults "
            f"{figure(figures['ratio_to_defaults'])}, fused / TBE+copy {figure(figures['ratio_to_copy'])}, "
            f"fused / floor {figure(figures['fused_over_floor'])}",
            f"overlap {figure(figures['overlap'])} (against the speed of stores {figure(figures['overlap_of_stores'])}): "
            f"geometric mean of the {figures['overlap_cells']} cells above {_LONG_CELL_MICROSECONDS:.0f} us",
        ]

    def label(self, cell: Result) -> str:
        return str(cell["name"]).removeprefix("row-wise ")

    def in_order(self, cells: Sequence[Result]) -> list[Result]:
        return sorted(cells, key=lambda cell: cell["ratio"] if cell["passed"] else math.inf)


REPORT = EmbeddingReport(
    key="stage",
    titles=STAGES,
    ratios=dict.fromkeys(STAGES, "fused / time of FBGEMM + NCCL (TorchRec)"),
    columns=lambda _: _COLUMNS,
    means=("ratio_to_defaults", "ratio_to_copy", "fused_over_floor"),
    name=("cell", 44),
    slower="slower_than_baseline",
    against=" than the baseline",
)
