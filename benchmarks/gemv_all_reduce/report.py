"""Table and picture of the GEMV + AllReduce benchmark: benchmarks/common/report.py shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import Result, figure, mean, picture, summarize_groups, worst

SIZES = {"small": "GEMV + AllReduce, CUDA graphs", "large": "GEMM + AllReduce"}
# The all-reduces over torch's symmetric memory.
RIVALS = ("one_shot", "two_shot")
# As in the scoring of few candidates.
FEW_ROWS = 16
_COLUMNS = ("fused", "nccl", *RIVALS, "gemm")
_HEADER = f"{'cell':<18}" + "".join(f"{name:>10}" for name in _COLUMNS) + f"{'floor':>9}{'/nccl':>8}{'/symm':>8}{'/floor':>8}"


def summarize(cells: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """By size: geometric means (None of no cells) and worst cells of those that passed, and the names of those that failed."""

    def figures(_: str, passed: Sequence[Result]) -> dict[str, Any]:
        return {
            "ratio_of_few_rows": mean([cell for cell in passed if cell["m"] <= FEW_ROWS], "ratio"),
            "ratio_to_symmetric": mean(passed, "ratio_to_symmetric"),
            "fused_over_floor": mean(passed, "fused_over_floor"),
            "slower_than_nccl": sum(cell["ratio"] >= 1 for cell in passed),
            "worst": worst(passed),
            "worst_to_symmetric": worst(passed, "ratio_to_symmetric"),
        }

    return summarize_groups(cells, "size", list(SIZES), figures)


def line(cell: Result) -> str:
    """A line of the table: times in microseconds."""
    if "error" in cell:
        return f"{cell['name']:<18}FAILED {cell['error']}"
    times = "".join(f"{cell['us'][name]:>10.1f}" if name in cell["us"] else f"{'-':>10}" for name in _COLUMNS)
    ratios = f"{cell['ratio']:>8.3f}{figure(cell['ratio_to_symmetric']):>8}{cell['fused_over_floor']:>8.2f}"
    text = f"{cell['name']:<18}{times}{cell['floor_us']:>9.1f}{ratios}"
    if cell["passed"]:
        return text
    same = "the same" if cell["same_bits_on_all_ranks"]["fused"] else "not the same"
    return f"{text}  FAILED error {cell['errors']['fused']:.1e}, {same} bits on all ranks"


def table(report: Mapping[str, Any]) -> str:
    """All cells, then geometric means and worst cells, by size."""
    cells, lines = report["cells"], []
    for size, figures in summarize(cells).items():
        lines += ["", f"{SIZES[size]} (us)", _HEADER, *(line(cell) for cell in cells if cell["size"] == size)]
        few_rows = f"{figure(figures['ratio_of_few_rows'])} for m <= {FEW_ROWS}, " if size == "small" else ""
        lines += [
            f"geometric means of {figures['cells'] - len(figures['failed'])} cells: fused / (cuBLAS + NCCL) {few_rows}"
            f"{figure(figures['ratio'])} of all; fused / best of {' and '.join(RIVALS)} "
            f"{figure(figures['ratio_to_symmetric'])}; fused / floor {figure(figures['fused_over_floor'])}",
        ]
        for key, rival in (("ratio", "cuBLAS + NCCL"), ("ratio_to_symmetric", "symmetric memory")):
            worst = figures["worst" if key == "ratio" else f"worst_{key.removeprefix('ratio_')}"]
            if worst:
                lines.append(f"worst against {rival}: " + ", ".join(f"{cell[key]:.3f} {cell['name']}" for cell in worst))
        lines.append(f"slower than cuBLAS + NCCL: {figures['slower_than_nccl']}; failed: {len(figures['failed'])}")
    for name in report["not_run"]:
        lines.append(f"not run: {name}")
    return "\n".join(lines)


def plot(report: Mapping[str, Any], output: Path) -> None:
    """Fused / (cuBLAS + NCCL) over m, a line for each (N, K); failed cells are left out."""
    summary = summarize(report["cells"])
    with picture(report, output, 1, len(summary), figsize=(6.5 * len(summary), 5)) as axes:
        for axis, (size, figures) in zip(axes.flat, summary.items(), strict=True):
            passed = [cell for cell in report["cells"] if cell["size"] == size and cell["passed"]]
            for n, k in dict.fromkeys((cell["n"], cell["k"]) for cell in passed):
                own = [cell for cell in passed if (cell["n"], cell["k"]) == (n, k)]
                axis.plot([cell["m"] for cell in own], [cell["ratio"] for cell in own], marker="o", label=f"{n} x {k}")
            axis.axhline(1.0, color="black", linewidth=1)
            if figures["ratio"] is not None:
                axis.axhline(figures["ratio"], color="gray", linestyle="--", label=f"geometric mean {figures['ratio']:.2f}")
                axis.legend(title="N x K", fontsize=8)
            rows = sorted({cell["m"] for cell in passed})
            axis.set_xscale("log", base=2)
            axis.set_xticks(rows, [str(m) for m in rows])
            axis.set_ylim(bottom=0)
            axis.set_xlabel("m, rows of x")
            axis.set_ylabel("time of fused / time of cuBLAS + NCCL")
            axis.set_title(SIZES[size], fontsize=10)
            axis.grid(alpha=0.3)
