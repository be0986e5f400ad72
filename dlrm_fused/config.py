"""Every setting of a run: its name, type, unit, default and what is allowed.

A run is described by a YAML file in ``configs/`` and ``key=value`` overrides on the command line; both are checked against
:class:`Config`. Enumerations are written by their names: ``embedding.sharding=row_wise``.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from dlrm_fused.errors import ConfigError


class Comm(Enum):
    """How the collectives of the embedding stage, of tensor-parallel layers and of experts run."""

    baseline = "baseline"  # TorchRec's own sharding; products and collectives in turn
    fused = "fused"  # computation and communication in one operator, where the plan allows it
    auto = "auto"  # the faster of the two for each sharding type and for the layers, measured at the start


class DataSource(Enum):
    """Where samples come from."""

    prepared = "prepared"  # a folder that data/prepare.py wrote
    criteo_npy = "criteo_npy"  # day_*_{dense,sparse,labels}.npy of TorchRec's or MLPerf's scripts
    synthetic = "synthetic"  # generated on the fly


class ModelKind(Enum):
    dlrm = "dlrm"
    dcnv2 = "dcnv2"
    transformer = "transformer"  # DLRM with a Transformer over the user's history


class Gate(Enum):
    """What the weights of a token's experts are: their probabilities or scores, divided by their sum."""

    softmax = "softmax"
    sigmoid = "sigmoid"


class Sharding(Enum):
    """How embedding tables are spread over ranks; ``auto`` lets the planner choose for each table."""

    auto = "auto"
    data_parallel = "data_parallel"
    table_wise = "table_wise"
    column_wise = "column_wise"
    row_wise = "row_wise"
    table_row_wise = "table_row_wise"
    table_column_wise = "table_column_wise"
    grid_shard = "grid_shard"


class ComputeKernel(Enum):
    """Where embedding weights live.

    ``fused``, which ``auto`` stands for: in the memory of the device. The others: in host memory that the GPU reads, with or
    without a cache in its own.
    """

    auto = "auto"
    fused = "fused"
    fused_uvm = "fused_uvm"
    fused_uvm_caching = "fused_uvm_caching"


class TableDtype(Enum):
    fp32 = "fp32"
    fp16 = "fp16"


class WireDtype(Enum):
    """The number format in which pooled embeddings, or their gradients, cross the network."""

    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class Precision(Enum):
    """Arithmetic of the dense layers: ``tf32`` and ``bf16`` (autocast) keep fp32 master weights."""

    fp32 = "fp32"
    tf32 = "tf32"
    bf16 = "bf16"


class EmbeddingOptimizerKind(Enum):
    rowwise_adagrad = "rowwise_adagrad"
    adagrad = "adagrad"
    sgd = "sgd"
    adam = "adam"


class DenseOptimizerKind(Enum):
    adagrad = "adagrad"
    sgd = "sgd"
    adam = "adam"


class Split(Enum):
    train = "train"
    validation = "validation"
    test = "test"


@dataclass
class SyntheticConfig:
    """Generated data with a planted signal; used with ``data.source=synthetic``."""

    dense_features: int = 13
    # One entry per table, or a single entry that holds for all `tables`.
    tables: int = 26
    rows: list[int] = field(default_factory=lambda: [100_000])
    # Ids per sample and table: fixed, or uniform in [1, pooling] when jagged.
    pooling: list[int] = field(default_factory=lambda: [1])
    jagged: bool = False
    # Popularity of ids: probability of the k-th most popular ~ 1 / k^zipf_exponent; 0 is uniform.
    zipf_exponent: float = 1.05
    train_samples: int = 1_000_000
    validation_samples: int = 100_000
    test_samples: int = 100_000
    # Standard deviation of the planted logit: larger is easier to predict.
    signal: float = 2.0
    # Groups of samples, told by their dense features, whose labels follow different rules; 1 for one rule.
    segments: int = 1
    # Past interactions of each sample: exactly so many, or uniform in [0, history_length] when jagged; 0 for no tokens.
    history_length: int = 0
    # Rows of the table of their items.
    history_items: int = 100_000


