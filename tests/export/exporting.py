"""Runs to export, what eval.py predicts with them, and rows for the exported models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars
import torch
from numpy.typing import NDArray

from dlrm_fused.config import Split, load_config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.export.folder import export_run
from dlrm_fused.export.quality import Quality
from dlrm_fused.training.offline_evaluation import evaluate_run
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import run_ranks


def export(run: Path, output: Path, table_dtype: str = "fp32", *overrides: str) -> Quality:
    return export_run(run, "last", output, table_dtype, Split.test, overrides)


def predictions_of_eval(run: Path, *overrides: str) -> NDArray[np.float32]:
    """What eval.py predicts on the test split, [n]."""
    path = run / "predictions.parquet"
    run_ranks(1, _evaluate, run, path, overrides)
    return polars.read_parquet(path)["prediction"].to_numpy()


def _evaluate(run: Path, path: Path, overrides: tuple[str, ...]) -> None:
    rank = Rank.from_environment()
    evaluate_run(run, "last", Split.test, overrides, path, rank, ErrorStore(rank))


def prepared_rows(run: Path, with_history: bool = False) -> list[dict[str, Any]]:
    """The test split of a run's data set, as rows of features."""
    dataset = open_dataset(load_config(run / "config.yaml", []), torch.device("cpu"))
    schema = dataset.schema
    samples = dataset.read(Split.test, torch.arange(dataset.samples(Split.test)))
    columns = {name: samples.dense[:, at].tolist() for at, name in enumerate(schema.dense_features)}
    for feature in schema.sparse_features:
        columns[feature.name] = _values(feature, samples.sparse)
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    if with_history:
        _add_histories(rows, samples, schema)
    return rows


def _values(feature: SparseFeature, bags: Any) -> list[Any]:
    of_bags = bags[feature.name].to_dense()
    return [bag.tolist() if feature.jagged else bag.tolist()[0] if len(bag) else None for bag in of_bags]


def _add_histories(rows: list[dict[str, Any]], samples: Samples, schema: DatasetSchema) -> None:
    assert samples.history_lengths is not None
    tokens = {feature.name: _values(feature, samples.tokens) for feature in schema.token_features}
    for number, (row, length) in enumerate(zip(rows, samples.history_lengths.tolist(), strict=True)):
        first = number * (schema.history_length + 1)
        row["history"] = [{name: values[at] for name, values in tokens.items()} for at in range(first, first + length)]
        for feature in schema.token_features:
            if not feature.history_only:
                row[feature.name] = tokens[feature.name][first + length]
