"""The models and the sources of samples that a config can name: one line for each, its name and the function that makes it.

Functions are named as ``module:function`` and imported when they are called for. docs/extending.md shows how to add one.
"""

from __future__ import annotations

from enum import Enum, unique


@unique
class ModelKind(Enum):
    """Models, by their :data:`dlrm_fused.models.task.BuildModel`."""

    dlrm = "dlrm_fused.models.dlrm:build_dlrm"
    dcnv2 = "dlrm_fused.models.dlrm:build_dcnv2"
    transformer = "dlrm_fused.models.transformer:build"  # DLRM with a Transformer over the user's history
    hstu = "dlrm_fused.models.hstu:build"  # the same with Hierarchical Sequential Transduction Units

    @property
    def reads_histories(self) -> bool:
        """Whether the model encodes the user's history, by blocks whose heads ranks can share."""
        return self in (ModelKind.transformer, ModelKind.hstu)

    @property
    def reads_times(self) -> bool:
        """Whether the model reads when tokens of a history happened, where that is known."""
        return self is ModelKind.hstu


@unique
class DataSource(Enum):
    """Sources of samples, each by its :data:`dlrm_fused.datasets.OpenDataset`."""

    prepared = "dlrm_fused.datasets.prepared:open_prepared"  # a folder that data/prepare.py wrote
    parquet = "dlrm_fused.datasets.parquet:open_parquet"  # Parquet files, read as they are
    criteo_npy = "dlrm_fused.datasets.criteo_npy:open_criteo_npy"  # the files of TorchRec's or MLPerf's scripts
    synthetic = "dlrm_fused.datasets.synthetic:open_synthetic"  # generated on the fly
