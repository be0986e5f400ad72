"""The outputs of a run for its user: metrics.jsonl, TensorBoard, mlperf.log, summary.json, progress, a profiler trace.

Only rank 0 writes, except for the trace, which every rank writes for itself.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

import numpy as np
import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter, SummaryWriter
from tqdm import tqdm

from dlrm_fused.config import Config, to_yaml
from dlrm_fused.errors import TrainingError
from dlrm_fused.records import replace_text
from dlrm_fused.symmetric.cuda import mapped_bytes
from dlrm_fused.training.mlperf_log import MlperfLog

logger = logging.getLogger(__name__)

_Value = float | int | str | bool | None
_Table = Mapping[str, str]

# Without a terminal, a line of the log replaces the bar: at most one in this many seconds.
_SECONDS_BETWEEN_LOG_LINES = 5.0
_FINAL = "final_evaluation"


Method = TypeVar("Method", bound=Callable[..., None])


def _on_rank_0(method: Method) -> Method:
    """Let a method of RunWriter do nothing on other ranks, and say which folder cannot be written, as when the disk is full."""

    @functools.wraps(method)
    def wrapped(self: RunWriter, *args: Any, **kwargs: Any) -> None:
        try:
            if self._active:
                method(self, *args, **kwargs)
        except OSError as error:
            raise TrainingError(
                f"{self._folder}: cannot be written: {error.strerror}; start the run again to continue from its last checkpoint"
            ) from None

    return cast(Method, wrapped)


class RunWriter:
    """Writes the course of a run into its folder on rank 0; does nothing on other ranks.

    A run that is killed and resumed has every step once: lines of metrics.jsonl after ``resume_step`` are removed, and
    TensorBoard hides its points of later steps. So the lines of step S must be written before the checkpoint of S is
    complete.

    Args:
        resume_step: the step of the checkpoint that the run continues from; 0 for a run that starts anew.
        made_again: names of the splits on which the model of that step is evaluated again; their lines of it are removed.
        mlperf_facts: for mlperf.log, see :func:`~dlrm_fused.training.mlperf_log.mlperf_facts`; None writes none.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        rank: int,
        resume_step: int = 0,
        made_again: Sequence[str] = (),
        mlperf_facts: Mapping[str, float | str] | None = None,
    ) -> None:
        self._active = rank == 0
        self._folder = run_dir
        self._mlperf: MlperfLog | None = None
        self._open(config, resume_step, made_again, mlperf_facts)

    @_on_rank_0
    def _open(
        self, config: Config, resume_step: int, made_again: Sequence[str], mlperf_facts: Mapping[str, float | str] | None
    ) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _open_metrics(self._folder / "metrics.jsonl", resume_step, made_again)
        self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"), purge_step=resume_step + 1 if resume_step else 0)
        self._progress = _progress(config.training.max_steps, resume_step)
        self.text("config", to_yaml(config))
        if mlperf_facts is not None:
            self._mlperf = MlperfLog(self._folder / "mlperf.log", config, mlperf_facts, resume_step, made_again)

    @_on_rank_0
    def text(self, tag: str, text: str) -> None:
        """Show a text, such as the sharding plan, in TensorBoard; its columns stay aligned."""
        self._tensorboard.add_text(tag, f"```\n{text}\n```")

    @_on_rank_0
    def train(self, step: int, values: Mapping[str, _Value]) -> None:
        """A line about the training steps up to ``step``.

        Args:
            values: loss, samples_per_second, samples_per_second_per_gpu, learning_rate, gpu_memory_gib, the times of
                :meth:`~dlrm_fused.training.step_timer.StepTimer.summary`, what
                :func:`~dlrm_fused.training.efficiency.efficiency` gives, and experts_<layer>_busiest and _idlest.
        """
        self._write_line({"kind": "train", "step": step, **values})
        self._write_scalars({_train_tag(name): value for name, value in values.items()}, step)
        self._progress.train(step, values)
        if self._mlperf is not None:
            self._mlperf.train(step, values["samples_per_second"])

    @_on_rank_0
    def expert_load(self, step: int, layer: int, fractions: Sequence[float]) -> None:
        """A chart of how much of a layer's work each expert has had since the report before: a bar for each expert."""
        edges = np.arange(1, len(fractions) + 1, dtype=np.float64)
        self._tensorboard.add_histogram_raw(
            f"experts/{layer}_load",
            min=0,
            max=len(fractions),
            num=len(fractions),
            sum=sum(fractions),
            sum_squares=sum(fraction**2 for fraction in fractions),
            bucket_limits=edges.tolist(),
            bucket_counts=list(fractions),
            global_step=step,
        )

    def evaluating(self) -> AbstractContextManager[None]:
        """Time an evaluation during training; :meth:`evaluation` follows."""
        return nullcontext() if self._mlperf is None else self._mlperf.evaluating()

    @_on_rank_0
    def evaluation(self, step: int, split: str, values: Mapping[str, _Value], final: bool = False) -> None:
        """A line about an evaluation after ``step``.

        Args:
            values: auc, auc_error, log_loss, normalized_entropy, calibration, samples.
            final: whether it is the one at the end of the run; a run that continues removes its line.
        """
        kind = _FINAL if final else "evaluation"
        self._write_line({"kind": kind, "step": step, "split": split, **values})
        self._write_scalars({f"evaluation/{split}_{name}": value for name, value in values.items()}, step)
        self._tensorboard.flush()
        self._progress.message(f"step {step}: {split} {_phrase(values)}")
        if self._mlperf is not None and not final:
            self._mlperf.evaluation(step, split, values)

    @_on_rank_0
    def training_ends(self, step: int, reached_target: bool) -> None:
        """Note that no step follows; an evaluation of the final model and :meth:`summary` do."""
        if self._mlperf is not None:
            self._mlperf.end(step, reached_target)

    @_on_rank_0
    def summary(self, values: Mapping[str, _Value | _Table]) -> None:
        """Write summary.json, the outcome of the run."""
        write_json(self._folder / "summary.json", values)

    @_on_rank_0
    def close(self) -> None:
        """Flush and close all files; may be called more than once."""
        self._progress.close()
        self._metrics.close()
        self._tensorboard.close()
        if self._mlperf is not None:
            self._mlperf.close()
        self._active = False

    def _write_line(self, values: Mapping[str, _Value]) -> None:
        # One write a line: a kill leaves at most one incomplete line, which the next start removes.
        self._metrics.write(json.dumps(_finite(values), allow_nan=False) + "\n")
        self._metrics.flush()

    def _write_scalars(self, scalars: Mapping[str, _Value], step: int) -> None:
        # One event: `add_scalar` would make one for each, with a checksum that Python computes.
        numbers = {tag: value for tag, value in scalars.items() if isinstance(value, int | float)}
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()]
        cast(FileWriter, self._tensorboard.file_writer).add_summary(Summary(value=values), step)


