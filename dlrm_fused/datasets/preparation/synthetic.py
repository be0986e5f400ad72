"""Exporting generated samples (:mod:`dlrm_fused.datasets.synthetic`) as a prepared set, to look at or to read elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from dlrm_fused.config import Split, SyntheticConfig, most_segments
from dlrm_fused.datasets.batch import Samples
from dlrm_fused.datasets.preparation.writer import NpyAppender, claim_output
from dlrm_fused.datasets.schema import INTERACTIONS, DatasetSchema, PreparedInfo, labels_shape
from dlrm_fused.datasets.synthetic import SyntheticDataset
from dlrm_fused.errors import DataError

ROWS_AT_ONCE = 16_384


@dataclass(frozen=True)
class SyntheticOptions:
    """
    Attributes:
        seed: decides every sample; a run with the same ``seed`` and ``data.synthetic`` generates the same ones.
    """

    output: Path
    settings: SyntheticConfig = field(default_factory=SyntheticConfig)
    seed: int = 1
    overwrite: bool = False


def prepare_synthetic(options: SyntheticOptions) -> PreparedInfo:
    """Write all samples of all splits to ``options.output``.

    Raises:
        DataError: if a setting is out of range or the output is taken.
    """
    settings = options.settings
    _check(settings)
    claim_output(options.output, options.overwrite)
    dataset = SyntheticDataset(settings, options.seed, torch.device("cpu"))
    features = tuple(replace(f, jagged=f.jagged or f.pooling_factor != 1) for f in dataset.schema.sparse_features)
    schema = replace(dataset.schema, sparse_features=features)
    with ExitStack() as stack:
        interactions = _open_interactions(options.output, schema, stack) if schema.token_features else None
        for split in Split:
            _write_split(dataset, split, schema, options.output / split.name, interactions)
    best = dataset.best_attainable_auc()  # of the first label
    origin = {
        "data_set": "synthetic",
        "seed": options.seed,
        **asdict(settings),
        "best_attainable_test_auc": best.auc,
        "best_attainable_test_auc_standard_error": best.error,
    }
    samples = {split.name: dataset.samples(split) for split in Split}
    info = PreparedInfo(schema, samples, origin, interactions.rows if interactions else 0)
    info.save(options.output)
    return info


def _check(settings: SyntheticConfig) -> None:
    for name in (
        "tables",
        "dense_features",
        "labels",
        *(f"{split.name}_samples" for split in Split),
        "segments",
        "history_items",
    ):
        if getattr(settings, name) < 1:
            raise DataError(f"--{name.replace('_', '-')}={getattr(settings, name)}: allowed: 1 or more")
    most = most_segments(settings.dense_features)
    if settings.segments > most:
        raise DataError(
            f"--segments={settings.segments}: allowed: at most {most} with --dense-features={settings.dense_features}"
        )
    for name in ("rows", "pooling"):
        values: list[int] = getattr(settings, name)
        if len(values) not in (1, settings.tables) or min(values) < 1:
            raise DataError(f"--{name} {values}: allowed: one positive number, or one for each of {settings.tables} tables")
    for name in ("zipf_exponent", "signal", "history_length"):
        if not 0 <= getattr(settings, name) < float("inf"):
            raise DataError(f"--{name.replace('_', '-')}={getattr(settings, name)}: allowed: 0 or more")


def _open_interactions(output: Path, schema: DatasetSchema, stack: ExitStack) -> NpyAppender:
    (output / INTERACTIONS).mkdir()
    return stack.enter_context(NpyAppender(output / INTERACTIONS / "single.npy", np.int32, (len(schema.token_features),)))


def _write_split(
    dataset: SyntheticDataset, split: Split, schema: DatasetSchema, folder: Path, interactions: NpyAppender | None
) -> None:
    single = [feature.name for feature in schema.sparse_features if not feature.jagged]
    jagged = [feature.name for feature in schema.sparse_features if feature.jagged]
    with ExitStack() as stack:

        def open_file(name: str, dtype: type[np.generic], row_shape: tuple[int, ...] = ()) -> NpyAppender:
            return stack.enter_context(NpyAppender(folder / f"{name}.npy", dtype, row_shape))

        labels, dense = (
            open_file("labels", np.uint8, labels_shape(schema.labels)),
            open_file("dense", np.float32, (len(schema.dense_features),)),
        )
        ids = open_file("single", np.int32, (len(single),))
        windows = open_file("history", np.int64, (3,)) if interactions else None
        values = {name: open_file(f"{name}.values", np.int32) for name in jagged}
        offsets = {name: open_file(f"{name}.offsets", np.int64) for name in jagged}
        for file in offsets.values():
            file.append(np.zeros(1, np.int64))
        for samples in _read_all(dataset, split):
            labels.append(samples.labels.numpy())
            dense.append(samples.dense.numpy())
            columns = samples.sparse.to_dict()
            if single:
                ids.append(np.stack([columns[name].values().numpy() for name in single], axis=1))
            for name in jagged:
                before = values[name].rows
                values[name].append(columns[name].values().numpy())
                offsets[name].append(before + np.cumsum(columns[name].lengths().numpy(), dtype=np.int64))
            if interactions and windows:
                _append_tokens(samples, schema, interactions, windows)


def _append_tokens(samples: Samples, schema: DatasetSchema, interactions: NpyAppender, windows: NpyAppender) -> None:
    """Write every sample's history and candidate as interactions of its own, with id 0 where the candidate has none."""
    assert samples.tokens is not None
    assert samples.history_lengths is not None
    lengths = samples.history_lengths.numpy().astype(np.int64)
    candidates = np.cumsum(lengths + 1) - 1
    single = np.zeros((candidates[-1] + 1, len(schema.token_features)), np.int32)
    of_history = np.ones(len(single), bool)
    of_history[candidates] = False
    columns = samples.tokens.to_dict()
    for column, feature in enumerate(schema.token_features):
        rows = of_history if feature.history_only else slice(None)
        single[rows, column] = columns[feature.name].values().numpy()
    stop = interactions.rows + candidates
    windows.append(np.stack([stop - lengths, stop, stop], axis=1))
    interactions.append(single)


def _read_all(dataset: SyntheticDataset, split: Split) -> Iterator[Samples]:
    count = dataset.samples(split)
    with tqdm(total=count, desc=split.name, unit="rows", unit_scale=True) as bar:
        for start in range(0, count, ROWS_AT_ONCE):
            rows = torch.arange(start, min(start + ROWS_AT_ONCE, count))
            yield dataset.read(split, rows)
            bar.update(len(rows))
