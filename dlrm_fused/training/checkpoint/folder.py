"""The complete checkpoints of a run, and where the run stood at each."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_fused.datasets.schema import LABEL
from dlrm_fused.errors import CheckpointError

_PREFIX, UNFINISHED_PREFIX = "step_", ".writing_step_"
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: steps made; the data position follows from it.
        samples: samples seen, over all ranks.
        loss: mean over the steps since the report before.
        world_size: ranks that wrote the checkpoint.
        validation_auc: of the first label, of an evaluation at this very step, if there was one.
        settings: the flattened config.
        evaluations_since_best: how many there were since the one with the highest AUC.
        labels: what the model predicts, in this order.
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


class CheckpointFolder:
    """The complete checkpoints of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Steps of all checkpoints, ascending."""
        names = (p.name.removeprefix(_PREFIX) for p in self.path.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdigit())

    def last(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step of the highest validation AUC. One that is not defined, NaN, is below all others."""
        aucs = [(self.progress(step).validation_auc, step) for step in self.steps()]
        scored = [(-math.inf if math.isnan(auc) else auc, step) for auc, step in aucs if auc is not None]
        return max(scored)[1] if scored else None

    def of(self, step: int) -> Path:
        return self.path / f"{_PREFIX}{step:09d}"

    def progress(self, step: int) -> Progress:
        """Raises CheckpointError if the checkpoint is damaged."""
        path = self.of(step) / PROGRESS_FILE
        try:
            return Progress(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path}: damaged ({type(error).__name__}); remove {self.of(step)} to go on from an earlier checkpoint"
            ) from None

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
        """The step of ``best``, ``last``, or a step given as a number.

        Raises:
            CheckpointError: if there is no such checkpoint.
        """
        steps = self.steps()
        found = {"last": self.last, "best": self.best}.get(which, lambda: int(which) if which.isdigit() else None)()
        if found is None or found not in steps:
            has = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"--checkpoint {which}: {self.path} has no such checkpoint; steps there: {has}")
        return found

    def remove_unfinished(self) -> None:
        for leftover in self.path.glob(f"{UNFINISHED_PREFIX}*"):
            shutil.rmtree(leftover)

    def prune(self, keep_last: int, keep_best: bool) -> None:
        """Remove all but the newest ``keep_last`` checkpoints and, if so wished, the best one."""
        keep = {*self.steps()[-keep_last:], self.best() if keep_best else None}
        for step in self.steps():
            if step not in keep:
                # Renamed first, so that a half removed one is never taken for complete.
                doomed = self.path / f"{UNFINISHED_PREFIX}{step}_removed"
                self.of(step).rename(doomed)
                shutil.rmtree(doomed)
