"""Splits whose labels are all the same, so that no AUC is defined."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlrm_fused.datasets.schema import DatasetSchema, PreparedInfo, labels_shape
from dlrm_fused.datasets.storage import map_array

_ROWS = 2**24  # read at a time


def splits_of_one_class(folder: Path, info: PreparedInfo) -> list[str]:
    """Return a line for each label and split of a prepared set in which all rows that count are of one class."""
    return [line for split, rows in info.samples.items() for line in _of_split(folder / split, info.schema, split, rows)]


def one_class(split: str, label: str, value: int, samples: int) -> str:
    """Return the line that says so of one label and split."""
    return f"{split} split: {label} is {value} in all {samples:,} samples, so its AUC is not defined; take other rows, or more"


def _of_split(folder: Path, schema: DatasetSchema, split: str, rows: int) -> list[str]:
    labels = map_array(folder / "labels.npy", [rows, *labels_shape(schema.labels)], ["uint8"]).reshape(rows, -1)
    weights = map_array(folder / "weights.npy", [rows], ["float32"]) if schema.has_weights else None
    has = np.zeros((2, len(schema.labels)), bool)
    for start in range(0, rows, _ROWS):
        part = labels[start : start + _ROWS]
        counts = part if weights is None else part[weights[start : start + _ROWS] > 0]
        has |= np.stack([(counts == 0).any(0), (counts == 1).any(0)])
        if has.all():
            return []
    return [
        one_class(split, label, int(is_positive), rows)
        for label, is_negative, is_positive in zip(schema.labels, *has, strict=True)
        if is_negative != is_positive
    ]
