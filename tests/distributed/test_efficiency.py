"""A run reports its efficiency on a GPU that has a data sheet; here the CPU is given one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torchrec.distributed.model_parallel import get_unwrapped_module

from dlrm_fused.config import Config
from dlrm_fused.models.flops import training_flops
from dlrm_fused.ops.common.gpus import H100
from dlrm_fused.sharding.tables import is_table
from dlrm_fused.training import trainer
from dlrm_fused.training.efficiency import StepWork, gradient_bytes, step_work
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import metrics, run_ranks, sharded_model, small_config, train

CPU = torch.device("cpu")
GPU = replace(H100, bf16=4e9, tf32=2e9, fp32=1e9, memory=1e9, nvlink=1e7)
FIGURES = {"model_flops_utilization", "hbm_gb_per_second", "link_gb_per_second", "floor_ms"}


def work_of(config: Config) -> tuple[StepWork, float, int, int, int]:
    """The work of a step, a sample's FLOPs, bytes sent to average gradients, and sizes of dense parameters: all, sharded."""
    rank = Rank.from_environment()
    with sharded_model(config, CPU) as (dataset, sharded):
        work = step_work(config, dataset.schema, CPU, sharded, rank.world_size)
        model = get_unwrapped_module(sharded.model)
        dense = [p for name, p in model.named_parameters() if not is_table(name)]
        shards = [p for p in dense if getattr(p, "shard_dim", None) is not None]
        sizes = [sum(p.numel() for p in group) for group in (dense, shards)]
        return work, training_flops(config, dataset.schema), gradient_bytes(sharded, rank.world_size), *sizes


def train_on_a_known_gpu(config: Config) -> None:
    rank = Rank.from_environment()
    with patch.object(trainer, "data_sheet", lambda device: GPU):
        trainer.train(config, rank, ErrorStore(rank))


def test_a_run_reports_its_work_over_the_time_of_all_steps(tmp_path: Path) -> None:
    config = small_config(tmp_path, "training.max_steps=20", "telemetry.log_every_steps=5")
    (work, flops, *_), _ = run_ranks(2, work_of, config)
    run_ranks(2, train_on_a_known_gpu, config)
    lines = metrics(config.run_dir, "train")
    assert len(lines) == 4
    for line in lines:
        seconds = 64 / line["samples_per_second"]
        assert line["model_flops_utilization"] == pytest.approx(32 * flops / 1e9 / seconds)
        assert line["hbm_gb_per_second"] == pytest.approx(work.hbm_bytes / seconds / 1e9)
        assert line["link_gb_per_second"] == pytest.approx(work.link_bytes / seconds / 1e9)
        assert line["floor_ms"] == pytest.approx(work.link_bytes / 1e7 * 1e3)


def test_the_cpu_reports_times_alone(tmp_path: Path) -> None:
    lines = metrics(train(tmp_path, 1, "training.max_steps=2"), "train")
    assert len(lines) == 2
    for line in lines:
        assert not FIGURES & line.keys()
        parts = [line[f"{part}_exposed_ms"] for part in ("input_dist", "embedding", "dense_forward", "backward", "optimizer")]
        assert sum(parts) + line["idle_ms"] == pytest.approx(line["step_ms"])


class TestAveragedGradients:
    def test_are_those_of_dense_layers_and_data_parallel_tables(self, tmp_path: Path) -> None:
        for sharding, weights in (("table_wise", 0), ("data_parallel", 8 * (50 + 120 + 300 + 700))):
            config = small_config(tmp_path, f"embedding.sharding={sharding}")
            _, _, found, dense, _ = run_ranks(2, work_of, config)[0]
            assert dense == (4 * 16 + 16) + (16 * 8 + 8) + (18 * 16 + 16) + (16 + 1)
            assert found == 2 * 1 / 2 * 4 * (dense + weights)

    def test_of_sharded_experts_go_to_the_ranks_with_the_same(self, tmp_path: Path) -> None:
        experts = ("model.experts.count=4", "model.experts.hidden=8")
        found = {}
        for parallel in (1, 2):
            config = small_config(tmp_path, *experts, f"model.experts.parallel={parallel}")
            _, _, found[parallel], dense, shards = run_ranks(2, work_of, config)[0]
        assert shards == 2 * 2 * 16 * 8  # two experts of two matrices
        assert found[2] == 2 * 1 / 2 * 4 * (dense - shards)
        assert found[1] == 2 * 1 / 2 * 4 * (dense + shards)
