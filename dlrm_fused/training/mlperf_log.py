"""The course of a run in the log lines of MLPerf Training, by which it can be compared with results that others publish.

Its rules: mlcommons/training_policies; the keys and the format: ``mllog`` of mlcommons/logging (``mlperf_logging`` on PyPI).
That package asks for pandas and SciPy, which its checkers need, so lines are written here and tests hold them against it.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from dlrm_fused.config import Config, DenseOptimizerKind, ModelKind, Precision, Split
from dlrm_fused.datasets import Dataset
from dlrm_fused.records import replace_text

_START, _END, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"
_PREFIX = ":::MLLOG "
_FILE = f"{__name__.replace('.', '/')}.py"


def mlperf_facts(config: Config, dataset: Dataset, device: torch.device, world_size: int) -> dict[str, float | str]:
    """Return the settings and sizes of a run by MLPerf's keys."""
    training, evaluation, sparse, kind = config.training, config.evaluation, config.embedding.optimizer, config.model.kind
    dense, schedule = training.dense_optimizer, training.schedule
    samples = dataset.samples(evaluation.split)
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    of_optimizers: dict[DenseOptimizerKind, dict[str, float]] = {
        DenseOptimizerKind.adagrad: {"epsilon": dense.eps, "initial_accumulator_value": 0, "learning_rate_decay": 0},
        DenseOptimizerKind.adam: {"beta_1": dense.beta1, "beta_2": dense.beta2, "epsilon": dense.eps},
    }
    return {
        "submission_benchmark": "dlrm" if kind is ModelKind.dlrm else f"dlrm_{kind.name}",
        "submission_org": "none",
        "submission_division": "open",
        "submission_status": "research",
        "submission_platform": f"{world_size} x {device_name}",
        "seed": config.seed,
        "global_batch_size": training.global_batch_size,
        "gradient_accumulation_steps": 1,
        "train_samples": dataset.samples(Split.train),
        "eval_samples": min(samples, evaluation.max_samples or samples),
        **({"target_accuracy": training.target_auc} if training.target_auc else {}),
        "opt_name": dense.kind.name,
        "opt_base_learning_rate": dense.learning_rate,
        "opt_weight_decay": dense.weight_decay,
        **{f"opt_{dense.kind.name}_{key}": value for key, value in of_optimizers.get(dense.kind, {}).items()},
        "opt_sparse_name": sparse.kind.name,
        "opt_sparse_base_learning_rate": sparse.learning_rate,
        "opt_learning_rate_warmup_steps": schedule.warmup_steps,
        "opt_learning_rate_decay_start_step": schedule.decay_start_step,
        "opt_learning_rate_decay_steps": schedule.decay_steps,
        "lowest_numerical_precision_in_linear": "bfloat16" if training.precision is Precision.bf16 else training.precision.name,
    }


class MlperfLog:
    """Writes the log of a run, a block of steps between two evaluations.

    A run that goes on has every evaluation once: lines after ``resume_step`` are removed. Its first ``run_start`` stays, so
    time counts on while the run rests.

    Args:
        facts: those of :func:`mlperf_facts`.
        resume_step, made_again: as for :class:`~dlrm_fused.training.telemetry.RunWriter`.
    """

    def __init__(
        self, path: Path, config: Config, facts: Mapping[str, float | str], resume_step: int, made_again: Sequence[str]
    ) -> None:
        self._batch, self._epoch = config.training.global_batch_size, float(facts["train_samples"])
        kept = self._kept(path, resume_step, made_again) if resume_step and path.exists() else {}
        if "run_start" not in kept.values():
            kept = {}
        replace_text(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")
        if not kept:
            self._write(_START, "init_start", seconds=psutil.Process().create_time())
            for key, value in facts.items():
                self._write(_POINT, key, value)
            self._write(_END, "init_stop")
            self._write(_START, "run_start", **self._at(resume_step))
        # The step and time at which the next block begins, unless steps of one have been reported.
        self._step, self._since = resume_step, time.time()
        self._in_block = [key for key in kept.values() if key.startswith("block")][-1:] == ["block_start"]
        self._evaluations = deque[tuple[float, float]]()

    def train(self, step: int, samples_per_second: object) -> None:
        """Tell of the steps up to ``step``."""
        if not self._in_block:
            self._write(_START, "block_start", seconds=self._since, **self._at(self._step))
            self._in_block = True
        self._write(_POINT, "tracked_stats", {"throughput": samples_per_second}, **self._at(step))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Note the time that an evaluation takes; :meth:`evaluation` tells of those that were made, in order."""
        began = time.time()
        yield
        self._evaluations.append((began, time.time()))

    def evaluation(self, step: int, split: str, values: Mapping[str, object]) -> None:
        """Tell of an evaluation; an AUC that is not defined has no line."""
        began, ended = self._evaluations.popleft()
        of_evaluation = {**self._at(step), "split": split, **({"window": values["window"]} if "window" in values else {})}
        self._stop_block(step, began)
        self._write(_START, "eval_start", seconds=began, **of_evaluation)
        auc = next(value for name, value in values.items() if name.split("/")[0] == "auc")  # of the first label
        if isinstance(auc, float) and math.isfinite(auc):
            self._write(_POINT, "eval_accuracy", auc, seconds=ended, **of_evaluation)
        self._write(_END, "eval_stop", seconds=ended, **of_evaluation)
        self._step, self._since = step, ended

    def end(self, step: int, reached_target: bool) -> None:
        """Tell of the end of training: that of the last evaluation, if no step has followed it."""
        self._stop_block(step, time.time())
        status = "success" if reached_target else "aborted"
        self._write(_END, "run_stop", seconds=self._since, status=status, **self._at(step))

    def close(self) -> None:
        self._file.close()

    def _stop_block(self, step: int, seconds: float) -> None:
        if self._in_block:
            self._write(_END, "block_stop", seconds=seconds, **self._at(step))
            self._in_block, self._step, self._since = False, step, seconds

    def _at(self, step: int) -> dict[str, float]:
        samples = step * self._batch
        return {"samples_count": samples, "epoch_num": samples / self._epoch, "step_num": step}

    def _write(self, event_type: str, key: str, value: object = None, seconds: float | None = None, **metadata: object) -> None:
        """Write a line at once: a kill leaves at most one incomplete line, which the next start removes."""
        line = {
            "namespace": "",
            "time_ms": int(1000 * (time.time() if seconds is None else seconds)),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {"file": _FILE, "lineno": sys._getframe(1).f_lineno, **metadata},
        }
        self._file.write(f"{_PREFIX}{json.dumps(line, allow_nan=False)}\n")
        self._file.flush()

    def _kept(self, path: Path, step: int, made_again: Sequence[str]) -> dict[str, str]:
        """Return the complete lines up to a step, each with its key, without the end of the run."""
        samples, kept = step * self._batch, dict[str, str]()
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                event: dict[str, Any] = json.loads(line.removeprefix(_PREFIX))
                key, of_step, split = event["key"], event["metadata"].get("samples_count", 0), event["metadata"].get("split")
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            is_made_again = of_step == samples and split in made_again
            if line.endswith("\n") and of_step <= samples and key != "run_stop" and not is_made_again:
                kept[line] = key
        return kept
