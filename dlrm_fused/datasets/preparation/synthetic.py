"""Exporting generated samples (:mod:`dlrm_fused.datasets.synthetic`) as a prepared set, to look at or to read elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from dlrm_fused.config import Split, SyntheticConfig, most_segments
from dlrm_fused.config.setting import check_bounds, require
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.datasets.preparation.writer import InteractionFiles, SplitFiles, new_output
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo
from dlrm_fused.datasets.synthetic import SyntheticDataset
from dlrm_fused.errors import ConfigError, DataError

ROWS_AT_ONCE = 16_384


def prepare_synthetic(output: Path, settings: SyntheticConfig, seed: int, overwrite: bool) -> PreparedInfo:
    """Write all samples of all splits to ``output``.

    Args:
        seed: decides every sample; a run with the same ``seed`` and ``data.synthetic`` generates the same ones.

    Raises:
        DataError: if a setting is out of range or the output is taken.
    """
    _check(settings)
    dataset = SyntheticDataset(settings, seed, torch.device("cpu"))
    features = tuple(replace(f, jagged=f.jagged or f.pooling_factor != 1) for f in dataset.schema.sparse_features)
    schema = replace(dataset.schema, sparse_features=features)
    with new_output(output, overwrite) as folder:
        with ExitStack() as stack:
            interactions = InteractionFiles(folder, schema.token_features, stack) if schema.token_features else None
            for split in Split:
                _write_split(dataset, split, schema, folder / split.name, interactions)
        best = dataset.best_attainable_auc()  # of the first label
        origin = {
            "data_set": "synthetic",
            "seed": seed,
            **asdict(settings),
            "best_attainable_test_auc": best.auc,
            "best_attainable_test_auc_standard_error": best.error,
        }
        samples = {split.name: dataset.samples(split) for split in Split}
        info = PreparedInfo(schema, samples, origin, interactions.ids.rows if interactions else 0)
        info.save(folder)
    return info


def _check(settings: SyntheticConfig) -> None:
    try:
        check_bounds(settings)
        require(settings.segments >= 1, "segments", settings.segments, "1 or more")
    except ConfigError as error:
        name, _, found = str(error).partition("=")
        raise DataError(f"--{name.replace('_', '-')}={found}") from None
    most = most_segments(settings.dense_features)
    if settings.segments > most:
        raise DataError(
            f"--segments={settings.segments}: allowed: at most {most} with --dense-features={settings.dense_features}"
        )
    for name in ("rows", "pooling"):
        values: list[int] = getattr(settings, name)
        if len(values) not in (1, settings.tables) or min(values) < 1:
            raise DataError(f"--{name} {values}: allowed: one positive number, or one for each of {settings.tables} tables")


def _write_split(
    dataset: SyntheticDataset, split: Split, schema: DatasetSchema, folder: Path, interactions: InteractionFiles | None
) -> None:
    with ExitStack() as stack:
        files = SplitFiles(folder, schema, stack)
        for samples in _read_all(dataset, split):
            columns = samples.sparse.to_dict()
            ids = {feature: columns[feature.name].values().numpy() for feature in schema.sparse_features}
            single = [values for feature, values in ids.items() if not feature.jagged]
            files.append(
                samples.labels.numpy(),
                samples.dense.numpy(),
                np.stack(single, axis=1) if single else np.zeros((len(samples.labels), 0)),
                {f.name: (values, columns[f.name].lengths().numpy()) for f, values in ids.items() if f.jagged},
                windows=_append_tokens(samples, schema, interactions) if interactions else None,
            )


def _append_tokens(samples: Samples, schema: DatasetSchema, interactions: InteractionFiles) -> NDArray[np.int64]:
    """Write every sample's history and candidate as interactions of its own, with id 0 where the candidate has none.

    Returns:
        the samples' windows: [b, 3].
    """
    assert samples.tokens is not None
    assert samples.history_lengths is not None
    assert samples.token_times is not None
    lengths = samples.history_lengths.numpy().astype(np.int64)
    candidates = np.cumsum(lengths + 1) - 1
    single = np.zeros((candidates[-1] + 1, len(schema.token_features)), np.int32)
    of_history = np.ones(len(single), bool)
    of_history[candidates] = False
    columns = samples.tokens.to_dict()
    for column, feature in enumerate(schema.token_features):
        rows = of_history if feature.history_only else slice(None)
        single[rows, column] = columns[feature.name].values().numpy()
    stop = interactions.ids.rows + candidates
    times = samples.token_times.numpy()
    interactions.append(single, {}, times[np.arange(times.shape[1]) <= lengths[:, None]])
    return np.stack([stop - lengths, stop, stop], axis=1)


def _read_all(dataset: SyntheticDataset, split: Split) -> Iterator[Samples]:
    count = dataset.samples(split)
    with tqdm(total=count, desc=split.name, unit="rows", unit_scale=True) as bar:
        for start in range(0, count, ROWS_AT_ONCE):
            rows = torch.arange(start, min(start + ROWS_AT_ONCE, count))
            yield dataset.read(split, rows)
            bar.update(len(rows))
