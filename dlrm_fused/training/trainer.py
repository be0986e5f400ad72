"""A training run from its config to its summary."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import get_unwrapped_module

from dlrm_fused.config import Config, OnDamage, Precision, Split, flatten
from dlrm_fused.datasets import Dataset, open_dataset
from dlrm_fused.datasets.identity import digests_of
from dlrm_fused.datasets.loader import TrainLoader
from dlrm_fused.datasets.synthetic import SyntheticDataset
from dlrm_fused.datasets.time_windows import TimeWindows, Window, time_windows
from dlrm_fused.errors import CheckpointError, ConfigError, TrainingError
from dlrm_fused.models import Output, RankingTask
from dlrm_fused.models.fp8 import check_gpu, describe
from dlrm_fused.ops.common.gpus import data_sheet
from dlrm_fused.sharding.options import AUTO
from dlrm_fused.sharding.parallel import ShardedModel
from dlrm_fused.sharding.planning import describe_plan
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.training.build import build
from dlrm_fused.training.checkpoint import CheckpointWriter, Progress, restore, set_aside_damaged
from dlrm_fused.training.efficiency import efficiency, step_work
from dlrm_fused.training.evaluation import REPORTED, evaluate, named, report, undefined
from dlrm_fused.training.metrics import BinaryMetricValues, LossTracker, load_values, read_expert_loads
from dlrm_fused.training.mlperf_log import mlperf_facts
from dlrm_fused.training.next_steps import next_steps
from dlrm_fused.training.pipeline import TrainingPipeline
from dlrm_fused.training.run_folder import RunFolder, loses_patience, reaches_target
from dlrm_fused.training.run_lock import RunLock
from dlrm_fused.training.runtime import ErrorStore, Rank, Stopped, StopRequest, join_run
from dlrm_fused.training.saved_run import try_to_write
from dlrm_fused.training.schedule import LearningRates
from dlrm_fused.training.step_timer import StepTimer
from dlrm_fused.training.telemetry import Profiler, RunWriter, gpu_memory_gib
from dlrm_fused.training.warm_start import warm_start

logger = logging.getLogger("dlrm_fused")

_TIMED_STEPS_APART = 8
_WINDOW = "window"  # in place of a split's name


def train(config: Config, rank: Rank, error_store: ErrorStore) -> None:
    """Train as the config says, on this rank of the run; continues a run of the same name.

    Raises:
        Stopped: a signal has ended the run; it goes on when it is started again.
        UserError: what is wrong, and what to do.
    """
    folder = RunFolder(config.run_dir)
    with (
        join_run(config, rank, error_store) as device,
        StopRequest(rank, error_store) as stop_request,
        RunLock(folder.path) as lock,
    ):
        if config.checkpoint.resume and config.checkpoint.on_damage is OnDamage.fallback:
            gather_or_raise(lambda: None if rank.index else lock.acquire())  # no other run renames or writes checkpoints now
            set_aside_damaged(folder.checkpoints, rank.index, rank.world_size)
        if gather_or_raise(lambda: config.checkpoint.resume and folder.is_finished(config))[0]:
            logger.info("%s is finished: %s", folder.path, folder.summary())
            return
        if config.training.global_batch_size < rank.world_size:
            raise ConfigError(
                f"training.global_batch_size={config.training.global_batch_size}: allowed: at least the number of ranks, "
                f"{rank.world_size}"
            )
        if config.training.precision is Precision.fp8:
            check_gpu(device)
        dataset = open_dataset(config, device)
        for split in Split:
            dataset.samples(split)  # a split that is missing is told now, not when it is needed
        windows = time_windows(config, dataset)
        step = _prepare_folder(folder, config, rank, lock)
        sharded = build(config, dataset.schema, device)
        trainer = Trainer(config, rank, device, folder, dataset, windows, sharded, step, stop_request)
        is_complete = trainer.run()
    if not is_complete:
        raise stop_request.stopped()


def _prepare_folder(folder: RunFolder, config: Config, rank: Rank, lock: RunLock) -> int:
    """Lock and prepare the folder on rank 0; all ranks agree on the step to continue from. Collective."""

    def prepare() -> int:
        if rank.index:
            return 0
        lock.acquire()
        return folder.prepare(config)

    step = gather_or_raise(prepare)[0]
    gather_or_raise(lambda: _check_folder(folder, step, config, rank))
    return step


def _check_folder(folder: RunFolder, step: int, config: Config, rank: Rank) -> None:
    """Look for the checkpoint, and try to write where checkpoints go, on every rank, since each writes a part of them."""
    if step and not folder.checkpoints.of(step).is_dir():
        raise CheckpointError(
            f"output_dir={config.output_dir}: host {rank.host} does not see {folder.checkpoints.of(step)}; "
            "it must be on a file system that all hosts share"
        )
    try:
        try_to_write(folder.checkpoints.path / f"rank_{rank.index}")
    except OSError as error:
        raise CheckpointError(f"{folder.checkpoints.path}: {rank} cannot write there: {error.strerror}") from None


class Trainer:
    """Makes the steps of a run, and evaluates, reports and saves at the right ones. Construction is collective."""

    def __init__(
        self,
        config: Config,
        rank: Rank,
        device: torch.device,
        folder: RunFolder,
        dataset: Dataset,
        windows: TimeWindows | None,
        sharded: ShardedModel,
        start_step: int,
        stop_request: StopRequest,
    ) -> None:
        self._stop_request = stop_request
        self._config = config
        self._rank = rank
        self._device = device
        self._folder = folder
        self._dataset = dataset
        self._data = digests_of(config, dataset)
        self._windows = windows
        self._windows_due: list[Window] = []
        self._sharded = sharded
        self._step = start_step
        self._rates = LearningRates(config.training.schedule, sharded.optimizer)
        self._checkpoints = CheckpointWriter(folder.checkpoints, config.checkpoint, device)
        self._loss = float("nan")
        self._best_auc = -math.inf  # so far
        self._told: set[str] = set()  # reasons of AUCs that are not defined, as logged
        self._evaluations_since_best = 0
        self._reached_target = self._lost_patience = False
        self._has_evaluation_to_make = False
        if start_step:
            self._continue_from(start_step)
        elif config.checkpoint.warm_start:
            warm_start(config, sharded, dataset.schema)
            self._windows_due = windows.due(0) if windows else []
        if config.checkpoint.every_steps:
            self._checkpoints.allocate(sharded)
        self._timer = StepTimer(device, every=_TIMED_STEPS_APART if device.type == "cuda" else 1)
        self._pipeline = TrainingPipeline(sharded.model, sharded.optimizer, device, self._timer)
        self._losses = LossTracker()
        task = cast(RankingTask, get_unwrapped_module(sharded.model))
        self._expert_layers, self._fp8_products = task.expert_layers, task.fp8_products
        if self._fp8_products is not None:
            logger.info(describe(self._fp8_products.weights, -(-config.training.global_batch_size // rank.world_size)))
        self._throughput = _Throughput(config.training.global_batch_size, rank.world_size)
        self._work = step_work(config, dataset.schema, device, sharded, rank.world_size)
        self._gpu = data_sheet(device)
        due = {_WINDOW: self._windows_due, config.evaluation.split.name: self._has_evaluation_to_make}
        made_again = [split for split in due if due[split]]
        facts = mlperf_facts(config, dataset, device, rank.world_size) if config.telemetry.mlperf_log else None
        self._writer = RunWriter(folder.path, config, rank.index, start_step, made_again, facts)
        self._show_plan()

    def _continue_from(self, step: int) -> None:
        progress = self._folder.checkpoints.progress(step)
        self._folder.check_data(step, self._config, self._dataset)
        restore(self._folder.checkpoints.of(step), self._sharded, progress, self._device)
        self._loss = progress.loss
        self._reached_target = reaches_target(self._config, progress.validation_auc)
        self._evaluations_since_best = progress.evaluations_since_best
        self._lost_patience = loses_patience(self._config, self._evaluations_since_best)
        # A signal has interrupted an evaluation that was due.
        is_due = is_multiple(step, self._config.evaluation.every_steps)
        self._has_evaluation_to_make = is_due and progress.validation_auc is None
        if self._windows and progress.windows_are_due:
            self._windows_due = self._windows.due(step)
        best = gather_or_raise(self._folder.checkpoints.best_readable)[0]  # by which all ranks save, or none
        if best is not None:
            auc = self._folder.checkpoints.progress(best).validation_auc
            self._best_auc = self._best_auc if auc is None or math.isnan(auc) else auc
        logger.info("continuing %s from step %d", self._folder.path, step)

    def _show_plan(self) -> None:
        self._paths = self._sharded.paths
        text = describe_plan(self._sharded.plan, self._dataset.schema, self._config.embedding, self._paths)
        if self._rank.index == 0:
            (self._folder.path / "plan.txt").write_text(text, encoding="utf-8")
            logger.info("sharding plan:\n%s", text)
        self._writer.text("plan", text)

    def run(self) -> bool:
        """Make all remaining steps, then evaluate on the test split and write the summary.

        Returns:
            whether the run is complete; otherwise a signal has ended it, and a checkpoint of its last step is there.
        """
        try:
            self._complete()
        except Stopped as stopped:
            # Wait for all ranks: a launcher may end the others when one has ended.
            gather_or_raise(self._checkpoints.wait)
            self._writer.close()
            logger.info("%s after step %d; to continue, start %s again", stopped, self._step, self._folder.path)
            return False
        return True

    def _complete(self) -> None:
        began = time.monotonic()
        self._make_steps()
        self._writer.training_ends(self._step, self._reached_target)
        self._checkpoints.wait()
        model = self._pipeline.detach()  # for good: going on would start an exchange that nobody waits for
        model.eval()
        test = evaluate(model, self._dataset, Split.test, self._config, self._device, before_batch=self._stop_request.check)
        self._writer.evaluation(self._step, Split.test.name, report(test), final=True)
        why = undefined(Split.test.name, test)
        self._tell(why.values())
        self._writer.summary(
            {
                **named({label: _summary(values, why.get(label)) for label, values in test.items()}),
                **self._attainable_auc(),
                "loss": self._loss,
                "samples_per_second": self._throughput.overall(),
                "steps": self._step,
                "reached_target": self._reached_target,
                "lost_patience": self._lost_patience,
                **({"table_paths": dict(self._paths)} if self._paths else {}),
                "wall_seconds": time.monotonic() - began,
            }
        )
        self._writer.close()
        aucs = ", ".join(
            f"{name} {'not defined' if math.isnan(auc) else f'{auc:.4f}'}"
            for name, auc in named({label: {"AUC": v.auc} for label, v in test.items()}).items()
        )
        logger.info("done after %d steps: test %s, results in %s", self._step, aucs, self._folder.path)
        logger.info("what to do next:\n%s", next_steps(self._config, self._rank.world_size))

    def _attainable_auc(self) -> dict[str, float]:
        """Return the test AUC of a model that knows the planted signal of synthetic data; nothing for other data."""
        if not isinstance(self._dataset, SyntheticDataset):
            return {}
        attainable = {
            label: self._dataset.best_attainable_auc(Split.test, label=number)
            for number, label in enumerate(self._dataset.schema.labels)
        }
        return named({k: {"attainable_auc": v.auc, "attainable_auc_error": v.error} for k, v in attainable.items()})

    def _make_steps(self) -> None:
        config = self._config
        loader = TrainLoader(
            self._dataset, config, self._rank.index, self._rank.world_size, self._device, self._step, self._windows
        )
        profiler = Profiler(self._folder.path, config.telemetry.profile_steps, self._rank.index, self._device)
        try:
            self._stop_request.check()
            self._throughput.start(self._step)
            if self._has_evaluation_to_make or self._windows_due:
                auc = self._evaluate_where_due(self._has_evaluation_to_make)
                if auc is not None:
                    self._note_auc(auc)
                self._save(auc)
            while self._step < config.training.max_steps and not (self._reached_target or self._lost_patience):
                profiler.before_step(self._step + 1)
                self._rates.apply(self._step)
                output = self._pipeline.progress(loader)
                self._step += 1
                self._losses.add(self._step, output.loss)
                self._timer.step_done()
                if AUTO in self._paths.values() and self._sharded.paths != self._paths:
                    self._show_plan()  # with the paths that were measured in this step
                self._after_step(output)
        finally:
            profiler.close()
            loader.close()

    def _after_step(self, output: Output) -> None:
        """Report, evaluate and save if it is time to.

        Raises:
            Stopped: a checkpoint of this step is being written, and the run is to end.
        """
        is_last = self._step == self._config.training.max_steps
        evaluates = is_multiple(self._step, self._config.evaluation.every_steps)
        saves = is_last or is_multiple(self._step, self._config.checkpoint.every_steps)
        self._windows_due = self._windows.due(self._step) if self._windows else []
        # Means are reported before a checkpoint, too, so that a resumed run reports the same ones as an uninterrupted run.
        is_evaluated = evaluates or bool(self._windows_due)
        reports = saves or is_evaluated or is_multiple(self._step, self._config.telemetry.log_every_steps)
        if reports:
            self._report_training(output)
        auc = self._evaluate_where_due(evaluates)
        is_best = auc is not None and self._note_auc(auc)
        stops = self._stop_request.is_due()
        if stops and not reports:
            self._report_training(output)
        if saves or stops or self._reached_target or self._lost_patience or (is_best and self._config.checkpoint.keep_best):
            self._save(auc)
        if stops:
            raise self._stop_request.stopped()

    def _note_auc(self, auc: float) -> bool:
        """Return whether an AUC is the best so far; it may end the run. An undefined one beats only none, and ends nothing."""
        if math.isnan(auc):
            return self._best_auc == -math.inf
        is_best = auc > self._best_auc
        self._best_auc = max(auc, self._best_auc)
        self._evaluations_since_best = 0 if is_best else self._evaluations_since_best + 1
        self._reached_target = reaches_target(self._config, auc)
        self._lost_patience = loses_patience(self._config, self._evaluations_since_best)
        return is_best

    def _report_training(self, output: Output) -> None:
        losses = self._losses.read()
        self._loss = losses.mean
        if losses.first_nonfinite_step is not None:
            raise TrainingError(
                f"step {losses.first_nonfinite_step}: the loss is not finite; lower training.dense_optimizer.learning_rate="
                f"{self._config.training.dense_optimizer.learning_rate} or embedding.optimizer.learning_rate="
                f"{self._config.embedding.optimizer.learning_rate}, or lengthen training.schedule.warmup_steps"
            )
        self._stop_if_constant(output)
        loads = read_expert_loads(self._expert_layers)
        training, rates = self._config.training, self._throughput.since_last(self._step)
        step_seconds = training.global_batch_size / rates["samples_per_second"]
        values: dict[str, float] = {
            "loss": losses.mean,
            **rates,
            "learning_rate": training.dense_optimizer.learning_rate * self._rates.factor,
            "embedding_learning_rate": self._config.embedding.optimizer.learning_rate * self._rates.factor,
            **self._timer.summary(),
            **efficiency(self._work, self._gpu, training.precision, step_seconds),
            **gpu_memory_gib(self._device),
            **load_values(loads),
        }
        if self._fp8_products is not None:
            values["fp8_cut_off"] = self._fp8_products.take_cut_off()
        self._writer.train(self._step, values)
        for layer, fractions in enumerate(loads):
            self._writer.expert_load(self._step, layer, fractions)

    def _stop_if_constant(self, output: Output) -> None:
        bounds = torch.stack([output.logits.amin(0), -output.logits.amax(0)])
        dist.all_reduce(bounds, dist.ReduceOp.MIN)
        for label, (low, negated_high) in zip(self._dataset.schema.labels, bounds.view(2, -1).T.tolist(), strict=True):
            if low == -negated_high and self._config.training.global_batch_size > 1:
                raise TrainingError(
                    f"step {self._step}: the model predicts the same{self._named(label)} for every sample (logit {low:g}); "
                    "its layers have died: lower the learning rates, or check the features"
                )

    def _evaluate_where_due(self, evaluates: bool) -> float | None:
        """Evaluate on windows of time that are due, and on the split of evaluations if it is time to.

        Returns:
            the AUC of the first label on that split, NaN where it is not defined; None if that was not evaluated.

        Raises:
            Stopped: a signal has interrupted it; a checkpoint is being written, with which it is made when the run continues.
        """
        try:
            of_windows = [(window, self._measure(Split.train, window)) for window in self._windows_due]
            self._windows_due = []
            for window, values in of_windows:
                self._writer.evaluation(self._step, _WINDOW, {"window": window.name, **report(values)})
            return self._evaluate() if evaluates else None
        except Stopped:
            self._save(None)
            raise

    def _evaluate(self) -> float:
        """Returns the AUC of the first label, NaN where it is not defined."""
        split = self._config.evaluation.split
        values = self._measure(split)
        for label, of_label in values.items():
            if of_label.constant:
                raise TrainingError(
                    f"step {self._step}: the model predicts{self._named(label)} {of_label.min_prediction:g} for every sample "
                    f"of the {split.name} split; lower the learning rates, or check the features"
                )
        self._writer.evaluation(self._step, split.name, report(values))
        self._tell(undefined(split.name, values).values())
        return next(iter(values.values())).auc

    def _measure(self, split: Split, window: Window | None = None) -> dict[str, BinaryMetricValues]:
        """Return the metrics of a split, or of a window of it, by label; its time does not count as one of training."""
        config = self._config
        self._throughput.stop(self._step)
        with self._pipeline.paused() as model, self._writer.evaluating():
            values = evaluate(
                model,
                self._dataset,
                split,
                config,
                self._device,
                config.evaluation.max_samples,
                before_batch=self._stop_request.check,
                window=window,
            )
        self._timer.interrupt()
        self._throughput.start(self._step)
        return values

    def _tell(self, reasons: Iterable[str]) -> None:
        """Log each reason once in a run."""
        for reason in reasons:
            if self._rank.index == 0 and reason not in self._told:
                logger.warning(reason)
                self._told.add(reason)

    def _named(self, label: str) -> str:
        """Return a label in a message; a single one goes without saying."""
        return f" {label}" if len(self._dataset.schema.labels) > 1 else ""

    def _save(self, auc: float | None) -> None:
        if not self._step:
            return  # a run that was stopped before its first step begins anew
        progress = Progress(
            step=self._step,
            samples=self._step * self._config.training.global_batch_size,
            loss=self._loss,
            world_size=self._rank.world_size,
            validation_auc=auc,
            settings=flatten(self._config),
            evaluations_since_best=self._evaluations_since_best,
            labels=self._dataset.schema.labels,
            data=self._data,
            windows_are_due=bool(self._windows_due),
        )
        self._checkpoints.save(self._sharded, progress)


def is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _summary(values: BinaryMetricValues, undefined: str | None) -> dict[str, float | str]:
    """Return what the summary says of a label; ``undefined`` is why its AUC is not defined, None if it is."""
    reported = {f"test_{name}" if name.startswith("auc") else name: getattr(values, name) for name in REPORTED}
    return {**({"test_auc_undefined": undefined} if undefined else {}), **reported}


class _Throughput:
    """Samples a second over the time spent in training, without evaluations."""

    def __init__(self, global_batch_size: int, world_size: int) -> None:
        self._batch = global_batch_size
        self._world_size = world_size
        self._total_steps, self._total_seconds = 0, 0.0
        self._interval_steps, self._interval_seconds = 0, 0.0
        self._from_step, self._from_time = 0, 0.0

    def start(self, step: int) -> None:
        self._from_step, self._from_time = step, time.monotonic()

    def stop(self, step: int) -> None:
        now = time.monotonic()
        self._interval_steps += step - self._from_step
        self._interval_seconds += now - self._from_time
        self._from_step, self._from_time = step, now

    def since_last(self, step: int) -> dict[str, float]:
        self.stop(step)
        rate = self._batch * self._interval_steps / max(self._interval_seconds, 1e-9)
        self._total_steps += self._interval_steps
        self._total_seconds += self._interval_seconds
        self._interval_steps, self._interval_seconds = 0, 0.0
        return {"samples_per_second": rate, "samples_per_second_per_gpu": rate / self._world_size}

    def overall(self) -> float:
        """NaN if no step was made."""
        return self._batch * self._total_steps / self._total_seconds if self._total_steps else float("nan")
