"""Seconds that checksums add to the reading of a checkpoint, a prepared set and an exported model.

    python -m benchmarks.data.checksums --mebibytes 512

Each is read with checksums and without them in turn, from the disk (``cold``) and from the page cache (``warm``), which is as
fast as memory; the medians are printed. The checkpoint is one table that is loaded into memory. The set is read for two epochs
in a random order, in batches of 8192 samples by one thread. The exported model's tables are read by copying them, which is what
its first requests amount to.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.distributed.checkpoint import save

from dlrm_fused.checksums import CHECKSUMS_FILE, Checksums, FileSums
from dlrm_fused.config import Split
from dlrm_fused.datasets.prepared import PreparedDataset
from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, SparseFeature
from dlrm_fused.inference.export import loader
from dlrm_fused.training.checkpoint import RawWriter, restore_tensors
from dlrm_fused.training.checkpoint.tensors import TENSORS_FILE

_BATCH = 8192
_COLUMNS = 64


def _checkpoint(folder: Path, mebibytes: int) -> dict[str, Callable[[], object]]:
    table = torch.rand(mebibytes * 2**20 // (4 * _COLUMNS), _COLUMNS)
    for name in ("with", "without"):
        path = folder / name
        save({"table": table}, storage_writer=RawWriter(path), no_dist=True)
        if name == "without":
            content = json.loads((path / TENSORS_FILE).read_text())
            for tensor in content["tensors"].values():
                for chunk in tensor["chunks"]:
                    chunk["slot"]["sums"] = None
            (path / TENSORS_FILE).write_text(json.dumps(content))
        Checksums({}, {TENSORS_FILE: FileSums.of(path / TENSORS_FILE)}).save(path)
    into = torch.empty_like(table)
    return {name: lambda path=folder / name: restore_tensors(path, {"table": into}) for name in ("with", "without")}  # type: ignore[misc]


def _prepared_set(folder: Path, mebibytes: int) -> dict[str, Callable[[], object]]:
    features = tuple(SparseFeature(f"f{number}", 1000) for number in range(26))
    dense = tuple(f"d{number}" for number in range(13))
    rows = mebibytes * 2**20 // (4 * (len(features) + len(dense)) + 1)
    generator = np.random.default_rng(0)
    for name in ("with", "without"):
        split = folder / name / "train"
        split.mkdir(parents=True)
        np.save(split / "dense.npy", generator.random((rows, len(dense)), np.float32))
        np.save(split / "single.npy", generator.integers(0, 1000, (rows, len(features)), np.int32))
        np.save(split / "labels.npy", generator.integers(0, 2, rows, np.uint8))
        PreparedInfo(DatasetSchema(dense, features), {"train": rows}).save(folder / name)
    (folder / "without" / CHECKSUMS_FILE).unlink()

    def read(path: Path) -> None:
        dataset = PreparedDataset(path)
        for epoch in range(2):
            order = torch.from_numpy(np.random.default_rng(epoch).permutation(rows))
            for batch in order.split(_BATCH):
                dataset.read(Split.train, batch)

    return {name: lambda path=folder / name: read(path) for name in ("with", "without")}  # type: ignore[misc]


def _exported_tables(folder: Path, mebibytes: int) -> dict[str, Callable[[], object]]:
    folder.mkdir(parents=True)
    rows = mebibytes * 2**20 // (4 * _COLUMNS)
    save_file({"f.rows": np.random.default_rng(0).random((rows, _COLUMNS), np.float32)}, folder / "tables.safetensors")
    for name in ("manifest.json", "dense.pt2"):
        (folder / name).write_text("{}")
    Checksums.of_folder(folder, {}).save(folder)

    def read(is_checked: bool) -> None:
        if is_checked:
            loader.check_files(folder)
        for table in loader.read_safetensors(folder / "tables.safetensors").values():
            np.array(table)

    return {"with": lambda: read(True), "without": lambda: read(False)}


def _drop_from_page_cache(folder: Path) -> None:
    gc.collect()  # what is still mapped would stay in the cache
    for path in folder.rglob("*.*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(reads: Mapping[str, Callable[[], object]], folder: Path, repeats: int, is_cold: bool) -> dict[str, object]:
    found: dict[str, list[float]] = {name: [] for name in reads}
    for repeat in range(repeats + 1):
        for name, read in reads.items():
            if is_cold:
                _drop_from_page_cache(folder)
            began = time.perf_counter()
            read()
            if repeat:  # the first fills the page cache
                found[name].append(time.perf_counter() - began)
    seconds = {name: statistics.median(times) for name, times in found.items()}
    added = seconds["with"] / seconds["without"] - 1
    return {**{name: round(value, 4) for name, value in seconds.items()}, "added": f"{added:.1%}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="of each of the three")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as name:
        kinds = {"checkpoint": _checkpoint, "prepared set": _prepared_set, "exported tables": _exported_tables}
        for kind, make in kinds.items():
            folder = Path(name) / kind.replace(" ", "_")
            reads = make(folder, options.mebibytes)
            for state in ("cold", "warm"):
                results[f"{kind}, {state}"] = _seconds(reads, folder, options.repeats, state == "cold")
    print(json.dumps({"mebibytes": options.mebibytes, "repeats": options.repeats, "seconds": results}, indent=2))


if __name__ == "__main__":
    main()
