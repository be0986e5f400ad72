"""Findings about the links between hosts: RDMA, and links slower than others."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.findings.finding import Check, Finding, Level, group_by, has_many_hosts, numbers, with_gpus
from dlrm_fused.doctor.measure import Measurement

_SLOW = 0.5  # of the median of its kind
_FEWEST = 3  # of a kind that have a median worth the name


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


CHECKS: tuple[Check, ...] = (_rdma,)
