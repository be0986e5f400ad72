"""Optimizers that keep states of elements, with the fused sharder: equal to TorchRec's, also with the kernels of GPUs.

FBGEMM has Adam on GPUs alone; here :mod:`tests.distributed.fbgemm_adam` is its kernels.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat.torchrec import fbgemm_lookups
from dlrm_fused.config import Config
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder
from dlrm_fused.sharding.optimizers import set_optimizer_step
from dlrm_fused.sharding.sharded_module import FusedShardedEmbeddingBagCollection
from dlrm_fused.training import trainer
from dlrm_fused.training.runtime import ErrorStore, Rank, process_group
from tests.distributed.fbgemm_adam import provide_adam_on_the_cpu
from tests.distributed.launch import losses, run_ranks, small_config, summary
from tests.distributed.test_fused_sharder import CPU, MEAN, Table, World, _run_both, batches, build, optimizer_of, tables_of

OF_ADAM = {"learning_rate": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
ADAMS = {
    "adam": {"optimizer": EmbOptimType.ADAM, **OF_ADAM},
    "rowwise_adam": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, **OF_ADAM},
}
OPTIMIZERS = {**ADAMS, "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}}
PLANS = {
    "table_wise": (Table("table_wise", 8, rank=1), Table("table_wise", 16, ("feature_0", "feature_1"), pooling=MEAN)),
    "column_wise": (Table("column_wise", 12), Table("column_wise", 8, pooling=MEAN)),
    "row_wise": (Table("row_wise", 4), Table("row_wise", 8)),
    "all": (Table("table_wise", 8, rank=1), Table("column_wise", 12), Table("row_wise", 4)),
}
STEPS = 6


def train(model: DistributedModelParallel, steps: list[KeyedJaggedTensor]) -> list[Tensor]:
    """The losses, and how many steps the optimizer of each lookup has counted."""
    optimizer, observed = optimizer_of(model), []
    for batch in steps:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        observed.append(loss.detach())
    return [*observed, *(lookup.iter for lookup in fbgemm_lookups(model))]


def assert_close(ours: list[Tensor], torchrecs: list[Tensor]) -> None:
    assert len(ours) == len(torchrecs) > STEPS
    for our, torchrec in zip(ours, torchrecs, strict=True):
        torch.testing.assert_close(our, torchrec, rtol=1e-6, atol=1e-6)


@pytest.mark.also_interpreted
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", PLANS)
def test_weights_states_and_counts_are_those_of_torchrec(plan, optimizer):
    world = World((PLANS[plan],), optimizer=OPTIMIZERS[optimizer])
    for ours, torchrecs in run_ranks(world.ranks, _run_both_with_adam, world):
        assert_close(ours, torchrecs)


def _run_both_with_adam(world: World) -> tuple[list[Tensor], list[Tensor]]:
    provide_adam_on_the_cpu()
    return _run_both(world, lambda model, world: train(model, batches(world, STEPS)))


@pytest.mark.also_interpreted
def test_batches_that_take_torchrecs_path_are_steps_like_the_others():
    world = World((PLANS["all"],), optimizer=ADAMS["adam"])
    for ours, torchrecs in run_ranks(world.ranks, _run_both_with_other_batches_between, world):
        assert_close(ours, torchrecs)


def _run_both_with_other_batches_between(world: World) -> tuple[list[Tensor], list[Tensor]]:
    reasons = itertools.cycle([None, None, "a reason of the test"])
    with mock.patch.object(FusedShardedEmbeddingBagCollection, "_reason_against_batch", side_effect=reasons):
        return _run_both_with_adam(world)


@pytest.mark.also_interpreted
@pytest.mark.parametrize("optimizer", ADAMS)
def test_each_sharder_continues_what_the_other_has_left(optimizer):
    world = World((PLANS["all"],), optimizer=ADAMS[optimizer])
    for alternating, uninterrupted in run_ranks(world.ranks, _with_changes_of_sharder, world):
        assert_close(alternating, uninterrupted)


def _with_changes_of_sharder(world: World) -> tuple[list[Tensor], list[Tensor]]:
    """Losses, counts, weights and states of TorchRec's sharder, ours, TorchRec's; and of TorchRec's alone."""
    provide_adam_on_the_cpu()
    torchrecs, ours = EmbeddingBagCollectionSharder, FusedEmbeddingBagCollectionSharder
    with process_group(Rank.from_environment(), CPU):
        alone = build(world, torchrecs(dict(world.optimizer)))
        expected = [*train(alone, batches(world, STEPS)), *tables_of(alone)]
        observed: list[Tensor] = []
        before = None
        for number, sharder in enumerate((torchrecs, ours, torchrecs)):
            model = build(world, sharder(dict(world.optimizer)))
            if before is not None:
                model.load_state_dict(before.state_dict())
                model.fused_optimizer.load_state_dict(before.fused_optimizer.state_dict())
                set_optimizer_step(model, 2 * number)
            found = train(model, batches(world, STEPS)[2 * number :][:2])
            observed += found[:2]
            before = model
        return [*observed, *found[2:], *tables_of(model)], expected


