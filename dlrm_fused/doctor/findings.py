"""Judges what ranks have gathered and measured: each fault by name, with its level and what to do about it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import permutations
from typing import TypeVar

from dlrm_fused.doctor.architectures import runs_on
from dlrm_fused.doctor.facts import Interface, RankFacts
from dlrm_fused.doctor.measure import Measurement
from dlrm_fused.doctor.transports import MESSAGES, is_nvlink, lacks_peer_access, peer_groups
from dlrm_fused.symmetric.memory import readable
from dlrm_fused.versions import VERSION_SETS, VersionError, check_installed

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_SAME_PACKAGES = "use the same .venv or container image on all hosts"
# FBGEMM's wheels in the ordinary index have kernels for these, as cuobjdump lists them in that of release 1.8.0.
_OF_FBGEMM_WHEELS = ("sm_80", "sm_90a", "sm_100a")
# NCCL allocates a segment of this size for each channel from one rank to another, for all its protocols
# (github.com/NVIDIA/nccl/issues/342).
_SEGMENT_BYTES = 9_637_888
# Two channels in each of two communicators: that of the process group, and that of messages between GPUs.
_SEGMENTS = 4
_SOCKET_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_SLOW = 0.5  # of the median of its kind
_FEWEST = 3  # of a kind that have a median worth the name
_SHOWN_HOSTS = 4


class Level(Enum):
    """Levels, with their exit status: ``broken`` keeps training or ``comm=fused`` from running, ``slower`` costs time, ``note``
    costs nothing."""

    broken = 1
    slower = 2
    note = 0


# All kinds of faults; docs/many_nodes.md says what each means.
NAMES = frozenset({
    "rank-missing", "rank-failed", "release-differs", "version-set", "version-untested", "versions-differ", "host-name-twice",
    "too-few-gpus", "devices-differ", "gpus-unused", "torch-kernels", "fbgemm-kernels", "rocm", "gpu-shared", "no-peer-access",
    "shared-memory", "containers", "nvlink-inactive", "no-nvlink", "interface-missing", "loopback", "address-twice",
    "interfaces-differ", "no-connection", "slow-link", "no-rdma", "rdma-down", "rdma-off", "no-gpudirect-rdma",
})  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """Attributes:
    name: one of ``NAMES``.
    ranks: where.
    what: is wrong, with names and values.
    advice: what to do.
    """

    name: str
    level: Level
    ranks: Sequence[int]
    what: str
    advice: str

    def __post_init__(self) -> None:
        assert self.name in NAMES, self.name


def exit_status(findings: Iterable[Finding]) -> int:
    """0 all well, 1 something is broken, 2 it works, but slower than it could."""
    levels = {finding.level for finding in findings}
    return next((level.value for level in (Level.broken, Level.slower) if level in levels), 0)


# Packages that do not belong together, or differ between ranks.


def _version_sets(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for versions, alike in _group_by(ranks, lambda facts: tuple(facts.versions.items())).items():
        try:
            untested = check_installed(dict(versions))
        except VersionError as error:
            what = f"{_hosts(alike)}: {error}"
            yield Finding("version-set", Level.broken, _numbers(alike), what, "install one set on all hosts: `make setup`")
            continue
        if untested:
            advice = "compare losses with those of a tested set, which `make setup` installs"
            yield Finding("version-untested", Level.note, _numbers(alike), f"{_hosts(alike)}: {untested}", advice)


def _packages(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for package in VERSION_SETS[0]:
        yield from _differing(ranks, package, [facts.versions.get(package) for facts in ranks], Level.broken, _SAME_PACKAGES)
    yield from _differing(ranks, "NCCL", [facts.nccl for facts in ranks], Level.broken, _SAME_PACKAGES)
    minors = [facts.python.rpartition(".")[0] for facts in ranks]
    yield from _differing(ranks, "Python", minors, Level.note, _SAME_PACKAGES)


def _kinds_of_gpus(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    users = _with_gpus(ranks)
    gpus = [facts.gpu for facts in users if facts.gpu]
    yield from _differing(users, "the GPU's driver", [gpu.driver for gpu in gpus], Level.note, "install one on all hosts")
    advice = "use GPUs of one kind: the slowest sets the pace"
    yield from _differing(users, "the GPU", [gpu.name for gpu in gpus], Level.slower, advice)


def _differing(
    ranks: Sequence[RankFacts], what: str, values: Sequence[str | None], level: Level, advice: str
) -> Iterator[Finding]:
    """One finding for each of the ranks' values but the commonest."""
    groups = _group_by(zip(ranks, values, strict=True), lambda pair: pair[1])
    ranks_with = {value: [facts for facts, _ in pairs] for value, pairs in groups.items()}
    common = max(ranks_with, key=lambda value: len(ranks_with[value]), default=None)
    for value, alike in ranks_with.items():
        if value != common:
            said = f"{what} is {value or 'missing'} on {_hosts(alike)}, {common or 'missing'} on {_hosts(ranks_with[common])}"
            yield Finding("versions-differ", level, _numbers(alike), said, advice)


