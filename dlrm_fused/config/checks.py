"""Checks of a whole config: the bounds of its settings, and settings that contradict each other."""

from __future__ import annotations

from dlrm_fused.config.registry import DataSource, ModelKind
from dlrm_fused.config.schema import (
    CacheHints,
    Comm,
    Config,
    DataConfig,
    EmbeddingOptimizerConfig,
    EmbeddingOptimizerKind,
    ModelConfig,
)
from dlrm_fused.config.setting import check_bounds, require


def check_consistency(config: Config) -> None:
    """Reject values out of range and settings that contradict each other.

    Raises:
        ConfigError: names the key, its value and what is allowed.
    """
    check_bounds(config)
    _check_run(config)
    _check_data(config)
    _check_model(config)
    _check_embedding(config)
    _check_training(config)


def _check_run(config: Config) -> None:
    strict_means_something = not config.comm_strict or config.comm is not Comm.baseline
    require(strict_means_something, "comm_strict", "true", "false with comm=baseline, which covers all tables")
    steps, last = config.telemetry.profile_steps, config.training.max_steps
    valid = not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1])
    require(valid, "telemetry.profile_steps", steps, "[] or [first, last] with 1 <= first <= last")
    require(not steps or steps[0] <= last, "telemetry.profile_steps", steps, f"steps up to training.max_steps={last}")


def _check_data(config: Config) -> None:
    data, synthetic = config.data, config.data.synthetic
    if data.source in (DataSource.prepared, DataSource.parquet, DataSource.criteo_npy):
        require(bool(data.path), "data.path", repr(data.path), f"the data set's folder, for data.source={data.source.name}")
    if data.source is not DataSource.parquet:
        words = "with data.source=parquet alone; other data state their labels and weights"
        require(data.labels == DataConfig().labels, "data.labels", data.labels, words)
        require(not data.sample_weight, "data.sample_weight", data.sample_weight, words)
    for key in ("rows", "pooling"):
        values: list[int] = getattr(synthetic, key)
        valid = len(values) in (1, synthetic.tables) and all(v >= 1 for v in values)
        require(valid, f"data.synthetic.{key}", values, f"one positive number, or one for each of {synthetic.tables} tables")
    most, dense = most_segments(synthetic.dense_features), f"data.synthetic.dense_features={synthetic.dense_features}"
    require(1 <= synthetic.segments <= most, "data.synthetic.segments", synthetic.segments, f"1 to {most} with {dense}")


def most_segments(dense_features: int) -> int:
    """Return how many segments dense features of synthetic data tell apart, each by a high or low mean; at most 1,024."""
    return int(2 ** min(dense_features, 10))


def _check_model(config: Config) -> None:
    model, dim = config.model, config.embedding.dim
    require(
        model.bottom_mlp[-1] == dim,
        "model.bottom_mlp",
        model.bottom_mlp,
        f"a last width of embedding.dim={dim}, since dense and sparse features interact",
    )
    require(
        len(model.top_mlp) >= 2 and model.top_mlp[-1] == 1,
        "model.top_mlp",
        model.top_mlp,
        "two or more widths, the last one 1: the logit",
    )
    if model.kind is ModelKind.transformer:
        _check_transformer(config)
    if model.experts.count:
        _check_experts(model)


def _check_experts(model: ModelConfig) -> None:
    experts, prefix = model.experts, "model.experts"
    require(1 <= experts.top_k <= experts.count, f"{prefix}.top_k", experts.top_k, f"1 to {prefix}.count={experts.count}")
    require(
        experts.parallel >= 0 and (experts.parallel == 0 or experts.count % experts.parallel == 0),
        f"{prefix}.parallel",
        experts.parallel,
        f"0, or a divisor of {prefix}.count={experts.count}, since ranks take whole experts",
    )
    with_experts = f"with {prefix}.count={experts.count}"
    if model.kind is ModelKind.transformer:
        require(model.d_model % 8 == 0, "model.d_model", model.d_model, f"a multiple of 8 {with_experts}")
        require(model.tensor_parallel == 1, "model.tensor_parallel", model.tensor_parallel, f"1 {with_experts}")
    else:
        first = model.top_mlp[0]
        require(first % 8 == 0, "model.top_mlp", model.top_mlp, f"a first width that is a multiple of 8 {with_experts}")


