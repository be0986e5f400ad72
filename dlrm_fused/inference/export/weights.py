"""Loads all weights of a run into one process, whatever ranks and plan it was trained with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dlrm_fused.config import Config, TableDtype
from dlrm_fused.datasets.schema import DatasetSchema
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


@dataclass(frozen=True)
class Weights:
    """Holds a trained model.

    Attributes:
        model: its dense part, on the CPU, in evaluation mode; its tables have no memory.
        tables: [rows, dim] float32, by name.
    """

    model: nn.Module
    tables: dict[str, NDArray[np.float32]]


def restore_weights(saved: SavedRun, schema: DatasetSchema) -> Weights:
    """Load a checkpoint.

    Raises:
        CheckpointError: if it is damaged or does not fit.
    """
    config = saved.config
    task = build_model(config, schema, 1, torch.device("cpu")).eval()
    tables = _empty_tables(config, schema, has_tokens=getattr(task.model, "reads_histories", False))
    dense: State = {f"dense.{name}": value.detach() for name, value in task.state_dict().items() if not is_table(name)}
    restore_tensors(saved.checkpoint, {**dense, **{f"table.{name}.weight": table for name, table in tables.items()}})
    return Weights(task.model, {name: table.float().numpy() for name, table in tables.items()})


def _empty_tables(config: Config, schema: DatasetSchema, has_tokens: bool) -> dict[str, Tensor]:
    dtype = torch.float16 if config.embedding.dtype is TableDtype.fp16 else torch.float32
    features = schema.tables if has_tokens else schema.sparse_features
    return {feature.name: torch.empty(feature.rows, config.embedding.dim_of(feature.name), dtype=dtype) for feature in features}
