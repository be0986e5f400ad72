"""The complete checkpoints of a run, where the run stood at each, and which of them are damaged."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.datasets.schema import LABEL
from dlrm_fused.errors import CheckpointError
from dlrm_fused.records import read_record
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.training.checkpoint.storage import REMEDY, RawReader, records_of

logger = logging.getLogger("dlrm_fused")

_PREFIX, UNFINISHED_PREFIX, _DAMAGED_PREFIX = "step_", ".writing_step_", "damaged_step_"
_REPLACED_PREFIX = ".replaced_step_"
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        step: steps made; the data position follows from it.
        samples: samples seen, over all ranks.
        loss: mean over the steps since the report before.
        world_size: ranks that wrote the checkpoint.
        validation_auc: of the first label, of an evaluation at this very step, if there was one.
        evaluations_since_best: how many there were since the one with the highest AUC.
        windows_are_due: whether the evaluation on windows of time that follows this step was not made yet.
        data: digests of the data set that the model was trained on; see :mod:`dlrm_fused.datasets.identity`.
    """

    step: int
    samples: int
    loss: float
    world_size: int
    validation_auc: float | None
    settings: dict[str, object]
    evaluations_since_best: int = 0
    labels: Sequence[str] = (LABEL,)
    data: dict[str, str] = field(default_factory=dict)
    windows_are_due: bool = False


class CheckpointFolder:
    """The complete checkpoints of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending."""
        numbers = (p.name.removeprefix(_PREFIX) for p in self.path.glob(f"{_PREFIX}*"))
        # step_5 and step_² are no names of ours.
        return sorted(int(n) for n in numbers if _is_step(n) and self.of(int(n)).name == f"{_PREFIX}{n}")

    def last(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Return the step of the highest validation AUC. One that is not defined, NaN, is below all others.

        Raises:
            CheckpointError: if a checkpoint, which may be the best, is damaged.
        """
        return self._best_of(self.steps())

    def best_readable(self) -> int | None:
        """Return :meth:`best` of the checkpoints whose records are not damaged; the log tells the others."""
        return self._best_of([step for step in self.steps() if self._is_readable(step)])

    def _is_readable(self, step: int) -> bool:
        try:
            self.progress(step)
        except CheckpointError as error:
            logger.warning("a checkpoint is left out of the search for the best one: %s", error)
            return False
        return True

    def _best_of(self, steps: Sequence[int]) -> int | None:
        aucs = [(self.progress(step).validation_auc, step) for step in steps]
        scored = [(-math.inf if math.isnan(auc) else auc, step) for auc, step in aucs if auc is not None]
        return max(scored)[1] if scored else None

    def of(self, step: int) -> Path:
        return self.path / f"{_PREFIX}{step:09d}"

    def progress(self, step: int) -> Progress:
        """Read the progress. Raises CheckpointError if the records are damaged, or those of another checkpoint."""
        folder = self.of(step)
        checksums = records_of(folder)
        if checksums is not None:
            checksums.check(folder, PROGRESS_FILE, CheckpointError, REMEDY)
        progress = read_record(folder / PROGRESS_FILE, Progress, CheckpointError, REMEDY)
        if progress.step != step:
            raise CheckpointError(
                f"{folder / PROGRESS_FILE}: is of step {progress.step}, in the folder of step {step}; {REMEDY}"
            )
        owner = owner_of(progress)
        if checksums is not None and checksums.owner != owner:
            raise CheckpointError(
                f"{folder / CHECKSUMS_FILE}: is of {checksums.owner}, {PROGRESS_FILE} beside it of {owner}; {REMEDY}"
            )
        return progress

    def set_aside(self, step: int) -> Path:
        """Rename a checkpoint that is damaged, so that nothing takes it for one; returns its new folder."""
        aside, number = self.path / f"{_DAMAGED_PREFIX}{step:09d}", 1
        while aside.exists():
            aside, number = self.path / f"{_DAMAGED_PREFIX}{step:09d}.{number}", number + 1
        self.of(step).rename(aside)
        return aside

    def check_labels(self, step: int, labels: Sequence[str]) -> None:
        """
        Args:
            labels: of a data set that a checkpoint's model is to predict.

        Raises:
            CheckpointError: if it predicts others. A single label may have any name.
        """
        predicted = self.progress(step).labels
        if len(predicted) != len(labels) or (len(labels) > 1 and list(predicted) != list(labels)):
            raise CheckpointError(
                f"{self.of(step)}: its model predicts {', '.join(predicted)}, the data set has {', '.join(labels)}; "
                "prepare the data with the labels of the model, in the same order"
            )

    def select(self, which: str) -> int:
        """Return the step of ``best``, ``last``, or a step given as a number.

        Raises:
            CheckpointError: if there is no such checkpoint.
        """
        steps = self.steps()
        found = {"last": self.last, "best": self.best}.get(which, lambda: int(which) if _is_step(which) else None)()
        if found is None or found not in steps:
            has = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"--checkpoint {which}: {self.path} has no such checkpoint; steps there: {has}")
        return found

    def step_aside(self, step: int) -> Path | None:
        """Rename a checkpoint that another one of the same step replaces; returns its new folder, None if there is none."""
        if not self.of(step).exists():
            return None
        return self.of(step).rename(self.path / f"{_REPLACED_PREFIX}{step:09d}")

    def remove_unfinished(self) -> None:
        """Remove what a killed run has left. A checkpoint that was to be replaced, and was not, gets its name back."""
        for replaced in self.path.glob(f"{_REPLACED_PREFIX}*"):
            target = self.path / f"{_PREFIX}{replaced.name.removeprefix(_REPLACED_PREFIX)}"
            if not target.exists():
                replaced.rename(target)
        for leftover in [*self.path.glob(f"{UNFINISHED_PREFIX}*"), *self.path.glob(f"{_REPLACED_PREFIX}*")]:
            shutil.rmtree(leftover)

    def prune(self, keep_last: int, keep_best: bool) -> None:
        """Remove all but the newest ``keep_last`` checkpoints and, if so wished, the best one."""
        keep = {*self.steps()[-keep_last:], self.best_readable() if keep_best else None}
        for step in self.steps():
            if step not in keep:
                # Renamed first, so that a half removed one is never taken for complete.
                doomed = self.path / f"{UNFINISHED_PREFIX}{step}_removed"
                self.of(step).rename(doomed)
                shutil.rmtree(doomed)


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


def owner_of(progress: Progress) -> dict[str, object]:
    """Return the run, the step and the number of ranks, which tie a checkpoint's checksums to it."""
    return {"run": progress.settings.get("name"), "step": progress.step, "world_size": progress.world_size}


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdecimal()
