"""Pictures of answers. Needs matplotlib, which ``make setup-dev`` installs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlrm_fused.errors import UsageError
from dlrm_fused.scaleout.sweep import Row, Sensitivity


def scaling(path: Path, rows: Sequence[Row], title: str) -> None:
    """Samples/s by ranks, ``baseline`` and ``fused``, beside their ideal; below, step time of ``fused`` over ``baseline``."""
    plt = _pyplot()
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 7), sharex=True, height_ratios=(2, 1))
    by_comm = {comm: [row for row in rows if row["comm"] == comm] for comm in ("baseline", "fused")}
    for comm, some in by_comm.items():
        above.plot([row["ranks"] for row in some], [row["samples_per_second"] / 1e6 for row in some], "o-", label=comm)
    first = by_comm["baseline"][0]
    ranks = [row["ranks"] for row in by_comm["baseline"]]
    rate = first["samples_per_second"] / first["ranks"] / 1e6
    above.plot(ranks, [rate * some for some in ranks], "--", color="gray", label="baseline of the fewest, times the ranks")
    above.set(title=title, ylabel="million samples/s", xscale="log", yscale="log")
    above.legend()
    ratios = [fused["step_ms"] / base["step_ms"] for base, fused in zip(by_comm["baseline"], by_comm["fused"], strict=True)]
    below.plot(ranks, ratios, "o-")
    below.axhline(1, color="gray", linestyle="--")
    below.set(xlabel="ranks", ylabel="step time, fused / baseline")
    _save(plt, figure, path)


def tornado(path: Path, saved: float, found: Sequence[Sensitivity], title: str) -> None:
    """A bar for each setting, from the least to the most that fusion saves with its values; ``saved`` is the scenario's."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.4 * len(found)))
    for place, one in enumerate(reversed(found)):
        least, most = min(saved, *one.saved), max(saved, *one.saved)
        axes.barh(place, 100 * (most - least), left=100 * least, color="tab:blue")
        for value, share in zip(one.values, one.saved, strict=True):
            axes.annotate(f" {value} ", (100 * share, place), va="center", ha="right" if share == least else "left")
    axes.axvline(100 * saved, color="black")
    axes.set_yticks(range(len(found)), [one.key.removeprefix("train.settings.") for one in reversed(found)])
    axes.set(title=title, xlabel="what fusion saves of a step, %")
    axes.use_sticky_edges = False  # bars start where labels need room
    axes.margins(x=0.1, y=0.02)
    _save(plt, figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("pictures need matplotlib; install it, or run without --plot and --tornado") from None
    return pyplot


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
