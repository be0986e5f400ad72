"""The configs that users start from: each loads, and those of published models have the published numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_fused.config import (
    Config,
    DataSource,
    DenseOptimizerKind,
    EmbeddingOptimizerKind,
    ModelKind,
    Precision,
    Split,
    flatten,
    load_config,
    to_yaml,
)

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))

# mlcommons/training, recommendation_v2/torchrec_dlrm.
MLPERF_ROWS = [40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10]
MLPERF_ROWS += [2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36]
MLPERF_POOLING = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]
MLPERF_TRAINING_SAMPLES = 4_195_197_692


def load(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_loads_and_its_runs_go_to_a_folder_of_its_name(path: Path) -> None:
    assert load_config(path).name == path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_equals_the_resolved_config_that_is_saved_with_the_run(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_evaluates_and_saves_within_the_run(path: Path) -> None:
    config = load_config(path)
    for every in (config.evaluation.every_steps, config.checkpoint.every_steps, config.telemetry.log_every_steps):
        assert every <= config.training.max_steps


@pytest.mark.parametrize("name", ["criteo_1tb_dcnv2", "criteo_1tb_dcnv2_synthetic"])
def test_dcnv2_has_the_shape_of_mlperf(name: str) -> None:
    config = load(name)
    assert config.model.kind is ModelKind.dcnv2
    assert config.embedding.dim == 128
    assert config.model.bottom_mlp == [512, 256, 128]
    assert config.model.top_mlp == [1024, 1024, 512, 256, 1]
    assert (config.model.cross_layers, config.model.cross_rank) == (3, 512)
    assert config.training.global_batch_size == 65_536


def test_dcnv2_has_the_optimizers_of_mlperf() -> None:
    config = load("criteo_1tb_dcnv2")
    embedding, dense = config.embedding.optimizer, config.training.dense_optimizer
    assert (embedding.kind, dense.kind) == (EmbeddingOptimizerKind.adagrad, DenseOptimizerKind.adagrad)
    assert embedding.learning_rate == dense.learning_rate == 0.005
    assert embedding.eps == dense.eps == 1e-8
    assert embedding.weight_decay == dense.weight_decay == 0


def test_dcnv2_trains_one_epoch_of_mlperf_until_its_target() -> None:
    config = load("criteo_1tb_dcnv2")
    batch = config.training.global_batch_size
    assert config.data.source is DataSource.criteo_npy
    assert config.embedding.rows == MLPERF_ROWS
    assert config.embedding.max_rows == 0
    assert config.training.max_steps == MLPERF_TRAINING_SAMPLES // batch
    assert config.training.target_auc == 0.80275
    assert config.evaluation.every_steps == MLPERF_TRAINING_SAMPLES // (batch * 20)
    assert (config.evaluation.split, config.evaluation.max_samples) == (Split.validation, 0)


def test_synthetic_dcnv2_differs_by_its_data_and_capped_tables() -> None:
    config = load("criteo_1tb_dcnv2_synthetic")
    assert config.data.source is DataSource.synthetic
    assert config.data.synthetic.rows == MLPERF_ROWS
    assert config.data.synthetic.pooling == MLPERF_POOLING
    assert config.embedding.max_rows == 4_000_000
    assert config.evaluation.every_steps == 0


def test_kaggle_has_the_layers_of_the_dlrm_benchmark_and_one_epoch() -> None:
    config = load("criteo_kaggle")
    held_out = round(45_840_617 / 7)
    assert config.model.kind is ModelKind.dlrm
    assert config.embedding.dim == 16
    assert config.model.bottom_mlp == [512, 256, 64, 16]
    assert config.model.top_mlp == [512, 256, 1]
    assert config.training.max_steps == (45_840_617 - held_out) // config.training.global_batch_size


def test_the_large_transformer_has_the_shape_that_is_benchmarked() -> None:
    config = load("transformer_large")
    assert config.model.kind is ModelKind.transformer
    assert (config.model.d_model, config.model.layers, config.model.heads) == (4096, 8, 32)
    assert config.data.source is DataSource.synthetic
    assert config.data.synthetic.history_length == 2048
    assert config.training.precision is Precision.bf16
    # Memory for activations is that of a batch; the default for evaluations is far too large.
    assert config.evaluation.global_batch_size <= config.training.global_batch_size


def test_criteo_with_experts_differs_from_mlperf_by_its_top_and_its_end() -> None:
    config, mlperf = flatten(load("moe_criteo")), flatten(load("criteo_1tb_dcnv2"))
    differ = {key for key in config if config[key] != mlperf[key] and not key.startswith("model.experts.")}
    assert differ == {"name", "comm", "model.top_mlp", "training.target_auc"}
    assert config["training.precision"] == "bf16"
    assert config["model.experts.count"] % 8 == 0  # GPUs


def test_the_large_mixture_has_many_experts_and_trains_on_generated_data() -> None:
    config = load("moe_large")
    assert (config.model.experts.count, config.model.experts.top_k) == (128, 8)
    assert config.data.source is DataSource.synthetic
    assert config.training.precision is Precision.bf16


def test_quickstart_trains_on_what_make_train_prepares() -> None:
    config = load("quickstart")
    makefile = (CONFIGS.parent / "Makefile").read_text()
    assert f"{config.data.path}/dataset.json" in makefile
    assert config.data.source is DataSource.prepared
