"""Judges what ranks have gathered and measured: each fault by name, with its level and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.findings import builds, devices, interfaces, links, versions
from dlrm_fused.doctor.findings.finding import Finding, Level, exit_status
from dlrm_fused.doctor.findings.links import judge_measurements


def judge_facts(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Return all findings that follow from the facts of those ranks that sent them."""
    checks = (*versions.CHECKS, *builds.CHECKS, *devices.CHECKS, *interfaces.CHECKS, *links.CHECKS)
    return [finding for check in checks for finding in check(ranks)]
