"""Quality of a model on a split."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets import Dataset
from dlrm_fused.datasets.loader import EvaluationLoader
from dlrm_fused.datasets.one_class import one_class
from dlrm_fused.datasets.time_windows import Window
from dlrm_fused.models import Output
from dlrm_fused.training.metrics import BinaryMetrics, BinaryMetricValues

Value = TypeVar("Value")

# The values of :class:`BinaryMetricValues` that evaluations report.
REPORTED = ("auc", "auc_error", "normalized_entropy", "log_loss", "calibration")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    split: Split,
    config: Config,
    device: torch.device,
    max_samples: int = 0,
    observe: Callable[[Output], None] | None = None,
    before_batch: Callable[[], None] | None = None,
    window: Window | None = None,
) -> dict[str, BinaryMetricValues]:
    """Metrics over a split, by label, the same on all ranks. Collective.

    Samples count as their weights say, in AUC, too.

    Args:
        model: in evaluation mode, not held by a pipeline.
        max_samples: take only so many samples; 0 takes all.
        observe: called with the output of each batch of this rank.
        before_batch: called before each batch; what it raises ends the evaluation.
        window: take the samples of this window of time alone.
    """
    loader = EvaluationLoader(
        dataset,
        split,
        config.evaluation.global_batch_size,
        dist.get_rank(),
        dist.get_world_size(),
        device,
        config,
        max_samples=max_samples,
        window=window,
    )
    schema = dataset.schema
    metrics = {label: BinaryMetrics(device, weighted=schema.has_weights) for label in schema.labels}
    with loader:
        for batch in loader:
            if before_batch is not None:
                before_batch()
            _, output = model(batch.to(device, non_blocking=True))
            by_metrics = zip(metrics.values(), by_label(output.logits), by_label(output.labels), strict=True)
            for of_label, logits, labels in by_metrics:
                of_label.update(logits, labels, output.sample_weights)
            if observe is not None:
                observe(output)
    return {label: of_label.compute() for label, of_label in metrics.items()}


def by_label(values: Tensor) -> tuple[Tensor, ...]:
    """Return [b] of one label, or [b, L], as [b] of each."""
    return values.unbind(1) if values.dim() > 1 else (values,)


def named(values: Mapping[str, Mapping[str, Value]]) -> dict[str, Value]:
    """Return values of all labels, each by its name and label, such as ``auc/bought``; of a single label by the name alone."""
    if len(values) == 1:
        return dict(next(iter(values.values())))
    return {f"{name}/{label}": value for label, of_label in values.items() for name, value in of_label.items()}


def report(values: Mapping[str, BinaryMetricValues]) -> dict[str, float]:
    """Return the metrics of all labels that are reported, and the number of samples."""
    samples = next(iter(values.values())).samples
    return {**named({label: {name: getattr(v, name) for name in REPORTED} for label, v in values.items()}), "samples": samples}


def undefined(split: str, values: Mapping[str, BinaryMetricValues]) -> dict[str, str]:
    """Reasons why an AUC is not defined, for each label without one; ``split``: its name."""
    return {
        label: "a prediction is not a number" if v.only_class is None else one_class(split, label, v.only_class, v.samples)
        for label, v in values.items()
        if math.isnan(v.auc)
    }
