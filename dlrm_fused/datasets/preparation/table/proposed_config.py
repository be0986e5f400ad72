"""A config that trains on a prepared table at once: a point to start from, chosen by the sizes of tables and training split."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from dlrm_fused.datasets.schema import DatasetSchema

STEPS_OF_EPOCH = 80
BATCHES = (64, 8192)
EVALUATION_TOKENS = 2**18  # of a batch, with histories


def proposed_config(schema: DatasetSchema, train_rows: int, folder: Path) -> str:
    """YAML for train.py.

    Args:
        schema: of the prepared set.
        train_rows: rows of the training split.
        folder: of the prepared set.
    """
    dim = _dim(max(feature.rows for feature in schema.tables))
    batch = _batch(train_rows)
    epoch = -(-train_rows // batch)
    steps = epoch * _epochs(train_rows)
    every = max(1, epoch // 2) if train_rows < 10**7 else 1000
    lines = [
        "# A point to start from, proposed by data/prepare.py; docs/reference/config.md has all settings.",
        f"# {len(schema.tables)} tables, {sum(feature.rows for feature in schema.tables) * dim * 4 / 2**20:,.1f} MiB:",
        *(f"#   {feature.name}: {feature.rows:,} rows" for feature in schema.tables),
        f"name: {_run_name(folder)}",
        "data:",
        f"  path: {json.dumps(str(folder))}",
        *_model(schema, dim, train_rows),
        "embedding:",
        f"  dim: {dim}",
        "  init_std: 0.01",
        "  optimizer:",
        "    kind: rowwise_adagrad",
        "    learning_rate: 0.05",
        "training:",
        f"  max_steps: {steps}  # of {epoch} in an epoch",
        f"  global_batch_size: {batch}",
        "  dense_optimizer:",
        "    kind: adagrad",
        "    learning_rate: 0.02",
        "  schedule:",
        "    # The decay keeps the last epochs from overfitting.",
        f"    decay_start_step: {steps // 4}",
        f"    decay_steps: {steps - steps // 4}",
        "evaluation:",
        f"  every_steps: {every}",
        *([f"  global_batch_size: {_evaluation_batch(schema.history_length)}"] if schema.history_length else []),
        "checkpoint:",
        f"  every_steps: {every}",
        "telemetry:",
        f"  log_every_steps: {max(1, every // 4)}",
    ]
    return "\n".join(lines) + "\n"


def _model(schema: DatasetSchema, dim: int, train_rows: int) -> list[str]:
    bottom, top = ([64, dim], [64, 32, 1]) if train_rows < 10**7 else ([512, 256, dim], [512, 256, 1])
    blocks = ["  kind: transformer", "  d_model: 32", "  layers: 1", "  heads: 4"] if schema.history_length else []
    return ["model:", *blocks, f"  bottom_mlp: {bottom}", f"  top_mlp: {top}"]


def _dim(largest_rows: int) -> int:
    """Columns of all tables, by the rows of the largest."""
    return 16 if largest_rows < 10**5 else 32 if largest_rows < 10**7 else 64


def _batch(train_rows: int) -> int:
    """A power of two that gives about ``STEPS_OF_EPOCH`` steps, but not very few or very many samples."""
    wanted = 2 ** round(math.log2(max(train_rows / STEPS_OF_EPOCH, 1)))
    return min(max(wanted, BATCHES[0]), BATCHES[1], train_rows)


def _epochs(train_rows: int) -> int:
    """Few samples are seen several times."""
    return 5 if train_rows < 10**6 else 2 if train_rows < 10**7 else 1


def _evaluation_batch(history_length: int) -> int:
    return max(64, EVALUATION_TOKENS // (history_length + 1))


def _run_name(folder: Path) -> str:
    return re.sub(r"[^\w.-]", "_", folder.resolve().name, flags=re.ASCII).lstrip(".") or "table"
