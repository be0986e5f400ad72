"""Every setting of a run: its name, type, unit, default and what is allowed.

Enumerations are written by their names: ``embedding.sharding=row_wise``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path

from dlrm_fused.config.registry import DataSource, ModelKind
from dlrm_fused.config.setting import (
    BELOW_ONE,
    POSITIVE,
    Bound,
    at_least,
    between,
    each_positive,
    multiple_of,
    one_of,
    setting,
)

MAX_INT32 = 2**31 - 1
# Default of data.shuffle_window_rows with data.source=parquet, which holds the window in memory.
PARQUET_WINDOW_ROWS = 1_048_576


class Comm(Enum):
    """Ways to run the collectives of the embedding stage, of tensor-parallel layers and of experts."""

    baseline = "baseline"  # TorchRec's own sharding; products and collectives in turn
    fused = "fused"  # computation and communication in one operator, where the plan allows it
    auto = "auto"  # the faster of the two for each sharding type and for the layers, measured at the start


# Whether the dense part of a training step, loss included, is compiled by `torch.compile`; `auto`: on GPUs, where a C compiler
# is found.
Compile = StrEnum("Compile", "auto always never")
# The function that an expert applies to its first product: silu(h), or silu(gate) * up, of two matrices.
ExpertActivation = StrEnum("ExpertActivation", "silu swiglu")
# The weights of a token's experts: their probabilities or scores, divided by their sum.
Gate = StrEnum("Gate", "softmax sigmoid")
# Ways to spread embedding tables over ranks; `auto` lets the planner choose for each table.
Sharding = StrEnum("Sharding", "auto data_parallel table_wise column_wise row_wise table_row_wise table_column_wise grid_shard")
# The memory that holds embedding weights. `fused`, which `auto` stands for: the device's. The others: host memory that the GPU
# reads, with or without a cache in its own.
ComputeKernel = StrEnum("ComputeKernel", "auto fused fused_uvm fused_uvm_caching")
TableDtype = StrEnum("TableDtype", "fp32 fp16")
# The number format in which pooled embeddings, or their gradients, cross the network.
WireDtype = StrEnum("WireDtype", "fp32 fp16 bf16")
# Windows of time that training goes through, each once, after an evaluation on it; by UTC, weeks from Monday. `none`: epochs.
Windows = StrEnum("Windows", "none hour day week month")
# The number format of pooled embeddings, and of their gradients, as the dense part gets and gives them. `auto` is bf16 with
# training.precision=bf16 or fp8 on GPUs, unless a format on the wire is set; else fp32.
OutputDtype = StrEnum("OutputDtype", "auto fp32 fp16 bf16")


class Precision(StrEnum):
    """Arithmetic of the dense layers; weights are stored in fp32."""

    fp32 = "fp32"
    tf32 = "tf32"  # matrix products on GPUs
    bf16 = "bf16"  # autocast
    fp8 = "fp8"  # bf16, and the large matrix products of training in 8 bits

    @property
    def is_bf16(self) -> bool:
        """Whether what is not multiplied in 8 bits is computed under bf16 autocast."""
        return self in (Precision.bf16, Precision.fp8)


EmbeddingOptimizerKind = StrEnum("EmbeddingOptimizerKind", "rowwise_adagrad adagrad sgd adam rowwise_adam")
DenseOptimizerKind = StrEnum("DenseOptimizerKind", "adagrad sgd adam")
# The action if the newest checkpoint is damaged: the run ends, or goes on from the last one that is intact.
OnDamage = StrEnum("OnDamage", "error fallback")
Split = StrEnum("Split", "train validation test")


def _is_dcnv2(config: Config) -> bool:
    return config.model.kind is ModelKind.dcnv2


def _reads_histories(config: Config) -> bool:
    return config.model.kind.reads_histories


def _has_experts(config: Config) -> bool:
    return config.model.experts.count > 0


_FOLDER_NAME = Bound(lambda name: re.fullmatch(r"(?!\.\.?$)[\w.\-]+", name) is not None, "letters, digits, '.', '_' and '-'")
_DIFFERENT_COLUMNS = Bound(lambda names: 0 < len(names) == len(set(names)), "one or more different columns")
_WIDTHS = each_positive("one or more positive widths", minimum_length=1)


@dataclass
class SyntheticConfig:
    """Generated data with a planted signal; used with ``data.source=synthetic``."""

    dense_features: int = setting(13, at_least(1))
    # One entry per table, or a single entry that holds for all `tables`.
    tables: int = setting(26, at_least(1))
    rows: list[int] = setting([100_000])
    # Ids per sample and table: fixed, or uniform in [1, pooling] when jagged.
    pooling: list[int] = setting([1])
    jagged: bool = False
    # Popularity of ids: probability of the k-th most popular ~ 1 / k^zipf_exponent; 0 is uniform.
    zipf_exponent: float = setting(1.05, at_least(0))
    train_samples: int = setting(1_000_000, at_least(1))
    validation_samples: int = setting(100_000, at_least(1))
    test_samples: int = setting(100_000, at_least(1))
    # Labels, each with effects of its own.
    labels: int = setting(1, at_least(1))
    # Standard deviation of the planted logit: larger is easier to predict.
    signal: float = setting(2.0, at_least(0))
    # Groups of samples, told by their dense features, whose labels follow different rules; 1 for one rule.
    segments: int = 1
    # Past interactions of each sample: exactly so many, or uniform in [0, history_length] when jagged; 0 for no tokens.
    history_length: int = setting(0, at_least(0))
    # Rows of the table of their items.
    history_items: int = setting(100_000, between(1, MAX_INT32))


@dataclass
class DataConfig:
    source: DataSource = DataSource.prepared
    # Folder of the data set (prepared, parquet, criteo_npy).
    path: str = ""
    # Rows that are shuffled together; 0 keeps the order of the files. Where a config does not set it, parquet has its own.
    shuffle_window_rows: int = setting(16_777_216, at_least(0))
    # For sets with times: training in order of time, shuffled within windows.
    windows: Windows = Windows.none
    # For parquet: columns of labels, the first of which decides which checkpoint is best, of weights and of times; "" for none.
    labels: list[str] = setting(["label"], _DIFFERENT_COLUMNS)
    sample_weight: str = ""
    sample_time: str = ""
    # Threads that assemble batches, and batches each rank holds ready.
    workers: int = setting(2, at_least(1))
    prefetch_batches: int = setting(4, at_least(1))
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)


@dataclass
class ExpertsConfig:
    """A Mixture of Experts: in the top of dlrm and dcnv2, or for the feed-forward layers of the Transformer's blocks."""

    # 0: none.
    count: int = setting(0, at_least(0))
    # Experts of a token.
    top_k: int = 2
    # Width of an expert's hidden layer, and of that of an expert that all tokens have; 0: no such expert.
    hidden: int = setting(256, multiple_of(8), used=_has_experts)
    shared_hidden: int = setting(0, at_least(0), used=_has_experts)
    # Settings that all experts share.
    activation: ExpertActivation = ExpertActivation.silu
    gate: Gate = Gate.softmax
    # Weights of the auxiliary losses.
    balance_loss: float = setting(0.01, at_least(0), used=_has_experts)
    z_loss: float = setting(0.001, at_least(0), used=_has_experts)
    # Consecutive ranks that the experts are spread over; 0 takes all ranks.
    parallel: int = 0


