"""A config that trains on a prepared table at once: a point to start from, chosen by the sizes of tables and training split.

The values for small tables are those that docs/quickstart_tuning.md found for MovieLens-100K.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from omegaconf import OmegaConf

from dlrm_fused.datasets.schema import DatasetSchema

SMALL, LARGE = 10**6, 10**7  # training rows
STEPS_OF_EPOCH = 80
BATCHES = (64, 8192)
EVALUATION_TOKENS = 2**18  # of a batch, with histories

_CONFIG = """\
# A point to start from, proposed by data/prepare.py; docs/reference/config.md has all settings.
# {tables} tables, {mebibytes:,.1f} MiB:
{rows_of_tables}
name: {name}
data:
  path: {path}
model:
{transformer}  bottom_mlp: {bottom_mlp}
  top_mlp: {top_mlp}
embedding:
  dim: {dim}
  init_std: 0.01
  optimizer:
    kind: {optimizer}
    learning_rate: {learning_rate:g}
{narrower_tables}training:
  max_steps: {steps}  # an epoch has {epoch}
  global_batch_size: {batch}
  dense_optimizer:
    kind: {dense_optimizer}
  schedule:
    # The decay keeps the last epochs from overfitting.
{warmup}    decay_start_step: {decay_start}
    decay_steps: {decay_steps}
evaluation:
  every_steps: {every}
{evaluation_batch}checkpoint:
  every_steps: {every}
telemetry:
  log_every_steps: {log_every}
"""
_TRANSFORMER = "  kind: transformer\n  d_model: 32\n  layers: 1\n  heads: 4\n"


def _as_text(name: str) -> str:
    """Return a name as YAML has it: in quotes if it would be something else, such as null or a number."""
    read = OmegaConf.to_container(OmegaConf.create(f"[{name}]"))
    return name if read == [name] else json.dumps(name)


def proposed_config(schema: DatasetSchema, train_rows: int, folder: Path) -> str:
    """YAML for train.py."""
    largest = max(feature.rows for feature in schema.tables)
    dim = 16 if largest < 10**5 else 32 if largest < 10**7 else 64
    # As many columns as are enough for the rows: the power of two from their square root on, 4 at least.
    dims = {f.name: min(max(4, 2 ** math.ceil(math.log2(max(f.rows, 1)) / 2)), dim) for f in schema.tables}
    narrower = "".join(f"    {json.dumps(name)}: {{dim: {own}}}\n" for name, own in dims.items() if own < dim)
    wanted = 2 ** round(math.log2(max(train_rows / STEPS_OF_EPOCH, 1)))
    batch = min(max(wanted, BATCHES[0]), BATCHES[1], train_rows)
    epoch = -(-train_rows // batch)
    has_history = schema.history_length > 0
    # Few rows are seen several times; with histories, each is in many samples.
    epochs = 1 if train_rows >= LARGE else 2 if has_history or train_rows >= SMALL else 5
    steps = epoch * epochs
    every = max(1, epoch // 2) if train_rows < LARGE else 1000
    # On few rows, SGD overfits less; its rate grows with the batch, in whose mean a row of a table occurs once or twice.
    optimizer, rate = ("sgd", min(0.04 * batch, 40.0)) if train_rows < SMALL else ("rowwise_adagrad", 0.05)
    evaluation_batch = max(64, EVALUATION_TOKENS // (schema.history_length + 1))
    return _CONFIG.format(
        tables=len(schema.tables),
        mebibytes=sum(feature.rows * dims[feature.name] for feature in schema.tables) * 4 / 2**20,
        rows_of_tables="\n".join(f"#   {f.name}: {f.rows:,} rows of {dims[f.name]} numbers" for f in schema.tables),
        name=_as_text(re.sub(r"[^\w.-]", "_", folder.resolve().name, flags=re.ASCII).lstrip(".") or "table"),
        path=json.dumps(str(folder)),
        transformer=_TRANSFORMER if has_history else "",
        bottom_mlp=[64, dim] if train_rows < LARGE else [512, 256, dim],
        top_mlp=[64, 32, 1] if train_rows < LARGE else [512, 256, 1],
        dim=dim,
        optimizer=optimizer,
        learning_rate=rate,
        narrower_tables=f"  tables:\n{narrower}" if narrower else "",
        steps=steps,
        epoch=epoch,
        batch=batch,
        dense_optimizer="adam\n    learning_rate: 0.002" if has_history else "adagrad\n    learning_rate: 0.02",
        warmup=f"    warmup_steps: {steps // 8}\n" if has_history else "",
        decay_start=steps // 4,
        decay_steps=steps - steps // 4,
        every=every,
        evaluation_batch=f"  global_batch_size: {evaluation_batch}\n" if has_history else "",
        log_every=max(1, every // 4),
    )