# Set before a step, or while it waits for its backward pass, which FBGEMM runs with the numbers of its forward pass.
CHANGES = {1: {"eps": 1.0}, 3: {"beta1": 0.5, "beta2": 0.9, "weight_decay": 0.3}, 4: {"eps": 1e-3, "lr": 0.02}}
CHANGES_IN_BETWEEN = {2: {"eps": 0.1, "weight_decay": 0.0}}
ROWWISE_ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}


@pytest.mark.also_interpreted
@pytest.mark.parametrize("optimizer", [ROWWISE_ADAGRAD, ADAMS["adam"]], ids=["rowwise_adagrad", "adam"])
def test_numbers_that_change_and_tables_that_move_in_training_are_followed(optimizer):
    world = World((PLANS["all"],), optimizer=optimizer)
    for ours, torchrecs in run_ranks(world.ranks, _run_both_with_changes, world):
        assert_close(ours, torchrecs)


def _run_both_with_changes(world: World) -> tuple[list[Tensor], list[Tensor]]:
    provide_adam_on_the_cpu()
    return _run_both(world, train_with_changes)


def train_with_changes(model: DistributedModelParallel, world: World) -> list[Tensor]:
    """The losses, and where FBGEMM's tables and states lie at the end, what is there."""
    lookups, observed = fbgemm_lookups(model), []
    for step, batch in enumerate(batches(world, STEPS)):
        set_numbers(model, CHANGES.get(step, {}))
        if step == 4:  # of the same values, elsewhere; the old memory keeps the old ones
            for lookup in lookups:
                lookup.weights_host.data = lookup.weights_host.data.clone()
                lookup.momentum1_host.data = lookup.momentum1_host.data.clone()
        loss = model(batch)
        set_numbers(model, CHANGES_IN_BETWEEN.get(step, {}))
        loss.backward()
        observed.append(loss.detach())
    return [*observed, *(tensor.detach() for lookup in lookups for tensor in (lookup.weights_host, lookup.momentum1_host))]


def set_numbers(model: DistributedModelParallel, numbers: dict[str, float]) -> None:
    model.fused_optimizer.update_hyper_parameters(numbers)


def train_and_freeze(model: DistributedModelParallel, world: World) -> list[Tensor]:
    observed = []
    for step, batch in enumerate(batches(world, STEPS)):
        for lookup in fbgemm_lookups(model):
            lookup.requires_grad_(not 2 <= step < 4)
        loss = model(batch)
        loss.backward()
        observed += [loss.detach(), *(lookup.weights_host.detach().clone() for lookup in fbgemm_lookups(model))]
    return observed


def train_with_weight_decay(model: DistributedModelParallel, world: World) -> list[Tensor]:
    set_numbers(model, {"weight_decay": 0.5})
    return train(model, batches(world, STEPS))[:STEPS]  # kernels count no steps of Adagrad


