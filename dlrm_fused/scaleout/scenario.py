"""A question to the model: which training, on which machines and network, on how many hosts. From YAML and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dlrm_fused.config.loading import parse_override, read_yaml
from dlrm_fused.config.setting import Bound, at_least, check_bounds, one_of, require, setting
from dlrm_fused.errors import ConfigError
from dlrm_fused.scaleout.collectives import algorithms_of
from dlrm_fused.scaleout.topologies import Cluster, Switch, Topology, Torus

_TRAINER = "train.settings."


_ABOVE_0, _FROM_0 = Bound(lambda value: value > 0, "above 0"), at_least(0)
NetworkKind = StrEnum("NetworkKind", "cluster switch torus")


@dataclass
class TrainSettings:
    """The trainer's config, and overrides of it as its command line takes them."""

    config: str = ""
    settings: list[str] = field(default_factory=list)


@dataclass
class NetworkSettings:
    """Links in one direction: 10^9 bytes/s, and microseconds from rank to rank (of a hop, on a torus).

    ``switch`` and ``torus`` are networks of hosts of one rank, and have the NICs only.
    """

    kind: NetworkKind = NetworkKind.cluster
    ranks_per_host: int = setting(8, _ABOVE_0)
    nvlink_gb_per_second: float = setting(450.0, _ABOVE_0)
    nvlink_latency_us: float = setting(2.0, _FROM_0)
    nic_gb_per_second: float = setting(50.0, _ABOVE_0)
    nic_latency_us: float = setting(5.0, _FROM_0)
    hosts_per_pod: int = setting(32, _ABOVE_0)
    oversubscription: float = setting(1.0, Bound(lambda value: value >= 1, "1 (a full fat tree) or more"))


@dataclass
class RateSettings:
    """Factors of what the machine's calibration says, to ask what another one would bring."""

    memory: float = setting(1.0, _ABOVE_0)
    products: float = setting(1.0, _ABOVE_0)
    lookup: float = setting(1.0, _ABOVE_0)
    update: float = setting(1.0, _ABOVE_0)
    optimizer: float = setting(1.0, _ABOVE_0)


@dataclass
class HostSettings:
    """Milliseconds that a rank's process needs to launch a step, by ``comm``: those of a step with few samples, measured.

    A GPU's step takes at least as long; on CPUs, which compute themselves, it is added. 0 leaves it out.
    """

    baseline: float = setting(0.0, _FROM_0)
    fused: float = setting(0.0, _FROM_0)


@dataclass
class Scenario:
    """
    Attributes:
        machine: a file of benchmarks/calibrate.py.
        nvlink: one that was made on several GPUs, for the shares of NVLink, if ``machine`` was made on one.
        memory_gib: of a rank, for the planner.
        hosts: a step is simulated for each.
        samples_per_rank: weak scaling; 0 leaves ``training.global_batch_size`` as it is, strong scaling.
        all_to_all, all_reduce: algorithms; ``auto`` is the faster of ring and trees, as NCCL chooses.
        slices: parts in which a fused kernel sends its result.
        epoch_samples: of the GPU hours of an epoch; 0 leaves them out.
        straggling: how unequal ranks are: the deviation of the logarithm of the time that one computes. 0: all alike.
        seed: of stragglers.
        sweep: settings and the values that they take in turn, in all combinations. Settings of the trainer are named with
            ``train.settings.`` before them, as in ``train.settings.embedding.dim: [64, 128]``.
        sensitivity: as ``sweep``, for ``--tornado``, which changes one setting at a time.
    """

    name: str = "scaleout"
    train: TrainSettings = field(default_factory=TrainSettings)
    machine: str = ""
    nvlink: str = ""
    memory_gib: float = setting(80.0, _ABOVE_0)
    network: NetworkSettings = field(default_factory=NetworkSettings)
    hosts: list[int] = setting([1, 2, 4, 8])
    samples_per_rank: int = setting(0, _FROM_0)
    all_to_all: str = setting("direct", one_of(*algorithms_of("all_to_all")))
    all_reduce: str = setting("auto", one_of(*algorithms_of("all_reduce")))
    slices: int = setting(64, _ABOVE_0)
    epoch_samples: int = setting(0, _FROM_0)
    machine_rates: RateSettings = field(default_factory=RateSettings)
    host_ms: HostSettings = field(default_factory=HostSettings)
    straggling: float = setting(0.0, _FROM_0)
    seed: int = setting(0, _FROM_0)
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    sensitivity: dict[str, list[Any]] = field(default_factory=dict)


def load_scenario(path: Path, overrides: Sequence[str]) -> Scenario:
    """Raises: ConfigError: one line with the setting, its value and what is allowed."""
    updates = [read_yaml(path, "configs/scaleout"), *map(parse_override, overrides)]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Scenario), *updates)
        scenario = cast(Scenario, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"config {path}: {str(error).splitlines()[0]}") from None
    _check(scenario)
    return scenario


def changed(scenario: Scenario, key: str, value: object) -> Scenario:
    """Return a scenario with one setting changed: its own, or one of the trainer with ``train.settings.`` before its name.

    Raises:
        ConfigError: no such setting, or a value that is not allowed. Settings of the trainer are checked when it is read.
    """
    if key.startswith(_TRAINER):
        settings = [*scenario.train.settings, f"{key.removeprefix(_TRAINER)}={value}"]
        return replace(scenario, train=replace(scenario.train, settings=settings))
    try:
        settings_of = OmegaConf.structured(scenario)
        OmegaConf.update(settings_of, key, value)
        found = cast(Scenario, OmegaConf.to_object(settings_of))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={value}: {str(error).splitlines()[0]}") from None
    _check(found)
    return found


def _check(scenario: Scenario) -> None:
    check_bounds(scenario)
    for number, hosts in enumerate(scenario.hosts):
        require(hosts > 0, f"hosts[{number}]", hosts, "above 0")
    for question in ("sweep", "sensitivity"):
        for key, values in getattr(scenario, question).items():
            if not values:
                raise ConfigError(f"{question}.{key}=[]: give at least one value, or leave it out")
    if not scenario.hosts:
        raise ConfigError("hosts=[]: name at least one number of hosts")
    kind, ranks_per_host = scenario.network.kind, scenario.network.ranks_per_host
    if kind is not NetworkKind.cluster and ranks_per_host != 1:
        raise ConfigError(
            f"network.ranks_per_host={ranks_per_host}: allowed with network.kind={kind.name}: 1; "
            "network.kind=cluster has hosts of several ranks"
        )
    for key, given in (("train.config", scenario.train.config), ("machine", scenario.machine)):
        if not given:
            raise ConfigError(f"{key} is not set; give a file")


def topology_of(network: NetworkSettings, hosts: int) -> Topology:
    """Raises: UsageError: hosts that do not fill pods."""
    nic, latency = network.nic_gb_per_second * 1e9, network.nic_latency_us * 1e-6
    match network.kind:
        case NetworkKind.switch:
            return Switch(hosts, nic, latency)
        case NetworkKind.torus:
            rows = max(rows for rows in range(1, int(hosts**0.5) + 1) if hosts % rows == 0)
            return Torus(rows, hosts // rows, nic, latency)
        case NetworkKind.cluster:
            return Cluster(
                hosts=hosts,
                ranks_per_host=network.ranks_per_host,
                nvlink=network.nvlink_gb_per_second * 1e9,
                nic=nic,
                nvlink_latency=network.nvlink_latency_us * 1e-6,
                nic_latency=latency,
                hosts_per_pod=network.hosts_per_pod,
                oversubscription=network.oversubscription,
            )
