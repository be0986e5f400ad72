"""Which transport communication fused into kernels takes between two ranks, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from dlrm_fused.doctor.facts import RankFacts

STORES = "stores"  # the peer's memory is mapped: kernels, or copies on the CPU, write into it
MESSAGES = "messages"  # finished slices through the process group


class Choice(NamedTuple):
    """A transport, why it is that one, and what would give a better one: empty if nothing would."""

    transport: str
    why: str
    advice: str


@dataclass(frozen=True)
class Operator:
    """A fused operator; ``is_within_host``: its group of ranks never reaches over hosts, so the trainer makes it."""

    name: str
    is_within_host: bool = False
    needs_gpu: bool = False


OPERATORS = (
    Operator("embedding + All-to-All"),
    Operator("feature All-to-All", needs_gpu=True),
    Operator("GEMV + AllReduce", is_within_host=True),
    Operator("GEMM + All-to-All"),
    Operator("expert layer"),
)


def transport_of(facts: RankFacts, peer: RankFacts) -> Choice:
    """The transport from one rank to another, by what both know of themselves.

    Between hosts these are messages by default: put-with-signal through NVSHMEM has not been run on GPUs yet.
    """
    if (facts.gpu is None) != (peer.gpu is None):
        return Choice(
            MESSAGES, "one has a GPU, the other has none", "give every rank a GPU, or none: CUDA_VISIBLE_DEVICES= for all"
        )
    if facts.host != peer.host:
        return _between_hosts(facts, peer)
    if facts.gpu is None or peer.gpu is None:
        return Choice(STORES, "one host: shared memory", "")
    if facts.gpu.peer_access.get(peer.gpu.uuid) is False:
        return Choice(
            MESSAGES,
            "one host, but their GPUs have no peer access",
            "`nvidia-smi topo -p2p r` shows why; switch off ACS and IOMMU in the host's BIOS, or use GPUs with NVLink",
        )
    link = facts.gpu.topology.get(peer.gpu.uuid, "")
    return Choice(STORES, f"one host: peer access{_over(link)}", "")


def _over(link: str) -> str:
    if not link:
        return ""
    return f" over {link.removeprefix('NV')} NVLinks" if is_nvlink(link) else f" over PCIe ({link})"


def is_nvlink(link: str) -> bool:
    """Whether ``nvidia-smi topo -m`` means NVLink: ``NV18``."""
    return link.startswith("NV") and link[2:].isdigit()


def _between_hosts(facts: RankFacts, peer: RankFacts) -> Choice:
    if facts.host.name == peer.host.name and facts.host.boot == peer.host.boot:
        return Choice(MESSAGES, "one host, but another container", "run all ranks of a host in one container")
    if facts.gpu is None:
        return Choice(MESSAGES, "other hosts: gloo", "")
    if not (facts.nvshmem.in_torch and peer.nvshmem.in_torch):
        return Choice(MESSAGES, "other hosts, without NVSHMEM: NCCL", _rdma_advice(facts, peer))
    how = sorted({facts.nvshmem.transport, peer.nvshmem.transport})
    why = f"other hosts: NCCL; NVSHMEM ({', '.join(how)}) is there; DLRM_FUSED_TRANSPORT=nvshmem takes it"
    return Choice(MESSAGES, why, _rdma_advice(facts, peer))


def _rdma_advice(facts: RankFacts, peer: RankFacts) -> str:
    if all(rank.has_gpudirect_rdma for rank in (facts, peer)):
        return ""
    if all(rank.active_rdma for rank in (facts, peer)):
        return "`modprobe nvidia_peermem` on both hosts, so that adapters reach the memory of GPUs"
    return "an active InfiniBand or RoCE port on both hosts; NCCL then takes it by itself"


@dataclass(frozen=True)
class PeerGroup:
    """Pairs of ranks that have one choice in common."""

    choice: Choice
    pairs: Sequence[tuple[int, int]]


def peer_groups(ranks: Iterable[RankFacts]) -> list[PeerGroup]:
    """All pairs of ranks by their transport and its reason, the commonest first."""
    pairs: dict[Choice, list[tuple[int, int]]] = defaultdict(list)
    for facts, peer in combinations(ranks, 2):
        pairs[transport_of(facts, peer)].append((facts.rank, peer.rank))
    return sorted((PeerGroup(choice, found) for choice, found in pairs.items()), key=lambda group: -len(group.pairs))


def operator_transports(ranks: Sequence[RankFacts]) -> Mapping[str, str]:
    """By operator: the transports that it takes with ``comm=fused``, or what runs in its place."""
    hosts = {facts.host for facts in ranks}
    groups = {
        False: [group.choice.transport for group in peer_groups(ranks)],
        True: [
            group.choice.transport for host in hosts for group in peer_groups([facts for facts in ranks if facts.host == host])
        ],
    }
    has_gpus = all(facts.gpu is not None for facts in ranks)
    return {
        operator.name: "TorchRec's own, through gloo: the fused one needs GPUs"
        if operator.needs_gpu and not has_gpus
        else ", ".join(sorted(set(groups[operator.is_within_host]), reverse=True)) or "none: no peers"
        for operator in OPERATORS
    }
