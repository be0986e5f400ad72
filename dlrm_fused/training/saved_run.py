"""A run on disk that is evaluated: which checkpoint, with which settings, and the files that an evaluation adds to it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlrm_fused.config import Config, load_config
from dlrm_fused.datasets import Dataset
from dlrm_fused.errors import CheckpointError, ConfigError
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.training.run_folder import RunFolder
from dlrm_fused.training.runtime import Rank
from dlrm_fused.training.telemetry import write_json

logger = logging.getLogger("dlrm_fused")
Content = Mapping[str, float | int | str | bool | None]


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint of a run, chosen for an evaluation.

    Attributes:
        config: the run's, with overrides.
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
        # Settings are compared without overrides, which differ on purpose.
        checkpoint = folder.checkpoints.of(step)
        remedy = f"the checkpoint {checkpoint.name} is not of the config.yaml beside it"
        folder.check_settings(load_config(path / "config.yaml"), step, remedy)
        return SavedRun(path, config, step, checkpoint)

    def as_rank_0_has_it(self) -> SavedRun:
        """Return the run at the checkpoint that rank 0 has chosen. Collective.

        Ranks look for ``last`` and ``best`` one after the other, and a run that still trains may write another one meanwhile.
        """
        step = gather_or_raise(lambda: self.step)[0]
        return replace(self, step=step, checkpoint=RunFolder(self.path).checkpoints.of(step))

    def check_data(self, dataset: Dataset) -> None:
        """Raises CheckpointError if the model predicts other labels than the data set has, or takes other ids or features."""
        RunFolder(self.path).check_data(self.step, self.config, dataset)


def check_output(option: str, path: Path | None) -> None:
    """Raise ConfigError if the file that an option names is a folder, which :func:`try_to_write` does not see."""
    if path and path.is_dir():
        raise ConfigError(f"{option} {path}: allowed: a file, this is a folder")


def try_to_write(path: Path) -> None:
    """Make a file beside ``path``, and remove it, so that hours of work do not end at a place that cannot be written.

    Raises:
        OSError: if it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = path.with_name(f".{path.name}.partial")
    probe.open("w").close()
    probe.unlink()


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


def write_result(content: Content, in_run: Path, output: Path | None, rank: Rank) -> None:
    """Write what an evaluation has found as JSON, on rank 0. Collective.

    Args:
        in_run: the file in the run's folder that is written by default; if it cannot be written, as in a run that may
            only be read, the log tells so.

    Raises:
        CheckpointError: on all ranks, if ``output`` cannot be written.
    """
    if output is not None:
        write_on_rank_0(lambda: write_json(output, content), output, rank)
    elif rank.index == 0:
        try:
            write_json(in_run, content)
        except OSError as error:
            logger.warning("%s was not written (%s); name another place with --output", in_run, error.strerror)
