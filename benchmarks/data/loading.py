"""Samples a second that the readers give a rank.

    python -m benchmarks.data.loading --output loading.json [--sets prepared parquet_8192] [--workers 1 2] [--ranks 1 8]

Prepared sets, Criteo's npy files with one id a feature, npy files with the 214 ids of MLPerf's multi-hot set, and Parquet files
of large and small row groups; 26 features and 13 dense ones, of random content; shuffled, and in the order of the files, those
of Parquet in a window much smaller than the set, so that every epoch reads all of it. The loader's threads assemble the batches
of the first of so many ranks, which does nothing else; the files are in the host's page cache. A rank needs its share of what
training takes: 6 million samples/s on 2 GPUs are 3 million a rank.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.environment import describe_environment
from benchmarks.common.results import add_report_arguments, write_results
from dlrm_fused.config import Config, DataSource
from dlrm_fused.datasets.criteo_npy import CriteoNpyDataset
from dlrm_fused.datasets.dataset import Dataset
from dlrm_fused.datasets.loader import TrainLoader
from dlrm_fused.datasets.parquet import ParquetDataset
from dlrm_fused.datasets.preparation.parquet import ROW_GROUP_ROWS, write_parquet
from dlrm_fused.datasets.prepared import PreparedDataset
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature

FEATURES, DENSE_FEATURES, ROWS = 26, 13, 100_000
# Ids of each feature in MLPerf's DLRM-DCNv2.
HOTNESS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
_EVALUATED = 8  # samples of each other split


def prepared(folder: Path, samples: int) -> PreparedDataset:
    generator = np.random.default_rng(0)
    for split, count in {"train": samples, "validation": _EVALUATED, "test": _EVALUATED}.items():
        (folder / split).mkdir(parents=True)
        np.save(folder / split / "dense.npy", generator.random((count, DENSE_FEATURES), dtype=np.float32))
        np.save(folder / split / "labels.npy", generator.integers(0, 2, count, dtype=np.uint8))
        np.save(folder / split / "single.npy", generator.integers(0, ROWS, (count, FEATURES), dtype=np.int32))
    features = tuple(SparseFeature(f"feature_{i}", ROWS) for i in range(FEATURES))
    schema = DatasetSchema(tuple(f"dense_{i}" for i in range(DENSE_FEATURES)), features)
    PreparedInfo(schema, {"train": samples, "validation": _EVALUATED, "test": _EVALUATED}).save(folder)
    return PreparedDataset(folder)


def criteo_npy(folder: Path, samples: int, is_multi_hot: bool) -> CriteoNpyDataset:
    folder.mkdir()
    generator = np.random.default_rng(0)
    for day, count in enumerate((samples, 2 * _EVALUATED)):
        np.save(folder / f"day_{day}_dense.npy", generator.random((count, DENSE_FEATURES), dtype=np.float32))
        np.save(folder / f"day_{day}_labels.npy", generator.integers(0, 2, (count, 1), dtype=np.int32))
        if is_multi_hot:
            columns: dict[str, Any] = {
                str(i): generator.integers(0, ROWS, (count, n), dtype=np.int32) for i, n in enumerate(HOTNESS)
            }
            np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **columns)
        else:
            np.save(folder / f"day_{day}_sparse.npy", generator.integers(0, ROWS, (count, FEATURES), dtype=np.int32))
    return CriteoNpyDataset(folder, [ROWS] * FEATURES)


def samples_per_second(dataset: Dataset, config: Config, seconds: float, world_size: int = 1) -> float:
    """Return the samples a second of rank 0's loader after its first batches; no other rank runs, so it waits for none."""
    with TrainLoader(dataset, config, 0, world_size, torch.device("cpu")) as loader:
        for _ in range(config.data.prefetch_batches + config.data.workers):
            next(loader)
        batches, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            next(loader)
            batches += 1
        return batches * config.training.global_batch_size / world_size / (time.perf_counter() - began)


def parquet(folder: Path, samples: int, row_group_rows: int) -> ParquetDataset:
    prepared(folder / "prepared", samples)
    write_parquet(folder / "prepared", folder / "files", row_group_rows)
    config = Config()
    config.data.source, config.data.path = DataSource.parquet, str(folder / "files")
    return ParquetDataset(config)


# By name, from a new folder and a number of samples.
SETS: dict[str, Callable[[Path, int], Dataset]] = {
    "prepared": prepared,
    "criteo_npy": partial(criteo_npy, is_multi_hot=False),
    "criteo_npy_214_ids": partial(criteo_npy, is_multi_hot=True),
    **{f"parquet_{rows}": partial(parquet, row_group_rows=rows) for rows in (ROW_GROUP_ROWS, 8192)},
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--batch", type=int, default=8192, help="samples of a rank")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="threads of the loader")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of which the first is measured")
    parser.add_argument("--samples", type=int, default=500_000, help="of a set; a twentieth of that with many ids")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    add_report_arguments(parser)
    options = parser.parse_args(arguments)

    rows: list[dict[str, Any]] = []
    print(f"{'set':<20}{'order':<12}{'workers':>8}{'ranks':>6}{'samples/s':>12}")
    for name in options.sets:
        samples = options.samples // 20 if "214" in name else options.samples
        window = samples // 6 if "parquet" in name else Config().data.shuffle_window_rows
        with tempfile.TemporaryDirectory() as folder:
            dataset = SETS[name](Path(folder) / "set", max(samples, options.batch * max(options.ranks)))
            for order, workers, ranks in product(("shuffled", "of files"), options.workers, options.ranks):
                config = Config()
                config.training.global_batch_size, config.data.workers = options.batch * ranks, workers
                config.data.shuffle_window_rows = window if order == "shuffled" else 0
                rate = samples_per_second(dataset, config, options.seconds, ranks)
                cell = {"set": name, "order": order, "workers": workers, "ranks": ranks}
                rows.append({**cell, "samples_per_second": round(rate)})
                print(f"{name:<20}{order:<12}{workers:>8}{ranks:>6}{rate:>12,.0f}", flush=True)
    write_results(options.output, {**describe_environment(["CPU"], options.commit), "batch": options.batch, "rates": rows})


if __name__ == "__main__":
    main()