@dataclass
class DataConfig:
    source: DataSource = DataSource.prepared
    # Folder of the data set (prepared, criteo_npy).
    path: str = ""
    # Rows that are shuffled together; 0 keeps the order of the files.
    shuffle_window_rows: int = 16_777_216
    # Threads that assemble batches, and batches each rank holds ready.
    workers: int = 2
    prefetch_batches: int = 4
    synthetic: SyntheticConfig = field(default_factory=SyntheticConfig)


@dataclass
class ExpertsConfig:
    """A Mixture of Experts: in the top of dlrm and dcnv2, or for the feed-forward layers of the Transformer's blocks."""

    # 0: none.
    count: int = 0
    # Experts of a token.
    top_k: int = 2
    # Width of an expert's hidden layer, and of that of an expert that all tokens have; 0: no such expert.
    hidden: int = 256
    shared_hidden: int = 0
    gate: Gate = Gate.softmax
    # Weights of the auxiliary losses.
    balance_loss: float = 0.01
    z_loss: float = 0.001
    # Consecutive ranks that the experts are spread over; 0 takes all ranks.
    parallel: int = 0


@dataclass
class ModelConfig:
    kind: ModelKind = ModelKind.dlrm
    # Widths of the layers; the bottom one must end with embedding.dim, the top one with 1.
    bottom_mlp: list[int] = field(default_factory=lambda: [512, 256, 64])
    top_mlp: list[int] = field(default_factory=lambda: [512, 256, 1])
    # DCNv2 only: number of low-rank cross layers and their rank.
    cross_layers: int = 3
    cross_rank: int = 512
    # Transformer only: its width, its blocks, and the attention heads of a block.
    d_model: int = 64
    layers: int = 2
    heads: int = 4
    # Transformer only: consecutive ranks of a host that share the weights of its blocks; 0 takes all ranks of the host.
    tensor_parallel: int = 0
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)


@dataclass
class EmbeddingOptimizerConfig:
    """The optimizer that updates embedding rows inside the backward pass."""

    kind: EmbeddingOptimizerKind = EmbeddingOptimizerKind.rowwise_adagrad
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    eps: float = 1e-8
    beta1: float = 0.9  # adam
    beta2: float = 0.999  # adam


@dataclass
class TableConfig:
    """What the planner is told about one table, by its name; overrides the settings of the group."""

    sharding: Sharding = Sharding.auto
    compute_kernel: ComputeKernel = ComputeKernel.auto
    # Average number of ids per sample; 0 takes what the data set states.
    pooling_factor: float = 0.0


@dataclass
class EmbeddingConfig:
    dim: int = 64
    dtype: TableDtype = TableDtype.fp32
    # Caps the rows of every table (ids are taken modulo the cap); 0 keeps the rows of the data set.
    max_rows: int = 0
    # Rows of every table in order of the features; required for criteo_npy, which does not state them.
    rows: list[int] = field(default_factory=list)
    # Standard deviation of the initial weights; 0 means uniform in +-sqrt(1 / rows), as in the DLRM paper.
    init_std: float = 0.0
    sharding: Sharding = Sharding.auto
    compute_kernel: ComputeKernel = ComputeKernel.auto
    # Columns of a shard for column_wise, table_column_wise and grid_shard; 0 splits over all ranks.
    shard_columns: int = 0
    optimizer: EmbeddingOptimizerConfig = field(default_factory=EmbeddingOptimizerConfig)
    # Number format on the wire (quantized communication), forward and backward.
    forward_wire: WireDtype = WireDtype.fp32
    backward_wire: WireDtype = WireDtype.fp32
    tables: dict[str, TableConfig] = field(default_factory=dict)


@dataclass
class DenseOptimizerConfig:
    kind: DenseOptimizerKind = DenseOptimizerKind.adagrad
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    eps: float = 1e-8
    momentum: float = 0.0  # sgd
    beta1: float = 0.9  # adam
    beta2: float = 0.999  # adam


