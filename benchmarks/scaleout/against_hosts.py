"""Steps of the trainer on two hosts of this machine beside those that ``dlrm_fused.scaleout`` says, on shaped networks.

    python -m benchmarks.scaleout.against_hosts --machine cpu.json --rounds 3 --output results.json

docs/scaleout.md has the command that calibrates the machine with tables like these.

Two network namespaces with a rank each, as of ``benchmarks/training/across_hosts.py``, which says what that needs. What a
rank's process does besides the kernels, such as reading samples and sorting ids, is a line through two batch sizes that are no
cells of the comparison, on links of 10 Gbit/s: measured less simulated, of the step (``host_ms``) and, as a part of that,
of the embedding stage. Nothing else comes from steps.

The embedding stage is what the trainer writes as ``embedding_ms``, forward: ids that are still waited for, the lookup, and the
exchange of pooled embeddings until they are there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import LinearRegression
from typing import Any

from benchmarks.common.environment import describe_environment
from benchmarks.common.network import Hosts, obstacle
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.scaleout.library_collectives import PAYLOAD
from benchmarks.training.across_hosts import SETTINGS
from benchmarks.training.runs_on_hosts import train_on_hosts
from dlrm_fused.scaleout.answers import sweep
from dlrm_fused.scaleout.scenario import HostSettings, NetworkKind, NetworkSettings, Scenario, TrainSettings
from dlrm_fused.scaleout.training_step import embedding_seconds

RANKS = [1, 1]
COMMS = ("baseline", "fused")
_WARMUP, _STEPS, _INTERVAL = 5, 20, 5
_CALIBRATED_BATCHES = (512, 2048)
# Links that do not limit much, and that two cores can still fill: gloo's All-to-All takes as long as they say.
_CALIBRATED_GBIT_PER_SECOND = 10.0

_TABLES = [
    "data.source=synthetic",
    "data.synthetic.tables=16",
    "data.synthetic.rows=[20000]",
    "embedding.dim=64",
    "embedding.sharding=table_wise",
    "training.precision=fp32",
    # Few: an evaluation of them ends each run, and is not timed.
    "data.synthetic.test_samples=1024",
]
MODELS = {
    "DLRM": ("configs/synthetic.yaml", [*_TABLES, "data.synthetic.pooling=[20]", "model.bottom_mlp=[256,64]"]),
    "DCNv2": (
        "configs/criteo_1tb_dcnv2_synthetic.yaml",
        [
            *(*_TABLES, "data.synthetic.pooling=[4]", "model.bottom_mlp=[256,64]", "model.top_mlp=[512,256,1]"),
            "model.cross_rank=64",
        ],
    ),
}


@dataclass(frozen=True)
class Cell:
    model: str
    batch: int
    gbit_per_second: float

    @property
    def train(self) -> TrainSettings:
        config, settings = MODELS[self.model]
        return TrainSettings(config, [*SETTINGS, *settings, f"training.global_batch_size={self.batch}"])


CELLS = [Cell(model, batch, rate) for model in MODELS for batch in (1024, 4096) for rate in (0.5, 2.0)]


@dataclass(frozen=True)
class Times:
    """Milliseconds of a step, and of its embedding stage."""

    step_ms: float
    embedding_ms: float


def measured(hosts: Hosts, cell: Cell, comm: str) -> dict[str, Any]:
    """As of :func:`~benchmarks.training.runs_on_hosts.train_on_hosts`, with ``embedding_ms``."""
    lengths = [f"training.max_steps={_WARMUP + _STEPS}", f"telemetry.log_every_steps={_INTERVAL}"]
    hosts.shape(cell.gbit_per_second * 1e9)
    with tempfile.TemporaryDirectory() as scratch:
        settings = [*cell.train.settings, *lengths, f"comm={comm}"]
        run = train_on_hosts(hosts, RANKS, cell.train.config, settings, Path(scratch) / "runs", _WARMUP)
    kept = {key: run[key] for key in ("step_ms", "sent_bytes_per_step", "intervals")}
    return {**kept, "embedding_ms": run["median_parts"]["embedding_ms"]}


def simulated(cell: Cell, machine: Path, host_ms: HostSettings) -> dict[str, Times]:
    """By ``comm``."""
    scenario = Scenario(
        train=cell.train,
        machine=str(machine),
        memory_gib=4,
        network=NetworkSettings(
            kind=NetworkKind.switch,
            ranks_per_host=1,
            nic_gb_per_second=cell.gbit_per_second / 8 * PAYLOAD,
            nic_latency_us=50,
        ),
        hosts=[2],
        host_ms=host_ms,
    )
    return {row["comm"]: Times(row["step_ms"], 1e3 * embedding_seconds(timeline)) for row, timeline in sweep(scenario)}


def compare(cells: Sequence[Cell], machine: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each cell and ``comm``; the median of the rounds counts."""
    with Hosts(len(RANKS)) as hosts:
        besides = {model: _besides(hosts, model, machine, rounds) for model in {cell.model: None for cell in cells}}
        for cell in cells:
            own = {comm: line(cell.batch) for comm, line in besides[cell.model].items()}
            host_ms = HostSettings(**{comm: times.step_ms for comm, times in own.items()})
            said = simulated(cell, machine, host_ms)
            for comm in COMMS:
                runs, found = _median(hosts, cell, comm, rounds)
                embedding_ms = said[comm].embedding_ms + own[comm].embedding_ms
                yield {
                    **vars(cell),
                    "comm": comm,
                    "besides": vars(own[comm]),
                    "simulated_ms": said[comm].step_ms,
                    "step_ms": found.step_ms,
                    "error": said[comm].step_ms / found.step_ms - 1,
                    "simulated_embedding_ms": embedding_ms,
                    "embedding_ms": found.embedding_ms,
                    "embedding_error": embedding_ms / found.embedding_ms - 1,
                    "runs": runs,
                }


