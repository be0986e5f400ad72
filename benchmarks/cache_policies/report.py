"""What the measurements of cache policies say together, and how they are printed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.harness import geometric_mean

RATIOS = ("selected_over_best", "selected_over_off", "selected_over_hardware", "best_over_off")


def summarize(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means, largest and smallest ratio of the workloads that passed; the names of those that failed.

    ``off_apart``: how far equal policies are apart, |time of off / time of off - 1|; of a replayed run nothing is known of it.
    """
    passed = [cell for cell in cells if cell["passed"]]
    ratios = {name: [cell[name] for cell in passed] for name in RATIOS}
    apart = sorted(abs(cell["off_over_off"] - 1) for cell in passed if "off_over_off" in cell)
    return {
        "workloads": len(cells),
        "failed": [cell["name"] for cell in cells if not cell["passed"]],
        **{name: {"mean": geometric_mean(own), "most": max(own), "least": min(own)} for name, own in ratios.items() if own},
        **({"off_apart": {"median": statistics.median(apart), "most": apart[-1]}} if apart else {}),
        "beyond 2% of the best": [cell["name"] for cell in passed if cell["selected_over_best"] > 1.02],
        "slower than off by 1%": [cell["name"] for cell in passed if cell["selected_over_off"] > 1.01],
        "slower than hardware by 1%": [cell["name"] for cell in passed if cell["selected_over_hardware"] > 1.01],
    }


def line(cell: Mapping[str, Any]) -> str:
    """A workload in one line."""
    if "error" in cell:
        return f"{cell['name']}: FAILED {cell['error']}"
    hints = ", ".join(f"{stream} {hint}" for stream, hint in cell["selected"].items() if hint != cell["off"][stream]) or "off"
    text = (
        f"{cell['name']}: off {cell['us']['off']:.1f} us, best static {cell['best']} {cell['best_over_off']:.3f}, "
        f"selected {cell['selected_over_off']:.3f} ({hints}), selected / best {cell['selected_over_best']:.3f}, "
        f"selected / hardware {cell['selected_over_hardware']:.3f}"
    )
    if "off_over_off" in cell:
        text += f", off / off {cell['off_over_off']:.3f}, spread {cell['final_spread']['off']:.3f}"
    if "over_off" in cell.get("window", {}):
        text += f", L2 window {cell['window']['over_off']:.3f}"
    return text if cell["passed"] else f"{text}  FAILED, other results than off: {', '.join(cell['differ']) or 'all are 0'}"


def text(report: Mapping[str, Any]) -> str:
    """The summary."""
    summary = report["summary"]
    lines = [f"{summary['workloads']} workloads, {len(summary['failed'])} failed: {', '.join(summary['failed']) or '-'}"]
    for name in RATIOS:
        if name in summary:
            own = summary[name]
            what = name.replace("_over_", " / ")
            lines.append(f"{what}: geometric mean {own['mean']:.4f}, most {own['most']:.4f}, least {own['least']:.4f}")
    if "off_apart" in summary:
        own = summary["off_apart"]
        lines.append(f"off / off, apart from 1: median {own['median']:.4f}, most {own['most']:.4f}")
    for name in ("beyond 2% of the best", "slower than off by 1%", "slower than hardware by 1%"):
        lines.append(f"{name}: {', '.join(summary[name]) or 'none'}")
    return "\n".join(lines)
