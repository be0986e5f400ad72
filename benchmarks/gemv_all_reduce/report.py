"""Columns, figures and picture of the GEMV + AllReduce benchmark: benchmarks/common/report.py shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.report import OperatorReport, Result, field, figure, mean, times, worst

SIZES = {"small": "GEMV + AllReduce, CUDA graphs", "large": "GEMM + AllReduce"}
# The all-reduces over torch's symmetric memory.
RIVALS = ("one_shot", "two_shot")
# As in the scoring of few candidates.
FEW_ROWS = 16
_COLUMNS = (
    *times(("fused", "nccl", *RIVALS, "gemm")),
    field("floor_us", "floor", 9),
    field("ratio", "/nccl", 8, 3),
    field("ratio_to_symmetric", "/symm", 8, 3),
    field("fused_over_floor", "/floor", 8, 2),
)


class GemvReport(OperatorReport):
    def figures(self, passed: Sequence[Result]) -> Mapping[str, Any]:
        return {
            "ratio_of_few_rows": mean([cell for cell in passed if cell["m"] <= FEW_ROWS], "ratio"),
            "worst_to_symmetric": worst(passed, "ratio_to_symmetric"),
        }

    def describe_means(self, group: str, figures: Result) -> list[str]:
        few_rows = f"{figure(figures['ratio_of_few_rows'])} for m <= {FEW_ROWS}, " if group == "small" else ""
        return [
            f"fused / (cuBLAS + NCCL) {few_rows}{figure(figures['ratio'])} of all; fused / best of {' and '.join(RIVALS)} "
            f"{figure(figures['ratio_to_symmetric'])}; fused / floor {figure(figures['fused_over_floor'])}"
        ]

    def describe_worst(self, figures: Result) -> list[str]:
        kinds = (("cuBLAS + NCCL", "worst", "ratio"), ("symmetric memory", "worst_to_symmetric", "ratio_to_symmetric"))
        return [
            f"worst against {rival}: " + ", ".join(f"{cell[ratio]:.3f} {cell['name']}" for cell in figures[key])
            for rival, key, ratio in kinds
            if figures[key]
        ]

    def describe_failure(self, cell: Result) -> str:
        same = "the same" if cell["same_bits_on_all_ranks"]["fused"] else "not the same"
        return f"error {cell['errors']['fused']:.1e}, {same} bits on all ranks"

    def height(self, cells: int) -> float:
        return 5.0

    def draw(self, axis: Any, group: str, cells: Sequence[Result], ratio: float | None) -> None:
        """Draw the ratio over m, a line for each (N, K); failed cells are left out."""
        passed = [cell for cell in cells if cell["passed"]]
        for n, k in dict.fromkeys((cell["n"], cell["k"]) for cell in passed):
            own = [cell for cell in passed if (cell["n"], cell["k"]) == (n, k)]
            axis.plot([cell["m"] for cell in own], [cell["ratio"] for cell in own], marker="o", label=f"{n} x {k}")
        axis.axhline(1.0, color="black", linewidth=1)
        if ratio is not None:
            axis.axhline(ratio, color="gray", linestyle="--", label=f"geometric mean {ratio:.2f}")
            axis.legend(title="N x K", fontsize=8)
        rows = sorted({cell["m"] for cell in passed})
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows, [str(m) for m in rows])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("m, rows of x")
        axis.set_ylabel(f"time of {self.ratios[group]}")
        axis.grid(alpha=0.3)


REPORT = GemvReport(
    key="size",
    titles=SIZES,
    ratios=dict.fromkeys(SIZES, "fused / time of cuBLAS + NCCL"),
    columns=lambda _: _COLUMNS,
    means=("ratio_to_symmetric", "fused_over_floor"),
    name=("cell", 18),
    slower="slower_than_nccl",
    against=" than cuBLAS + NCCL",
)
