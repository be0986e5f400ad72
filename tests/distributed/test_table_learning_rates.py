"""Learning rates of single tables: the same training with TorchRec's sharder, with ours, and in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from dlrm_fused.compat.torchrec import fbgemm_lookups, set_fused_params
from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import losses, run_ranks, train
from tests.distributed.test_fused_sharder import (
    CPU,
    Table,
    Towers,
    World,
    assert_paths,
    batches,
    build,
    optimizer_of,
    whole_table,
)

RATES = {"table_0_1": 0.02, "table_0_3": 0.3}
GROUP_RATE, DENSE_RATE = 0.1, 0.5
STEPS = 4
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": GROUP_RATE}
# Two rates in one sharding type, and in several.
PLANS = {
    "table_wise": tuple(Table("table_wise", 8, rank=i % 2) for i in range(4)),
    "all": (Table("table_wise", 8), Table("column_wise", 12), Table("row_wise", 4), Table("row_wise", 8)),
}
Factor = Callable[[int], float]


def halved_after_two_steps(step: int) -> float:
    """What a schedule multiplies all rates by."""
    return 1.0 if step < 2 else 0.5


@pytest.mark.also_interpreted
@pytest.mark.parametrize("plan", PLANS)
def test_tables_are_trained_at_rates_of_their_own_which_a_schedule_scales(plan):
    world = World((PLANS[plan],), optimizer=dict(SGD))
    expected = _in_plain_torch(world)
    by_rank = run_ranks(world.ranks, _with_both_sharders, world)
    seen = {(number, name) for found in by_rank for number, of_sharder in enumerate(found) for name, _, _ in of_sharder}
    assert seen == {(number, name) for number in (0, 1) for name in expected}
    for found in by_rank:
        for name, (row, column), shard in (part for of_sharder in found for part in of_sharder):
            rows, columns = shard.shape
            wanted = expected[name][row : row + rows, column : column + columns]
            torch.testing.assert_close(shard, wanted, rtol=1e-5, atol=1e-6)


Shards = list[tuple[str, tuple[int, int], Tensor]]


def _with_both_sharders(world: World) -> list[Shards]:
    """Of each sharder the shards of this rank: table, (first row, first column), weights."""
    found = []
    with process_group(Rank.from_environment(), CPU):
        for sharder in (FusedEmbeddingBagCollectionSharder(dict(SGD)), EmbeddingBagCollectionSharder(dict(SGD))):
            model = build(world, sharder, give_rates)
            assert_paths(model, world)
            _train(model, world)
            found.append(
                [
                    (name.split(".")[-2], tuple(shard.metadata.shard_offsets), shard.tensor.detach().clone())
                    for name, weight in model.fused_optimizer.params.items()
                    for shard in weight.local_shards()
                ]
            )
    return found


def give_rates(model: Towers) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and (rate := RATES.get(name.split(".")[-2])) is not None:
            set_fused_params(parameter, None, {"learning_rate": rate})


def _train(model: DistributedModelParallel, world: World) -> None:
    dense, tables = optimizer_of(model), model.fused_optimizer
    rates = [group["lr"] for group in tables.param_groups]
    for step, batch in enumerate(batches(world, STEPS)):
        for group, rate in zip(tables.param_groups, rates, strict=True):
            group["lr"] = rate * halved_after_two_steps(step)
        tables.zero_grad()  # hands them to the lookups
        dense.zero_grad()
        model(batch).backward()
        dense.step()


def _in_plain_torch(world: World) -> dict[str, Tensor]:
    """The weights of all tables, after steps on the batches of all ranks."""
    torch.manual_seed(3)
    model = Towers(world)
    tables = {name: parameter for name, parameter in model.named_parameters() if ".embedding_bags." in name}
    for name, parameter in tables.items():
        parameter.data.copy_(whole_table(name, parameter.size()))
    own = [{"params": [p], "lr": RATES.get(name.split(".")[-2], GROUP_RATE)} for name, p in tables.items()]
    of_tables = torch.optim.SGD(own, lr=GROUP_RATE)
    of_dense = torch.optim.SGD(cast(nn.Linear, model.over).parameters(), lr=DENSE_RATE)
    rates = [group["lr"] for group in of_tables.param_groups]
    by_rank = [batches(world, STEPS, rank) for rank in range(world.ranks)]
    for step, of_step in enumerate(zip(*by_rank, strict=True)):
        for group, rate in zip(of_tables.param_groups, rates, strict=True):
            group["lr"] = rate * halved_after_two_steps(step)
        of_tables.zero_grad()
        of_dense.zero_grad()
        torch.stack([model(batch) for batch in of_step]).mean().backward()
        of_tables.step()
        of_dense.step()
    return {name.split(".")[-2]: parameter.detach() for name, parameter in tables.items()}


def test_tables_of_one_rate_share_a_lookup():
    world = World((PLANS["table_wise"],), optimizer=dict(SGD))
    assert run_ranks(world.ranks, _rates_of_lookups, world) == [[0.1], [0.02, 0.3]]


def _rates_of_lookups(world: World) -> list[float]:
    with process_group(Rank.from_environment(), CPU):
        model = build(world, FusedEmbeddingBagCollectionSharder(dict(SGD)), give_rates)
        return sorted(round(lookup.get_learning_rate(), 6) for lookup in fbgemm_lookups(model))


@pytest.mark.parametrize("comm", ["baseline", "fused"])
def test_a_rate_of_every_table_equals_that_of_the_group(tmp_path: Path, comm: str) -> None:
    plan = ("row_wise", "column_wise", "data_parallel", "table_wise")
    settings = [
        f"comm={comm}",
        "training.max_steps=6",
        "training.schedule.warmup_steps=4",
        *(f"embedding.tables.table_{i}.sharding={kind}" for i, kind in enumerate(plan)),
    ]
    own = [f"embedding.tables.table_{i}.learning_rate=0.03" for i in range(4)]
    of_tables = train(tmp_path / "own", 2, *settings, "embedding.optimizer.learning_rate=0.2", *own)
    of_group = train(tmp_path / "group", 2, *settings, "embedding.optimizer.learning_rate=0.03")
    of_others = train(tmp_path / "others", 2, *settings, "embedding.optimizer.learning_rate=0.2")
    assert losses(of_tables) == losses(of_group) != losses(of_others)