@dataclass
class ModelConfig:
    kind: ModelKind = ModelKind.dlrm
    # Widths of the layers; the bottom one must end with embedding.dim, the top one with 1, which is that of each label.
    bottom_mlp: list[int] = setting([512, 256, 64], _WIDTHS)
    top_mlp: list[int] = setting([512, 256, 1], _WIDTHS)
    # DCNv2 only: number of low-rank cross layers and their rank.
    cross_layers: int = setting(3, at_least(1), used=_is_dcnv2)
    cross_rank: int = setting(512, at_least(1), used=_is_dcnv2)
    # Transformer and HSTU: the width, the blocks, and the attention heads of a block.
    d_model: int = 64
    layers: int = setting(2, at_least(1), used=_reads_histories)
    heads: int = setting(4, at_least(1), used=_reads_histories)
    # Transformer and HSTU: consecutive ranks that share the weights of the blocks; 0 takes all ranks of a host.
    tensor_parallel: int = 0
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)


@dataclass
class EmbeddingOptimizerConfig:
    """The optimizer that updates embedding rows inside the backward pass."""

    kind: EmbeddingOptimizerKind = EmbeddingOptimizerKind.rowwise_adagrad
    learning_rate: float = setting(0.01, POSITIVE)
    weight_decay: float = setting(0.0, at_least(0))
    # Steps after which an occurrence of a row counts half; the rarer a row, the more its weights decay. 0: all decay alike.
    counter_halflife: int = setting(0, at_least(0))  # rowwise_adagrad
    eps: float = setting(1e-8, POSITIVE)
    beta1: float = setting(0.9, BELOW_ONE)  # adam, rowwise_adam
    beta2: float = setting(0.999, BELOW_ONE)  # adam, rowwise_adam


@dataclass
class TableConfig:
    """The settings of one table, by its name; overrides those of the group."""

    sharding: Sharding = Sharding.auto
    compute_kernel: ComputeKernel = ComputeKernel.auto
    # Average number of ids per sample; 0 takes what the data set states.
    pooling_factor: float = setting(0.0, at_least(0))
    learning_rate: float = setting(0.0, at_least(0))  # 0: that of embedding.optimizer
    # Columns; 0 takes embedding.dim.
    dim: int = setting(0, Bound(lambda columns: columns >= 0 and columns % 4 == 0, "0, or a positive multiple of 4"))


