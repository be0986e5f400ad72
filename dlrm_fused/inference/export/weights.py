"""Loads all weights of a run into one process, whatever ranks and plan it was trained with; writes tables in number formats."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import nn

from dlrm_fused.config import TableDtype
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.inference.export.loader import Table
from dlrm_fused.models import build_model
from dlrm_fused.sharding.tables import is_table
from dlrm_fused.training.checkpoint import State, restore_tensors
from dlrm_fused.training.saved_run import SavedRun

# Settings that put the run together in one process, whatever it was trained with.
ALONE = (
    "comm=baseline",
    "comm_strict=false",
    "model.tensor_parallel=1",
    "model.experts.parallel=1",
    "training.precision=fp32",
    "training.compile=never",
    "embedding.output_dtype=auto",
    "runtime.device=cpu",
)


_LARGEST = 127  # the largest int8; -128 is left out, so that both signs have one scale


def convert(weight: NDArray[np.float32], dtype: str) -> Table:
    """Return a table [rows, dim] in ``fp32``, ``fp16`` or ``int8``.

    In int8, a row is rounded to multiples of its largest absolute value / 127, its scale.
    """
    if dtype == "fp32":
        return Table(weight)
    if dtype == "fp16":
        return Table(weight.astype(np.float16))
    scales = np.abs(weight).max(axis=1) / np.float32(_LARGEST)
    divisors = np.where(scales > 0, scales, np.float32(1))
    return Table(np.rint(weight / divisors[:, None]).astype(np.int8), scales)


def write_tables(path: Path, tables: Mapping[str, Table]) -> None:
    """Write the tables, by name, to a safetensors file, as :mod:`dlrm_fused.inference.export.loader` describes it."""
    arrays = {}
    for name, table in tables.items():
        arrays[f"{name}.rows"] = table.rows
        if table.scales is not None:
            arrays[f"{name}.scales"] = table.scales
    save_file(arrays, path)


def restore_weights(saved: SavedRun, schema: DatasetSchema) -> tuple[nn.Module, dict[str, NDArray[np.float32]]]:
    """Load a checkpoint.

    Returns:
        The model, its dense part on the CPU, in evaluation mode, its tables without memory; and these, [rows, dim], by name.

    Raises:
        CheckpointError: if it is damaged or does not fit.
    """
    config = saved.config
    task = build_model(config, schema, 1, torch.device("cpu")).eval()
    dtype = torch.float16 if config.embedding.dtype is TableDtype.fp16 else torch.float32
    features = schema.tables if getattr(task.model, "reads_histories", False) else schema.sparse_features
    dims = config.embedding.dim_of
    tables = {feature.name: torch.empty(feature.rows, dims(feature.name), dtype=dtype) for feature in features}
    dense: State = {f"dense.{name}": value.detach() for name, value in task.state_dict().items() if not is_table(name)}
    of_tables = {f"table.{name}.weight": table for name, table in tables.items()}
    restore_tensors(saved.checkpoint, {**dense, **of_tables}, is_whole=True)
    return task.model, {name: table.float().numpy() for name, table in tables.items()}
