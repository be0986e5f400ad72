"""The samples of a run's data set as rows of features, as clients of an exported model send them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Split, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature


def prepared_rows(
    run: Path,
    count: int | None = None,
    with_history: bool = False,
    with_times: bool = False,
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The first ``count`` samples of the test split, by default all, as rows of ids and numbers.

    Args:
        with_history: give rows what a model reads that reads histories.
        with_times: give rows and histories their times, too.
        overrides: ``key=value`` settings in place of those of the run.
    """
    dataset = open_dataset(load_config(run / "config.yaml", overrides), torch.device("cpu"))
    schema = dataset.schema
    samples = dataset.read(Split.test, torch.arange(count or dataset.samples(Split.test)))
    columns = {name: samples.dense[:, at].tolist() for at, name in enumerate(schema.dense_features)}
    for feature in schema.sparse_features:
        columns[feature.name] = _values(feature, samples.sparse)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if with_history:
        _add_histories(rows, samples, schema)
    if with_times:
        assert samples.token_times is not None
        for row, times in zip(rows, samples.token_times.tolist(), strict=True):
            for token, time in zip([*row["history"], row], times, strict=False):
                token["token_time"] = time
    return rows


def _values(feature: SparseFeature, bags: KeyedJaggedTensor) -> list[Any]:
    """Return for each bag its ids if the feature is jagged, otherwise its id, None for padding."""
    of_bags = [bag.tolist() for bag in bags[feature.name].to_dense()]
    return of_bags if feature.jagged else [bag[0] if bag else None for bag in of_bags]


def _add_histories(rows: list[dict[str, Any]], samples: Samples, schema: DatasetSchema) -> None:
    assert samples.tokens is not None
    assert samples.history_lengths is not None
    tokens = {feature.name: _values(feature, samples.tokens) for feature in schema.token_features}
    for number, (row, length) in enumerate(zip(rows, samples.history_lengths.tolist(), strict=True)):
        first = number * (schema.history_length + 1)
        row["history"] = [{name: values[at] for name, values in tokens.items()} for at in range(first, first + length)]
        for feature in schema.token_features:
            if not feature.history_only:
                row[feature.name] = tokens[feature.name][first + length]
