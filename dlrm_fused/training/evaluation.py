"""Quality of a model on a split."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_fused.config import Config, Split
from dlrm_fused.datasets import Dataset
from dlrm_fused.datasets.loader import EvaluationLoader
from dlrm_fused.models import Output
from dlrm_fused.training.metrics import BinaryMetrics, BinaryMetricValues


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    split: Split,
    config: Config,
    device: torch.device,
    max_samples: int = 0,
    observe: Callable[[Output], None] | None = None,
) -> BinaryMetricValues:
    """Metrics over a split, the same on all ranks. Collective.

    Args:
        model: in evaluation mode, not held by a pipeline.
        max_samples: take only so many samples; 0 takes all.
        observe: called with the output of each batch of this rank.
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
    )
    metrics = BinaryMetrics(device)
    with loader:
        for batch in loader:
            _, output = model(batch.to(device, non_blocking=True))
            metrics.update(output.logits, output.labels, output.weights)
            if observe is not None:
                observe(output)
    return metrics.compute()


class PredictionCollector:
    """Keeps the predictions of this rank on the host, without padding."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def __call__(self, output: Output) -> None:
        real = output.weights > 0
        self._parts.append((output.logits[real].sigmoid().cpu(), output.labels[real].cpu()))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(predictions [b] float32, labels [b] float32) of each batch, in the order of the split."""
        yield from self._parts
