"""Experts in the trainer: the same run however they are spread and computed, also if that changes on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.auto_choice import BothWays
from dlrm_fused.config import Config
from dlrm_fused.models import expert_parallel
from dlrm_fused.models.expert_parallel import ExpertComputation, choose_computations
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import (
    WITHOUT_AMPLIFIED_ROUNDING,
    assert_same_run,
    evaluate,
    losses,
    metrics,
    run_ranks,
    small_config,
    summary,
    train,
)
from tests.distributed.without_symmetric_memory import choose_without_symmetric_memory

HALF, STEPS = 6, 12
SETTINGS = [
    "model.top_mlp=[16,8,1]",
    "model.experts.count=8",
    "model.experts.hidden=16",
    "model.experts.balance_loss=0.1",
    *WITHOUT_AMPLIFIED_ROUNDING,
]
MODELS = {
    "dlrm": ["model.experts.top_k=3", "model.experts.shared_hidden=16"],
    "dcnv2": [],
    "transformer": [
        "model.d_model=16",
        "model.tensor_parallel=1",
        "model.experts.gate=sigmoid",
        "model.experts.activation=swiglu",
        "data.synthetic.history_length=6",
        "data.synthetic.history_items=200",
    ],
}


def spread(folder: Path, model: str, ranks: int, parallel: int, comm: str, steps: int = STEPS) -> Path:
    """Train, or continue to train, on so many ranks, with experts spread over ``parallel`` of them."""
    here = [f"model.experts.parallel={parallel}", f"comm={comm}", f"training.max_steps={steps}"]
    strict = ["comm_strict=true"] if comm == "fused" else []
    return train(folder, ranks, f"model.kind={model}", *SETTINGS, *MODELS[model], *here, *strict)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run of each model on one rank."""
    return {model: spread(tmp_path_factory.mktemp(model), model, 1, 1, "baseline") for model in MODELS}


def loads(run: Path) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if key.startswith("experts_")} for line in metrics(run, "train")]


def test_training_learns(tmp_path):
    """Otherwise equal losses would mean little."""
    run = spread(tmp_path, "dcnv2", 1, 1, "baseline", steps=40)
    by_step = list(losses(run).values())
    assert sum(by_step[-10:]) < 0.96 * sum(by_step[:10])
    assert summary(run)["test_auc"] > 0.65


@pytest.mark.parametrize(
    ("model", "ranks", "parallel", "comm"),
    [
        ("dlrm", 2, 0, "baseline"),
        ("dcnv2", 2, 1, "fused"),
        ("dcnv2", 2, 2, "auto"),
        ("dcnv2", 4, 2, "fused"),
        ("transformer", 2, 2, "fused"),
    ],
)
def test_losses_and_loads_do_not_depend_on_ranks_expert_parallelism_and_comm(tmp_path, alone, model, ranks, parallel, comm):
    run = spread(tmp_path, model, ranks, parallel, comm)
    assert_same_run(run, alone[model], STEPS)
    assert loads(run) == [pytest.approx(load) for load in loads(alone[model])]


def test_loads_of_each_layer_are_reported_relative_to_their_mean(alone):
    layers = {"dlrm": 1, "dcnv2": 1, "transformer": 2}
    for model, run in alone.items():
        for load in loads(run):
            assert len(load) == 2 * layers[model]
            for layer in range(layers[model]):
                assert 0 <= load[f"experts_{layer}_idlest"] <= 1 <= load[f"experts_{layer}_busiest"] <= 8


@pytest.mark.slow
def test_a_run_of_two_ranks_is_evaluated_on_one_and_goes_on_with_four(tmp_path, alone):
    run = spread(tmp_path, "transformer", 2, 2, "fused", steps=HALF)
    of_half = summary(run)
    found = evaluate(run, 1, "model.experts.parallel=0")
    assert found["auc"] == pytest.approx(of_half["test_auc"], abs=1e-6)
    assert found["log_loss"] == pytest.approx(of_half["log_loss"], abs=1e-6)
    spread(tmp_path, "transformer", 4, 4, "baseline")
    assert_same_run(run, alone["transformer"], STEPS)


def computations(config: Config, group: dist.ProcessGroup, device: torch.device) -> list[ExpertComputation]:
    return choose_computations(config, group, 2, 16, 1, device)


def test_experts_of_ranks_without_shared_memory_run_as_with_baseline_unless_strict(tmp_path):
    config = small_config(tmp_path, *SETTINGS, "comm=fused")
    for is_baseline, message in run_ranks(2, choose_without_symmetric_memory, computations, config):
        assert is_baseline
        assert message == "comm_strict=true: experts without fused communication: no peer access"


def computations_of_auto(config: Config, fused_is_faster: bool) -> tuple[list[bool], set[str]]:
    """Whether each layer is fused, and of which of them memory for tokens and results is left."""

    def measured(fused: Callable[[], object], unfused: Callable[[], object], *_: object, **__: object) -> BothWays:
        fused()
        unfused()
        return BothWays(fused=1.0, unfused=2.0 if fused_is_faster else 0.5)

    expert_parallel.measure_both = measured
    device = torch.device("cpu")
    with process_group(Rank.from_environment(), device):
        group = dist.group.WORLD
        computations = choose_computations(config, group, 2, 16, 1, device)
        memories = {memory.name for memory in symmetric_group(group, device)._memories}
    left = {name.removesuffix(".received") for name in memories if name.endswith((".received", ".combined"))}
    return [c.workspace is not None for c in computations], {name.removesuffix(".combined") for name in left}


@pytest.mark.parametrize("fused_is_faster", [True, False])
def test_auto_takes_the_faster_way_and_keeps_no_memory_of_the_other(tmp_path, fused_is_faster):
    config = small_config(tmp_path, *SETTINGS, "comm=auto")
    for are_fused, with_memory in run_ranks(2, computations_of_auto, config, fused_is_faster):
        assert are_fused == [fused_is_faster] * 2
        assert with_memory == ({"experts_0", "experts_1"} if fused_is_faster else set())
