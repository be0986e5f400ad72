"""Steps of the trainer on GPUs, from raw results in benchmarks/results, beside those that ``dlrm_fused.scaleout`` says.

    python -m benchmarks.scaleout.against_gpus --output results.json

The step of the smallest batch of a file with several gives the milliseconds that the host needs (``host_ms``), and is no row.
Nothing else comes from steps. The embedding stage is compared where the GPU's work, and not the host, sets the pace.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.environment import ROOT, describe_environment
from benchmarks.common.results import add_report_arguments, write_results
from dlrm_fused.config import Comm, load_config
from dlrm_fused.scaleout.scenario import HostSettings, NetworkSettings, Scenario, TrainSettings
from dlrm_fused.scaleout.step import Timeline
from dlrm_fused.scaleout.sweep import sweep
from dlrm_fused.scaleout.training_step import embedding_seconds

RESULTS = ROOT / "benchmarks/results"
DCNV2 = "configs/criteo_1tb_dcnv2_synthetic.yaml"


@dataclass(frozen=True)
class Source:
    """A file with runs of one config.

    Args:
        variants: Those of its runs that are the trainer as it was, by their names; of other files, all.
        settings: Of all runs.
        has_host_ms: Whether the smallest of its batches gives the time of the host.
    """

    file: str
    config: str
    gpus: int
    variants: tuple[str, ...] = ()
    settings: str = ""
    has_host_ms: bool = False


SOURCES = (
    Source("training_batch_sizes_one_h200.json", DCNV2, 1, has_host_ms=True),
    Source("training_one_h200.json", DCNV2, 1),
    Source("training_batch_sizes_2_h200.json", DCNV2, 2, has_host_ms=True),
    Source(
        "training_large_variants_2_h200.json",
        DCNV2,
        2,
        variants=("as it is: features exchanged by kernels, flat parameters",),
        settings="comm=fused",
    ),
    Source(
        "training_16_bit_embeddings_2_h200.json",
        DCNV2,
        2,
        variants=("eager, fp32 embeddings", "compiled, bf16 embeddings"),
    ),
    # Its trainer had TorchRec's exchanges, fp32 embeddings and layers that are not compiled, and nothing else to choose.
    Source("trainer_throughput.json", DCNV2, 4, settings="comm=baseline training.compile=never embedding.output_dtype=fp32"),
    Source("training_moe_large_one_h200.json", "configs/moe_large.yaml", 1),
    Source("training_transformer_large_one_h200.json", "configs/transformer_large.yaml", 1),
)
_SMALLEST_BATCH = 4096  # of those that give the time of the host


@dataclass(frozen=True)
class Run:
    """A measured run. Attributes: parts: medians in milliseconds."""

    comm: Comm
    batch: int
    settings: tuple[str, ...]
    parts: dict[str, float]


def runs_of(source: Source) -> Iterator[Run]:
    report = json.loads((RESULTS / source.file).read_text())
    for run in report.get("runs") or [turn["trainer"] for turn in report["rounds"]]:
        if source.variants and run["variant"] not in source.variants:
            continue
        settings = [*source.settings.split(), *run.get("settings", "").split()]
        (comm,) = (Comm(setting.removeprefix("comm=")) for setting in settings if setting.startswith("comm="))
        others = tuple(setting for setting in settings if not setting.startswith("comm="))
        batch = run.get("batch") or load_config(source.config, others).training.global_batch_size
        yield Run(comm, batch, others, run.get("median_parts") or run["median_parts_ms"])


def rows_of(source: Source, machine: Path, nvlink: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, each with ``simulated_ms`` and ``step_ms``, and both times of the embedding stage."""
    for comm in Comm.baseline, Comm.fused:
        runs = sorted((run for run in runs_of(source) if run.comm is comm), key=lambda run: run.batch)
        host_ms = 0.0
        if source.has_host_ms:
            smallest, *runs = [run for run in runs if run.batch >= _SMALLEST_BATCH]
            host_ms = smallest.parts["step_ms"]
        for run in runs:
            simulated, timeline = _simulated(source, run, host_ms, machine, nvlink)
            yield {
                "file": source.file,
                "gpus": source.gpus,
                "batch": run.batch,
                "comm": comm.name,
                "settings": " ".join(run.settings),
                "host_ms": host_ms,
                "simulated_ms": simulated,
                "step_ms": run.parts["step_ms"],
                "error": simulated / run.parts["step_ms"] - 1,
                "simulated_embedding_ms": 1e3 * embedding_seconds(timeline),
                "embedding_ms": run.parts["embedding_ms"],
                "is_paced_by_gpu": simulated > host_ms,
            }


def _simulated(source: Source, run: Run, host_ms: float, machine: Path, nvlink: Path) -> tuple[float, Timeline]:
    scenario = Scenario(
        train=TrainSettings(source.config, list(run.settings)),
        machine=str(machine),
        nvlink=str(nvlink),
        memory_gib=130,
        network=NetworkSettings(ranks_per_host=source.gpus),
        hosts=[1],
        samples_per_rank=run.batch // source.gpus,
        host_ms=HostSettings(baseline=host_ms, fused=host_ms),
    )
    return next((row["step_ms"], timeline) for row, timeline in sweep(scenario) if row["comm"] == run.comm.name)


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'GPUs':>4} {'batch':>6} {'comm':<9} {'simulated':>9} {'measured':>9} {'error':>7} {'embedding stage':>18}"]
    for row in rows:
        stage = f"{row['simulated_embedding_ms']:.2f} / {row['embedding_ms']:.2f}" if row["is_paced_by_gpu"] else ""
        lines.append(
            f"{row['gpus']:>4} {row['batch']:>6} {row['comm']:<9} {row['simulated_ms']:>9.2f} {row['step_ms']:>9.2f} "
            f"{100 * row['error']:>+6.1f}% {stage:>18}  {row['file']} {_unlike_the_config(row['settings'])}"
        )
    within = sum(abs(row["error"]) <= 0.15 for row in rows)
    stages = [row["simulated_embedding_ms"] / row["embedding_ms"] - 1 for row in rows if row["is_paced_by_gpu"]]
    exact = sum(abs(error) <= 0.15 for error in stages)
    return "\n".join([*lines, f"{within} of {len(rows)} steps, {exact} of {len(stages)} embedding stages within 15%"])


def _unlike_the_config(settings: str) -> str:
    """Return the settings that change the computation."""
    return " ".join(setting for setting in settings.split() if "samples" not in setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, default=RESULTS / "calibration_one_h200.json")
    parser.add_argument("--nvlink", type=Path, default=RESULTS / "calibration_2_h100.json", help="for NVLink's shares")
    add_report_arguments(parser)
    options = parser.parse_args()
    rows = [row for source in SOURCES for row in rows_of(source, options.machine, options.nvlink)]
    write_results(options.output, {**describe_environment([], options.commit), "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