def _check_transformer(config: Config) -> None:
    model = config.model
    require(
        model.d_model >= 1 and model.d_model % model.heads == 0,
        "model.d_model",
        model.d_model,
        f"a positive multiple of model.heads={model.heads}",
    )
    require(
        model.tensor_parallel >= 0 and (model.tensor_parallel == 0 or model.heads % model.tensor_parallel == 0),
        "model.tensor_parallel",
        model.tensor_parallel,
        f"0, or a divisor of model.heads={model.heads}, since ranks take whole heads",
    )
    source, history_length = config.data.source, config.data.synthetic.history_length
    has_tokens = source in (DataSource.prepared, DataSource.synthetic)
    require(has_tokens, "data.source", source.name, "prepared, synthetic with model.kind=transformer")
    require(
        history_length >= 1 or source is not DataSource.synthetic,
        "data.synthetic.history_length",
        history_length,
        "1 or more with model.kind=transformer",
    )


def _check_embedding(config: Config) -> None:
    embedding, columns = config.embedding, config.embedding.shard_columns
    dims = {f"embedding.tables.{name}.dim": table.dim for name, table in embedding.tables.items() if table.dim}
    for key, dim in {"embedding.dim": embedding.dim, **dims}.items():
        require(
            columns >= 0 and columns % 4 == 0 and (columns == 0 or dim % columns == 0),
            "embedding.shard_columns",
            columns,
            f"0, or a multiple of 4 that divides {key}={dim}",
        )
    is_selected = embedding.cache_hints is CacheHints.selected
    without = "default with comm=baseline, whose kernels take no hints"
    require(not is_selected or config.comm is not Comm.baseline, "embedding.cache_hints", embedding.cache_hints.name, without)
    if config.data.source is DataSource.criteo_npy:
        require(bool(embedding.rows), "embedding.rows", embedding.rows, "the rows of every table, for data.source=criteo_npy")
    optimizer = embedding.optimizer
    without_decay = (EmbeddingOptimizerKind.sgd, EmbeddingOptimizerKind.adagrad)
    require(
        optimizer.weight_decay == 0 or optimizer.kind not in without_decay,
        "embedding.optimizer.weight_decay",
        optimizer.weight_decay,
        f"0 with embedding.optimizer.kind={optimizer.kind.name}, whose kernel has no weight decay",
    )
    if optimizer.counter_halflife:
        _check_counters(optimizer, max([optimizer.learning_rate, *(t.learning_rate for t in embedding.tables.values())]))


def _check_counters(optimizer: EmbeddingOptimizerConfig, largest_rate: float) -> None:
    """Check the settings that need rows' occurrences counted: only rowwise_adagrad counts, and decay must not cross zero."""
    halflife, prefix = optimizer.counter_halflife, "embedding.optimizer"
    require(
        optimizer.kind is EmbeddingOptimizerKind.rowwise_adagrad,
        f"{prefix}.counter_halflife",
        halflife,
        f"0 with {prefix}.kind={optimizer.kind.name}; rowwise_adagrad counts how often rows occur",
    )
    most = 1 / (largest_rate * halflife)
    require(
        0 < optimizer.weight_decay <= most,
        f"{prefix}.weight_decay",
        optimizer.weight_decay,
        f"above 0 and up to 1 / (learning_rate={largest_rate:g} * {prefix}.counter_halflife) = {most:g}, by which a row decays "
        "to zero when it occurs for the first time",
    )


def _check_training(config: Config) -> None:
    schedule, every = config.training.schedule, config.evaluation.every_steps
    require(
        not config.training.target_auc or every > 0,
        "evaluation.every_steps",
        every,
        "1 or more, since training.target_auc is checked by evaluations",
    )
    patience = config.evaluation.patience
    require(not patience or every > 0, "evaluation.every_steps", every, f"1 or more with evaluation.patience={patience}")
    require(
        not patience or config.checkpoint.keep_best,
        "checkpoint.keep_best",
        "false",
        f"true with evaluation.patience={patience}, since the best checkpoint is the one to keep then",
    )
    require(
        not schedule.decay_steps or schedule.decay_start_step >= schedule.warmup_steps,
        "training.schedule.decay_start_step",
        schedule.decay_start_step,
        f"training.schedule.warmup_steps={schedule.warmup_steps} or more",
    )