@dataclass
class ScheduleConfig:
    """A factor on both learning rates: linear warm-up, then constant, then polynomial decay, then the floor."""

    warmup_steps: int = 0
    decay_start_step: int = 0
    decay_steps: int = 0  # 0: no decay
    decay_power: float = 2.0
    floor: float = 0.0  # the factor after the decay


@dataclass
class TrainingConfig:
    # Training ends after this many steps.
    max_steps: int = 1000
    # Samples of one step over all ranks.
    global_batch_size: int = 8192
    precision: Precision = Precision.fp32
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # Ends training as soon as an evaluation reaches this AUC; 0 never does.
    target_auc: float = 0.0


@dataclass
class EvaluationConfig:
    # Steps between evaluations during training; 0 evaluates only at the end.
    every_steps: int = 0
    split: Split = Split.validation
    global_batch_size: int = 65_536
    # Samples of an evaluation during training; 0 takes the whole split.
    max_samples: int = 0


@dataclass
class CheckpointConfig:
    # Steps between checkpoints; 0 writes one at the end only.
    every_steps: int = 0
    keep_last: int = 2
    # Also write a checkpoint whenever an evaluation gives a new best AUC, and keep the best one.
    keep_best: bool = True
    # Continue the run of the same name from its last checkpoint; false puts the old run aside and starts anew.
    resume: bool = True


@dataclass
class TelemetryConfig:
    # Steps between lines of metrics.jsonl and TensorBoard.
    log_every_steps: int = 50
    # First and last step (inclusive) of a torch.profiler trace; empty takes none.
    profile_steps: list[int] = field(default_factory=list)


@dataclass
class RuntimeConfig:
    # cpu, cuda, or auto: cuda where there is one.
    device: str = "auto"
    # A rank that has given no sign of life for this many seconds ends the run on all others.
    peer_timeout_seconds: float = 30.0


@dataclass
class Config:
    # Results go to output_dir/name.
    name: str = "dlrm"
    output_dir: str = "runs"
    seed: int = 1
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


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``key=value`` overrides, and check the result.

    Raises:
        ConfigError: one line that names the key, its value, what is allowed and, for an unknown key, the nearest one.
    """
    config = cast(DictConfig, OmegaConf.structured(Config))
    config = _merge(config, _read_yaml(Path(path)), origin=str(path))
    for override in overrides:
        config = _merge(config, _parse_override(override), origin="the command line")
    try:
        typed = cast(Config, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:  # a ${reference} that leads nowhere
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from None
    check_consistency(typed)
    return typed


def to_yaml(config: Config) -> str:
    """The resolved config, every setting included, as YAML that :func:`load_config` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def flatten(config: Config) -> dict[str, object]:
    """Every setting by its dotted key, enumerations by name; for comparing two configs."""
    container = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return dict(_flatten(cast(dict[str, Any], container), ""))


def _flatten(tree: dict[str, Any], prefix: str) -> Iterable[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _read_yaml(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        known = sorted(str(p) for p in Path("configs").glob("*.yaml"))
        raise ConfigError(f"config {path}: no such file; there are: {', '.join(known) or 'none in configs/'}") from None
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config {path}: not readable as YAML: {_yaml_reason(error)}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"config {path}: expected a mapping of settings, such as name: my_run, found a list")
    return loaded


def _yaml_reason(error: Exception) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {error.problem}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


def _parse_override(override: str) -> DictConfig:
    key, separator, _ = override.partition("=")
    if not separator or not re.fullmatch(r"[A-Za-z_][\w.\-]*", key):
        raise ConfigError(f"override {override!r}: expected key=value, such as training.max_steps=100")
    try:
        return OmegaConf.from_dotlist([override])
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"override {override!r}: {_first_line(error)}") from None