def _besides(hosts: Hosts, model: str, machine: Path, rounds: int) -> dict[str, Callable[[float], Times]]:
    """By ``comm``: what a rank's process does besides what is simulated, by the batch."""
    cells = [Cell(model, batch, _CALIBRATED_GBIT_PER_SECOND) for batch in _CALIBRATED_BATCHES]
    said = [simulated(cell, machine, HostSettings()) for cell in cells]
    lines: dict[str, Callable[[float], Times]] = {}
    for comm in COMMS:
        found = [_median(hosts, cell, comm, rounds)[1] for cell in cells]
        lines[comm] = partial(
            _on_lines,
            statistics.linear_regression(
                _CALIBRATED_BATCHES, [one.step_ms - own[comm].step_ms for one, own in zip(found, said, strict=True)]
            ),
            statistics.linear_regression(
                _CALIBRATED_BATCHES, [one.embedding_ms - own[comm].embedding_ms for one, own in zip(found, said, strict=True)]
            ),
        )
        print(f"{model} {comm} besides: " + ", ".join(f"batch {b} {lines[comm](b)}" for b in _CALIBRATED_BATCHES), flush=True)
    return lines


def _on_lines(step: LinearRegression, embedding: LinearRegression, batch: float) -> Times:
    return Times(*(max(0.0, line.intercept + line.slope * batch) for line in (step, embedding)))


def _median(hosts: Hosts, cell: Cell, comm: str, rounds: int) -> tuple[list[dict[str, Any]], Times]:
    """The runs, and the medians of their times."""
    runs = [measured(hosts, cell, comm) for _ in range(rounds)]
    return runs, Times(*(statistics.median(run[key] for run in runs) for key in ("step_ms", "embedding_ms")))


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:<6} batch {row['batch']:>5} {row['gbit_per_second']:>5g} Gbit/s {row['comm']:<9}"
        f"step {row['simulated_ms']:>7.2f} / {row['step_ms']:>7.2f} ms {100 * row['error']:+5.1f}%, embedding stage "
        f"{row['simulated_embedding_ms']:>6.2f} / {row['embedding_ms']:>6.2f} ms {100 * row['embedding_error']:+5.1f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, required=True, help="of benchmarks/calibrate.py, on this machine")
    parser.add_argument("--rounds", type=int, default=1)
    add_report_arguments(parser)
    options = parser.parse_args()
    if reason := obstacle():
        raise SystemExit(f"this machine cannot have several hosts: {reason}")
    calibration = json.loads(options.machine.read_text())
    environment = describe_environment(["CPU"] * sum(RANKS), options.commit)
    rows: list[dict[str, Any]] = []
    for row in compare(CELLS, options.machine, options.rounds):
        rows.append(row)
        print(_line(row), flush=True)
        # After each row, so that what was measured is there if a later one fails.
        write_results(options.output, {**environment, "calibration": calibration, "rows": rows})
    for key, what in (("error", "steps"), ("embedding_error", "embedding stages")):
        print(f"{sum(abs(row[key]) <= 0.15 for row in rows)} of {len(rows)} {what} within 15%")


if __name__ == "__main__":
    main()
