"""A config that trains on a prepared table at once: a point to start from, chosen by the sizes of tables and training split.

The values for small tables are those that docs/quickstart_tuning.md found for MovieLens-100K.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from dlrm_fused.datasets.schema import DatasetSchema

SMALL, LARGE = 10**6, 10**7  # training rows
STEPS_OF_EPOCH = 80
BATCHES = (64, 8192)
EVALUATION_TOKENS = 2**18  # of a batch, with histories


def proposed_config(schema: DatasetSchema, train_rows: int, folder: Path) -> str:
    """YAML for train.py."""
    dim = _dim(max(feature.rows for feature in schema.tables))
    dims = {feature.name: min(_own_dim(feature.rows), dim) for feature in schema.tables}
    lines = [
        "# A point to start from, proposed by data/prepare.py; docs/reference/config.md has all settings.",
        *_tables(schema, dims),
        f"name: {_run_name(folder)}",
        "data:",
        f"  path: {json.dumps(str(folder))}",
        *_model(schema, dim, train_rows),
        *_embedding(dim, train_rows),
        *_narrower_tables(dims, dim),
        *_training(schema, train_rows),
    ]
    return "\n".join(lines) + "\n"


def _tables(schema: DatasetSchema, dims: Mapping[str, int]) -> list[str]:
    mebibytes = sum(feature.rows * dims[feature.name] for feature in schema.tables) * 4 / 2**20
    rows = [f"#   {feature.name}: {feature.rows:,} rows of {dims[feature.name]} numbers" for feature in schema.tables]
    return [f"# {len(schema.tables)} tables, {mebibytes:,.1f} MiB:", *rows]


def _model(schema: DatasetSchema, dim: int, train_rows: int) -> list[str]:
    bottom, top = ([64, dim], [64, 32, 1]) if train_rows < LARGE else ([512, 256, dim], [512, 256, 1])
    blocks = ["  kind: transformer", "  d_model: 32", "  layers: 1", "  heads: 4"] if schema.history_length else []
    return ["model:", *blocks, f"  bottom_mlp: {bottom}", f"  top_mlp: {top}"]


def _embedding(dim: int, train_rows: int) -> list[str]:
    # On few rows, SGD overfits less; its rate grows with the batch, in whose mean a row of a table occurs once or twice.
    optimizer = ("sgd", min(0.04 * _batch(train_rows), 40.0)) if train_rows < SMALL else ("rowwise_adagrad", 0.05)
    return [
        "embedding:",
        f"  dim: {dim}",
        "  init_std: 0.01",
        "  optimizer:",
        f"    kind: {optimizer[0]}",
        f"    learning_rate: {optimizer[1]:g}",
    ]


def _narrower_tables(dims: Mapping[str, int], dim: int) -> list[str]:
    narrower = [f"    {json.dumps(name)}: {{dim: {own}}}" for name, own in dims.items() if own < dim]
    return ["  tables:", *narrower] if narrower else []


def _training(schema: DatasetSchema, train_rows: int) -> list[str]:
    batch = _batch(train_rows)
    epoch = -(-train_rows // batch)
    steps = epoch * _epochs(schema, train_rows)
    every = max(1, epoch // 2) if train_rows < LARGE else 1000
    has_history = schema.history_length > 0
    return [
        "training:",
        f"  max_steps: {steps}  # an epoch has {epoch}",
        f"  global_batch_size: {batch}",
        "  dense_optimizer:",
        f"    kind: {'adam' if has_history else 'adagrad'}",
        f"    learning_rate: {0.002 if has_history else 0.02}",
        "  schedule:",
        "    # The decay keeps the last epochs from overfitting.",
        *([f"    warmup_steps: {steps // 8}"] if has_history else []),
        f"    decay_start_step: {steps // 4}",
        f"    decay_steps: {steps - steps // 4}",
        "evaluation:",
        f"  every_steps: {every}",
        *([f"  global_batch_size: {max(64, EVALUATION_TOKENS // (schema.history_length + 1))}"] if has_history else []),
        "checkpoint:",
        f"  every_steps: {every}",
        "telemetry:",
        f"  log_every_steps: {max(1, every // 4)}",
    ]


def _dim(largest_rows: int) -> int:
    """Columns of the largest table, by its rows."""
    return 16 if largest_rows < 10**5 else 32 if largest_rows < 10**7 else 64


def _own_dim(rows: int) -> int:
    """Columns that are enough for so many rows: the power of two from their square root on, 4 at least."""
    return int(max(4, 2 ** math.ceil(math.log2(max(rows, 1)) / 2)))


def _batch(train_rows: int) -> int:
    """Return a power of two that gives about ``STEPS_OF_EPOCH`` steps, but not very few or very many samples."""
    wanted = 2 ** round(math.log2(max(train_rows / STEPS_OF_EPOCH, 1)))
    return min(max(wanted, BATCHES[0]), BATCHES[1], train_rows)


def _epochs(schema: DatasetSchema, train_rows: int) -> int:
    """Few rows are seen several times; with histories, each is in many samples."""
    if train_rows >= LARGE:
        return 1
    return 2 if schema.history_length or train_rows >= SMALL else 5


def _run_name(folder: Path) -> str:
    return re.sub(r"[^\w.-]", "_", folder.resolve().name, flags=re.ASCII).lstrip(".") or "table"
