"""The command: simulates the steps of a scenario, prints a table, and writes CSV and timelines."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from dlrm_fused.config import Comm, Config, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.errors import ConfigError, UsageError
from dlrm_fused.scaleout import machine as machines
from dlrm_fused.scaleout.scenario import Scenario, load_scenario, topology_of
from dlrm_fused.scaleout.step import Timeline, simulate
from dlrm_fused.scaleout.training_step import Algorithms, tasks_of_step
from dlrm_fused.scaleout.workload import workload

DESCRIPTION = """\
How long a training step takes on hosts that one does not have: python -m dlrm_fused.scaleout --config configs/scaleout/X.yaml.
docs/scaleout.md says how it counts.
"""
COMMS = (Comm.baseline, Comm.fused)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; 1 for wrong input, with one line that says what to change."""
    parser = argparse.ArgumentParser("dlrm_fused.scaleout", description=DESCRIPTION)
    parser.add_argument("--config", type=Path, required=True, help="a scenario, such as those in configs/scaleout")
    parser.add_argument("--output", type=Path, help="folder for steps.csv and a timeline of each step, for ui.perfetto.dev")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the scenario")
    options = parser.parse_args(arguments)
    try:
        scenario = load_scenario(options.config, options.overrides)
        rows = []
        for row, timeline in _steps(scenario):
            rows.append(row)
            if options.output is not None:
                _write_timeline(options.output, row, timeline)
    except (ConfigError, UsageError) as error:
        print(f"dlrm_fused scaleout: {error}", file=sys.stderr)
        return 1
    print(_table(rows))
    if options.output is not None:
        _write_csv(options.output / "steps.csv", rows)
    return 0


def _steps(scenario: Scenario) -> Iterator[tuple[dict[str, str | float], Timeline]]:
    """A row of the table for each number of hosts and each comm."""
    machine = machines.read(Path(scenario.machine))
    config = load_config(scenario.train.config, scenario.train.settings)
    topologies = [topology_of(scenario.network, hosts) for hosts in scenario.hosts]
    schema = open_dataset(config, torch.device("cpu")).schema
    algorithms = Algorithms(scenario.all_to_all, scenario.all_reduce, scenario.slices)
    dtype = config.training.precision.name
    if dtype not in machine.products:
        raise ConfigError(f"training.precision={dtype}: {scenario.machine} has measured {', '.join(machine.products)} only")
    cells = [(hosts, topology, comm) for hosts, topology in zip(scenario.hosts, topologies, strict=True) for comm in COMMS]
    for hosts, topology, comm in tqdm(cells, desc="steps", disable=None, leave=False):
        own = _with_comm(config, comm, scenario.samples_per_rank * topology.ranks)
        work = workload(own, schema, topology.ranks, scenario.network.ranks_per_host, scenario.memory_gib)
        tasks = tasks_of_step(work, machine, topology, algorithms, dtype, is_fused=comm is Comm.fused)
        timeline = simulate(tasks, topology)
        samples_per_second = work.samples * topology.ranks / timeline.seconds
        row: dict[str, str | float] = {
            "hosts": hosts,
            "ranks": topology.ranks,
            "comm": comm.name,
            "step_ms": 1e3 * timeline.seconds,
            "samples_per_second": samples_per_second,
            "imbalance": work.imbalance,
            "critical_path": _parts(timeline),
        }
        if scenario.epoch_samples:
            row["gpu_hours_per_epoch"] = scenario.epoch_samples / samples_per_second * topology.ranks / 3600
        yield row, timeline


def _with_comm(config: Config, comm: Comm, global_batch_size: int) -> Config:
    training = config.training
    if global_batch_size:
        training = replace(training, global_batch_size=global_batch_size)
    return replace(config, comm=comm, training=training)


def _parts(timeline: Timeline) -> str:
    """The milliseconds of the critical path, kernels of the dense part together."""
    parts: dict[str, float] = defaultdict(float)
    for span in timeline.critical_path():
        parts[span.task.name.split(" ")[0] if ":" in span.task.name else span.task.name] += span.end - span.start
    return ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items())


def _table(rows: Sequence[dict[str, str | float]]) -> str:
    """Fused steps beside those of the baseline on as many hosts."""
    baseline = {row["hosts"]: float(row["step_ms"]) for row in rows if row["comm"] == Comm.baseline.name}
    lines = [f"{'hosts':>6} {'ranks':>6} {'comm':<9} {'step ms':>9} {'/ base':>7} {'samples/s':>13}  critical path, ms"]
    for row in rows:
        step = float(row["step_ms"])
        lines.append(
            f"{row['hosts']:>6} {row['ranks']:>6} {row['comm']:<9} {step:>9.3f} {step / baseline[row['hosts']]:>7.3f} "
            f"{float(row['samples_per_second']):>13,.0f}  {row['critical_path']}"
        )
    return "\n".join(lines)


def _write_timeline(folder: Path, row: dict[str, str | float], timeline: Timeline) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{row['hosts']}_hosts_{row['comm']}.json").write_text(json.dumps(timeline.trace_events()))


def _write_csv(path: Path, rows: Sequence[dict[str, str | float]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