def _merge(config: DictConfig, update: DictConfig, origin: str) -> DictConfig:
    unknown = _first_unknown_key(update, Config, "")
    if unknown:
        nearest = difflib.get_close_matches(unknown, _candidates(unknown), n=1, cutoff=0.0)[0]
        raise ConfigError(f"{unknown}: unknown setting (from {origin}); the nearest existing one is {nearest}")
    for group in _keys_of_groups(Config, ""):
        value = OmegaConf.select(update, group, throw_on_resolution_failure=False)
        if not (value is None or isinstance(value, DictConfig)):
            raise ConfigError(f"{group}={value}: allowed: {_allowed(group)} (from {origin})")
    try:
        return cast(DictConfig, OmegaConf.merge(config, update))
    except (OmegaConfBaseException, TypeError) as error:
        key = getattr(error, "full_key", None)
        if not key:
            raise ConfigError(f"{' '.join(OmegaConf.to_yaml(update).split())}: {_first_line(error)} (from {origin})") from None
        value = OmegaConf.select(update, key)
        shown = "null" if value is None else value
        raise ConfigError(f"{key}={shown}: allowed: {_allowed(key)} (from {origin})") from None


def _candidates(unknown: str) -> list[str]:
    """Settings that an unknown key may have been meant for, those of single tables included."""
    group, _, table = unknown.rpartition(".")[0].rpartition(".")
    if group != "embedding.tables":
        return known_keys()
    return [f"{group}.{table}.{f.name}" for f in fields(TableConfig)]


def _first_unknown_key(update: Any, schema: type, prefix: str) -> str | None:
    types = {f.name: _field_type(schema, f.name) for f in fields(schema)}
    for key in update:
        if key not in types:
            return f"{prefix}{key}"
        if is_dataclass(types[key]) and isinstance(update._get_node(key), DictConfig):
            unknown = _first_unknown_key(update._get_node(key), cast(type, types[key]), f"{prefix}{key}.")
            if unknown:
                return unknown
        elif key == "tables" and isinstance(update._get_node(key), DictConfig) and schema is EmbeddingConfig:
            for table, settings in update._get_node(key).items():
                if isinstance(settings, DictConfig):
                    unknown = _first_unknown_key(settings, TableConfig, f"{prefix}tables.{table}.")
                    if unknown:
                        return unknown
    return None


def known_keys() -> list[str]:
    """Dotted names of all settings, in the order of the schema."""
    return list(_known_keys(Config, ""))


def _known_keys(schema: type, prefix: str) -> Iterable[str]:
    for f in fields(schema):
        kind = _field_type(schema, f.name)
        if is_dataclass(kind):
            yield from _known_keys(cast(type, kind), f"{prefix}{f.name}.")
        else:
            yield f"{prefix}{f.name}"


def _field_type(schema: type, name: str) -> Any:
    annotation = next(f.type for f in fields(schema) if f.name == name)
    return globals().get(str(annotation), annotation)


def _keys_of_groups(schema: type, prefix: str) -> Iterable[str]:
    for f in fields(schema):
        kind = _field_type(schema, f.name)
        if is_dataclass(kind):
            yield f"{prefix}{f.name}"
            yield from _keys_of_groups(cast(type, kind), f"{prefix}{f.name}.")


_IN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "list[int]": "a list of whole numbers, such as [64,32]",
    "dict[str, TableConfig]": "a group of settings for each table, by its name",
}


