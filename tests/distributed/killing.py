"""Runs that are killed while they train, and what they must be equal to once they have been started again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dlrm_fused.training.checkpoint import CheckpointFolder, RawReader
from tests.distributed.launch import losses, metrics, summary

DEADLINE_SECONDS = 240
# What depends on the clock.
TIMES = ("samples_per_second", "wall_seconds")


class Attempt(Protocol):
    """The processes of one start of a run."""

    def alive(self) -> bool: ...
    def kill(self) -> None: ...
    def wait(self) -> object: ...


def wait_for(happens: Callable[[], bool], attempt: Attempt) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not happens():
        assert attempt.alive(), "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.001)


def last_step(run: Path) -> int:
    """The last step that the run reports, 0 before it does."""
    try:
        complete = (run / "metrics.jsonl").read_text().rpartition("\n")[0]
    except FileNotFoundError:
        return 0
    return max((json.loads(line)["step"] for line in complete.splitlines()), default=0)


def unfinished(run: Path) -> set[Path]:
    return set((run / "checkpoints").glob(".writing_step_*"))


def kill_at_step(attempt: Attempt, run: Path, step: int, delay: float) -> None:
    begun_at = last_step(run)  # of the attempt before, whose lines are still there
    wait_for(lambda: last_step(run) >= step and last_step(run) != begun_at, attempt)
    time.sleep(delay)
    attempt.kill()


def kill_in_checkpoint(attempt: Attempt, run: Path, number: int, delay: float) -> None:
    """Kill while the ``number``-th checkpoint of this attempt is being written."""
    leftovers = unfinished(run)
    found: set[Path] = set()

    def is_writing() -> bool:
        nonlocal leftovers
        current = unfinished(run)
        leftovers &= current  # the new attempt removes those of the old one
        found.update(current - leftovers)
        return len(found) >= number

    wait_for(is_writing, attempt)
    time.sleep(delay)
    attempt.kill()


def assert_checkpoints_are_complete(run: Path) -> None:
    folder = CheckpointFolder(run / "checkpoints")
    for step in folder.steps():
        assert folder.progress(step).step == step
        metadata = RawReader(folder.of(step)).read_metadata()
        for piece in metadata.storage_data.values():
            assert (folder.of(step) / piece.file).stat().st_size >= piece.begin + piece.length


def assert_same_outcome(run: Path, uninterrupted: Path) -> None:
    """Bit by bit: every loss, every evaluation, the summary, and which checkpoints are kept."""
    found, wanted = losses(run), losses(uninterrupted)
    differing = [step for step in sorted(found.keys() | wanted.keys()) if found.get(step) != wanted.get(step)]
    of_first = {step: (found.get(step), wanted.get(step)) for step in differing[:3]}
    assert not differing, f"{len(differing)} of {len(wanted)} losses differ, first: {of_first}"
    for kind in ("evaluation", "final_evaluation"):
        assert metrics(run, kind) == metrics(uninterrupted, kind)
    outcome, expected = ({k: v for k, v in summary(r).items() if k not in TIMES} for r in (run, uninterrupted))
    assert outcome == expected
    assert CheckpointFolder(run / "checkpoints").steps() == CheckpointFolder(uninterrupted / "checkpoints").steps()
    assert not unfinished(run)
    assert_checkpoints_are_complete(run)