def write_json(path: Path, values: Mapping[str, _Value | _Table]) -> None:
    """Write a JSON object so that the file is complete or absent; NaN and infinity become null."""
    text = json.dumps(_finite(values), allow_nan=False, indent=2) + "\n"
    replace_text(path, text)


def gpu_memory_gib(device: torch.device) -> dict[str, float]:
    """``gpu_memory_gib``: the most memory that this process has held on the GPU, for tensors and as symmetric memory; empty on
    the CPU."""
    if device.type != "cuda":
        return {}
    return {"gpu_memory_gib": (torch.cuda.max_memory_allocated(device) + mapped_bytes(device)) / 2**30}


def _finite(values: Mapping[str, _Value | _Table]) -> dict[str, _Value | _Table]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _train_tag(name: str) -> str:
    shown = "nothing" if name == "idle_ms" else name.removesuffix("_ms").removesuffix("_exposed").removeprefix("experts_")
    return f"{_train_group(name)}/{shown}"


def _train_group(name: str) -> str:
    if name.startswith("experts_"):
        return "experts"
    if name.endswith("_exposed_ms") or name == "idle_ms":
        return "exposed_ms"
    if name.endswith("_ms"):
        return "time_ms"
    if name.endswith("_share"):
        return "time"
    if name.endswith(("_utilization", "_gb_per_second")):
        return "efficiency"
    if name.startswith("samples_per_second"):
        return "throughput"
    if name.endswith("learning_rate"):
        return "schedule"
    return "memory" if name.startswith("gpu_memory") else "train"


