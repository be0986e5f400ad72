"""Findings about the links between hosts: RDMA, the transport that is asked for, NVSHMEM; links slower than others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from dlrm_fused.doctor.facts import Nvshmem, RankFacts
from dlrm_fused.doctor.findings.finding import Check, Finding, Level, group_by, has_many_hosts, hosts, numbers, with_gpus
from dlrm_fused.doctor.measure import Measurement
from dlrm_fused.doctor.transports import IBGDA_ADVICE, MESSAGES, NVSHMEM, puts_slices
from dlrm_fused.symmetric.factory import TRANSPORT_VARIABLE

_SLOW = 0.5  # of the median of its kind
_FEWEST = 3  # of a kind that have a median worth the name
_INSTALL = "`pip install nvidia-nvshmem-cu13`, or NVSHMEM_HOME, bring it"


def _rdma(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    if not has_many_hosts(ranks):
        return
    for host, alike in group_by(with_gpus(ranks), lambda facts: facts.host).items():
        fault = _rdma_fault(alike[0])
        if fault is not None:
            name, level, what, advice = fault
            yield Finding(name, level, numbers(alike), f"{host.name}: {what}", advice)


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


def _transport(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Yield findings about values of DLRM_FUSED_TRANSPORT that ranks cannot follow, or not together."""
    by_value = group_by(ranks, lambda facts: facts.transport)
    if len(by_value) > 1:
        what = ", ".join(f"{value} on {hosts(alike)}" for value, alike in by_value.items())
        fewest = min(by_value.values(), key=len)
        advice = "set it alike for all ranks, or for none"
        yield Finding("transport-setting", Level.broken, numbers(fewest), f"{TRANSPORT_VARIABLE} is {what}", advice)
        return
    for kind, allowed in (("CPUs", [MESSAGES]), ("GPUs", [MESSAGES, NVSHMEM])):
        alike = [facts for facts in ranks if (facts.gpu is None) == (kind == "CPUs") and facts.transport not in allowed]
        if alike:
            what = f"{TRANSPORT_VARIABLE}={alike[0].transport}: for {kind} it is one of: {', '.join(allowed)}"
            yield Finding("transport-setting", Level.broken, numbers(alike), what, f"unset {TRANSPORT_VARIABLE}")


def _nvshmem(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """NVSHMEM that is asked for and missing, or that could be asked for between hosts."""
    gpu_ranks = with_gpus(ranks)
    for host, alike in group_by(gpu_ranks, lambda facts: facts.host).items():
        nvshmem, is_asked = alike[0].nvshmem, puts_slices(*alike)
        is_there = nvshmem.library is not None and nvshmem.in_torch
        if is_asked and not nvshmem.in_torch:
            what = f"{host.name}: {_missing(nvshmem)}, and {TRANSPORT_VARIABLE}=nvshmem"
            advice = f"{_INSTALL}; or unset {TRANSPORT_VARIABLE}"
            yield Finding("nvshmem-missing", Level.broken, numbers(alike), what, advice)
        elif is_asked or not has_many_hosts(gpu_ranks):
            continue
        elif is_there:
            what = f"{host.name}: NVSHMEM is there ({nvshmem.transport}), and not asked for"
            advice = f"nothing; {TRANSPORT_VARIABLE}=nvshmem would put slices between hosts, which has not been run on GPUs yet"
            if nvshmem.transport != "IBGDA":
                advice += f"; {IBGDA_ADVICE}"
            yield Finding("nvshmem-unused", Level.note, numbers(alike), what, advice)
        else:
            advice = f"nothing, as slices go as messages by default; {_INSTALL}"
            yield Finding("nvshmem-missing", Level.note, numbers(alike), f"{host.name}: {_missing(nvshmem)}", advice)


def _missing(nvshmem: Nvshmem) -> str:
    return "torch's symmetric memory has no NVSHMEM backend" if nvshmem.library else "libnvshmem_host.so is not found"


def judge_measurements(measurements: Sequence[Measurement], ranks: Sequence[RankFacts]) -> list[Finding]:
    """Links that are much slower than others of their kind, within a host or between two."""
    host_of = {facts.rank: facts.host for facts in ranks}
    kinds = group_by(measurements, lambda measured: host_of[measured.ranks[0]] == host_of[measured.ranks[1]])
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


CHECKS: tuple[Check, ...] = (_rdma, _transport, _nvshmem)
