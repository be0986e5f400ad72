"""The types of a finding and of its level."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from dlrm_fused.doctor.facts import RankFacts

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
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


Check = Callable[[Sequence[RankFacts]], Iterator[Finding]]


def exit_status(findings: Iterable[Finding]) -> int:
    """0 all well, 1 something is broken, 2 it works, but slower than it could."""
    levels = {finding.level for finding in findings}
    return next((level.value for level in (Level.broken, Level.slower) if level in levels), 0)


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by their key, in the order of their first appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def numbers(ranks: Iterable[RankFacts]) -> list[int]:
    return [facts.rank for facts in ranks]


def hosts(ranks: Iterable[RankFacts]) -> str:
    """Return names of the ranks' hosts, the first few of many."""
    names = list(dict.fromkeys(facts.host.name for facts in ranks))
    more = len(names) - _SHOWN_HOSTS
    return ", ".join(names[:_SHOWN_HOSTS]) + (f" and {more} more" if more > 0 else "")


def has_many_hosts(ranks: Iterable[RankFacts]) -> bool:
    return len({facts.host for facts in ranks}) > 1


def with_gpus(ranks: Iterable[RankFacts]) -> list[RankFacts]:
    return [facts for facts in ranks if facts.gpu is not None]


def pairs_text(pairs: Sequence[tuple[int, int]]) -> str:
    """Pairs of ranks: the only one, or how many and the first."""
    first = f"ranks {pairs[0][0]} and {pairs[0][1]}"
    return first if len(pairs) == 1 else f"{len(pairs)} pairs, such as {first}"