def _allowed(key: str) -> str:
    """What a setting may be, in words."""
    schema: Any = Config
    for part in re.sub(r"\[.*", "", key).split("."):
        schema = TableConfig if schema == "dict[str, TableConfig]" else _field_type(cast(type, schema), part)
    if isinstance(schema, type) and issubclass(schema, Enum):
        return ", ".join(member.name for member in schema)
    if is_dataclass(schema):
        return "a group of settings: " + ", ".join(f.name for f in fields(schema))
    return _IN_WORDS[str(schema)]


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def check_consistency(config: Config) -> None:
    """Reject values out of range and settings that contradict each other.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    for key, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: allowed: a finite number")
    _check_run(config)
    _check_data(config)
    _check_model(config)
    _check_embedding(config)
    _check_training(config)


def _require(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={value}: allowed: {allowed}")


def _check_run(config: Config) -> None:
    strict_means_something = not config.comm_strict or config.comm is not Comm.baseline
    _require(strict_means_something, "comm_strict", "true", "false with comm=baseline, which covers all tables")
    _require(
        re.fullmatch(r"[\w.\-]+", config.name) is not None and config.name not in (".", ".."),
        "name",
        config.name,
        "letters, digits, '.', '_' and '-'",
    )
    _require(0 <= config.seed < 2**31, "seed", config.seed, "0 to 2147483647")
    _require(config.runtime.device in ("auto", "cpu", "cuda"), "runtime.device", config.runtime.device, "auto, cpu, cuda")
    timeout = config.runtime.peer_timeout_seconds
    _require(timeout >= 1, "runtime.peer_timeout_seconds", timeout, "1 second or more")
    _require(config.checkpoint.every_steps >= 0, "checkpoint.every_steps", config.checkpoint.every_steps, "0 or more")
    _require(config.checkpoint.keep_last >= 1, "checkpoint.keep_last", config.checkpoint.keep_last, "1 or more")
    every = config.telemetry.log_every_steps
    _require(every >= 1, "telemetry.log_every_steps", every, "1 or more")
    steps = config.telemetry.profile_steps
    valid = not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1])
    _require(valid, "telemetry.profile_steps", steps, "[] or [first, last] with 1 <= first <= last")
    last = config.training.max_steps
    _require(not steps or steps[0] <= last, "telemetry.profile_steps", steps, f"steps up to training.max_steps={last}")


def _check_data(config: Config) -> None:
    data, synthetic = config.data, config.data.synthetic
    if data.source is not DataSource.synthetic:
        _require(bool(data.path), "data.path", repr(data.path), f"the data set's folder, for data.source={data.source.name}")
    _require(data.shuffle_window_rows >= 0, "data.shuffle_window_rows", data.shuffle_window_rows, "0 or more")
    _require(data.workers >= 1, "data.workers", data.workers, "1 or more")
    _require(data.prefetch_batches >= 1, "data.prefetch_batches", data.prefetch_batches, "1 or more")
    _require(synthetic.tables >= 1, "data.synthetic.tables", synthetic.tables, "1 or more")
    _require(synthetic.dense_features >= 1, "data.synthetic.dense_features", synthetic.dense_features, "1 or more")
    for key in ("rows", "pooling"):
        values: list[int] = getattr(synthetic, key)
        valid = len(values) in (1, synthetic.tables) and all(v >= 1 for v in values)
        _require(valid, f"data.synthetic.{key}", values, f"one positive number, or one for each of {synthetic.tables} tables")
    for key in ("train_samples", "validation_samples", "test_samples"):
        _require(getattr(synthetic, key) >= 1, f"data.synthetic.{key}", getattr(synthetic, key), "1 or more")
    _require(synthetic.zipf_exponent >= 0, "data.synthetic.zipf_exponent", synthetic.zipf_exponent, "0 or more")
    _require(synthetic.signal >= 0, "data.synthetic.signal", synthetic.signal, "0 or more")
    most, dense = most_segments(synthetic.dense_features), f"data.synthetic.dense_features={synthetic.dense_features}"
    _require(1 <= synthetic.segments <= most, "data.synthetic.segments", synthetic.segments, f"1 to {most} with {dense}")
    _require(synthetic.history_length >= 0, "data.synthetic.history_length", synthetic.history_length, "0 or more")
    _require(1 <= synthetic.history_items < 2**31, "data.synthetic.history_items", synthetic.history_items, "1 to 2147483647")


def most_segments(dense_features: int) -> int:
    """So many segments do that many features of synthetic data tell apart, each by a high or a low mean; 1,024 at most."""
    return int(2 ** min(dense_features, 10))


def _check_model(config: Config) -> None:
    model, dim = config.model, config.embedding.dim
    for key, widths in (("bottom_mlp", model.bottom_mlp), ("top_mlp", model.top_mlp)):
        _require(bool(widths) and all(w >= 1 for w in widths), f"model.{key}", widths, "one or more positive widths")
    _require(
        model.bottom_mlp[-1] == dim,
        "model.bottom_mlp",
        model.bottom_mlp,
        f"a last width of embedding.dim={dim}, since dense and sparse features interact",
    )
    _require(
        len(model.top_mlp) >= 2 and model.top_mlp[-1] == 1,
        "model.top_mlp",
        model.top_mlp,
        "two or more widths, the last one 1: the logit",
    )
    if model.kind is ModelKind.dcnv2:
        _require(model.cross_layers >= 1, "model.cross_layers", model.cross_layers, "1 or more")
        _require(model.cross_rank >= 1, "model.cross_rank", model.cross_rank, "1 or more")
    if model.kind is ModelKind.transformer:
        _check_transformer(config)
    _require(model.experts.count >= 0, "model.experts.count", model.experts.count, "0 or more")
    if model.experts.count:
        _check_experts(model)


def _check_experts(model: ModelConfig) -> None:
    experts, prefix = model.experts, "model.experts"
    _require(1 <= experts.top_k <= experts.count, f"{prefix}.top_k", experts.top_k, f"1 to {prefix}.count={experts.count}")
    _require(experts.hidden >= 8 and experts.hidden % 8 == 0, f"{prefix}.hidden", experts.hidden, "a positive multiple of 8")
    _require(experts.shared_hidden >= 0, f"{prefix}.shared_hidden", experts.shared_hidden, "0 or more")
    for key in ("balance_loss", "z_loss"):
        _require(getattr(experts, key) >= 0, f"{prefix}.{key}", getattr(experts, key), "0 or more")
    _require(
        experts.parallel >= 0 and (experts.parallel == 0 or experts.count % experts.parallel == 0),
        f"{prefix}.parallel",
        experts.parallel,
        f"0, or a divisor of {prefix}.count={experts.count}, since ranks take whole experts",
    )
    with_experts = f"with {prefix}.count={experts.count}"
    if model.kind is ModelKind.transformer:
        _require(model.d_model % 8 == 0, "model.d_model", model.d_model, f"a multiple of 8 {with_experts}")
        _require(model.tensor_parallel == 1, "model.tensor_parallel", model.tensor_parallel, f"1 {with_experts}")
    else:
        first = model.top_mlp[0]
        _require(first % 8 == 0, "model.top_mlp", model.top_mlp, f"a first width that is a multiple of 8 {with_experts}")


def _check_transformer(config: Config) -> None:
    model = config.model
    _require(model.layers >= 1, "model.layers", model.layers, "1 or more")
    _require(model.heads >= 1, "model.heads", model.heads, "1 or more")
    _require(
        model.d_model >= 1 and model.d_model % model.heads == 0,
        "model.d_model",
        model.d_model,
        f"a positive multiple of model.heads={model.heads}",
    )
    _require(
        model.tensor_parallel >= 0 and (model.tensor_parallel == 0 or model.heads % model.tensor_parallel == 0),
        "model.tensor_parallel",
        model.tensor_parallel,
        f"0, or a divisor of model.heads={model.heads}, since ranks take whole heads",
    )
    source, history_length = config.data.source, config.data.synthetic.history_length
    _require(source is not DataSource.criteo_npy, "data.source", source.name, "prepared, synthetic with model.kind=transformer")
    _require(
        history_length >= 1 or source is not DataSource.synthetic,
        "data.synthetic.history_length",
        history_length,
        "1 or more with model.kind=transformer",
    )


def _check_embedding(config: Config) -> None:
    embedding = config.embedding
    _require(embedding.dim >= 4 and embedding.dim % 4 == 0, "embedding.dim", embedding.dim, "a positive multiple of 4")
    _require(embedding.max_rows >= 0, "embedding.max_rows", embedding.max_rows, "0 or more")
    _require(all(r >= 1 for r in embedding.rows), "embedding.rows", embedding.rows, "positive numbers")
    _require(embedding.init_std >= 0, "embedding.init_std", embedding.init_std, "0 or more")
    columns = embedding.shard_columns
    _require(
        columns >= 0 and columns % 4 == 0 and (columns == 0 or embedding.dim % columns == 0),
        "embedding.shard_columns",
        columns,
        f"0, or a multiple of 4 that divides embedding.dim={embedding.dim}",
    )
    if config.data.source is DataSource.criteo_npy:
        _require(
            bool(embedding.rows),
            "embedding.rows",
            embedding.rows,
            "the rows of every table, for data.source=criteo_npy",
        )
    for name, table in embedding.tables.items():
        _require(table.pooling_factor >= 0, f"embedding.tables.{name}.pooling_factor", table.pooling_factor, "0 or more")
    optimizer = embedding.optimizer
    _check_optimizer("embedding.optimizer", optimizer)
    without_decay = (EmbeddingOptimizerKind.sgd, EmbeddingOptimizerKind.adagrad)
    _require(
        optimizer.weight_decay == 0 or optimizer.kind not in without_decay,
        "embedding.optimizer.weight_decay",
        optimizer.weight_decay,
        f"0 with embedding.optimizer.kind={optimizer.kind.name}, whose kernel has no weight decay",
    )


def _check_optimizer(prefix: str, optimizer: EmbeddingOptimizerConfig | DenseOptimizerConfig) -> None:
    _require(optimizer.learning_rate > 0, f"{prefix}.learning_rate", optimizer.learning_rate, "a positive number")
    _require(optimizer.weight_decay >= 0, f"{prefix}.weight_decay", optimizer.weight_decay, "0 or more")
    _require(optimizer.eps > 0, f"{prefix}.eps", optimizer.eps, "a positive number")
    for key in ("beta1", "beta2"):
        _require(0 <= getattr(optimizer, key) < 1, f"{prefix}.{key}", getattr(optimizer, key), "0 to below 1")


def _check_training(config: Config) -> None:
    training, schedule = config.training, config.training.schedule
    _require(training.max_steps >= 1, "training.max_steps", training.max_steps, "1 or more")
    _require(training.global_batch_size >= 1, "training.global_batch_size", training.global_batch_size, "1 or more")
    _require(0 <= training.target_auc <= 1, "training.target_auc", training.target_auc, "0 to 1")
    if training.target_auc:
        _require(
            config.evaluation.every_steps > 0,
            "evaluation.every_steps",
            config.evaluation.every_steps,
            "1 or more, since training.target_auc is checked by evaluations",
        )
    _check_optimizer("training.dense_optimizer", training.dense_optimizer)
    momentum = training.dense_optimizer.momentum
    _require(0 <= momentum < 1, "training.dense_optimizer.momentum", momentum, "0 to below 1")
    for key in ("warmup_steps", "decay_start_step", "decay_steps"):
        _require(getattr(schedule, key) >= 0, f"training.schedule.{key}", getattr(schedule, key), "0 or more")
    if schedule.decay_steps:
        _require(
            schedule.decay_start_step >= schedule.warmup_steps,
            "training.schedule.decay_start_step",
            schedule.decay_start_step,
            f"training.schedule.warmup_steps={schedule.warmup_steps} or more",
        )
    _require(schedule.decay_power > 0, "training.schedule.decay_power", schedule.decay_power, "a positive number")
    _require(0 <= schedule.floor <= 1, "training.schedule.floor", schedule.floor, "0 to 1")
    evaluation = config.evaluation
    _require(evaluation.every_steps >= 0, "evaluation.every_steps", evaluation.every_steps, "0 or more")
    _require(evaluation.global_batch_size >= 1, "evaluation.global_batch_size", evaluation.global_batch_size, "1 or more")
    _require(evaluation.max_samples >= 0, "evaluation.max_samples", evaluation.max_samples, "0 or more")
