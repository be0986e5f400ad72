"""FusedEmbeddingBagCollectionSharder in anyone's DistributedModelParallel: equal to TorchRec's own sharder.

On the CPU to the bit; those marked ``also_interpreted`` run with the kernels of GPUs too, which add in another order.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.sharding import FusedEmbeddingBagCollectionSharder
from dlrm_fused.sharding.cpu_path import CpuPath
from dlrm_fused.sharding.paths import TorchRecPath
from dlrm_fused.sharding.sharded_module import FusedShardedEmbeddingBagCollection
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import RankFailed, measure_briefly, on_hosts, run_ranks

CPU = torch.device("cpu")
WITH_KERNELS = os.environ.get("TRITON_INTERPRET") == "1"
ROWS = 40
# TorchRec takes a kernel with an optimizer of its own for plans that are made by hand for the CPU.
FUSED = EmbeddingComputeKernel.FUSED.value
ADAGRAD = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-8}


@dataclass(frozen=True)
class Table:
    """How a table is sharded, its dimension, the features that read it; ``kernel=None`` is what TorchRec takes by itself."""

    sharding: str
    dim: int = 8
    features: tuple[str, ...] = ()
    pooling: PoolingType = PoolingType.SUM
    rank: int = 0
    kernel: str | None = FUSED


@dataclass(frozen=True)
class World:
    """A model of some modules of tables, and what its batches are like."""

    modules: tuple[tuple[Table, ...], ...]
    weighted: bool = False
    batch_sizes: tuple[int, ...] = (6, 6)
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=lambda: dict(ADAGRAD))

    @property
    def ranks(self) -> int:
        return len(self.batch_sizes)


class Towers(nn.Module):
    """The embeddings of all modules, one after another in the order of their keys, and a linear layer."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.collections = nn.ModuleList(
            EmbeddingBagCollection([config_of(m, t, table) for t, table in enumerate(tables)], is_weighted=world.weighted)
            for m, tables in enumerate(world.modules)
        )
        width = sum(
            config.embedding_dim * len(config.feature_names)
            for collection in self.collections
            for config in cast(EmbeddingBagCollection, collection).embedding_bag_configs()
        )
        self.over = nn.Linear(width, 1)

    def embeddings(self, features: KeyedJaggedTensor) -> Tensor:
        tensors: list[KeyedTensor] = [collection(features) for collection in self.collections]
        return torch.cat([tensor[key] for tensor in tensors for key in sorted(tensor.keys())], dim=1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return cast(Tensor, self.over(self.embeddings(features)).sigmoid().square().mean())


def config_of(module: int, number: int, table: Table) -> EmbeddingBagConfig:
    name = f"table_{module}_{number}"
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS + number,
        embedding_dim=table.dim,
        feature_names=list(table.features) or [f"feature_{number}"],
        pooling=table.pooling,
    )


