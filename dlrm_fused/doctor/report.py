"""The examination of a cluster, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.findings import Finding, Level, exit_status
from dlrm_fused.doctor.measure import BANDWIDTH_BYTES, Measurement
from dlrm_fused.doctor.transports import PeerGroup, operator_transports, peer_groups
from dlrm_fused.versions import VERSION_SETS

_VERDICTS = {0: "all is well", 1: "broken: training or comm=fused cannot run", 2: "works, but slower than it could"}


@dataclass(frozen=True)
class Examination:
    """Attributes:
    not_measured: why nothing was measured; empty if something was.
    """

    world_size: int
    ranks: Sequence[RankFacts]
    measurements: Sequence[Measurement]
    not_measured: str
    findings: Sequence[Finding]

    @property
    def status(self) -> int:
        return exit_status(self.findings)


def as_json(examination: Examination) -> str:
    """Return one object: status, ranks (facts), measurements, transports, operators, findings."""
    content: dict[str, Any] = {
        "status": examination.status,
        "world_size": examination.world_size,
        "ranks": [asdict(facts) for facts in examination.ranks],
        "measurements": [{**asdict(m), "bytes": BANDWIDTH_BYTES} for m in examination.measurements],
        "not_measured": examination.not_measured,
        "transports": [{**group.choice._asdict(), "pairs": group.pairs} for group in peer_groups(examination.ranks)],
        "operators": operator_transports(examination.ranks),
        "findings": [{**asdict(finding), "level": finding.level.name} for finding in examination.findings],
    }
    return json.dumps(content, indent=2)


def as_text(examination: Examination) -> str:
    hosts = len({facts.host for facts in examination.ranks})
    ranks = examination.world_size
    parts = [
        f"dlrm_fused doctor: {ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts != 1)}",
        _ranks(examination.ranks),
        _hosts(examination.ranks),
        _measurements(examination),
        _transports(examination.ranks),
        _findings(examination.findings),
        f"status {examination.status}: {_VERDICTS[examination.status]}",
    ]
    return "\n\n".join(part for part in parts if part)


def _ranks(ranks: Sequence[RankFacts]) -> str:
    def row(facts: RankFacts) -> list[str]:
        versions = [facts.versions.get(package, "missing") or "unknown" for package in VERSION_SETS[0]]
        return [facts.host.name, facts.gpu.name if facts.gpu else "CPU", facts.python, *versions, facts.nccl or "-"]

    return _table(["ranks", "host", "device", "Python", *VERSION_SETS[0], "NCCL"], _by_ranks(ranks, row))


def _hosts(ranks: Sequence[RankFacts]) -> str:
    def row(facts: RankFacts) -> list[str]:
        links = facts.gpu.nvlinks if facts.gpu else None
        nvlink = f"{len(links)} x {links[0]:.1f} GB/s" if links else "-"
        rdma = ", ".join(f"{p.adapter} {p.link_layer} {p.state}" for p in facts.network.rdma) or "-"
        gpudirect = "yes" if facts.has_gpudirect_rdma else "-"
        over = [f"{backend}: {_used(facts, backend)}" for backend in facts.backends]
        return [facts.host.name, ", ".join(over), nvlink, rdma, gpudirect]

    head = ["ranks", "host", "connects over", "NVLink", "RDMA", "GPUDirect RDMA"]
    return _table(head, _by_ranks(ranks, row))


def _used(facts: RankFacts, backend: str) -> str:
    addresses = {i.name: i.addresses[0] for i in facts.network.interfaces if i.addresses}
    names = facts.network.uses[backend]
    return ", ".join(f"{name} ({addresses.get(name, 'no address')})" for name in names) or "no interface"


def _measurements(examination: Examination) -> str:
    if examination.not_measured:
        return f"not measured: {examination.not_measured}"
    host_of = {facts.rank: facts.host.name for facts in examination.ranks}
    rows = [
        [
            f"{first}, {second}",
            " - ".join(dict.fromkeys([host_of[first], host_of[second]])),
            m.backend,
            f"{m.latency_us:.0f} us",
            f"{m.gb_per_s:.2f} GB/s",
        ]
        for m in examination.measurements
        for first, second in [m.ranks]
    ]
    return _table(["ranks", "where", "through", "latency", f"bandwidth ({BANDWIDTH_BYTES // 1_000_000} MB)"], rows)


def _transports(ranks: Sequence[RankFacts]) -> str:
    if len(ranks) < 2:
        return ""
    head = ["comm=fused between", "takes", "why", "for a better one"]
    peers = _table(head, [[_pairs(g), g.choice.transport, g.choice.why, g.choice.advice or "-"] for g in peer_groups(ranks)])
    operators = _table(["operator", "takes"], [[name, taken] for name, taken in operator_transports(ranks).items()])
    return f"{peers}\n\n{operators}"


def _pairs(group: PeerGroup) -> str:
    first, second = group.pairs[0]
    return f"{len(group.pairs)} pairs, such as {first}, {second}" if len(group.pairs) > 1 else f"ranks {first}, {second}"


def _findings(findings: Sequence[Finding]) -> str:
    ordered = sorted(findings, key=lambda finding: [Level.broken, Level.slower, Level.note].index(finding.level))
    return "\n".join(
        f"{finding.level.name}: {finding.name}{_at(finding.ranks)}: {finding.what}\n    do: {finding.advice}"
        for finding in ordered
    )


def _at(ranks: Sequence[int]) -> str:
    return f" ({'rank' if len(ranks) == 1 else 'ranks'} {as_ranges(ranks)})" if ranks else ""


def as_ranges(ranks: Iterable[int]) -> str:
    """``0-3, 6``"""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ranges)


def _by_ranks(ranks: Sequence[RankFacts], row: Callable[[RankFacts], Sequence[str]]) -> list[list[str]]:
    """Return rows with their ranks before them; ranks whose rows are alike share one."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for facts in ranks:
        alike.setdefault(tuple(row(facts)), []).append(facts.rank)
    return [[as_ranges(numbers), *cells] for cells, numbers in alike.items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [head, *rows])
