"""Damaged checkpoints are set aside, so that a run goes on from the last intact one: ``checkpoint.on_damage=fallback``."""

from __future__ import annotations

import logging
from pathlib import Path

from dlrm_fused.errors import CheckpointError
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.training.checkpoint.folder import CheckpointFolder
from dlrm_fused.training.checkpoint.storage import REMEDY, RawReader

logger = logging.getLogger("dlrm_fused")


def set_aside_damaged(checkpoints: CheckpointFolder, rank: int, world_size: int) -> None:
    """Read the newest checkpoint whole, each rank a part of its files, and rename it if it is damaged; then the one before,
    until one is intact. Collective.

    Raises:
        CheckpointError: none is intact, and the oldest one keeps its name; or a rank cannot read a file, which is no damage.
    """
    while True:
        steps = gather_or_raise(checkpoints.steps)[0]
        if not steps:
            return
        gather_or_raise(lambda step=steps[-1]: _check_readable(checkpoints.of(step)))  # type: ignore[misc]
        reasons = gather_or_raise(lambda step=steps[-1]: _damage(checkpoints, step, rank, world_size))  # type: ignore[misc]
        reason = next((reason for reason in reasons if reason), None)
        if reason is None:
            return
        if len(steps) == 1:
            raise CheckpointError(f"{reason}; no checkpoint is intact: checkpoint.resume=false starts over")
        aside = gather_or_raise(lambda step=steps[-1]: checkpoints.set_aside(step) if rank == 0 else None)[0]  # type: ignore[misc]
        logger.warning("%s; it is now %s, and the run goes on from step %d or an earlier one", reason, aside, steps[-2])


def _check_readable(folder: Path) -> None:
    """Raise CheckpointError unless this rank can read the files that are there: a disk may be away for a while."""
    try:
        for path in folder.iterdir():
            path.open("rb").close()
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror}); all ranks need to see {folder}") from None


def _damage(checkpoints: CheckpointFolder, step: int, rank: int, world_size: int) -> str | None:
    """Describe the damage of the files of a checkpoint that this rank reads; None if they are intact."""
    try:
        checkpoints.progress(step)
        RawReader(checkpoints.of(step)).check_files(rank, world_size)
    except CheckpointError as error:
        return str(error).removesuffix(f"; {REMEDY}")
    return None
