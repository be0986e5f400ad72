"""The settings of a run.

A run is described by a YAML file in ``configs/`` and ``key=value`` overrides on the command line; both are checked against
:class:`Config`.
"""

from dlrm_fused.config.checks import check_consistency, most_segments
from dlrm_fused.config.keys import known_keys
from dlrm_fused.config.loading import flatten, load_config, to_yaml
from dlrm_fused.config.registry import DataSource, ModelKind
from dlrm_fused.config.schema import (
    CheckpointConfig,
    Comm,
    Compile,
    ComputeKernel,
    Config,
    DenseOptimizerConfig,
    DenseOptimizerKind,
    EmbeddingConfig,
    EmbeddingOptimizerConfig,
    EmbeddingOptimizerKind,
    ExpertActivation,
    ExpertsConfig,
    Gate,
    ModelConfig,
    OnDamage,
    OutputDtype,
    Precision,
    ScheduleConfig,
    Sharding,
    Split,
    SyntheticConfig,
    TableConfig,
    TableDtype,
    Windows,
    WireDtype,
)