@dataclass
class EmbeddingConfig:
    # Columns of the tables, and of the vectors that interact.
    dim: int = setting(64, multiple_of(4))
    dtype: TableDtype = TableDtype.fp32
    # Caps the rows of every table (ids are taken modulo the cap); 0 keeps the rows of the data set.
    max_rows: int = setting(0, at_least(0))
    # Rows of every table in order of the features; required where the data do not state them: criteo_npy, perhaps parquet.
    rows: list[int] = setting([], each_positive("positive numbers"))
    # Standard deviation of the initial weights; 0 means uniform in +-sqrt(1 / rows), as in the DLRM paper.
    init_std: float = setting(0.0, at_least(0))
    sharding: Sharding = Sharding.auto
    compute_kernel: ComputeKernel = ComputeKernel.auto
    # Columns of a shard for column_wise, table_column_wise and grid_shard; 0 splits over all ranks.
    shard_columns: int = 0
    optimizer: EmbeddingOptimizerConfig = field(default_factory=EmbeddingOptimizerConfig)
    # Number format of pooled embeddings; what is looked up in 16 bits is sent so, too.
    output_dtype: OutputDtype = OutputDtype.auto
    # Number format on the wire (quantized communication), forward and backward.
    forward_wire: WireDtype = WireDtype.fp32
    backward_wire: WireDtype = WireDtype.fp32
    tables: dict[str, TableConfig] = field(default_factory=dict)

    def dim_of(self, table: str) -> int:
        """Columns of a table, by its name."""
        return self.tables.get(table, TableConfig()).dim or self.dim


@dataclass
class DenseOptimizerConfig:
    kind: DenseOptimizerKind = DenseOptimizerKind.adagrad
    learning_rate: float = setting(0.01, POSITIVE)
    weight_decay: float = setting(0.0, at_least(0))
    eps: float = setting(1e-8, POSITIVE)
    momentum: float = setting(0.0, BELOW_ONE)  # sgd
    beta1: float = setting(0.9, BELOW_ONE)  # adam
    beta2: float = setting(0.999, BELOW_ONE)  # adam


@dataclass
class ScheduleConfig:
    """A factor on both learning rates: linear warm-up, then constant, then polynomial decay, then the floor."""

    warmup_steps: int = setting(0, at_least(0))
    decay_start_step: int = setting(0, at_least(0))
    decay_steps: int = setting(0, at_least(0))  # 0: no decay
    decay_power: float = setting(2.0, POSITIVE)
    floor: float = setting(0.0, between(0, 1))  # the factor after the decay


@dataclass
class TrainingConfig:
    # Training ends after this many steps.
    max_steps: int = setting(1000, at_least(1))
    # Samples of one step over all ranks.
    global_batch_size: int = setting(8192, at_least(1))
    precision: Precision = Precision.fp32
    # For model.kind=dlrm and dcnv2; takes up to a minute at the first step.
    compile: Compile = Compile.auto
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # Weights of the labels' losses, by name, for data of several labels; 1 where none is given.
    task_weights: dict[str, float] = setting({}, at_least(0))
    # Ends training as soon as an evaluation reaches this AUC, of the first label; 0 never does.
    target_auc: float = setting(0.0, between(0, 1))


@dataclass
class EvaluationConfig:
    # Steps between evaluations during training; 0 evaluates only at the end.
    every_steps: int = setting(0, at_least(0))
    split: Split = Split.validation
    global_batch_size: int = setting(65_536, at_least(1))
    # Samples of an evaluation during training; 0 takes the whole split.
    max_samples: int = setting(0, at_least(0))
    # Ends training after so many evaluations in a row without a new best AUC, of the first label; 0 never does.
    patience: int = setting(0, at_least(0))


@dataclass
class CheckpointConfig:
    # Steps between checkpoints; 0 writes one at the end only.
    every_steps: int = setting(0, at_least(0))
    keep_last: int = setting(2, at_least(1))
    # Also write a checkpoint whenever an evaluation gives a new best AUC, and keep the best one.
    keep_best: bool = True
    # Continue the run of the same name from its last checkpoint; false puts the old run aside and starts anew.
    resume: bool = True
    # If the last checkpoint is damaged: end with an error, or set it aside and go on from the last intact one. For that, the
    # checkpoint is read twice.
    on_damage: OnDamage = OnDamage.error
    # Folder of a run, such as runs/a, whose weights a new run begins with; rows of tables are matched by their values.
    warm_start: str = ""


@dataclass
class TelemetryConfig:
    # Steps between lines of metrics.jsonl and TensorBoard.
    log_every_steps: int = setting(50, at_least(1))
    # First and last step (inclusive) of a torch.profiler trace; empty takes none.
    profile_steps: list[int] = setting([])
    # Also write the course of the run to mlperf.log, in the lines of MLPerf Training.
    mlperf_log: bool = False


@dataclass
class RuntimeConfig:
    # cpu, cuda, or auto: cuda where there is one.
    device: str = setting("auto", one_of("auto", "cpu", "cuda"))
    # A rank that has given no sign of life for this many seconds ends the run on all others.
    peer_timeout_seconds: float = setting(30.0, at_least(1, "second"))


@dataclass
class Config:
    # Results go to output_dir/name.
    name: str = setting("dlrm", _FOLDER_NAME)
    output_dir: str = "runs"
    seed: int = setting(1, between(0, MAX_INT32))
    comm: Comm = Comm.baseline
    # Refuse tables that comm=fused or auto does not cover, instead of running them as comm=baseline does.
    comm_strict: bool = False
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir) / self.name
