"""Answers to the questions of a scenario: a row for each step that it asks for, and what its assumptions are worth."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dlrm_fused.config import Comm, Config, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.errors import ConfigError
from dlrm_fused.scaleout import machine as machines
from dlrm_fused.scaleout.dense_trace import DenseWork
from dlrm_fused.scaleout.machine import Machine
from dlrm_fused.scaleout.scenario import Scenario, changed, topology_of
from dlrm_fused.scaleout.step import Timeline, simulate
from dlrm_fused.scaleout.training_step import Algorithms, tasks_of_step
from dlrm_fused.scaleout.workload import Workload, workload

COMMS = (Comm.baseline, Comm.fused)
Row = dict[str, Any]


def sweep(scenario: Scenario) -> Iterator[tuple[Row, Timeline]]:
    """The steps of every combination of the values in ``sweep``; these are the first columns of a row.

    Raises:
        ConfigError: a setting that the scenario, the trainer or the planner refuses.
    """
    keys = list(scenario.sweep)
    planned = _Planned()
    for values in itertools.product(*scenario.sweep.values()):
        chosen = scenario
        for key, value in zip(keys, values, strict=True):
            chosen = changed(chosen, key, value)
        for row, timeline in steps(chosen, planned):
            yield {**dict(zip(keys, map(str, values), strict=True)), **row}, timeline


@dataclass(frozen=True)
class Sensitivity:
    """The share of a step that fusion saves (1 - fused / baseline), with one setting changed to each of its values."""

    key: str
    values: tuple[Any, ...]
    saved: tuple[float, ...]


def sensitivities(scenario: Scenario) -> tuple[float, list[Sensitivity]]:
    """Return fusion's saving on the first of ``hosts``, and with each setting of ``sensitivity`` changed, largest change first.

    Raises:
        ConfigError: as of :func:`sweep`; nothing in ``sensitivity``.
    """
    if not scenario.sensitivity:
        raise ConfigError("sensitivity is not set; give settings and their values, such as network.nic_latency_us: [1, 10]")
    planned = _Planned()
    only = replace(scenario, hosts=scenario.hosts[:1])

    def saved(asked: Scenario) -> float:
        baseline, fused = (row["step_ms"] for row, _ in steps(asked, planned, progress=False))
        return 1 - fused / baseline

    found = []
    for key, values in tqdm(scenario.sensitivity.items(), desc="sensitivity", disable=None, leave=False):
        found.append(Sensitivity(key, tuple(values), tuple(saved(changed(only, key, value)) for value in values)))
    own = saved(only)
    return own, sorted(found, key=lambda one: min(own, *one.saved) - max(own, *one.saved))


class _Planned:
    """Workloads by what they depend on: planning takes longer than simulating."""

    def __init__(self) -> None:
        self._known: dict[str, Workload] = {}
        self._traces: dict[str, DenseWork] = {}

    def workload(self, config: Config, scenario: Scenario, ranks: int) -> Workload:
        key = repr((config, ranks, scenario.network.ranks_per_host, scenario.memory_gib))
        if key not in self._known:
            schema = open_dataset(config, torch.device("cpu")).schema
            network, memory_gib = scenario.network, scenario.memory_gib
            self._known[key] = workload(config, schema, ranks, network.ranks_per_host, memory_gib, self._traces)
        return self._known[key]


def steps(scenario: Scenario, planned: _Planned, *, progress: bool = True) -> Iterator[tuple[Row, Timeline]]:
    """A row for each number of hosts and each comm."""
    machine = _machine(scenario)
    config = load_config(scenario.train.config, scenario.train.settings)
    topologies = [topology_of(scenario.network, hosts) for hosts in scenario.hosts]
    algorithms = Algorithms(scenario.all_to_all, scenario.all_reduce, scenario.slices)
    dtype = config.training.precision.name
    if dtype not in machine.products:
        raise ConfigError(f"training.precision={dtype}: {scenario.machine} has measured {', '.join(machine.products)} only")
    cells = list(itertools.product(zip(scenario.hosts, topologies, strict=True), COMMS))
    for (hosts, topology), comm in tqdm(cells, desc="steps", disable=None if progress else True, leave=False):
        own = _with_comm(config, comm, scenario.samples_per_rank * topology.ranks)
        work = planned.workload(own, scenario, topology.ranks)
        slowest = slowest_rank(scenario, topology.ranks)
        tasks = tasks_of_step(
            work,
            machine.slower(slowest),
            topology,
            algorithms,
            dtype,
            is_fused=comm is Comm.fused,
            host_seconds=slowest * getattr(scenario.host_ms, comm.name) / 1e3,
        )
        timeline = simulate(tasks, topology)
        samples_per_second = work.samples * topology.ranks / timeline.seconds
        row: Row = {
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


def slowest_rank(scenario: Scenario, ranks: int) -> float:
    """Return how many times as long as others the slowest rank computes: log-normal factors, drawn by the seed.

    All ranks wait for it in the first exchange of a step, so it counts for all.
    """
    return float(np.exp(scenario.straggling * np.random.default_rng(scenario.seed).standard_normal(ranks)).max())


def _machine(scenario: Scenario) -> Machine:
    machine, factors = machines.read(Path(scenario.machine)), scenario.machine_rates
    if scenario.nvlink:
        shares = machines.read(Path(scenario.nvlink), "nvlink").nvlink_shares
        if not shares:
            raise ConfigError(f"nvlink={scenario.nvlink}: no shares of NVLink; calibrate a machine of several GPUs")
        machine = replace(machine, nvlink_shares=shares)
    return replace(
        machine,
        memory=machine.memory * factors.memory,
        lookup=machine.lookup * factors.lookup,
        update=machine.update * factors.update,
        optimizer=machine.optimizer * factors.optimizer,
        products={dtype: rate * factors.products for dtype, rate in machine.products.items()},
    )


def _with_comm(config: Config, comm: Comm, global_batch_size: int) -> Config:
    training = config.training
    if global_batch_size:
        training = replace(training, global_batch_size=global_batch_size)
    return replace(config, comm=comm, training=training)


def _parts(timeline: Timeline) -> str:
    """Return the milliseconds of the critical path, kernels of the dense part together."""
    parts: dict[str, float] = defaultdict(float)
    for span in timeline.critical_path():
        parts[span.task.name.split(" ")[0] if ":" in span.task.name else span.task.name] += span.end - span.start
    return ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items())
