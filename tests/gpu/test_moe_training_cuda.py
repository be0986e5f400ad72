"""Experts on GPUs: the same losses whatever ranks share them and whatever carries the tokens, and no wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.config import Config, ExpertsConfig
from dlrm_fused.models.expert_parallel import choose_computations
from dlrm_fused.models.moe import MixtureOfExperts
from dlrm_fused.training.runtime import Rank, choose_device, process_group
from tests.distributed.launch import run_ranks, small_config
from tests.gpu.training_runs import WITHOUT_AMPLIFIED_ROUNDING, check_losses_of_groups, gpu_counts

pytestmark = pytest.mark.gpu(2)

MODEL = ["model.kind=dcnv2", "model.top_mlp=[128,64,1]", "model.experts.count=16", "model.experts.hidden=256"]
# In fp32 experts run unfused on GPUs.
SETTINGS = [*MODEL, *WITHOUT_AMPLIFIED_ROUNDING, "training.precision=tf32"]


def test_losses_do_not_depend_on_expert_parallelism_and_comm(tmp_path: Path) -> None:
    check_losses_of_groups(tmp_path, SETTINGS, "model.experts.parallel")


@contextmanager
def waits_for_the_device_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_a_layer_without_waiting(config: Config) -> bool:
    rank = Rank.from_environment()
    device = choose_device("cuda", rank)
    with process_group(rank, device):
        experts: ExpertsConfig = config.model.experts
        (computation,) = choose_computations(config, dist.group.WORLD, 1, 128, 1, device)
        layer = MixtureOfExperts(128, experts, computation).to(device)
        x = torch.randn(64, 128, device=device, requires_grad=True)
        mask = torch.arange(64, device=device) < 60
        for run in range(3):
            if run == 0:  # kernels are compiled
                _step(layer, x, mask)
                continue
            with waits_for_the_device_are_errors():
                _step(layer, x, mask)
        return bool(layer.load.any())


def _step(layer: MixtureOfExperts, x: torch.Tensor, mask: torch.Tensor) -> None:
    loss = layer(x, mask).float().square().sum()
    auxiliary = layer.take_auxiliary_loss()
    assert auxiliary is not None
    (loss + auxiliary).backward()


def test_a_fused_layer_never_waits_for_the_device(tmp_path: Path) -> None:
    config = small_config(tmp_path, *SETTINGS, "comm=fused", "comm_strict=true")
    assert all(run_ranks(gpu_counts()[-1], train_a_layer_without_waiting, config))
