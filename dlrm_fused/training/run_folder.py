"""The folder of a run: whether to start, continue, or leave it, and the config and plan saved in it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dlrm_fused.config import Config, TableConfig, Windows, flatten, to_yaml
from dlrm_fused.datasets import Dataset
from dlrm_fused.datasets.identity import difference, digests_of, is_unknown
from dlrm_fused.errors import CheckpointError, ConfigError
from dlrm_fused.records import parse_record, read_json, replace_text
from dlrm_fused.training.checkpoint import CheckpointFolder

logger = logging.getLogger("dlrm_fused")

# Settings that may change when a run continues: they move work around, say how exactly it is computed, or
# when to stop and what to report.
_FREE_SETTINGS = (
    "output_dir",
    "comm",
    "comm_strict",
    "data.path",
    "data.workers",
    "data.prefetch_batches",
    "model.tensor_parallel",
    "model.experts.parallel",
    "embedding.sharding",
    "embedding.compute_kernel",
    "embedding.shard_columns",
    "embedding.tables",
    "training.max_steps",
    "training.precision",
    "training.target_auc",
    "evaluation",
    "checkpoint",
    "telemetry",
    "runtime",
)


@dataclass(frozen=True)
class _End:
    """The part of a summary that says why the run ended."""

    steps: int = 0
    reached_target: bool = False
    lost_patience: bool = False


_ENDS = {field.name for field in fields(_End)}


def reaches_target(config: Config, auc: float | None) -> bool:
    """Return whether a run ends with this AUC, of an evaluation during training."""
    return auc is not None and 0 < config.training.target_auc <= auc


def loses_patience(config: Config, evaluations_since_best: int) -> bool:
    """Return whether a run ends since its AUC has not risen for so many evaluations."""
    return 0 < config.evaluation.patience <= evaluations_since_best


class RunFolder:
    """``output_dir/name`` with config.yaml, plan.txt, metrics.jsonl, tensorboard/, checkpoints/ and summary.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = CheckpointFolder(path / "checkpoints")

    def summary(self) -> dict[str, Any] | None:
        """Return the outcome, if the run has ended; the log tells of a damaged one, which counts as none and is rewritten."""
        path = self.path / "summary.json"
        if not path.exists():
            return None
        try:
            content = read_json(path, CheckpointError, "it is written anew when the run ends")
            parse_record({name: content[name] for name in _ENDS & content.keys()}, _End)
        except CheckpointError as error:
            logger.warning("%s", error)
            return None
        except ValueError as error:
            logger.warning("%s: damaged: %s; it is written anew when the run ends", path, error)
            return None
        return content

    def is_finished(self, config: Config) -> bool:
        """Return whether the run has already got where the config wants it to go.

        Raises:
            CheckpointError: if it has, with other settings.
        """
        summary, most = self.summary(), config.training.max_steps
        if summary is None:
            return False
        step = self.checkpoints.last()
        if step is None:
            ended_early = bool(summary.get("reached_target")) or bool(summary.get("lost_patience"))
            return ended_early or summary.get("steps", 0) >= most
        # The summary's word is not enough: a higher target, or more patience, may be wanted now, or the last checkpoint was
        # damaged and set aside.
        progress = self.checkpoints.progress(step)
        has_ended = reaches_target(config, progress.validation_auc) or loses_patience(config, progress.evaluations_since_best)
        is_finished = has_ended or step >= most
        if is_finished:
            self.check_settings(config, step)
        return is_finished

    def prepare(self, config: Config) -> int:
        """Make the folder ready, on one rank; returns the step to continue from, 0 for a new run.

        Raises:
            ConfigError: if the run in the folder has other settings, or the folder cannot be written.
        """
        try:
            if not config.checkpoint.resume:
                self._put_aside()
            self.checkpoints.remove_unfinished()
            step = self.checkpoints.last() or 0
            if step:
                self.check_settings(config, step)
            self.path.mkdir(parents=True, exist_ok=True)
            self.checkpoints.path.mkdir(exist_ok=True)
            (self.path / "summary.json").unlink(missing_ok=True)
            replace_text(self.path / "config.yaml", to_yaml(config))
        except OSError as error:
            raise ConfigError(f"output_dir={config.output_dir}: {error.filename} cannot be written: {error.strerror}") from None
        return step

    def _put_aside(self) -> None:
        if self.path.exists():
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
                number += 1
            shutil.move(self.path, aside)

    def check_settings(
        self, config: Config, step: int, remedy: str = "choose another name=, or start over with checkpoint.resume=false"
    ) -> None:
        """Raises CheckpointError, with the remedy, if a checkpoint was written with settings that may not change."""
        saved, now = self.checkpoints.progress(step).settings, flatten(config)
        fixed = {key for key in now if not any(key == free or key.startswith(f"{free}.") for free in _FREE_SETTINGS)}
        # A table that only one of the two names has the default there.
        saved_dims, dims = _dims_of_tables(saved), _dims_of_tables(now)
        default = dict.fromkeys([*saved_dims, *dims], TableConfig().dim)
        saved, now = saved | default | saved_dims, {key: now[key] for key in fixed} | default | dims
        saved.setdefault("data.windows", Windows.none.name)  # earlier releases had no others
        for key, value in now.items():
            if key in saved and saved[key] != value:
                raise CheckpointError(f"{key}={value}: the run in {self.path} was started with {saved[key]}; {remedy}")

    def check_data(self, step: int, config: Config, dataset: Dataset) -> None:
        """
        Args:
            config: whose ``data`` is ``dataset``.

        Raises:
            CheckpointError: if the model of a checkpoint predicts other labels, or takes other ids or features.
        """
        self.checkpoints.check_labels(step, dataset.schema.labels)
        before, now = self.checkpoints.progress(step).data, digests_of(config, dataset)
        changed = difference(before, now)
        if changed:
            raise CheckpointError(
                f"{self.checkpoints.of(step)}: its model was trained on other data: data.path={config.data.path} has changed "
                f"{changed}; use the set of the training, apply its transformation to new rows (data/prepare.py apply), or "
                "train a new run"
            )
        if is_unknown(before, now, config):
            logger.info(
                "%s, data.path=%s: nothing tells whether they belong together; one has no digest",
                self.checkpoints.of(step),
                config.data.path,
            )


def _dims_of_tables(settings: Mapping[str, Any]) -> dict[str, int]:
    """The only setting of a single table that may not change when a run continues: it decides the shape of weights."""
    default = TableConfig().dim
    tables = settings.get("embedding.tables", {})
    return {f"embedding.tables.{name}.dim": table.get("dim", default) for name, table in tables.items()}
