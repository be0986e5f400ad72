"""The models and the sources of samples that a config can name."""

from __future__ import annotations

from enum import Enum


class ModelKind(Enum):
    dlrm = "dlrm"
    dcnv2 = "dcnv2"
    transformer = "transformer"  # DLRM with a Transformer over the user's history


class DataSource(Enum):
    """Where samples come from."""

    prepared = "prepared"  # a folder that data/prepare.py wrote
    criteo_npy = "criteo_npy"  # day_*_{dense,sparse,labels}.npy of TorchRec's or MLPerf's scripts
    synthetic = "synthetic"  # generated on the fly
