"""The sharder in TorchRec's own pipeline and under its own checks, also by what only its newest release has."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.modules import embedding_modules
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder, paths
from dlrm_fused.sharding.options import Mode
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import measure_briefly, run_ranks
from tests.distributed.test_fused_sharder import (
    ADAGRAD,
    CPU,
    RowWiseToo,
    Table,
    World,
    assert_equal,
    batches,
    config_of,
    fill_tables,
    optimizer_of,
    sharding_of,
    tables_of,
)

TABLES = (Table("table_wise", 8, rank=1), Table("column_wise", 8), Table("row_wise", 4), Table("data_parallel", 4))
EVALUATED_ALONE = getattr(embedding_modules, "mark_data_parallel_skip_grad_sync", None)
PIPELINE_OPTIONS = set(inspect.signature(TrainPipelineSparseDist).parameters)


class Scores(nn.Module):
    """A layer over two modules of tables, which TorchRec's pipeline can trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        first, second = world.modules
        self.first = EmbeddingBagCollection([config_of(0, t, table) for t, table in enumerate(first)])
        self.second = EmbeddingBagCollection([config_of(1, t, table) for t, table in enumerate(second)])
        self.over = nn.Linear(sum(table.dim for table in first + second), 1)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """The loss and what it is computed from."""
        scores = self.over(torch.cat([self.first(batch).values(), self.second(batch).values()], dim=1)).sigmoid()
        return scores.square().mean(), scores.detach()


def build(world: World, sharder: EmbeddingBagCollectionSharder, averages_replicas: bool) -> DistributedModelParallel:
    torch.manual_seed(3)
    model = Scores(world)
    plan = {}
    for name, tables in zip(("first", "second"), world.modules, strict=True):
        module = getattr(model, name)
        if not averages_replicas:
            assert EVALUATED_ALONE is not None
            EVALUATED_ALONE(module)
        plan[name] = construct_module_sharding_plan(
            module,
            {
                config.name: sharding_of(t, world.ranks)
                for config, t in zip(module.embedding_bag_configs(), tables, strict=True)
            },
            cast(ModuleSharder[nn.Module], RowWiseToo(sharder)),
            local_size=world.ranks,
            world_size=world.ranks,
            device_type="cpu",
        )
    sharders = [cast(ModuleSharder[nn.Module], sharder)]
    sharded = DistributedModelParallel(model, device=CPU, plan=ShardingPlan(plan), sharders=sharders, init_parameters=False)
    fill_tables(sharded)
    return sharded


def trained(
    world: World,
    options: dict[str, Any],
    averages_replicas: bool,
    environment: dict[str, str],
    mode: Mode = "fused",
    count: int = 6,
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of TorchRec's pipeline for some batches, and the tables afterwards, with our sharder and with TorchRec's."""
    results = []
    with pytest.MonkeyPatch.context() as patch, process_group(Rank.from_environment(), CPU):
        for name, value in environment.items():
            patch.setenv(name, value)
        for sharder in (
            FusedEmbeddingBagCollectionSharder(dict(ADAGRAD), mode=mode),
            EmbeddingBagCollectionSharder(dict(ADAGRAD)),
        ):
            model = build(world, sharder, averages_replicas)
            pipeline = TrainPipelineSparseDist(model, optimizer_of(model), CPU, execute_all_batches=True, **options)
            given = iter(batches(world, count))
            observed = [pipeline.progress(given).clone() for _ in range(count)]
            with pytest.raises(StopIteration):
                pipeline.progress(given)
            results.append([*observed, *tables_of(model)])
    return results[0], results[1]


@pytest.mark.also_interpreted
@pytest.mark.parametrize("fused_is_faster", [True, False])
def test_paths_take_turns_in_the_pipeline(fused_is_faster: bool) -> None:
    """Features of two batches are on their way to one path when the turn is another's."""
    world = World((TABLES, (Table("row_wise", 8), Table("table_wise", 4))))
    assert_equal(run_ranks(2, trained_while_paths_are_measured, world, fused_is_faster))


def trained_while_paths_are_measured(world: World, fused_is_faster: bool) -> tuple[list[Tensor], list[Tensor]]:
    def seconds(own: list[float], *_: Any) -> list[float]:
        *fused, torchrecs = own
        return [0.5 * torchrecs if fused_is_faster else 2 * torchrecs] * len(fused) + [torchrecs]

    measure_briefly()
    with mock.patch.object(paths, "on_slowest_rank", seconds):
        # One module has four paths, the other three, each of which has two batches; then those that are left.
        return trained(world, {}, True, {}, mode="auto", count=2 * (4 + 3) + 4)


def assert_same_training(options: dict[str, Any], averages_replicas: bool = True, **environment: str) -> None:
    world = World((TABLES, (Table("row_wise", 8), Table("table_wise", 4))))
    assert_equal(run_ranks(2, partial(trained, world, options, averages_replicas, environment)))


@pytest.mark.also_interpreted
@pytest.mark.parametrize("options", [{}, {"enable_inplace_copy_batch": True}, {"async_inplace_copy": True}], ids=str)
def test_torchrecs_pipeline_trains_as_with_its_own_sharder(options: dict[str, Any]) -> None:
    if not options.keys() <= PIPELINE_OPTIONS:
        pytest.skip(f"this release of TorchRec has no {', '.join(options)}")
    assert_same_training(options)


@pytest.mark.also_interpreted
def test_ranks_whose_collectives_torchrec_compares_train_alike() -> None:
    """TorchRec's check has a mark for each module whose features go past its own exchange."""
    assert_same_training({}, TORCHREC_VALIDATE_COLLECTIVES="1")


@pytest.mark.skipif(EVALUATED_ALONE is None, reason="this release of TorchRec always wraps data-parallel tables in DDP")
def test_data_parallel_tables_without_ddp_are_looked_up_and_saved_as_torchrecs_are() -> None:
    assert_same_training({}, averages_replicas=False)
