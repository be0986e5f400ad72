"""The transport that fused communication takes between two ranks, and the reason for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from dlrm_fused.doctor.facts import RankFacts

STORES = "stores"  # the peer's memory is mapped: kernels, or copies on the CPU, write into it
MESSAGES = "messages"  # finished slices through the process group
TORCHREC = "torchrec"  # comm=fused runs TorchRec's own path


class Choice(NamedTuple):
    """A transport, why it is that one, and what would give a better one: empty if nothing would."""

    transport: str
    why: str
    advice: str


@dataclass(frozen=True)
class Operator:
    """A fused operator.

    Attributes:
        over_hosts: the setting that lets its group of ranks reach over hosts; empty if it always does.
        needs_gpu_stores: it runs between GPUs that reach each other by stores, and not otherwise.
    """

    name: str
    over_hosts: str = ""
    needs_gpu_stores: bool = False


OPERATORS = (
    Operator("embedding + All-to-All"),
    Operator("feature All-to-All", needs_gpu_stores=True),
    Operator("GEMV + AllReduce", over_hosts="model.tensor_parallel"),
    Operator("GEMM + All-to-All"),
    Operator("expert layer"),
)


def transport_of(facts: RankFacts, peer: RankFacts) -> Choice:
    """Return the transport from one rank to another, by what both know of themselves."""
    if (facts.gpu is None) != (peer.gpu is None):
        return Choice(
            MESSAGES, "one has a GPU, the other has none", "give every rank a GPU, or none: CUDA_VISIBLE_DEVICES= for all"
        )
    if facts.gpu is not None and (facts.hip or peer.hip):
        return Choice(TORCHREC, "ROCm: fused communication has never run on AMD's GPUs", "")
    if facts.host != peer.host:
        return _between_hosts(facts, peer)
    if facts.gpu is None or peer.gpu is None:
        return Choice(STORES, "one host: shared memory", "")
    if lacks_peer_access(facts, peer):
        why = "one host, but their GPUs have no peer access"
        advice = "`nvidia-smi topo -p2p r` shows why; switch off ACS and IOMMU in the host's BIOS, or use GPUs with NVLink"
        if facts.is_p2p_off or peer.is_p2p_off:
            why = "one host, but NCCL_P2P_DISABLE=1 switches peer access off"
            advice = "unset NCCL_P2P_DISABLE, unless peer access fails or hangs on this machine"
        return Choice(MESSAGES, why, f"{advice}; comm=auto takes the faster of fused communication and TorchRec's")
    link = facts.gpu.topology.get(peer.gpu.uuid, "")
    return Choice(STORES, f"one host: peer access{_over(link)}", "")


def lacks_peer_access(facts: RankFacts, peer: RankFacts) -> bool:
    """Return whether GPUs of one host do not reach each other's memory, or are told not to."""
    if facts.host != peer.host or facts.gpu is None or peer.gpu is None:
        return False
    return facts.is_p2p_off or peer.is_p2p_off or facts.gpu.peer_access.get(peer.gpu.uuid) is False


def _over(link: str) -> str:
    if not link:
        return ""
    return f" over {link.removeprefix('NV')} NVLinks" if is_nvlink(link) else f" over PCIe ({link})"


def is_nvlink(link: str) -> bool:
    """Return whether ``nvidia-smi topo -m`` means NVLink: ``NV18``."""
    return link.startswith("NV") and link[2:].isdigit()


def _between_hosts(facts: RankFacts, peer: RankFacts) -> Choice:
    if facts.host.name == peer.host.name and facts.host.boot == peer.host.boot:
        return Choice(MESSAGES, "one host, but another container", "run all ranks of a host in one container")
    if facts.gpu is None:
        return Choice(MESSAGES, "other hosts: gloo", "")
    return Choice(MESSAGES, "other hosts: NCCL", _rdma_advice(facts, peer))


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
    """Return all pairs of ranks by their transport and its reason, the commonest first."""
    pairs: dict[Choice, list[tuple[int, int]]] = defaultdict(list)
    for facts, peer in combinations(ranks, 2):
        pairs[transport_of(facts, peer)].append((facts.rank, peer.rank))
    return sorted((PeerGroup(choice, found) for choice, found in pairs.items()), key=lambda group: -len(group.pairs))


def operator_transports(ranks: Sequence[RankFacts]) -> Mapping[str, str]:
    """Return, by operator, the transports that it takes with ``comm=fused``, or what runs in its place."""
    return {operator.name: _taken(operator, ranks) for operator in OPERATORS}


def _taken(operator: Operator, ranks: Sequence[RankFacts]) -> str:
    by_host: dict[object, list[RankFacts]] = defaultdict(list)
    for facts in ranks:
        by_host[facts.host].append(facts)
    everywhere = _transports(ranks)
    if operator.needs_gpu_stores and any(facts.gpu is None for facts in ranks):
        return "TorchRec's own, through gloo: the fused one needs GPUs"
    if operator.needs_gpu_stores and MESSAGES in everywhere:
        return "TorchRec's own, through NCCL: the fused one needs stores between all ranks"
    if not operator.over_hosts or len(by_host) < 2:
        return _text(everywhere)
    within = _text(set().union(*map(_transports, by_host.values())))
    return f"{within}; with {operator.over_hosts} over hosts: {_text(everywhere)}"


def _transports(ranks: Iterable[RankFacts]) -> set[str]:
    return {group.choice.transport for group in peer_groups(ranks)}


def _text(transports: Collection[str]) -> str:
    return ", ".join(sorted(transports, key=(STORES, MESSAGES, TORCHREC).index)) or "none: no peers"
