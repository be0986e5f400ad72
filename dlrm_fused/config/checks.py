"""Checks of a whole config: the bounds of its settings, and settings that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import reduce

from dlrm_fused.config.registry import DataSource, ModelKind
from dlrm_fused.config.schema import Comm, Config, DataConfig, EmbeddingOptimizerKind, Windows
from dlrm_fused.config.setting import check_bounds, require

# Whether a setting's value goes with the others, the setting, and what is allowed.
_Check = tuple[bool, str, str]


def check_consistency(config: Config) -> None:
    """Reject values out of range and settings that contradict each other.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    check_bounds(config)
    for checks in (_run, _data, _model, _embedding, _training):
        for is_allowed, key, allowed in checks(config):
            require(is_allowed, key, _shown(reduce(getattr, key.split("."), config)), allowed)


def _shown(value: object) -> object:
    if isinstance(value, Enum):
        return value.name
    return str(value).lower() if isinstance(value, bool) else value or repr(value)


def _run(config: Config) -> Iterator[_Check]:
    means_something = not config.comm_strict or config.comm is not Comm.baseline
    yield means_something, "comm_strict", "false with comm=baseline, which covers all tables"
    key, steps, last = "telemetry.profile_steps", config.telemetry.profile_steps, config.training.max_steps
    is_range = not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1])
    yield is_range, key, "[] or [first, last] with 1 <= first <= last"
    yield not steps or steps[0] <= last, key, f"steps up to training.max_steps={last}"


def _data(config: Config) -> Iterator[_Check]:
    data, synthetic = config.data, config.data.synthetic
    if data.source in (DataSource.prepared, DataSource.parquet, DataSource.criteo_npy):
        yield bool(data.path), "data.path", f"the data set's folder, for data.source={data.source.name}"
    if data.source is not DataSource.parquet:
        allowed = "with data.source=parquet alone; other data state their labels, weights and times"
        yield data.labels == DataConfig().labels, "data.labels", allowed
        yield not data.sample_weight, "data.sample_weight", allowed
        yield not data.sample_time, "data.sample_time", allowed
    is_other = data.sample_time not in (*data.labels, data.sample_weight) or not data.sample_time
    yield is_other, "data.sample_time", "another column than labels and weights"
    has_times = data.source is DataSource.prepared or bool(data.sample_time) or data.windows is Windows.none
    allowed = "none, but with prepared data that hold times, or data.source=parquet whose column of times is data.sample_time"
    others = "data.windows=none, and with files that have no times data.sample_time=''"
    yield has_times, "data.windows", f"{allowed}; to evaluate or export a run of windows on other data, add {others}"
    for key in ("rows", "pooling"):
        values: list[int] = getattr(synthetic, key)
        fits = len(values) in (1, synthetic.tables) and all(v >= 1 for v in values)
        yield fits, f"data.synthetic.{key}", f"one positive number, or one for each of {synthetic.tables} tables"
    most, dense = most_segments(synthetic.dense_features), f"data.synthetic.dense_features={synthetic.dense_features}"
    yield 1 <= synthetic.segments <= most, "data.synthetic.segments", f"1 to {most} with {dense}"


def most_segments(dense_features: int) -> int:
    """Return how many segments dense features of synthetic data tell apart, each by a high or low mean; at most 1,024."""
    return int(2 ** min(dense_features, 10))


def _model(config: Config) -> Iterator[_Check]:
    model, dim = config.model, config.embedding.dim
    allowed = f"a last width of embedding.dim={dim}, since dense and sparse features interact"
    yield model.bottom_mlp[-1] == dim, "model.bottom_mlp", allowed
    ends_in_logit = len(model.top_mlp) >= 2 and model.top_mlp[-1] == 1
    yield ends_in_logit, "model.top_mlp", "two or more widths, the last one 1: the logit"
    if model.kind.reads_histories:
        yield from _history_encoder(config)
    if model.experts.count:
        yield from _experts(config)


def _experts(config: Config) -> Iterator[_Check]:
    model, experts = config.model, config.model.experts
    with_count = f"model.experts.count={experts.count}"
    has_feed_forward = model.kind is not ModelKind.hstu
    yield has_feed_forward, "model.experts.count", "0 with model.kind=hstu, whose blocks have no feed-forward layer"
    yield 1 <= experts.top_k <= experts.count, "model.experts.top_k", f"1 to {with_count}"
    allowed = f"0, or a divisor of {with_count}, since ranks take whole experts"
    yield _is_0_or_divisor(experts.parallel, experts.count), "model.experts.parallel", allowed
    if model.kind is ModelKind.transformer:
        yield model.d_model % 8 == 0, "model.d_model", f"a multiple of 8 with {with_count}"
        yield model.tensor_parallel == 1, "model.tensor_parallel", f"1 with {with_count}"
    else:
        yield model.top_mlp[0] % 8 == 0, "model.top_mlp", f"a first width that is a multiple of 8 with {with_count}"


