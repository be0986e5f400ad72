"""The Transformer in the trainer: the same run however its layers and tables are spread, also if that changes on the way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.auto_choice import BothWays
from dlrm_fused.config import Config
from dlrm_fused.models import product_choice
from dlrm_fused.models.product_choice import choose_product
from dlrm_fused.models.tensor_parallel import LayerProducts
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import (
    WITHOUT_AMPLIFIED_ROUNDING,
    assert_same_run,
    evaluate,
    losses,
    run_ranks,
    small_config,
    summary,
    train,
)
from tests.distributed.without_symmetric_memory import choose_without_symmetric_memory

HALF, STEPS = 6, 12
SETTINGS = [
    "model.kind=transformer",
    "model.d_model=16",
    "model.heads=4",
    "data.synthetic.history_length=6",
    "data.synthetic.history_items=200",
    *WITHOUT_AMPLIFIED_ROUNDING,
    # Sample and token tables under plans of each kind.
    "embedding.sharding=row_wise",
    "embedding.tables.table_0.sharding=table_wise",
    "embedding.tables.table_1.sharding=column_wise",
    "embedding.tables.token_response.sharding=table_wise",
    "embedding.tables.token_gap.sharding=column_wise",
]


def spread(folder: Path, ranks: int, tensor_parallel: int, comm: str, steps: int = STEPS) -> Path:
    """Train, or continue to train, on so many ranks, with layers cut over ``tensor_parallel`` of them."""
    here = [f"model.tensor_parallel={tensor_parallel}", f"comm={comm}", f"training.max_steps={steps}"]
    return train(folder, ranks, *SETTINGS, *here, *(["comm_strict=true"] if comm == "fused" else []))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one rank."""
    return spread(tmp_path_factory.mktemp("alone"), 1, 1, "baseline")


def test_training_learns(tmp_path):
    """Otherwise equal losses would mean little."""
    run = spread(tmp_path, 1, 1, "baseline", steps=40)
    by_step = list(losses(run).values())
    assert sum(by_step[-10:]) < 0.96 * sum(by_step[:10])
    assert summary(run)["test_auc"] > 0.65


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "comm"),
    [
        (2, 1, "fused"),
        pytest.param(2, 2, "baseline", marks=pytest.mark.slow),
        (2, 0, "auto"),
        pytest.param(4, 2, "baseline", marks=pytest.mark.slow),
        pytest.param(4, 4, "fused", marks=pytest.mark.slow),
    ],
)
def test_losses_do_not_depend_on_ranks_tensor_parallelism_and_comm(tmp_path, alone, ranks, tensor_parallel, comm):
    run = spread(tmp_path, ranks, tensor_parallel, comm)
    assert_same_run(run, alone, STEPS)
    tables = (run / "plan.txt").read_text().split("\n\n")[0].splitlines()[1:]
    assert len(tables) == 4 + 3
    # Sample and token tables are two modules; there are steps enough to measure the first.
    measured_or_fused = {"fused": r"fused", "auto": r"((fused|torchrec): [\d.]+ ms, \w+ [\d.]+ ms|auto)"}
    assert comm == "baseline" or all(re.search(rf" {measured_or_fused[comm]}$", line) for line in tables)


def test_losses_of_hstu_do_not_depend_on_them_either(tmp_path):
    """Generated histories have times, which its bias reads."""
    alone, fused = (
        train(tmp_path / comm, ranks, *SETTINGS, "model.kind=hstu", f"comm={comm}", "training.max_steps=8")
        for ranks, comm in ((1, "baseline"), (2, "fused"))
    )
    assert losses(fused) == pytest.approx(losses(alone), rel=1e-5, abs=0)
    assert evaluate(fused, 1, "comm=baseline")["auc"] == pytest.approx(summary(alone)["test_auc"], abs=1e-5)


def test_pooled_embeddings_of_16_bits_are_read(tmp_path):
    of_comm = {
        comm: train(tmp_path / comm, 2, *SETTINGS, f"comm={comm}", "training.max_steps=10", "embedding.output_dtype=fp16")
        for comm in ("baseline", "fused")
    }
    assert len(losses(of_comm["fused"])) == 10
    assert losses(of_comm["fused"]) == pytest.approx(losses(of_comm["baseline"]), rel=1e-5, abs=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((4, 2, "fused"), (1, 1, "baseline"), marks=pytest.mark.slow),
        ((1, 1, "baseline"), (2, 2, "fused")),
    ],
)
def test_a_run_goes_on_with_another_tensor_parallel_size(tmp_path, alone, before, after):
    run = spread(tmp_path, *before, steps=HALF)
    of_half = summary(run)
    found = evaluate(run, after[0], f"model.tensor_parallel={after[1]}", f"comm={after[2]}", "comm_strict=false")
    assert found["auc"] == pytest.approx(of_half["test_auc"], abs=1e-6)
    assert found["log_loss"] == pytest.approx(of_half["log_loss"], abs=1e-6)
    spread(tmp_path, *after)
    assert_same_run(run, alone, STEPS)


def product(config: Config, group: dist.ProcessGroup, device: torch.device) -> LayerProducts:
    return choose_product(config, group, 7, device)


def test_layers_of_ranks_without_shared_memory_run_as_with_baseline_unless_strict(tmp_path):
    config = small_config(tmp_path, *SETTINGS, "comm=fused")
    for is_baseline, message in run_ranks(2, choose_without_symmetric_memory, product, config):
        assert is_baseline
        assert message == "comm_strict=true: tensor-parallel layers without fused communication: no peer access"


def choose_by_measurement(config: Config) -> tuple[bool, list[list[int]]]:
    """Whether the fused way was chosen; and the shapes of gradients that the measured ways computed, one after the other."""
    shapes: list[list[int]] = []
    gradients_of = torch.autograd.grad

    def note_shapes(*given):
        found = gradients_of(*given)
        shapes.extend(list(gradient.shape) for gradient in found)
        return found

    def measure_both(fused, unfused, group, device, **names):
        fused()
        unfused()
        return BothWays(fused=1.0, unfused=2.0)

    torch.autograd.grad, product_choice.measure_both = note_shapes, measure_both
    device = torch.device("cpu")
    with process_group(Rank.from_environment(), device), torch.no_grad():  # as where a model is evaluated
        return product(config, dist.group.WORLD, device).workspace is not None, shapes


def test_auto_measures_layers_forward_and_backward(tmp_path):
    config = small_config(tmp_path, *SETTINGS, "comm=auto")
    rows, width = 2 * -(-config.training.global_batch_size // 2) * 7, 16
    attention, feed_forward = [[3 * width // 2, width], [width, width // 2]], [[2 * width, width], [width, 2 * width]]
    for is_fused, shapes in run_ranks(2, choose_by_measurement, config):
        assert is_fused
        assert shapes == 2 * [[rows, width], *attention, [rows, width], *feed_forward]