def sharding_of(table: Table, ranks: int) -> Callable[..., Any]:
    if table.sharding == "column_wise":
        return column_wise(ranks=[rank % ranks for rank in range(table.dim // 4)], compute_kernel=table.kernel)
    if table.sharding == "table_wise":
        return table_wise(rank=table.rank % ranks, compute_kernel=table.kernel)
    return row_wise(compute_kernel=table.kernel) if table.sharding == "row_wise" else data_parallel()


def plan_of_modules(
    collections: nn.ModuleList,
    modules: Sequence[Sequence[Any]],
    sharding_of: Callable[[Any, int], Callable[..., Any]],
    sharder: EmbeddingBagCollectionSharder,
    ranks: int,
    device_type: str,
) -> dict[str, EmbeddingModuleShardingPlan]:
    """The plan of ``collections`` by name, whose tables are ``modules``."""
    return {
        f"collections.{m}": construct_module_sharding_plan(
            cast(EmbeddingBagCollection, collections[m]),
            {f"table_{m}_{t}": sharding_of(table, ranks) for t, table in enumerate(tables)},
            cast(ModuleSharder[nn.Module], RowWiseToo(sharder)),
            local_size=ranks,
            world_size=ranks,
            device_type=device_type,
        )
        for m, tables in enumerate(modules)
    }


def build(
    world: World, sharder: EmbeddingBagCollectionSharder, prepare: Callable[[Towers], None] | None = None
) -> DistributedModelParallel:
    """The model of a world, with the same weights whatever the sharder; ``prepare`` is called before it is sharded."""
    torch.manual_seed(3)
    model = Towers(world)
    if prepare is not None:
        prepare(model)
    plan = ShardingPlan(plan_of_modules(model.collections, world.modules, sharding_of, sharder, world.ranks, CPU.type))
    sharded = DistributedModelParallel(
        model, device=CPU, plan=plan, sharders=[cast(ModuleSharder[nn.Module], sharder)], init_parameters=False
    )
    fill_tables(sharded)
    return sharded


def fill_tables(sharded: DistributedModelParallel) -> None:
    """Give every table the same weights, whatever the plan."""
    for name, weight in sharded.state_dict().items():
        if hasattr(weight, "local_shards"):
            for shard in weight.local_shards():
                row, column = shard.metadata.shard_offsets
                shard.tensor.copy_(
                    whole_table(name, weight.size())[row:, column:][: shard.tensor.shape[0], : shard.tensor.shape[1]]
                )
        elif "table_" in name:
            weight.copy_(whole_table(name, weight.size()))


class RowWiseToo:
    """The plan's view of a sharder that offers row-wise tables on the CPU as well."""

    def __init__(self, sharder: EmbeddingBagCollectionSharder) -> None:
        self.sharder = sharder

    def sharding_types(self, _: str) -> list[str]:
        return self.sharder.sharding_types("cuda")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sharder, name)


def whole_table(name: str, size: torch.Size) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(size, generator=generator)


def batches(world: World, count: int, rank: int | None = None) -> list[KeyedJaggedTensor]:
    """The batches of a rank, or this one: bags of 0 to 4 rows."""
    rank = dist.get_rank() if rank is None else rank
    keys = sorted({f for tables in world.modules for t, table in enumerate(tables) for f in table.features or [f"feature_{t}"]})
    generator = torch.Generator().manual_seed(1_000 + rank)
    made = []
    for _ in range(count):
        lengths = torch.randint(0, 5, (len(keys) * world.batch_sizes[rank],), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(values.shape, generator=generator) if world.weighted else None
        made.append(KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights))
    return made


Course = Callable[[DistributedModelParallel, World], list[Tensor]]


def run_both(world: World, course: Course, hosts: Sequence[int] | None = None) -> list[tuple[list[Tensor], list[Tensor]]]:
    """By rank, what a course of events gives with our sharder, and with TorchRec's; ``hosts``: the number of each rank's."""
    return run_ranks(world.ranks, on_hosts, hosts or [0] * world.ranks, _run_both, world, course)


def _run_both(world: World, course: Course) -> tuple[list[Tensor], list[Tensor]]:
    results = []
    with process_group(Rank.from_environment(), CPU):
        for sharder in (
            FusedEmbeddingBagCollectionSharder(dict(world.optimizer), **world.options),
            EmbeddingBagCollectionSharder(dict(world.optimizer)),
        ):
            model = build(world, sharder)
            assert_paths(model, world)
            observed = course(model, world)
            results.append([*observed, *tables_of(model)])
    return results[0], results[1]


def assert_paths(model: DistributedModelParallel, world: World) -> None:
    """Every table that is covered takes the fused path, unless the model is TorchRec's."""
    for m, tables in enumerate(world.modules):
        paths = getattr(get_unwrapped_module(model).collections[m], "paths", {})
        for name, path in paths.items():
            covered = tables[int(name.rsplit("_", 1)[1])].sharding != "data_parallel"
            assert path == (world.options.get("mode", "fused") if covered else "torchrec: sharding type data_parallel")


def tables_of(model: DistributedModelParallel) -> list[Tensor]:
    """Weights of all local shards, and the state of their optimizer."""
    shards = [shard.tensor for w in model.state_dict().values() if hasattr(w, "local_shards") for shard in w.local_shards()]
    states = [
        shard.tensor
        for state in model.fused_optimizer.state_dict()["state"].values()
        for value in state.values()
        for shard in value.local_shards()
    ]
    return [tensor.detach().clone() for tensor in (*shards, *states)]


def assert_equal(results: list[tuple[list[Tensor], list[Tensor]]], exactly: bool = True) -> None:
    for ours, torchrecs in results:
        assert len(ours) == len(torchrecs) > 0
        for our, torchrec in zip(ours, torchrecs, strict=True):
            same_bits = exactly and not WITH_KERNELS
            torch.testing.assert_close(our, torchrec, rtol=0 if same_bits else 1e-5, atol=0 if same_bits else 1e-6)


def optimizer_of(model: DistributedModelParallel) -> torch.optim.Optimizer:
    """Of all that FBGEMM does not update."""
    fused = set(model.fused_optimizer.params)
    return torch.optim.SGD([p for name, p in model.named_parameters() if name not in fused], lr=0.5)


def step_by_step(model: DistributedModelParallel, world: World, count: int = 4) -> list[Tensor]:
    optimizer, observed = optimizer_of(model), []
    for batch in batches(world, count):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        observed.append(loss.detach())
    return observed


def with_gradients_of_weights(model: DistributedModelParallel, world: World) -> list[Tensor]:
    """As where a feature processor computes the weights of samples between input dist and lookup."""
    collection = get_unwrapped_module(model).collections[0]
    observed: list[Tensor] = []
    for batch in batches(world, 2):
        context = collection.create_context()
        distributed = collection.input_dist(context, batch).wait().wait()
        weights = [features.weights().detach().requires_grad_() for features in distributed]
        for features, weight in zip(distributed, weights, strict=True):
            features._weights = weight
        output = collection.compute_and_output_dist(context, distributed).wait()
        torch.stack([output[key].square().sum() for key in output.keys()]).sum().backward()  # noqa: SIM118
        # Of features of no table on this rank there are none.
        observed += [cast(Tensor, weight.grad) for weight in weights if weight.numel()]
    assert all(gradient.abs().sum() > 0 for gradient in observed)
    return observed


def with_features_sent_by_kernels(model: DistributedModelParallel, world: World) -> list[Tensor]:
    """Asserts that from the second batch on TorchRec's input dist is not used, unless the model is TorchRec's."""
    observed = step_by_step(model, world)
    collection = get_unwrapped_module(model).collections[0]
    if isinstance(collection, FusedShardedEmbeddingBagCollection):
        with mock.patch.object(
            ShardedEmbeddingBagCollection, "input_dist", side_effect=AssertionError("TorchRec's input dist")
        ):
            observed += step_by_step(model, world)
    else:
        observed += step_by_step(model, world)
    return observed


def received_features(model: DistributedModelParallel, world: World) -> list[Tensor]:
    """Lengths and ids, among them a wrong one, for a check at the lookup to find; from the second batch on by kernels."""
    collection, observed = get_unwrapped_module(model).collections[0], []
    is_fused = isinstance(collection, FusedShardedEmbeddingBagCollection)
    for number, batch in enumerate(batches(world, 3)):
        batch["feature_0"].values()[:1] = -1
        context = collection.create_context()
        torchrecs = mock.patch.object(ShardedEmbeddingBagCollection, "input_dist", side_effect=AssertionError("TorchRec's"))
        with torchrecs if is_fused and number else nullcontext():
            features = collection.input_dist(context, batch).wait().wait()
        observed += [tensor.clone() for own in features for tensor in (own.lengths(), own.values())]
    return observed


SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
EVERY_KIND = (
    Table("table_wise", 8, rank=1),
    Table("column_wise", 12),
    Table("row_wise", 4),
    Table("table_wise", 16, pooling=MEAN),
    Table("column_wise", 8),
)
# FBGEMM's backward pass on the CPU does not divide by the length of weighted bags whose mean is taken; that on GPUs does.
WEIGHTED = tuple(table for table in EVERY_KIND if table.pooling is SUM)
WITHOUT_ROW_WISE = tuple(table for table in EVERY_KIND if table.sharding != "row_wise")
ONE_OF_EACH = EVERY_KIND[1:4]


def with_kernels_too(value: object) -> object:
    """A parameter for which a test runs under Triton's interpreter as well, which is slow."""
    return pytest.param(value, marks=pytest.mark.also_interpreted)


class TestOneStepAfterTheOther:
    @pytest.mark.parametrize("ranks", [1, with_kernels_too(2), 3, 4])
    def test_every_covered_kind_in_one_module(self, ranks):
        tables = EVERY_KIND if ranks > 1 else WITHOUT_ROW_WISE
        assert_equal(run_both(World((tables,), batch_sizes=(6,) * ranks), step_by_step), exactly=ranks <= 2)

    @pytest.mark.slow
    @pytest.mark.interpreted
    @pytest.mark.parametrize(
        ("ranks", "tables"),
        [
            (1, EVERY_KIND),
            (2, WITHOUT_ROW_WISE),
            (2, EVERY_KIND),
            (3, (Table("row_wise", 4), Table("row_wise", 8))),
            (2, (Table("row_wise", 4, ("feature_0", "feature_1")), Table("table_wise", 8, ("feature_2",)))),
        ],
    )
    def test_features_are_sent_by_kernels(self, ranks, tables):
        assert_equal(run_both(World((tables,), batch_sizes=(6,) * ranks), with_features_sent_by_kernels))

    @pytest.mark.interpreted
    @pytest.mark.parametrize(("hosts", "tables"), [((0, 1), EVERY_KIND), ((0, 0, 1), ONE_OF_EACH)])
    def test_between_hosts_kernels_and_messages_send_features(self, hosts, tables):
        world = World((tables,), batch_sizes=(6,) * len(hosts))
        assert_equal(run_both(world, with_features_sent_by_kernels, hosts), exactly=len(hosts) == 2)

    @pytest.mark.slow
    @pytest.mark.interpreted
    @pytest.mark.parametrize("tables", [WITHOUT_ROW_WISE[:2], EVERY_KIND[:3], (Table("row_wise"),)])
    @pytest.mark.parametrize("sizes", [(0, 2), (3, 2)])
    def test_kernels_send_the_ids_that_torchrec_sends(self, tables, sizes):
        for hosts in ([0, 0], [0, 1]):
            assert_equal(run_both(World((tables,), batch_sizes=sizes), received_features, hosts))

    @pytest.mark.parametrize("sizes", [(7, 2), with_kernels_too((1, 9, 4)), (3, 3, 5, 8)])
    def test_uneven_batches(self, sizes):
        assert_equal(run_both(World((WITHOUT_ROW_WISE,), batch_sizes=sizes), step_by_step))

    @pytest.mark.also_interpreted
    def test_features_that_read_several_tables_and_tables_that_several_features_read(self):
        tables = (
            Table("table_wise", 8, ("feature_0", "feature_1")),
            Table("table_wise", 4, ("feature_1",), rank=1),
            Table("column_wise", 8, ("feature_1", "feature_2")),
            Table("row_wise", 8, ("feature_2", "feature_0")),
        )
        assert_equal(run_both(World((tables,)), step_by_step))

    @pytest.mark.also_interpreted
    def test_ranks_without_tables(self):
        assert_equal(run_both(World(((Table("table_wise", rank=1),),), batch_sizes=(3, 3, 3)), step_by_step))

    @pytest.mark.also_interpreted
    def test_mean_pooling_of_row_wise_tables(self):
        tables = (Table("row_wise", 8, pooling=MEAN), Table("row_wise", 4))
        assert_equal(run_both(World((tables,)), step_by_step))

    @pytest.mark.parametrize("ranks", [with_kernels_too(2), 3])
    def test_weighted_features(self, ranks):
        world = World((WEIGHTED,), weighted=True, batch_sizes=(4,) * ranks)
        assert_equal(run_both(world, step_by_step), exactly=ranks == 2)

    @pytest.mark.parametrize("ranks", [with_kernels_too(2), 3])
    def test_gradients_of_the_weights(self, ranks):
        world = World((WEIGHTED,), weighted=True, batch_sizes=(4,) * ranks)
        assert_equal(run_both(world, with_gradients_of_weights), exactly=ranks == 2)

    @pytest.mark.also_interpreted
    def test_beside_tables_that_stay_on_torchrecs_path(self):
        tables = (Table("table_wise"), Table("data_parallel", 4), Table("row_wise"), Table("column_wise"))
        assert_equal(run_both(World((tables,)), step_by_step))

    def test_gradients_that_are_not_to_be_divided(self):
        assert_equal(run_both(World((WEIGHTED,), weighted=True), without_gradient_division))

    @pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=str)
    def test_under_another_default_device(self, hosts):
        assert_equal(run_both(World((WITHOUT_ROW_WISE,)), under_another_default_device, hosts), exactly=hosts == (0, 0))


def under_another_default_device(model: DistributedModelParallel, world: World) -> list[Tensor]:
    """As with ``torch.set_default_device("cuda")`` on GPUs, where tensors of host memory are still to be made."""
    given, observed = batches(world, 3), []
    with torch.device("meta"):
        for batch in given:
            loss = model(batch)
            loss.backward()
            observed.append(loss.detach())
    return observed


def without_gradient_division(model: DistributedModelParallel, world: World) -> list[Tensor]:
    set_gradient_division(False)
    observed = step_by_step(model, world)
    set_gradient_division(True)
    return observed


class TestHeldTensors:
    """Outputs stay what they were, however many forward passes follow before they are used."""

    @pytest.mark.parametrize(
        "course",
        [
            "many_forwards_before_any_backward",
            "backwards_in_the_order_of_forwards",
            with_kernels_too("accumulation"),
            with_kernels_too("evaluation_in_between"),
        ],
    )
    def test_equals_torchrec(self, course):
        assert_equal(run_both(World((ONE_OF_EACH,), batch_sizes=(4, 4)), globals()[course]))

    @pytest.mark.interpreted
    def test_training_goes_on_after_a_first_batch_in_inference_mode(self):
        assert_equal(run_both(World((ONE_OF_EACH,), batch_sizes=(4, 4)), inference_first))

    @pytest.mark.also_interpreted
    @pytest.mark.parametrize("course", ["step_by_step", "many_forwards_before_any_backward"])
    def test_two_sharded_modules(self, course):
        assert_equal(run_both(World((ONE_OF_EACH, ONE_OF_EACH[::-1]), batch_sizes=(4, 4)), globals()[course]))


def many_forwards_before_any_backward(model: DistributedModelParallel, world: World) -> list[Tensor]:
    losses = [model(batch) for batch in batches(world, 6)]
    held = [loss.detach().clone() for loss in losses]
    for loss in reversed(losses):
        loss.backward()
    return [*held, *_gradients(model)]


def backwards_in_the_order_of_forwards(model: DistributedModelParallel, world: World) -> list[Tensor]:
    outputs = [get_unwrapped_module(model).embeddings(batch) for batch in batches(world, 6)]
    for output in outputs:
        output.square().sum().backward()
    return [output.detach() for output in outputs]


def accumulation(model: DistributedModelParallel, world: World) -> list[Tensor]:
    optimizer, observed = optimizer_of(model), []
    for i, batch in enumerate(batches(world, 8)):
        loss = model(batch)
        loss.backward()
        observed.append(loss.detach())
        if i % 4 == 3:
            observed += _gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    return observed


def evaluation_in_between(model: DistributedModelParallel, world: World) -> list[Tensor]:
    optimizer, observed = optimizer_of(model), []
    made = batches(world, 6)
    for training, evaluated in zip(made[::2], made[1::2], strict=True):
        loss = model(training)
        model.eval()
        with torch.no_grad():
            observed += [model(evaluated), model(training)]
        model.train()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        observed.append(loss.detach())
    return observed


def inference_first(model: DistributedModelParallel, world: World) -> list[Tensor]:
    """FBGEMM's own lookups know no inference mode on the CPU; what they give without is right."""
    is_ours = isinstance(get_unwrapped_module(model).collections[0], FusedShardedEmbeddingBagCollection)
    observed = []
    for batch in batches(world, 2):
        with torch.inference_mode() if is_ours else torch.no_grad():
            observed.append(model(batch))
    return [*(loss.clone() for loss in observed), *step_by_step(model, world)]


def _gradients(model: DistributedModelParallel) -> list[Tensor]:
    return [p.grad.clone() for p in get_unwrapped_module(model).over.parameters() if p.grad is not None]


class TestNumberFormatsOnTheWire:
    @pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
    def test_results_are_rounded_once(self, wire):
        world = World((WITHOUT_ROW_WISE,), options={"forward_wire": wire})
        for ours, torchrecs in run_both(world, embeddings_of_a_batch):
            assert torch.equal(ours[0], torchrecs[0].to(wire).float())


def embeddings_of_a_batch(model: DistributedModelParallel, world: World) -> list[Tensor]:
    (batch,) = batches(world, 1)
    with torch.no_grad():
        return [get_unwrapped_module(model).embeddings(batch)]


AUTO = {"mode": "auto"}


class TestAuto:
    def test_the_same_results_whatever_is_chosen(self):
        world = World((EVERY_KIND, (Table("data_parallel"),)), options={"mode": "auto"})
        assert_equal(run_both(world, step_by_step))

    def test_all_ranks_choose_the_same_and_say_both_times(self):
        world = World((EVERY_KIND,), options={"mode": "auto"})
        (paths, messages), (other_paths, none) = run_ranks(2, _auto_choice, world, 4)
        assert paths == other_paths
        assert none == []
        measured = [message for message in messages if "comm=auto" in message]
        assert len(measured) == 3
        assert all("fused " in message and "TorchRec " in message for message in measured)

    def test_ranks_measure_alike_whatever_the_garbage_collector_has_done(self):
        paths, other_paths = run_ranks(2, _auto_after_a_model_that_is_gone_on_one_rank, World((EVERY_KIND,), options=AUTO))
        assert paths == other_paths
        assert "auto" not in paths.values()

    @pytest.mark.parametrize("slow", ["row_wise", "column_wise"])
    def test_of_each_sharding_type_the_faster_path_is_taken(self, slow):
        """Fused communication is made slow for one sharding type, TorchRec's for the others."""
        world = World((EVERY_KIND,), options={"mode": "auto"})
        results = run_ranks(2, _auto_choice_with_slow_paths, world, slow)
        for paths, _, losses, losses_of_torchrec in results:
            for t, table in enumerate(EVERY_KIND):
                taken, other = ("torchrec", "fused") if table.sharding == slow else ("fused", "TorchRec")
                assert re.fullmatch(rf"{taken}: [\d.]+ ms, {other} [\d.]+ ms", paths[f"table_0_{t}"])
            assert losses == losses_of_torchrec
        messages = [message for message in results[0][1] if message.startswith("comm=auto, collections.0: ")]
        assert {message.split()[2]: message.split()[-1] for message in messages} == {
            kind: "TorchRec" if kind == slow else "fused" for kind in ("table_wise", "row_wise", "column_wise")
        }

    def test_between_hosts_all_sharding_types_take_one_path(self):
        """Messages of both paths in one step would wait for each other."""
        world = World((EVERY_KIND,), options={"mode": "auto"})
        for paths, messages in run_ranks(2, on_hosts, (0, 1), _auto_choice, world, 2):
            assert len(set(paths.values())) == 1
            measured = [message for message in messages if "comm=auto" in message]
            assert all("table_wise, column_wise, row_wise tables, a step: " in message for message in measured)
            assert len(measured) == (len(messages) > 0)


def _auto_after_a_model_that_is_gone_on_one_rank(world: World) -> dict[str, str]:
    measure_briefly()
    with process_group(Rank.from_environment(), CPU):
        first = [build(world, FusedEmbeddingBagCollectionSharder(dict(ADAGRAD), **world.options))]
        step_by_step(first[0], world, 1)
        if dist.get_rank() == 0:
            first.clear()
            gc.collect()
        model = build(world, FusedEmbeddingBagCollectionSharder(dict(ADAGRAD), **world.options))
        step_by_step(model, world, 2 * 4 + 1)
        return get_unwrapped_module(model).collections[0].paths


def _auto_choice(world: World, ways: int) -> tuple[dict[str, str], list[str]]:
    messages = recorded_messages()
    measure_briefly()
    with process_group(Rank.from_environment(), CPU):
        model = build(world, FusedEmbeddingBagCollectionSharder(dict(ADAGRAD), **world.options))
        collection = get_unwrapped_module(model).collections[0]
        step_by_step(model, world, 2 * ways)
        assert set(collection.paths.values()) == {"auto"}
        step_by_step(model, world, 1)
        return collection.paths, messages


def _auto_choice_with_slow_paths(world: World, slow: str) -> tuple[dict[str, str], list[str], list[Tensor], list[Tensor]]:
    def slowed(run: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
        def run_slowly(*arguments: Any) -> Any:
            time.sleep(seconds(*arguments))
            return run(*arguments)

        return run_slowly

    messages = recorded_messages()
    measure_briefly()
    with process_group(Rank.from_environment(), CPU):
        count = 4 * 2 + 3
        expected = step_by_step(build(world, EmbeddingBagCollectionSharder(dict(ADAGRAD))), world, count)
        model = build(world, FusedEmbeddingBagCollectionSharder(dict(ADAGRAD), **world.options))
        collection = get_unwrapped_module(model).collections[0]
        of_slow = collection._sharding_types.index(slow)
        CpuPath.look_up = slowed(CpuPath.look_up, lambda path, *_: 0.4 * (path.shardings == (of_slow,)))
        compat.look_up_and_deliver = slowed(compat.look_up_and_deliver, lambda _, sharding, *__: 0.2 * (sharding != of_slow))
        TorchRecPath.deliver = slowed(TorchRecPath.deliver, lambda *_: 0.4)
        losses = step_by_step(model, world, count)
    return collection.paths, messages, losses, expected


def recorded_messages() -> list[str]:
    """What the package logs from now on."""
    messages: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.disable(logging.NOTSET)
    logger = logging.getLogger("dlrm_fused")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Recorder())
    return messages


class TestWhatIsNotCovered:
    UNCOVERED = World(((Table("table_wise"), Table("data_parallel"), Table("data_parallel", 4)),))

    def test_is_said_once_for_each_table(self):
        messages, others = run_ranks(2, _messages, self.UNCOVERED, step_by_step)
        assert [message for message in messages if "TorchRec's own path" in message] == [
            f"table {name} runs on TorchRec's own path, without fused communication: sharding type data_parallel"
            for name in ("table_0_1", "table_0_2")
        ]
        assert others == []

    def test_one_line_counts_the_tables_and_says_what_to_do(self):
        line = _summary_line(self.UNCOVERED)
        assert line.startswith("fused communication for 1 of 3 embedding tables; not for 2: sharding type data_parallel")
        assert "sharding_types=['table_wise']" in line

    def test_a_plan_made_before_an_optimizer_was_applied_in_backward_fuses_nothing(self):
        """Although the sharder has fused_params."""
        line = _summary_line(World(((Table("table_wise", kernel=None), Table("row_wise", 4, kernel=None)),)))
        assert line.startswith("fused communication for 0 of 2 embedding tables; not for 2: compute kernel dense")
        assert "torchrec.optim.apply_optimizer_in_backward" in line

    def test_is_an_error_with_strict(self):
        world = World(self.UNCOVERED.modules, options={"strict": True})
        with pytest.raises(RankFailed) as failed:
            run_both(world, step_by_step)
        assert isinstance(failed.value.error, UsageError)
        assert "table_0_1: sharding type data_parallel; table_0_2: sharding type data_parallel" in str(failed.value.error)

    @pytest.mark.parametrize("course", ["a_tracker_of_lookups", "a_batch_size_for_each_feature"])
    def test_batches_run_on_torchrecs_path(self, course):
        assert_equal(run_both(World((WITHOUT_ROW_WISE,)), globals()[course]))

    def test_batches_are_spoken_of_once(self):
        messages, _ = run_ranks(2, _messages, World((WITHOUT_ROW_WISE,)), a_batch_size_for_each_feature)
        said = [message for message in messages if "TorchRec's own path" in message]
        assert said == [
            "batches with a batch size of its own for each feature run on TorchRec's own path, without fused communication"
        ]


def _summary_line(world: World) -> str:
    """What is said of the first module; once, on rank 0."""
    messages, others = run_ranks(2, _messages, world, step_by_step)
    assert others == []
    (line,) = [message for message in messages if "fused communication for" in message]
    assert line.startswith("collections.0: ")
    return line.removeprefix("collections.0: ")


def _messages(world: World, course: Course) -> list[str]:
    messages = recorded_messages()
    with process_group(Rank.from_environment(), CPU):
        course(build(world, FusedEmbeddingBagCollectionSharder(dict(ADAGRAD), **world.options)), world)
    return [message for message in messages if not message.startswith("symmetric memory")]


def a_tracker_of_lookups(model: DistributedModelParallel, world: World) -> list[Tensor]:
    observed: list[Tensor] = []
    collection = get_unwrapped_module(model).collections[0]
    collection.register_post_lookup_tracker_fn(lambda features, embeddings, *_: observed.append(embeddings.detach()))
    losses = step_by_step(model, world)
    assert observed
    return [*losses, *observed]


def a_batch_size_for_each_feature(model: DistributedModelParallel, world: World) -> list[Tensor]:
    keys = [f"feature_{i}" for i in range(len(world.modules[0]))]
    strides = [[i % 2 + 1] for i in range(len(keys))]
    generator = torch.Generator().manual_seed(dist.get_rank())
    samples = 3
    observed = []
    for _ in range(3):
        lengths = torch.randint(1, 4, (sum(stride for (stride,) in strides),), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        inverse = torch.stack([torch.arange(samples) % stride for (stride,) in strides])
        batch = KeyedJaggedTensor(
            keys=keys, values=values, lengths=lengths, stride_per_key_per_rank=strides, inverse_indices=(keys, inverse)
        )
        with torch.no_grad():  # TorchRec's backward pass of such batches fails on the CPU
            observed.append(model(batch))
    return observed


def test_a_rank_whose_gradient_is_sparse_is_named_by_the_others_at_once():
    _, message = run_ranks(2, _message_of_sparse_gradient, World((WITHOUT_ROW_WISE,)))
    assert "did not take part because of an error" in message


def _message_of_sparse_gradient(world: World) -> str:
    with process_group(Rank.from_environment(), CPU):
        model = build(world, FusedEmbeddingBagCollectionSharder(dict(ADAGRAD), timeout_seconds=5))
        output = get_unwrapped_module(model).collections[0](batches(world, 1)[0]).values()
        gradient = torch.ones_like(output)
        with pytest.raises((RuntimeError, CommunicationError)) as failed:
            output.backward(gradient.to_sparse() if dist.get_rank() == 0 else gradient)
        return str(failed.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "fast"}, "mode='fast': allowed: 'fused', 'auto'"),
        ({"forward_wire": torch.int8}, "forward_wire=torch.int8: allowed: torch.float32, torch.bfloat16, torch.float16"),
        ({"backward_wire": torch.float64}, "backward_wire=torch.float64: allowed"),
        ({"timeout_seconds": 0}, "timeout_seconds=0: allowed: a positive number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        FusedEmbeddingBagCollectionSharder(**arguments)
