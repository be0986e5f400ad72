"""Packages that do not belong together, or differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.findings.finding import Check, Finding, Level, group_by, hosts, numbers, with_gpus
from dlrm_fused.versions import VERSION_SETS, VersionError, check_installed

_SAME_PACKAGES = "use the same .venv or container image on all hosts"
_SAME_HOSTS = "install the same on all hosts"


def _sets(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for versions, alike in group_by(ranks, lambda facts: tuple(facts.versions.items())).items():
        try:
            check_installed(dict(versions))
        except VersionError as error:
            what = f"{hosts(alike)}: {error}"
            yield Finding("version-set", Level.broken, numbers(alike), what, "install one set on all hosts: `make setup`")


def _packages(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for package in VERSION_SETS[0]:
        versions = {facts.rank: facts.versions.get(package) for facts in ranks}
        yield from _differing(ranks, package, lambda facts, of=versions: of[facts.rank], Level.broken, _SAME_PACKAGES)  # type: ignore[misc]
    yield from _differing(ranks, "NCCL", lambda facts: facts.nccl, Level.broken, _SAME_PACKAGES)
    yield from _differing(ranks, "Python", lambda facts: facts.python.rpartition(".")[0], Level.note, _SAME_PACKAGES)


def _gpus(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    gpus = with_gpus(ranks)
    yield from _differing(gpus, "the GPU's driver", lambda facts: facts.gpu and facts.gpu.driver, Level.note, _SAME_HOSTS)
    slowest = "use GPUs of one kind: the slowest sets the pace"
    yield from _differing(gpus, "the GPU", lambda facts: facts.gpu and facts.gpu.name, Level.slower, slowest)


def _differing(
    ranks: Sequence[RankFacts], what: str, value_of: Callable[[RankFacts], str | None], level: Level, advice: str
) -> Iterator[Finding]:
    """One finding for each value but the commonest."""
    groups = group_by(ranks, value_of)
    common = max(groups, key=lambda value: len(groups[value]), default=None)
    for value, alike in groups.items():
        if value != common:
            said = f"{what} is {value or 'missing'} on {hosts(alike)}, {common or 'missing'} on {hosts(groups[common])}"
            yield Finding("versions-differ", level, numbers(alike), said, advice)


CHECKS: tuple[Check, ...] = (_sets, _packages, _gpus)
