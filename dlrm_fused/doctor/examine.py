"""The examination: all ranks send facts, measure what rank 0 asks for, and learn the status; rank 0 judges and prints."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

import dlrm_fused
from dlrm_fused.doctor.collect import collect_facts
from dlrm_fused.doctor.facts import RankFacts
from dlrm_fused.doctor.findings import Finding, Level, judge_facts, judge_measurements
from dlrm_fused.doctor.mailbox import Mailbox, OtherReleaseError
from dlrm_fused.doctor.measure import Measurement, measure, pairs_to_measure
from dlrm_fused.doctor.report import Examination
from dlrm_fused.training.runtime import Rank

# Findings after which no process group can be made.
_CUTS_OFF = {"rank-missing", "rank-failed", "release-differs", "interface-missing", "loopback", "address-twice", "gpu-shared"}
# Facts are waited for longer than a rank tries to gather them: ranks start at different times, and say so if they give up.
_MARGIN_SECONDS = 2.0
_LEAVING_SECONDS = 5.0
_SHOWN_ERRORS, _LONGEST_ERROR = 4, 300

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The value that work returned, or the reason why it did not return: ``error`` is empty if it did."""

    value: T | None
    error: str = ""


def attempt(work: Callable[[], T], seconds: float) -> Outcome[T]:
    """Run ``work`` in a thread for at most so long; never raises. A thread that hangs is left behind."""
    outcomes: list[Outcome[T]] = []

    def run() -> None:
        try:
            outcomes.append(Outcome(work()))
        except BaseException as error:
            outcomes.append(Outcome(None, f"{type(error).__name__}: {' '.join(str(error).split())}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcomes[0] if outcomes else Outcome(None, f"did not end within {seconds:.0f} s")


@dataclass(frozen=True)
class _Plan:
    """The measurements that rank 0 asks all ranks for; without pairs there are none."""

    pairs: list[tuple[int, int]]
    device_type: str


def lead(rank: Rank, mailbox: Mailbox, seconds: float, shown: Callable[[Examination], str]) -> int:
    """Rank 0's part; returns the status.

    Args:
        shown: what to print of the examination.
    """
    _send_facts(rank, mailbox, seconds)
    ranks, findings = _received_facts(mailbox, seconds)
    findings += judge_facts(ranks)
    obstacle = next((finding.name for finding in findings if finding.name in _CUTS_OFF), "")
    has_gpus = all(facts.gpu is not None for facts in ranks)
    pairs = [] if obstacle else pairs_to_measure([facts.host for facts in ranks])
    plan = _Plan(pairs, "cuda" if has_gpus else "cpu")
    mailbox.post("plan", plan)
    measurements: list[Measurement] = []
    if plan.pairs:
        _send_measurements(rank, mailbox, plan, seconds)
        measurements, failures = _received_measurements(mailbox, seconds)
        findings += failures + judge_measurements(measurements, ranks)
    not_measured = "" if measurements else obstacle or ("no pair answered" if plan.pairs else "one rank has no peers")
    examination = Examination(rank.world_size, ranks, measurements, not_measured, findings)
    print(shown(examination), flush=True)
    mailbox.post("status", examination.status)
    mailbox.post("left", True)
    # The store may be this process's own: the others read the status from it before it ends.
    mailbox.read_all("left", _LEAVING_SECONDS)
    return examination.status


def follow(rank: Rank, mailbox: Mailbox, seconds: float) -> int:
    """The part of all other ranks, which wait for rank 0 longer than its own limits add up to; returns the status."""
    _send_facts(rank, mailbox, seconds)
    plan: _Plan = mailbox.read("plan", 0, 3 * seconds + _MARGIN_SECONDS)
    if plan.pairs:
        _send_measurements(rank, mailbox, plan, seconds)
    status: int = mailbox.read("status", 0, 4 * seconds)
    mailbox.post("left", True)
    return status


def _send_facts(rank: Rank, mailbox: Mailbox, seconds: float) -> None:
    mailbox.post("arrival", rank.host)
    mailbox.post("facts", attempt(lambda: collect_facts(rank), seconds))


def _received_facts(mailbox: Mailbox, seconds: float) -> tuple[list[RankFacts], list[Finding]]:
    """Facts of the ranks that sent them, and a finding for each that did not."""
    ranks: list[RankFacts] = []
    findings: list[Finding] = []
    for number, outcome in mailbox.read_all("facts", seconds + _MARGIN_SECONDS).items():
        if isinstance(outcome, Outcome) and outcome.value is not None:
            ranks.append(outcome.value)
        else:
            findings.append(_without_facts(number, outcome, mailbox))
    return ranks, findings


def _without_facts(number: int, answer: Outcome[RankFacts] | Exception, mailbox: Mailbox) -> Finding:
    if isinstance(answer, OtherReleaseError):
        what = f"rank {number} has release {answer} of dlrm_fused, rank 0 has {dlrm_fused.__version__}"
        return Finding("release-differs", Level.broken, [number], what, "install one release on all hosts")
    try:
        place = f"rank {number} on {mailbox.read('arrival', number, 0.0)}"
    except TimeoutError:
        what = f"rank {number} has not arrived: {answer}"
        advice = "look at the output of its host's torchrun: was it started, does it reach MASTER_ADDR, does python start there"
        return Finding("rank-missing", Level.broken, [number], what, advice)
    reason = answer.error if isinstance(answer, Outcome) else f"{answer}; its checks hang, or its process has ended"
    advice = "run python -m dlrm_fused.doctor on that host alone, and nvidia-smi if it has GPUs"
    return Finding("rank-failed", Level.broken, [number], f"{place}: {reason}", advice)


def _send_measurements(rank: Rank, mailbox: Mailbox, plan: _Plan, seconds: float) -> None:
    device = torch.device(plan.device_type, rank.local_index) if plan.device_type == "cuda" else torch.device("cpu")
    mailbox.post("measured", attempt(lambda: measure(rank, device, plan.pairs, seconds), 2 * seconds))


def _received_measurements(mailbox: Mailbox, seconds: float) -> tuple[list[Measurement], list[Finding]]:
    """Return all measurements, and a finding if some ranks have none to send."""
    outcomes = mailbox.read_all("measured", seconds)
    errors = {
        number: outcome.error if isinstance(outcome, Outcome) else str(outcome)
        for number, outcome in outcomes.items()
        if not isinstance(outcome, Outcome) or outcome.error
    }
    measured = [m for outcome in outcomes.values() if isinstance(outcome, Outcome) for m in outcome.value or []]
    return measured, [_without_connection(errors)] if errors else []


def _without_connection(errors: Mapping[int, str]) -> Finding:
    """Return one finding for all ranks: where one cannot connect, most others say so too."""
    shown = [f"rank {number}: {error[:_LONGEST_ERROR]}" for number, error in list(errors.items())[:_SHOWN_ERRORS]]
    more = [f"{len(errors) - len(shown)} more ranks"] if len(errors) > len(shown) else []
    advice = (
        "let these hosts reach each other on all ports of the interfaces above (firewall, another network), or name an "
        "interface that all hosts share: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME"
    )
    return Finding("no-connection", Level.broken, sorted(errors), "; ".join(shown + more), advice)