def _open_metrics(path: Path, resume_step: int, made_again: Sequence[str]) -> TextIO:
    if resume_step and path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        replace_text(path, "".join(line for line in lines if _is_complete_up_to(line, resume_step, made_again)))
        return path.open("a", encoding="utf-8")
    return path.open("w", encoding="utf-8")


def _is_complete_up_to(line: str, step: int, made_again: Sequence[str]) -> bool:
    try:
        values = json.loads(line)
        # The final evaluation follows the last checkpoint, and will be made again.
        is_made_again = values["kind"] == _FINAL or (values["step"] == step and values.get("split") in made_again)
        return line.endswith("\n") and values["step"] <= step and not is_made_again
    except (ValueError, KeyError, TypeError):
        return False


def _phrase(values: Mapping[str, _Value]) -> str:
    return ", ".join(f"{name} {v:.6g}" if isinstance(v, float) else f"{name} {v}" for name, v in values.items())


def _progress(max_steps: int, first_step: int) -> _Bar | _LogLines:
    return _Bar(max_steps, first_step) if sys.stderr.isatty() else _LogLines(max_steps)


_SHOWN = ("loss", "samples_per_second", "learning_rate")


class _Bar:
    def __init__(self, max_steps: int, first_step: int) -> None:
        self._bar = tqdm(total=max_steps, initial=first_step, unit="step", dynamic_ncols=True)

    def train(self, step: int, values: Mapping[str, _Value]) -> None:
        self._bar.set_postfix({name: values[name] for name in _SHOWN if name in values}, refresh=False)
        self._bar.update(step - self._bar.n)

    def message(self, message: str) -> None:
        self._bar.clear()
        logger.info(message)
        self._bar.refresh()

    def close(self) -> None:
        self._bar.close()


class _LogLines:
    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self._last = -math.inf

    def train(self, step: int, values: Mapping[str, _Value]) -> None:
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_LOG_LINES and step < self._max_steps:
            return
        self._last = now
        shown = {name: values[name] for name in _SHOWN if name in values}
        self.message(f"step {step}/{self._max_steps}: {_phrase(shown)}")

    def message(self, message: str) -> None:
        logger.info(message)

    def close(self) -> None:
        pass


class Profiler:
    """A torch.profiler trace of the steps that ``telemetry.profile_steps`` names, for chrome://tracing or Perfetto.

    Up to two steps before them warm the profiler up. A run that resumes between the two traces what is left of them.

    Args:
        run_dir: the trace goes to ``profile/`` in it, one file for each rank.
        steps: empty for no trace, or the first and the last step.
    """

    _WARMUP_STEPS = 2

    def __init__(self, run_dir: Path, steps: list[int], rank: int, device: torch.device) -> None:
        self._folder = run_dir / "profile"
        self._first, self._last = steps or (0, -1)
        self._rank = rank
        self._activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile: torch.profiler.profile | None = None

    def before_step(self, step: int) -> None:
        """Begin or end the trace if this step is the one to. The caller calls this before each step, in order."""
        if self._profile is not None:
            self._profile.step()
            if step > self._last:
                self.close()
        elif self._first - self._WARMUP_STEPS <= step <= self._last:
            self._start(step)

    def close(self) -> None:
        """End the trace; one that the end of the run cuts short is written as far as it goes."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None

    def _start(self, step: int) -> None:
        first = max(step, self._first)
        schedule = torch.profiler.schedule(wait=0, warmup=first - step, active=self._last - first + 1, repeat=1)
        self._profile = torch.profiler.profile(
            activities=self._activities,
            schedule=schedule,
            on_trace_ready=lambda profile: self._write(profile, first),
        )
        self._profile.start()

    def _write(self, profile: torch.profiler.profile, first: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps{first}-{self._last}_rank{self._rank}.json.gz"
        profile.export_chrome_trace(str(path))
        logger.info("profiler trace: %s", path)
