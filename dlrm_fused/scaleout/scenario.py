"""A question to the model: which training, on which machines and network, on how many hosts. From YAML and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dlrm_fused.errors import ConfigError
from dlrm_fused.scaleout.collectives import algorithms_of
from dlrm_fused.scaleout.topologies import Cluster, Switch, Topology, Torus

_TRAINER = "train.settings."


class NetworkKind(Enum):
    cluster = "cluster"
    switch = "switch"
    torus = "torus"


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
    ranks_per_host: int = 8
    nvlink_gb_per_second: float = 450.0
    nvlink_latency_us: float = 2.0
    nic_gb_per_second: float = 50.0
    nic_latency_us: float = 5.0
    hosts_per_pod: int = 32
    oversubscription: float = 1.0


@dataclass
class RateSettings:
    """Factors of what the machine's calibration says, to ask what another one would bring."""

    memory: float = 1.0
    products: float = 1.0
    lookup: float = 1.0
    update: float = 1.0
    optimizer: float = 1.0


@dataclass
class HostSettings:
    """Milliseconds that a rank's process needs to launch a step, by ``comm``: those of a step with few samples, measured.

    A GPU's step takes at least as long; on CPUs, which compute themselves, it is added. 0 leaves it out.
    """

    baseline: float = 0.0
    fused: float = 0.0


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
    memory_gib: float = 80.0
    network: NetworkSettings = field(default_factory=NetworkSettings)
    hosts: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    samples_per_rank: int = 0
    all_to_all: str = "direct"
    all_reduce: str = "auto"
    slices: int = 64
    epoch_samples: int = 0
    machine_rates: RateSettings = field(default_factory=RateSettings)
    host_ms: HostSettings = field(default_factory=HostSettings)
    straggling: float = 0.0
    seed: int = 0
    sweep: dict[str, list[Any]] = field(default_factory=dict)
    sensitivity: dict[str, list[Any]] = field(default_factory=dict)


def load_scenario(path: Path, overrides: Sequence[str]) -> Scenario:
    """Raises: ConfigError: one line with the setting, its value and what is allowed."""
    try:
        read = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"config {path}: no such file; configs/scaleout has examples") from None
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: not readable as YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(read, DictConfig):
        raise ConfigError(f"config {path}: expected a mapping of settings, such as name: my_cluster")
    without = [override for override in overrides if "=" not in override]
    if without:
        raise ConfigError(f"override {without[0]!r}: expected key=value, such as slices=32")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Scenario), read, OmegaConf.from_dotlist(list(overrides)))
        scenario = cast(Scenario, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, YAMLError) as error:
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
    network = scenario.network
    positive = {
        "memory_gib": scenario.memory_gib,
        "slices": scenario.slices,
        "network.ranks_per_host": network.ranks_per_host,
        "network.nvlink_gb_per_second": network.nvlink_gb_per_second,
        "network.nic_gb_per_second": network.nic_gb_per_second,
        "network.hosts_per_pod": network.hosts_per_pod,
        **{f"machine_rates.{name}": factor for name, factor in asdict(scenario.machine_rates).items()},
        **{f"hosts[{number}]": hosts for number, hosts in enumerate(scenario.hosts)},
    }
    not_negative = {
        "samples_per_rank": scenario.samples_per_rank,
        "epoch_samples": scenario.epoch_samples,
        "straggling": scenario.straggling,
        "seed": scenario.seed,
        **{f"host_ms.{name}": time for name, time in asdict(scenario.host_ms).items()},
        "network.nvlink_latency_us": network.nvlink_latency_us,
        "network.nic_latency_us": network.nic_latency_us,
    }
    for key, value in positive.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{key}={value}: allowed: above 0")
    for key, value in not_negative.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{key}={value}: allowed: 0 or more")
    if network.oversubscription < 1:
        raise ConfigError(f"network.oversubscription={network.oversubscription}: allowed: 1 (a full fat tree) or more")
    for question in ("sweep", "sensitivity"):
        for key, values in getattr(scenario, question).items():
            if not values:
                raise ConfigError(f"{question}.{key}=[]: give at least one value, or leave it out")
    if not scenario.hosts:
        raise ConfigError("hosts=[]: name at least one number of hosts")
    for key in ("all_to_all", "all_reduce"):
        if getattr(scenario, key) not in algorithms_of(key):
            raise ConfigError(f"{key}={getattr(scenario, key)}: allowed: {', '.join(algorithms_of(key))}")
    if network.kind is not NetworkKind.cluster and network.ranks_per_host != 1:
        raise ConfigError(
            f"network.ranks_per_host={network.ranks_per_host}: allowed with network.kind={network.kind.name}: 1; "
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
