"""Packages that do not belong together, or differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.findings.finding import Check, Finding, Level, group_by, hosts, numbers, with_gpus
from dlrm_fused.versions import VERSION_SETS, VersionError, check_installed

_SAME_PACKAGES = "use the same .venv or container image on all hosts"


def _sets(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for versions, alike in group_by(ranks, lambda facts: tuple(facts.versions.items())).items():
        try:
            untested = check_installed(dict(versions))
        except VersionError as error:
            what = f"{hosts(alike)}: {error}"
            yield Finding("version-set", Level.broken, numbers(alike), what, "install one set on all hosts: `make setup`")
            continue
        if untested:
            advice = "compare losses with those of a tested set, which `make setup` installs"
            yield Finding("version-untested", Level.note, numbers(alike), f"{hosts(alike)}: {untested}", advice)


def _packages(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for package in VERSION_SETS[0]:
        yield from _differing(ranks, package, [facts.versions.get(package) for facts in ranks], Level.broken, _SAME_PACKAGES)
    yield from _differing(ranks, "NCCL", [facts.nccl for facts in ranks], Level.broken, _SAME_PACKAGES)
    minors = [facts.python.rpartition(".")[0] for facts in ranks]
    yield from _differing(ranks, "Python", minors, Level.note, _SAME_PACKAGES)


def _gpus(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    users = with_gpus(ranks)
    gpus = [facts.gpu for facts in users if facts.gpu]
    yield from _differing(users, "the GPU's driver", [gpu.driver for gpu in gpus], Level.note, "install one on all hosts")
    advice = "use GPUs of one kind: the slowest sets the pace"
    yield from _differing(users, "the GPU", [gpu.name for gpu in gpus], Level.slower, advice)


def _differing(
    ranks: Sequence[RankFacts], what: str, values: Sequence[str | None], level: Level, advice: str
) -> Iterator[Finding]:
    """One finding for each of the ranks' values but the commonest."""
    groups = group_by(zip(ranks, values, strict=True), lambda pair: pair[1])
    ranks_with = {value: [facts for facts, _ in pairs] for value, pairs in groups.items()}
    common = max(ranks_with, key=lambda value: len(ranks_with[value]), default=None)
    for value, alike in ranks_with.items():
        if value != common:
            said = f"{what} is {value or 'missing'} on {hosts(alike)}, {common or 'missing'} on {hosts(ranks_with[common])}"
            yield Finding("versions-differ", level, numbers(alike), said, advice)


CHECKS: tuple[Check, ...] = (_sets, _packages, _gpus)