# GPUs for which torch or FBGEMM has no kernels, or of a maker on which fused communication has not run.


def _torch_kernels(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for alike, kernels in _without_kernels(ranks, lambda facts: facts.torch_architectures):
        what = f"torch {alike[0].versions.get('torch')} has kernels for {kernels}, not for {_gpu(alike)}"
        advice = "install a build of torch for this GPU: https://pytorch.org/get-started has those of other CUDA releases"
        yield Finding("torch-kernels", Level.broken, _numbers(alike), what, advice)


def _fbgemm_kernels(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for alike, kernels in _without_kernels(ranks, lambda facts: facts.fbgemm_architectures or _OF_FBGEMM_WHEELS):
        release, is_read = f"fbgemm-gpu {alike[0].versions.get('fbgemm-gpu')}", bool(alike[0].fbgemm_architectures)
        seen = f"{release} has" if is_read else f"{release} cannot be looked into; wheels of the ordinary index have"
        what = f"{seen} kernels for {kernels}, not for {_gpu(alike)}"
        advice = (
            f"build FBGEMM from source for {_architecture(alike[0])}, at the release that belongs to torch, or use another "
            "GPU; runtime.device=cpu works"
        )
        level = Level.broken if is_read else Level.note
        yield Finding("fbgemm-kernels", level, _numbers(alike), what, advice if is_read else f"if it is one of them, {advice}")


def _without_kernels(
    ranks: Sequence[RankFacts], built_for: Callable[[RankFacts], Sequence[str]]
) -> Iterator[tuple[list[RankFacts], str]]:
    """Ranks with one kind of NVIDIA GPU that no architecture of ``built_for`` runs on, and those architectures."""
    on_nvidia = [facts for facts in _with_gpus(ranks) if facts.hip is None]
    kinds = _group_by(on_nvidia, lambda facts: (facts.gpu and (facts.gpu.name, facts.gpu.capability), tuple(built_for(facts))))
    for (gpu, architectures), alike in kinds.items():
        if gpu and architectures and not any(runs_on(architecture, gpu[1]) for architecture in architectures):
            yield alike, ", ".join(architectures)


def _rocm(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    alike = [facts for facts in _with_gpus(ranks) if facts.hip]
    if alike:
        what = f"torch for ROCm {alike[0].hip} on {_hosts(alike)}: fused communication has never run on AMD's GPUs"
        advice = "nothing: comm=fused runs TorchRec's path, as comm=baseline does, and that has not been tried there either"
        yield Finding("rocm", Level.note, _numbers(alike), what, advice)


def _gpu(ranks: Sequence[RankFacts]) -> str:
    assert ranks[0].gpu is not None
    return f"{ranks[0].gpu.name} ({_architecture(ranks[0])}) on {_hosts(ranks)}"


def _architecture(facts: RankFacts) -> str:
    assert facts.gpu is not None
    return "sm_{}{}".format(*facts.gpu.capability)


# GPUs that are missing, shared, idle, or do not reach each other within a host; hosts that share a name.


def _host_names(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for name, alike in _group_by(ranks, lambda facts: facts.host.name).items():
        if len({facts.host.boot for facts in alike}) > 1:
            what, advice = f"several machines call themselves {name}", "give each a name of its own: messages name the host"
            yield Finding("host-name-twice", Level.note, _numbers(alike), what, advice)


def _missing_gpus(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [facts for facts in ranks if facts.gpu is None]
    too_many = [facts for facts in without if facts.visible_gpus]
    for host, alike in _group_by(too_many, lambda facts: facts.host).items():
        what = f"{host.name} has {alike[0].visible_gpus} GPUs, and more ranks"
        yield Finding("too-few-gpus", Level.broken, _numbers(alike), what, "start fewer processes with --nproc-per-node")
    blank = [facts for facts in without if not facts.visible_gpus]
    if blank and len(without) < len(ranks):
        what = f"no GPU on {_hosts(blank)}, but on {_hosts(_with_gpus(ranks))}"
        yield Finding("devices-differ", Level.broken, _numbers(blank), what, "give all ranks GPUs, or set runtime.device=cpu")


def _idle_gpus(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    unseen = [facts for facts in ranks if facts.host_gpus and not facts.visible_gpus]
    for host, alike in _group_by(unseen, lambda facts: facts.host).items():
        what = f"nvidia-smi lists {alike[0].host_gpus} GPUs on {host.name}, torch {alike[0].versions.get('torch')} finds none"
        advice = "install torch's CUDA build (`make setup DEVICE=cuda`) and a driver for it, or unset CUDA_VISIBLE_DEVICES"
        yield Finding("gpus-unused", Level.slower, _numbers(alike), what, advice)


def _shared_gpus(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for (host, uuid), alike in _group_by(_with_gpus(ranks), lambda facts: (facts.host, facts.gpu and facts.gpu.uuid)).items():
        if len(alike) > 1:
            what = f"ranks {', '.join(map(str, _numbers(alike)))} on {host.name} use the same GPU ({uuid})"
            advice = "give each rank one of its own, by CUDA_VISIBLE_DEVICES or --nproc-per-node"
            yield Finding("gpu-shared", Level.broken, _numbers(alike), what, advice)


def _peer_access(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """GPUs of one host whose ranks do not reach each other by stores."""
    for host, alike in _group_by(_with_gpus(ranks), lambda facts: facts.host).items():
        yield from _without_stores("no-peer-access", host.name, alike)


def _shared_memory(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """GPUs without peer access, whose messages NCCL takes through /dev/shm: 64 MB in a container, unless it is told."""
    for host, alike in _group_by(_with_gpus(ranks), lambda facts: facts.host).items():
        pairs = sum(lacks_peer_access(*pair) for pair in permutations(alike, 2))
        free = alike[0].shared_memory
        if not pairs or free is None or alike[0].network.settings.get("NCCL_SHM_DISABLE") == "1":
            continue
        least, needed = (pairs * segments * _SEGMENT_BYTES for segments in (1, _SEGMENTS))
        if free < needed:
            level = Level.broken if free < least else Level.note
            room = f"{host.name}: {readable(free)} free in /dev/shm"
            what = f"{room}, NCCL needs about {readable(needed)} without peer access"
            advice = "start the container with a larger one (docker's --shm-size=8g, --ipc=host), or set NCCL_SHM_DISABLE=1"
            yield Finding("shared-memory", level, _numbers(alike), what, advice)


def _containers(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Containers on one machine that call themselves alike, or in which the same container began more than once."""
    for (name, _), alike in _group_by(ranks, lambda facts: (facts.host.name, facts.host.boot)).items():
        # One rank of each suffices: the others say the same.
        firsts = [together[0] for together in _group_by(alike, lambda facts: facts.host).values()]
        yield from _without_stores("containers", name, firsts)


def _without_stores(name: str, host: str, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for group in peer_groups(ranks):
        if group.choice.transport == MESSAGES:
            where = sorted({rank for pair in group.pairs for rank in pair})
            what = f"{host}: {group.choice.why}: {_pairs_text(group.pairs)}"
            yield Finding(name, Level.slower, where, what, group.choice.advice)


def _nvlinks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for host, alike in _group_by(_with_gpus(ranks), lambda facts: facts.host).items():
        links = {facts.rank: len(facts.gpu.nvlinks) for facts in alike if facts.gpu and facts.gpu.nvlinks is not None}
        most = max(links.values(), default=0)
        fewer = [rank for rank, count in links.items() if count < most]
        if fewer:
            what = f"{host.name}: {links[fewer[0]]} active NVLinks on the GPU of rank {fewer[0]}, {most} on others"
            advice = "`nvidia-smi nvlink -s` lists them; reset these GPUs, or have them repaired"
            yield Finding("nvlink-inactive", Level.slower, fewer, what, advice)


def _without_nvlink(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for host, alike in _group_by(_with_gpus(ranks), lambda facts: facts.host).items():
        rank_of = {facts.gpu.uuid: facts.rank for facts in alike if facts.gpu}
        apart = [
            (facts.rank, rank_of[other])
            for facts in alike
            if facts.gpu
            for other, link in facts.gpu.topology.items()
            if facts.rank < rank_of.get(other, -1) and not is_nvlink(link)
        ]
        if apart:
            advice = "if the host has NVSwitch, start nvidia-fabricmanager; `nvidia-smi topo -m` shows all connections"
            where = sorted({rank for pair in apart for rank in pair})
            what = f"{host.name}: GPUs connected by PCIe, not NVLink: {_pairs_text(apart)}"
            yield Finding("no-nvlink", Level.note, where, what, advice)


# Network interfaces that are named and not there, that no other host reaches, or that differ between hosts.


def _missing_interfaces(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for backend, variable in _SOCKET_VARIABLES.items():
        told = [facts for facts in _users_of(ranks, backend) if variable in facts.network.settings]
        for alike in _group_by(told, lambda facts: (facts.host, tuple(facts.network.settings.items()))).values():
            yield from _missing_on_host(alike, backend, variable)


def _missing_on_host(ranks: Sequence[RankFacts], backend: str, variable: str) -> Iterator[Finding]:
    network, host = ranks[0].network, ranks[0].host.name
    setting, used = network.settings[variable], network.uses[backend]
    # A list is gloo's to take in full; of NCCL's prefixes and exceptions, one match is enough.
    absent = [name for name in setting.split(",") if name not in used] if backend == "gloo" else [] if used else [setting]
    down = [interface.name for interface in network.interfaces if interface.name in used and not interface.is_up]
    for names, fault in ((absent, "no such interface there"), (down, "it is down")):
        if names:
            what = f"{variable}={setting} on {host}: {fault}: {', '.join(names)}"
            yield Finding("interface-missing", Level.broken, _numbers(ranks), what, _advice(variable, host, network.interfaces))


def _loopback(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    if not _need_a_network(ranks):
        return
    for backend, variable in _SOCKET_VARIABLES.items():
        for host, alike in _group_by(_users_of(ranks, backend), lambda facts: facts.host).items():
            network = alike[0].network
            loopbacks = {interface.name for interface in network.interfaces if interface.is_loopback}
            if network.uses[backend] and loopbacks.issuperset(network.uses[backend]):
                setting = network.settings.get(variable)
                reason = f"by {variable}={setting}" if setting else f"the address that the name {host.name} has there"
                what = f"{backend} on {host.name} uses loopback, {reason}: no other host can reach it"
                yield Finding("loopback", Level.broken, _numbers(alike), what, _advice(variable, host.name, network.interfaces))


def _same_address(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Hosts whose interfaces have one address, as those of container engines do: each reaches itself alone."""
    for backend, variable in _SOCKET_VARIABLES.items():
        users = [(facts, _first_address(facts, backend)) for facts in _users_of(ranks, backend)]
        for address, pairs in _group_by(users, lambda user: user[1]).items():
            alike = [facts for facts, _ in pairs]
            if address and _need_a_network(alike):
                what = f"{backend} has the address {address} on several hosts: {_hosts(alike)}"
                advice = f"name an interface of the network between the hosts on each of them: {variable}"
                yield Finding("address-twice", Level.broken, _numbers(alike), what, advice)


def _first_address(facts: RankFacts, backend: str) -> str:
    """Return an address of the first interface that the backend uses, "" for loopback, which has a finding of its own."""
    used = [interface for interface in facts.network.interfaces if interface.name in facts.network.uses[backend][:1]]
    return next((i.addresses[0] for i in used if i.addresses and not i.is_loopback), "")


def _differing_interfaces(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for backend, variable in _SOCKET_VARIABLES.items():
        users = [(facts, tuple(facts.network.uses[backend])) for facts in _users_of(ranks, backend)]
        groups = _group_by([(facts, names) for facts, names in users if names], lambda user: user[1])
        common = max(groups, key=lambda names: len(groups[names]), default=())
        for names in groups.keys() - {common}:
            alike, others = ([facts for facts, _ in groups[chosen]] for chosen in (names, common))
            what = f"{backend} uses {', '.join(names)} on {_hosts(alike)}, {', '.join(common)} on {_hosts(others)}"
            advice = f"if these are different networks, name one that all hosts share: {variable}"
            yield Finding("interfaces-differ", Level.slower, _numbers(alike), what, advice)


def _need_a_network(ranks: Sequence[RankFacts]) -> bool:
    """Return whether ranks are on several hosts that do not reach each other by any address.

    Hosts that ``DLRM_FUSED_HOST`` declares on one machine do, since they share its interfaces.
    """
    places = {(facts.host.boot, facts.network.namespace) for facts in ranks}
    return _has_many_hosts(ranks) and (len(places) > 1 or None in {namespace for _, namespace in places})


def _users_of(ranks: Sequence[RankFacts], backend: str) -> list[RankFacts]:
    return [facts for facts in ranks if backend in facts.backends]


def _advice(variable: str, host: str, interfaces: Sequence[Interface]) -> str:
    usable = [f"{i.name} ({i.addresses[0]})" for i in interfaces if i.is_up and i.addresses and not i.is_loopback]
    if not usable:
        return f"bring up a network interface on {host}: none has an address but loopback"
    return f"set {variable} on {host} to {' or '.join(usable)}"


# Links between hosts: RDMA, and links slower than others.


def _rdma(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    if not _has_many_hosts(ranks):
        return
    for host, alike in _group_by(_with_gpus(ranks), lambda facts: facts.host).items():
        fault = _rdma_fault(alike[0])
        if fault is not None:
            name, level, what, advice = fault
            yield Finding(name, level, _numbers(alike), f"{host.name}: {what}", advice)


def _rdma_fault(facts: RankFacts) -> tuple[str, Level, str, str] | None:
    """Return name, level, what is wrong, and what to do."""
    ports, active = facts.network.rdma, facts.active_rdma
    if not ports:
        advice = "if the machine has one, show it to the container: --device=/dev/infiniband"
        return "no-rdma", Level.note, "no InfiniBand or RoCE adapter, NCCL goes through TCP", advice
    if not active:
        listed = ", ".join(f"{port.adapter} port {port.port} is {port.state}" for port in ports)
        return "rdma-down", Level.slower, f"{listed}, NCCL goes through TCP", "check cable and switch; `ibstat` shows the port"
    if facts.network.settings.get("NCCL_IB_DISABLE") == "1":
        return "rdma-off", Level.slower, f"NCCL_IB_DISABLE=1, though {active[0].adapter} is up", "unset NCCL_IB_DISABLE"
    if not facts.has_gpudirect_rdma:
        what = "no GPUDirect RDMA (neither nvidia_peermem nor dmabuf), messages go through the host's memory"
        return "no-gpudirect-rdma", Level.slower, what, "`modprobe nvidia_peermem`"
    return None


# In the order in which findings are told.
_CHECKS: tuple[Callable[[Sequence[RankFacts]], Iterator[Finding]], ...] = (
    _version_sets, _packages, _kinds_of_gpus, _torch_kernels, _fbgemm_kernels, _rocm, _host_names, _missing_gpus, _idle_gpus,
    _shared_gpus, _peer_access, _shared_memory, _containers, _nvlinks, _without_nvlink, _missing_interfaces, _loopback,
    _same_address, _differing_interfaces, _rdma,
)  # fmt: skip


def judge_facts(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Return all findings that follow from the facts of those ranks that sent them."""
    return [finding for check in _CHECKS for finding in check(ranks)]


def judge_measurements(measurements: Sequence[Measurement], ranks: Sequence[RankFacts]) -> list[Finding]:
    """Links that are much slower than others of their kind, within a host or between two."""
    host_of = {facts.rank: facts.host for facts in ranks}
    kinds = _group_by(measurements, lambda measured: host_of[measured.ranks[0]] == host_of[measured.ranks[1]])
    return [
        _slow_link(measured, median, " and ".join(f"rank {rank} on {host_of[rank].name}" for rank in measured.ranks))
        for alike in kinds.values()
        if len(alike) >= _FEWEST
        for median in [statistics.median(measured.gb_per_s for measured in alike)]
        for measured in alike
        if measured.gb_per_s < _SLOW * median
    ]


def _slow_link(measured: Measurement, median: float, between: str) -> Finding:
    what = f"{measured.gb_per_s:.2f} GB/s between {between}, where the median of such pairs is {median:.2f}"
    advice = "look for other load, for a cable or port at a lower rate, for another interface on one of them"
    return Finding("slow-link", Level.slower, measured.ranks, what, advice)


def _group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by their key, in the order of their first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _numbers(ranks: Iterable[RankFacts]) -> list[int]:
    return [facts.rank for facts in ranks]


def _hosts(ranks: Iterable[RankFacts]) -> str:
    """Return names of the ranks' hosts, the first few of many."""
    names = list(dict.fromkeys(facts.host.name for facts in ranks))
    more = len(names) - _SHOWN_HOSTS
    return ", ".join(names[:_SHOWN_HOSTS]) + (f" and {more} more" if more > 0 else "")


def _has_many_hosts(ranks: Iterable[RankFacts]) -> bool:
    return len({facts.host for facts in ranks}) > 1


def _with_gpus(ranks: Iterable[RankFacts]) -> list[RankFacts]:
    return [facts for facts in ranks if facts.gpu is not None]


def _pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Pairs of ranks: the only one, or how many and the first."""
    first = f"ranks {pairs[0][0]} and {pairs[0][1]}"
    return first if len(pairs) == 1 else f"{len(pairs)} pairs, such as {first}"
