"""GPUs that are missing, shared, idle, or do not reach each other within a host; hosts that share a name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.findings.finding import Check, Finding, Level, group_by, hosts, numbers, pairs_text, with_gpus
from dlrm_fused.doctor.transports import MESSAGES, is_nvlink, lacks_peer_access, peer_groups
from dlrm_fused.symmetric.memory import readable

# NCCL allocates a segment of this size for each channel from one rank to another, for all its protocols
# (github.com/NVIDIA/nccl/issues/342).
_SEGMENT_BYTES = 9_637_888
# Two channels in each of two communicators: that of the process group, and that of messages between GPUs.
_SEGMENTS = 4


def _host_names(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for name, alike in group_by(ranks, lambda facts: facts.host.name).items():
        if len({facts.host.boot for facts in alike}) > 1:
            what, advice = f"several machines call themselves {name}", "give each a name of its own: messages name the host"
            yield Finding("host-name-twice", Level.note, numbers(alike), what, advice)


def _missing(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    without = [facts for facts in ranks if facts.gpu is None]
    too_many = [facts for facts in without if facts.visible_gpus]
    for host, alike in group_by(too_many, lambda facts: facts.host).items():
        what = f"{host.name} has {alike[0].visible_gpus} GPUs, and more ranks"
        yield Finding("too-few-gpus", Level.broken, numbers(alike), what, "start fewer processes with --nproc-per-node")
    blank = [facts for facts in without if not facts.visible_gpus]
    if blank and len(without) < len(ranks):
        what = f"no GPU on {hosts(blank)}, but on {hosts(with_gpus(ranks))}"
        yield Finding("devices-differ", Level.broken, numbers(blank), what, "give all ranks GPUs, or set runtime.device=cpu")


def _idle(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    unseen = [facts for facts in ranks if facts.host_gpus and not facts.visible_gpus]
    for host, alike in group_by(unseen, lambda facts: facts.host).items():
        what = f"nvidia-smi lists {alike[0].host_gpus} GPUs on {host.name}, torch {alike[0].versions.get('torch')} finds none"
        advice = "install torch's CUDA build (`make setup DEVICE=cuda`) and a driver for it, or unset CUDA_VISIBLE_DEVICES"
        yield Finding("gpus-unused", Level.slower, numbers(alike), what, advice)


def _shared(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for (host, uuid), alike in group_by(with_gpus(ranks), lambda facts: (facts.host, facts.gpu and facts.gpu.uuid)).items():
        if len(alike) > 1:
            what = f"ranks {', '.join(map(str, numbers(alike)))} on {host.name} use the same GPU ({uuid})"
            advice = "give each rank one of its own, by CUDA_VISIBLE_DEVICES or --nproc-per-node"
            yield Finding("gpu-shared", Level.broken, numbers(alike), what, advice)


def _peer_access(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """GPUs of one host whose ranks do not reach each other by stores."""
    for host, alike in group_by(with_gpus(ranks), lambda facts: facts.host).items():
        yield from _without_stores("no-peer-access", host.name, alike)


def _shared_memory(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """GPUs without peer access, whose messages NCCL takes through /dev/shm: 64 MB in a container, unless it is told."""
    for host, alike in group_by(with_gpus(ranks), lambda facts: facts.host).items():
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
            yield Finding("shared-memory", level, numbers(alike), what, advice)


def _containers(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Containers on one machine that call themselves alike, or in which the same container began more than once."""
    for (name, _), alike in group_by(ranks, lambda facts: (facts.host.name, facts.host.boot)).items():
        # One rank of each suffices: the others say the same.
        firsts = [together[0] for together in group_by(alike, lambda facts: facts.host).values()]
        yield from _without_stores("containers", name, firsts)


def _without_stores(name: str, host: str, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for group in peer_groups(ranks):
        if group.choice.transport == MESSAGES:
            where = sorted({rank for pair in group.pairs for rank in pair})
            what = f"{host}: {group.choice.why}: {pairs_text(group.pairs)}"
            yield Finding(name, Level.slower, where, what, group.choice.advice)


def _nvlinks(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for host, alike in group_by(with_gpus(ranks), lambda facts: facts.host).items():
        links = {facts.rank: len(facts.gpu.nvlinks) for facts in alike if facts.gpu and facts.gpu.nvlinks is not None}
        most = max(links.values(), default=0)
        fewer = [rank for rank, count in links.items() if count < most]
        if fewer:
            what = f"{host.name}: {links[fewer[0]]} active NVLinks on the GPU of rank {fewer[0]}, {most} on others"
            advice = "`nvidia-smi nvlink -s` lists them; reset these GPUs, or have them repaired"
            yield Finding("nvlink-inactive", Level.slower, fewer, what, advice)


def _without_nvlink(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for host, alike in group_by(with_gpus(ranks), lambda facts: facts.host).items():
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
            what = f"{host.name}: GPUs connected by PCIe, not NVLink: {pairs_text(apart)}"
            yield Finding("no-nvlink", Level.note, where, what, advice)


CHECKS: tuple[Check, ...] = (
    _host_names,
    _missing,
    _idle,
    _shared,
    _peer_access,
    _shared_memory,
    _containers,
    _nvlinks,
    _without_nvlink,
)