def _is_0_or_divisor(value: int, total: int) -> bool:
    return value == 0 or (value > 0 and total % value == 0)


def _history_encoder(config: Config) -> Iterator[_Check]:
    model = config.model
    fits = model.d_model >= 1 and model.d_model % model.heads == 0
    yield fits, "model.d_model", f"a positive multiple of model.heads={model.heads}"
    allowed = f"0, or a divisor of model.heads={model.heads}, since ranks take whole heads"
    yield _is_0_or_divisor(model.tensor_parallel, model.heads), "model.tensor_parallel", allowed
    source, key = config.data.source, "data.synthetic.history_length"
    has_tokens = source in (DataSource.prepared, DataSource.synthetic)
    with_kind = f"with model.kind={model.kind.name}"
    yield has_tokens, "data.source", f"prepared, synthetic {with_kind}"
    has_histories = config.data.synthetic.history_length >= 1 or source is not DataSource.synthetic
    yield has_histories, key, f"1 or more {with_kind}"


def _embedding(config: Config) -> Iterator[_Check]:
    embedding, columns, optimizer = config.embedding, config.embedding.shard_columns, config.embedding.optimizer
    dims = {f"embedding.tables.{name}.dim": table.dim for name, table in embedding.tables.items() if table.dim}
    for key, dim in {"embedding.dim": embedding.dim, **dims}.items():
        fits = _is_0_or_divisor(columns, dim) and columns % 4 == 0
        yield fits, "embedding.shard_columns", f"0, or a multiple of 4 that divides {key}={dim}"
    if config.data.source is DataSource.criteo_npy:
        yield bool(embedding.rows), "embedding.rows", "the rows of every table, for data.source=criteo_npy"
    decays = optimizer.kind not in (EmbeddingOptimizerKind.sgd, EmbeddingOptimizerKind.adagrad)
    allowed = f"0 with embedding.optimizer.kind={optimizer.kind.name}, whose kernel has no weight decay"
    yield decays or optimizer.weight_decay == 0, "embedding.optimizer.weight_decay", allowed
    if optimizer.counter_halflife:
        yield from _counters(config)


def _counters(config: Config) -> Iterator[_Check]:
    optimizer, prefix = config.embedding.optimizer, "embedding.optimizer"
    counts = optimizer.kind is EmbeddingOptimizerKind.rowwise_adagrad
    allowed = f"0 with {prefix}.kind={optimizer.kind.name}; rowwise_adagrad counts how often rows occur"
    yield counts, f"{prefix}.counter_halflife", allowed
    rate = max([optimizer.learning_rate, *(table.learning_rate for table in config.embedding.tables.values())])
    most = 1 / (rate * optimizer.counter_halflife)
    allowed = (
        f"above 0 and up to 1 / (learning_rate={rate:g} * {prefix}.counter_halflife) = {most:g}, by which a row decays "
        "to zero when it occurs for the first time"
    )
    yield 0 < optimizer.weight_decay <= most, f"{prefix}.weight_decay", allowed


def _training(config: Config) -> Iterator[_Check]:
    schedule, every, patience = config.training.schedule, config.evaluation.every_steps, config.evaluation.patience
    allowed = "1 or more, since training.target_auc is checked by evaluations"
    yield not config.training.target_auc or every > 0, "evaluation.every_steps", allowed
    yield not patience or every > 0, "evaluation.every_steps", f"1 or more with evaluation.patience={patience}"
    is_evaluated = every > 0 or config.data.windows is not Windows.none
    allowed = "1 or more with telemetry.mlperf_log=true, which tells of evaluations"
    yield is_evaluated or not config.telemetry.mlperf_log, "evaluation.every_steps", allowed
    allowed = f"true with evaluation.patience={patience}, since the best checkpoint is the one to keep then"
    yield not patience or config.checkpoint.keep_best, "checkpoint.keep_best", allowed
    starts_later = not schedule.decay_steps or schedule.decay_start_step >= schedule.warmup_steps
    allowed = f"training.schedule.warmup_steps={schedule.warmup_steps} or more"
    yield starts_later, "training.schedule.decay_start_step", allowed
