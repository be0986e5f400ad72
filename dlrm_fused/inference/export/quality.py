"""Compares the predictions of an exported model with those of the model in fp32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dlrm_fused.config import Split
from dlrm_fused.datasets import Dataset
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.inference.export.loader import Bags, Inputs, Model
from dlrm_fused.training.evaluation import by_label
from dlrm_fused.training.metrics import BinaryMetrics

_BATCH_SAMPLES = 16_384


@dataclass(frozen=True)
class Quality:
    """Holds the AUC of a label on the samples of a split.

    Attributes:
        auc: AUC of the exported model.
        auc_fp32: AUC with tables in fp32.
    """

    split: str
    samples: int
    auc: float
    auc_fp32: float

    @property
    def auc_difference(self) -> float:
        return self.auc - self.auc_fp32


def compare(model: Model, in_fp32: Model, dataset: Dataset, split: Split) -> dict[str, Quality]:
    """Return the quality of ``model`` beside that of the same model in fp32, by label.

    Raises:
        DataError: if the data set has no such split, or is damaged.
    """
    schema = dataset.schema
    metrics = [
        {label: BinaryMetrics(torch.device("cpu"), weighted=schema.has_weights) for label in schema.labels}
        for _ in (model, in_fp32)
    ]
    for samples in _batches(dataset, split):
        inputs = inputs_of(samples, bool(model.info["token_features"]), model.info["reads_times"])
        weights = torch.ones(len(samples.labels)) if samples.weights is None else samples.weights
        for each, by_name in zip((model, in_fp32), metrics, strict=True):
            logits = torch.from_numpy(each.score(inputs)).double().logit()
            for values, of_label, labels in zip(by_name.values(), by_label(logits), by_label(samples.labels), strict=True):
                values.update(of_label, labels, weights)
    own, fp32 = ({label: values.compute() for label, values in by_name.items()} for by_name in metrics)
    return {label: Quality(split.name, own[label].samples, own[label].auc, fp32[label].auc) for label in schema.labels}


def inputs_of(samples: Samples, has_tokens: bool, reads_times: bool) -> Inputs:
    """Return samples of a data set as an exported model takes them."""
    dense, lengths = samples.dense.numpy(), torch.zeros(len(samples.dense), dtype=torch.int64)
    parts = [samples.sparse]
    if has_tokens and samples.tokens is not None and samples.history_lengths is not None:
        parts.append(samples.tokens)
        lengths = samples.history_lengths.long()
    features = itertools.chain.from_iterable(part.to_dict().values() for part in parts)
    bags = tuple(Bags(feature.values().long().numpy(), feature.lengths().long().numpy()) for feature in features)
    times = samples.token_times.numpy() if reads_times and samples.token_times is not None else None
    return Inputs(dense, bags, lengths.numpy(), times)


def _batches(dataset: Dataset, split: Split) -> Iterator[Samples]:
    count = dataset.samples(split)
    for first in range(0, count, _BATCH_SAMPLES):
        yield dataset.read(split, torch.arange(first, min(first + _BATCH_SAMPLES, count)))
