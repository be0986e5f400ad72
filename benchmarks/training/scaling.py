"""Samples/s of the trainer on one GPU, two, four and so on: weak and strong scaling, with ``comm=fused`` and ``baseline``.

    python -m benchmarks.training.scaling --config configs/criteo_1tb_dcnv2_synthetic.yaml --gpus 1 2 4 --output scaling.json \
        --plot scaling.png

Strong: the config's global batch, divided by the GPUs. Weak: as many samples for each GPU as the largest number of them gives
each. So both have the same batch there, which is run once. Settings of the trainer, for all runs, may follow. A run's rate is
that of all steps after the warm-up; ``efficiency`` is that over the rate of the fewest GPUs for each GPU. Without GPUs ranks
share the cores, which tries the script, and the times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.training.trainer_runs import add_turns, report_of_runs, turns_of
from dlrm_fused.config import load_config

COMMS = ("fused", "baseline")


@dataclass(frozen=True)
class Cell:
    gpus: int
    batch: int  # of all GPUs
    comm: str

    @property
    def settings(self) -> list[str]:
        return [f"comm={self.comm}", f"training.global_batch_size={self.batch}"]


def cells(gpus: Sequence[int], batch: int) -> list[Cell]:
    """Those of both kinds of scaling, the most GPUs first: if time is short, these count most."""
    each = batch // max(gpus)
    sizes = {(count, size): None for count in sorted(gpus, reverse=True) for size in (batch, each * count)}
    return [Cell(count, size, comm) for (count, size), comm in itertools.product(sizes, COMMS)]


def summarize(runs: Sequence[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """A row for each run and kind of scaling that it belongs to, those with the fewest GPUs first."""
    most = max(run["gpus"] for run in runs)
    rows = []
    for scaling, comm in itertools.product(("strong", "weak"), COMMS):
        own = [
            run
            for run in sorted(runs, key=lambda run: run["gpus"])
            if run["comm"] == comm and run["batch"] == (batch if scaling == "strong" else batch // most * run["gpus"])
        ]
        for run in own:
            fewest = own[0]["samples_per_second"] / own[0]["gpus"]
            rows.append(
                {
                    "scaling": scaling,
                    "comm": comm,
                    "gpus": run["gpus"],
                    "batch": run["batch"],
                    "samples_per_second": run["samples_per_second"],
                    "step_ms": run["median_parts"]["step_ms"],
                    "efficiency": run["samples_per_second"] / run["gpus"] / fewest,
                    "over_baseline": _over_baseline(run, runs),
                }
            )
    return rows


def _over_baseline(run: dict[str, Any], runs: Sequence[dict[str, Any]]) -> float | None:
    """None if the same batch was not run with ``comm=baseline``."""
    for other in runs:
        if (other["gpus"], other["batch"], other["comm"]) == (run["gpus"], run["batch"], "baseline"):
            return float(run["samples_per_second"] / other["samples_per_second"])
    return None


def table(rows: Sequence[dict[str, Any]]) -> str:
    titles = ("GPUs", 5), ("batch", 9), ("M samples/s", 13), ("step ms", 9), ("efficiency", 12), ("/ baseline", 12)
    lines = [f"{'scaling':<8}{'comm':<10}" + "".join(f"{title:>{width}}" for title, width in titles)]
    for row in rows:
        over = "-" if row["over_baseline"] is None else f"{row['over_baseline']:.2f}"
        lines.append(
            f"{row['scaling']:<8}{row['comm']:<10}{row['gpus']:>5}{row['batch']:>9}{row['samples_per_second'] / 1e6:>13.3f}"
            f"{row['step_ms']:>9.2f}{row['efficiency']:>12.2f}{over:>12}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Samples/s by GPUs, a line for each comm, beside what each GPU more would bring at best; the suffix says the format."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for axis, scaling in zip(axes, ("strong", "weak"), strict=True):
        for comm in COMMS:
            own = [row for row in rows if (row["scaling"], row["comm"]) == (scaling, comm)]
            gpus = [row["gpus"] for row in own]
            (line,) = axis.plot(gpus, [row["samples_per_second"] / 1e6 for row in own], marker="o", label=f"comm={comm}")
            ideal = [row["samples_per_second"] / row["efficiency"] / 1e6 for row in own]
            axis.plot(gpus, ideal, linestyle=":", color=line.get_color())
        axis.set_title(f"{scaling} scaling (dotted: efficiency 1)", fontsize="medium")
        axis.set_xlabel("GPUs")
        axis.set_xticks(sorted({row["gpus"] for row in rows}))
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("million samples/s")
    axes[0].legend()
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="numbers of ranks, also on a machine without GPUs")
    add_turns(parser, warmup=100, steps=150, at_once=4)
    add_report_arguments(parser)
    parser.add_argument("--plot", type=Path, help="a picture, such as scaling.png")
    parser.add_argument("settings", nargs="*", help="of the trainer, key=value")
    options = parser.parse_intermixed_args(arguments)
    turns = turns_of(parser, options)
    batch = load_config(options.config, options.settings).training.global_batch_size
    if batch % max(options.gpus):
        parser.error(f"--gpus {max(options.gpus)}: training.global_batch_size={batch} must be a multiple of it")

    report = report_of_runs(max(options.gpus), options.commit)
    all_cells = cells(options.gpus, batch)
    runs = [(options.config, [*options.settings, *cell.settings], cell.gpus) for cell in all_cells]
    for cell, measured in zip(all_cells, turns.train(runs), strict=True):
        report["runs"].append({**asdict(cell), **measured})
        report["summary"] = summarize(report["runs"], batch)
        # After each run, so that what was measured is there if a later one fails.
        write_results(options.output, report)
    print(table(report["summary"]))
    if options.plot:
        plot(report["summary"], options.plot)


if __name__ == "__main__":
    main()
