"""Draw the training loss and AUC of a run: ``python -m benchmarks.training.plot_run runs/quickstart --output plot.png``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed
import matplotlib.pyplot as plt

_LOSS_COLOUR, _AUC_COLOUR = "tab:blue", "tab:orange"


def read_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def plot(lines: list[dict[str, Any]], title: str, output: Path) -> None:
    """Write the picture of a run; its format follows from the file's suffix."""
    training = [line for line in lines if line["kind"] == "train"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    final = [line for line in lines if line["kind"] == "final_evaluation"]

    figure, loss_axis = plt.subplots(figsize=(8, 4), layout="constrained")
    loss_axis.set_title(title)
    loss_axis.set_xlabel("step")
    loss_axis.set_ylabel("training loss", color=_LOSS_COLOUR)
    loss_axis.plot([line["step"] for line in training], [line["loss"] for line in training], color=_LOSS_COLOUR)
    loss_axis.grid(axis="x", alpha=0.3)

    auc_axis = loss_axis.twinx()
    auc_axis.set_ylabel("AUC", color=_AUC_COLOUR)
    steps, aucs = [line["step"] for line in evaluations], [line["auc"] for line in evaluations]
    auc_axis.plot(steps, aucs, marker="o", color=_AUC_COLOUR, label="validation AUC")
    for line in final:
        label = f"{line['split']} AUC {line['auc']:.4f}"
        auc_axis.plot(line["step"], line["auc"], marker="*", markersize=12, linestyle="", color="black", label=label)
    if evaluations or final:
        auc_axis.legend(loc="center right")

    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, required=True, help="the picture, such as plot.png or plot.svg")
    parser.add_argument("--title", help="default: the name of the run")
    arguments = parser.parse_args()
    plot(read_lines(arguments.run), arguments.title or arguments.run.name, arguments.output)


if __name__ == "__main__":
    main()
