"""Steps of the trainer on two hosts of this machine beside those that ``dlrm_fused.scaleout`` says, on shaped networks.

    python -m benchmarks.calibrate --device cpu --output cpu.json
    python -m benchmarks.scaleout.against_hosts --machine cpu.json --output results.json

Two network namespaces with a rank each, as of ``benchmarks/training/across_hosts.py``, which says what that needs. What a
rank's process does besides the kernels, such as reading samples and sorting ids (``host_ms``), is a line through two batch
sizes that are no cells of the comparison, on a network without limit: measured less simulated. Nothing else comes from steps.
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
from typing import Any

from benchmarks.common.environment import describe_environment
from benchmarks.common.network import Hosts, obstacle
from benchmarks.common.results import add_report_arguments, write_results
from benchmarks.training.across_hosts import SETTINGS
from benchmarks.training.runs_on_hosts import train_on_hosts
from dlrm_fused.scaleout.answers import sweep
from dlrm_fused.scaleout.scenario import HostSettings, NetworkKind, NetworkSettings, Scenario, TrainSettings

RANKS = [1, 1]
COMMS = ("baseline", "fused")
_WARMUP, _STEPS, _INTERVAL = 5, 20, 5
_CALIBRATED_BATCHES = (512, 2048)
_UNSHAPED_GBIT_PER_SECOND = 100.0
_PAYLOAD = 1448 / 1514  # of an Ethernet frame of TCP

_TABLES = [
    "data.source=synthetic",
    "data.synthetic.tables=16",
    "data.synthetic.rows=[20000]",
    "embedding.dim=64",
    "embedding.sharding=table_wise",
    "training.precision=fp32",
]
MODELS = {
    "DLRM": ("configs/synthetic.yaml", [*_TABLES, "data.synthetic.pooling=[20]", "model.bottom_mlp=[256,64]"]),
    "DCNv2": (
        "configs/criteo_1tb_dcnv2_synthetic.yaml",
        [*_TABLES, "data.synthetic.pooling=[4]", "model.bottom_mlp=[256,64]", "model.top_mlp=[512,256,1]"],
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


CELLS = [
    Cell(model, batch, rate)
    for model, rates in (("DLRM", (0.5, 2.0)), ("DCNv2", (0.2, 1.0)))
    for batch in (1024, 4096)
    for rate in rates
]


def measured_ms(hosts: Hosts, cell: Cell, comm: str) -> dict[str, Any]:
    """``step_ms`` and ``sent_bytes_per_step``, as of :func:`~benchmarks.training.runs_on_hosts.train_on_hosts`."""
    lengths = [f"training.max_steps={_WARMUP + _STEPS}", f"telemetry.log_every_steps={_INTERVAL}"]
    hosts.shape(cell.gbit_per_second * 1e9)
    with tempfile.TemporaryDirectory() as scratch:
        settings = [*cell.train.settings, *lengths, f"comm={comm}"]
        run = train_on_hosts(hosts, RANKS, cell.train.config, settings, Path(scratch) / "runs", _WARMUP)
    return {key: run[key] for key in ("step_ms", "sent_bytes_per_step", "intervals")}


def simulated_ms(cell: Cell, machine: Path, host_ms: HostSettings) -> dict[str, float]:
    """Of a step, by ``comm``."""
    scenario = Scenario(
        train=cell.train,
        machine=str(machine),
        memory_gib=4,
        network=NetworkSettings(
            kind=NetworkKind.switch,
            ranks_per_host=1,
            nic_gb_per_second=cell.gbit_per_second / 8 * _PAYLOAD,
            nic_latency_us=50,
        ),
        hosts=[2],
        host_ms=host_ms,
    )
    return {row["comm"]: row["step_ms"] for row, _ in sweep(scenario)}


def compare(cells: Sequence[Cell], machine: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each cell and ``comm``; the median of the rounds counts."""
    with Hosts(len(RANKS)) as hosts:
        lines = {model: _host_lines(hosts, model, machine, rounds) for model in {cell.model: None for cell in cells}}
        for cell in cells:
            host_ms = HostSettings(**{comm: max(0.0, line(cell.batch)) for comm, line in lines[cell.model].items()})
            simulated = simulated_ms(cell, machine, host_ms)
            for comm in COMMS:
                found = _median(hosts, cell, comm, rounds)
                row = {
                    **vars(cell),
                    "comm": comm,
                    "host_ms": getattr(host_ms, comm),
                    "simulated_ms": simulated[comm],
                    **found,
                    "error": simulated[comm] / found["step_ms"] - 1,
                }
                yield row


def _host_lines(hosts: Hosts, model: str, machine: Path, rounds: int) -> dict[str, Callable[[float], float]]:
    """By ``comm``: milliseconds by batch."""
    cells = [Cell(model, batch, _UNSHAPED_GBIT_PER_SECOND) for batch in _CALIBRATED_BATCHES]
    simulated = [simulated_ms(cell, machine, HostSettings()) for cell in cells]
    lines: dict[str, Callable[[float], float]] = {}
    for comm in COMMS:
        besides = [
            _median(hosts, cell, comm, rounds)["step_ms"] - own[comm] for cell, own in zip(cells, simulated, strict=True)
        ]
        slope, start = statistics.linear_regression(_CALIBRATED_BATCHES, besides)
        print(f"{model} {comm}: {start:.2f} ms and {1e3 * slope:.2f} ms for 1,000 samples besides", flush=True)
        lines[comm] = partial(_on_line, start, slope)
    return lines


def _on_line(start: float, slope: float, batch: float) -> float:
    return start + slope * batch


def _median(hosts: Hosts, cell: Cell, comm: str, rounds: int) -> dict[str, Any]:
    runs = [measured_ms(hosts, cell, comm) for _ in range(rounds)]
    return {"step_ms": statistics.median(run["step_ms"] for run in runs), "runs": runs}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:<6} batch {row['batch']:>5} {row['gbit_per_second']:>5g} Gbit/s {row['comm']:<9}"
        f"simulated {row['simulated_ms']:>8.2f} ms, measured {row['step_ms']:>8.2f} ms, {100 * row['error']:+.1f}%"
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
    within = sum(abs(row["error"]) <= 0.15 for row in rows)
    print(f"{within} of {len(rows)} within 15%")


if __name__ == "__main__":
    main()
