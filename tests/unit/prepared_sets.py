"""Small prepared sets for tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_fused.checksums import CHECKSUMS_FILE
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature

FEATURES = (
    SparseFeature("user", rows=50),
    SparseFeature("genres", rows=7, pooling_factor=1.5, jagged=True),
    SparseFeature("item", rows=30),
)


@dataclass(frozen=True)
class SplitArrays:
    """The samples of one split as plain arrays; ``ids[name]`` holds one array of ids for each sample."""

    dense: np.ndarray
    labels: np.ndarray
    ids: dict[str, list[np.ndarray]]


def write_prepared_set(
    folder: Path,
    samples: dict[str, int] | None = None,
    features: tuple[SparseFeature, ...] = FEATURES,
    dense_features: int = 2,
    seed: int = 0,
    has_checksums: bool = False,
    times: dict[str, np.ndarray] | None = None,
) -> dict[str, SplitArrays]:
    """Write a random set; samples of jagged features have 0 to 3 ids. Returns what it holds, by split.

    Args:
        times: microseconds since 1970 of each sample, by split.
        has_checksums: without them, tests may write into its files what a preparation would not.
    """
    samples = samples or {"train": 100, "validation": 20, "test": 21}
    generator = np.random.default_rng(seed)
    content = {}
    for split, count in samples.items():
        lengths = {f.name: generator.integers(0, 4, count) if f.jagged else np.ones(count, int) for f in features}
        content[split] = SplitArrays(
            dense=generator.standard_normal((count, dense_features), dtype=np.float32),
            labels=generator.integers(0, 2, count, dtype=np.uint8),
            ids={f.name: [generator.integers(0, f.rows, n, dtype=np.int32) for n in lengths[f.name]] for f in features},
        )
        _write_split(folder / split, content[split], features)
        if times is not None:
            np.save(folder / split / "times.npy", times[split])
    schema = DatasetSchema(tuple(f"dense_{i}" for i in range(dense_features)), features, has_times=times is not None)
    PreparedInfo(schema, samples).save(folder)
    if not has_checksums:
        (folder / CHECKSUMS_FILE).unlink()
    return content


def _write_split(folder: Path, arrays: SplitArrays, features: tuple[SparseFeature, ...]) -> None:
    folder.mkdir(parents=True)
    np.save(folder / "dense.npy", arrays.dense)
    np.save(folder / "labels.npy", arrays.labels)
    single = [np.concatenate(arrays.ids[f.name]) for f in features if not f.jagged]
    if single:
        np.save(folder / "single.npy", np.stack(single, axis=1))
    for feature in features:
        if feature.jagged:
            ids = arrays.ids[feature.name]
            np.save(folder / f"{feature.name}.values.npy", np.concatenate(ids))
            np.save(folder / f"{feature.name}.offsets.npy", np.cumsum([0, *(len(i) for i in ids)], dtype=np.int64))
