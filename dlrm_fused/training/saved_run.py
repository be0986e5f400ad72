"""A run on disk that is evaluated: which checkpoint, with which settings, and the files that an evaluation adds to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_fused.config import Config, load_config
from dlrm_fused.datasets import Dataset
from dlrm_fused.errors import CheckpointError
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.training.run_folder import RunFolder
from dlrm_fused.training.runtime import Rank


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run, chosen for an evaluation.

    Attributes:
        path: the run's folder.
        config: the run's, with overrides.
        step: of the checkpoint.
        checkpoint: its folder.
    """

    path: Path
    config: Config
    step: int
    checkpoint: Path

    @staticmethod
    def open(path: Path, which: str, overrides: Sequence[str]) -> SavedRun:
        """Args:
            which: ``best``, ``last`` or a step.
            overrides: ``key=value`` settings that replace those of the run.

        Raises:
            CheckpointError: if the run or the checkpoint does not exist, or was written with other settings than those of
                the run's config.yaml.
        """
        if not (path / "config.yaml").is_file():
            raise CheckpointError(f"--run {path}: no run there (config.yaml is missing)")
        config = load_config(path / "config.yaml", overrides)
        folder = RunFolder(path)
        step = folder.checkpoints.select(which)
        # Without overrides, which are wished for.
        folder.check_settings(load_config(path / "config.yaml"), step, "it belongs to another run than config.yaml beside it")
        return SavedRun(path, config, step, folder.checkpoints.of(step))

    def check_data(self, dataset: Dataset) -> None:
        """Raises CheckpointError if the model predicts other labels than the data set has, or takes other ids or features."""
        RunFolder(self.path).check_data(self.step, self.config, dataset)


def write_on_rank_0(write: Callable[[], None], path: Path, rank: Rank) -> None:
    """Call ``write`` on rank 0. Collective.

    Args:
        path: what is written, for an error that names no file.

    Raises:
        CheckpointError: on all ranks, if a file cannot be written.
    """

    def write_or_say_why() -> None:
        try:
            if rank.index == 0:
                write()
        except OSError as error:
            raise CheckpointError(f"{error.filename or path} cannot be written: {error.strerror or error}") from None

    gather_or_raise(write_or_say_why)