@pytest.mark.also_interpreted
@pytest.mark.parametrize(
    "train_so",
    [pytest.param(train_and_freeze, id="frozen tables"), pytest.param(train_with_weight_decay, id="weight decay ignored")],
)
def test_what_changes_while_training_has_the_effect_that_it_has_in_fbgemm(train_so):
    world = World((PLANS["row_wise"],), optimizer=ROWWISE_ADAGRAD)
    for ours, torchrecs in run_ranks(world.ranks, _run_both, world, train_so):
        assert_close(ours, torchrecs)


@pytest.mark.interpreted
def test_a_weight_decay_that_our_kernels_do_not_have_is_refused_on_all_ranks():
    optimizer = {**ROWWISE_ADAGRAD, "weight_decay_mode": WeightDecayMode.L2}
    world = World(((Table("table_wise", rank=1),),), optimizer=optimizer)
    without_tables, with_tables = run_ranks(world.ranks, _message_of_weight_decay, world)
    assert with_tables.startswith("UsageError: weight_decay=0.5 of row-wise Adagrad, set after the tables were sharded")
    assert without_tables.startswith("CommunicationError")
    assert "rank 1" in without_tables


def _message_of_weight_decay(world: World) -> str:
    with process_group(Rank.from_environment(), CPU):
        model = build(world, FusedEmbeddingBagCollectionSharder(dict(world.optimizer)))
        first, *others = batches(world, 3)
        model(first).backward()
        set_numbers(model, {"weight_decay": 0.5})
        with pytest.raises((UsageError, CommunicationError)) as raised:
            for batch in others:  # what has happened to a kernel is raised by the next call
                model(batch)
        return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("kind", ["adam", pytest.param("rowwise_adam", marks=pytest.mark.slow)])
def test_runs_continue_with_the_other_and_evaluations_leave_no_trace(tmp_path, kind):
    """FBGEMM counts the lookups of evaluations as steps; a run that continues could not know of them."""
    settings = [
        f"embedding.optimizer.kind={kind}",
        "embedding.optimizer.weight_decay=0.01",
        *(f"embedding.tables.table_{i}.sharding={plan}" for i, plan in enumerate(("row_wise", "table_wise", "column_wise"))),
        "embedding.tables.table_3.sharding=table_wise",
    ]
    uninterrupted = _train(tmp_path / "uninterrupted", 12, "baseline", *settings)
    evaluated = _train(tmp_path / "evaluated", 12, "baseline", "evaluation.every_steps=5", *settings)
    for steps, comm in ((4, "baseline"), (8, "fused"), (12, "baseline")):
        continued = _train(tmp_path / "continued", steps, comm, "evaluation.every_steps=4", *settings)
    assert list(losses(continued)) == list(range(1, 13))
    assert losses(continued) == losses(uninterrupted) == losses(evaluated)
    assert summary(continued)["test_auc"] == summary(uninterrupted)["test_auc"]


def test_data_parallel_tables_continue_in_their_count_of_steps(tmp_path):
    """Their Adam is torch's, whose count is in no checkpoint, since other plans have none."""
    settings = ["embedding.optimizer.kind=adam", "embedding.tables.table_3.sharding=data_parallel"]
    uninterrupted = _train(tmp_path / "uninterrupted", 20, "baseline", *settings)
    for steps in (10, 20):
        continued = _train(tmp_path / "continued", steps, "baseline", *settings)
    assert losses(continued) == losses(uninterrupted)


def test_the_measurements_of_auto_are_no_steps(tmp_path):
    settings = ["embedding.optimizer.kind=adam", "embedding.sharding=table_wise"]
    auto, baseline = (_train(tmp_path / comm, 6, comm, *settings) for comm in ("auto", "baseline"))
    assert losses(auto) == losses(baseline)


def _train(folder: Path, steps: int, comm: str, *settings: str) -> Path:
    """On two ranks; a run that is there continues."""
    config = small_config(folder, f"training.max_steps={steps}", f"comm={comm}", "checkpoint.every_steps=10", *settings)
    run_ranks(2, _train_with_adam, config)
    return config.run_dir


def _train_with_adam(config: Config) -> None:
    provide_adam_on_the_cpu()
    rank = Rank.from_environment()
    with mock.patch("dlrm_fused.sharding.parallel._check_for_cpu"):
        trainer.train(config, rank, ErrorStore(rank))
