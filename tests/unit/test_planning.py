"""What the planner is told, and how its plan reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from dlrm_fused.config import (
    Comm,
    ComputeKernel,
    Config,
    EmbeddingConfig,
    EmbeddingOptimizerKind,
    OutputDtype,
    Precision,
    Sharding,
    TableConfig,
    TableDtype,
    WireDtype,
)
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.errors import CommunicationError, ConfigError
from dlrm_fused.models import build_model
from dlrm_fused.sharding import planning
from dlrm_fused.sharding.optimizers import describe_table_optimizers
from dlrm_fused.sharding.parallel import make_sharder, pooled_dtype
from dlrm_fused.sharding.planning import Ranks, describe_plan, make_plan, planner_for, shard_columns, table_constraints
from dlrm_fused.sharding.tables import fill_uniform
from dlrm_fused.symmetric.hosts import Hosts

CPU = torch.device("cpu")
SCHEMA = DatasetSchema(
    dense_features=("age",),
    sparse_features=(SparseFeature("user", 1000, 1.0, False), SparseFeature("genres", 30, 2.5, True)),
)


class TestConstraints:
    def test_all_tables_follow_the_group(self):
        embedding = EmbeddingConfig(sharding=Sharding.row_wise)
        for constraint in table_constraints(embedding, SCHEMA, Ranks(4)).values():
            assert constraint.sharding_types == ["row_wise"]
            assert constraint.compute_kernels == ["fused"]

    def test_a_table_may_have_its_own(self):
        tables = {"user": TableConfig(Sharding.column_wise, ComputeKernel.fused_uvm_caching)}
        constraints = table_constraints(EmbeddingConfig(sharding=Sharding.table_wise, tables=tables), SCHEMA, Ranks(4))
        assert constraints["user"].sharding_types == ["column_wise"]
        assert constraints["user"].compute_kernels == ["fused_uvm_caching"]
        assert constraints["genres"].sharding_types == ["table_wise"]
        assert constraints["genres"].compute_kernels == ["fused"]

    def test_pooling_factors_come_from_the_data_unless_configured(self):
        tables = {"user": TableConfig(pooling_factor=7.0)}
        constraints = table_constraints(EmbeddingConfig(tables=tables), SCHEMA, Ranks(4))
        assert constraints["user"].pooling_factors == [7.0]
        assert constraints["genres"].pooling_factors == [2.5]

    def test_a_token_table_has_a_pooled_embedding_for_each_token_of_a_sample(self):
        schema = replace(SCHEMA, token_features=(SparseFeature("watched", 500, 0.9),), history_length=20)
        tables = {"watched": TableConfig(Sharding.row_wise)}
        constraints = table_constraints(EmbeddingConfig(tables=tables), schema, Ranks(4))
        assert {name: c.num_poolings for name, c in constraints.items()} == {"user": [1], "genres": [1], "watched": [21]}
        assert constraints["watched"].pooling_factors == [0.9]
        assert constraints["watched"].sharding_types == ["row_wise"]

    def test_each_table_is_cut_by_its_own_columns(self):
        embedding = EmbeddingConfig(dim=64, sharding=Sharding.column_wise, tables={"genres": TableConfig(dim=12)})
        constraints = table_constraints(embedding, SCHEMA, Ranks(4))
        assert {name: constraint.min_partition for name, constraint in constraints.items()} == {"user": 16, "genres": 4}

    def test_auto_gives_the_plan_that_torchrec_makes_by_itself(self):
        schema = DatasetSchema(
            ("age",), tuple(SparseFeature(f"table_{i}", rows, 10.0) for i, rows in enumerate((10, 1000, 10**6, 4 * 10**6)))
        )
        config = Config(embedding=EmbeddingConfig(dim=128))
        config.model.bottom_mlp = [128]
        model = build_model(config, schema, 4, CPU)
        sharder = make_sharder(config.embedding, torch.device("cuda"))
        own = {name: ParameterConstraints(pooling_factors=[10.0]) for name in (f.name for f in schema.sparse_features)}
        plans = [
            EmbeddingShardingPlanner(
                topology=Topology(world_size=4, compute_device="cuda"), batch_size=16_384, constraints=constraints, debug=False
            ).plan(model, [sharder])
            for constraints in (table_constraints(config.embedding, schema, Ranks(4)), own)
        ]
        ours, torchrecs = (
            {name: (p.sharding_type, p.ranks) for m in plan.plan.values() for name, p in m.items()} for plan in plans
        )
        assert ours == torchrecs

    @pytest.mark.parametrize(("rows", "ranks", "leaves_none"), [(2, 3, True), (4, 3, True), (3, 3, False), (2, 2, False)])
    def test_on_the_cpu_each_rank_has_a_row_of_a_row_wise_table(self, rows, ranks, leaves_none):
        schema = DatasetSchema(("age",), (SparseFeature("kind", rows, 1.0), SparseFeature("user", 1000, 1.0)))
        chosen = table_constraints(EmbeddingConfig(), schema, Ranks(ranks, on_cpu=True))
        assert chosen["kind"].sharding_types == (["table_wise"] if leaves_none else None)
        assert chosen["user"].sharding_types is None
        assert table_constraints(EmbeddingConfig(), schema, Ranks(ranks))["kind"].sharding_types is None
        told = EmbeddingConfig(sharding=Sharding.row_wise)
        message = f"row_wise: kind has {rows} rows for {ranks} ranks, so that one has none"
        with pytest.raises(ConfigError, match=message) if leaves_none else nullcontext():
            table_constraints(told, schema, Ranks(ranks, on_cpu=True))
        own = replace(told, tables={"kind": TableConfig(Sharding.table_wise)})
        assert table_constraints(own, schema, Ranks(ranks, on_cpu=True))["kind"].sharding_types == ["table_wise"]

    def test_tables_are_not_divided_within_hosts_that_differ(self):
        chosen = table_constraints(EmbeddingConfig(), SCHEMA, Ranks(3, hosts_differ=True))
        assert chosen["user"].sharding_types == ["table_wise", "column_wise", "row_wise"]
        for told in (Sharding.table_row_wise, Sharding.grid_shard):
            with pytest.raises(ConfigError, match=f"{told.name}: user would be divided within a host"):
                table_constraints(EmbeddingConfig(sharding=told), SCHEMA, Ranks(3, hosts_differ=True))

    def test_data_parallel_tables_have_a_plain_kernel(self):
        constraint = table_constraints(EmbeddingConfig(sharding=Sharding.data_parallel), SCHEMA, Ranks(4))["user"]
        assert constraint.sharding_types == ["data_parallel"]
        assert constraint.compute_kernels == ["dense"]

    def test_data_parallel_tables_are_fp32(self):
        tables = {"user": TableConfig(Sharding.data_parallel)}
        with pytest.raises(ConfigError, match=r"embedding.dtype=fp16: user is data_parallel, .*; allowed: fp32"):
            table_constraints(EmbeddingConfig(dtype=TableDtype.fp16, tables=tables), SCHEMA, Ranks(4))

    def test_data_parallel_tables_have_no_weight_decay(self):
        embedding = EmbeddingConfig(tables={"user": TableConfig(Sharding.data_parallel)})
        embedding.optimizer.weight_decay = 0.1
        with pytest.raises(ConfigError, match=r"embedding.optimizer.weight_decay=0.1: user is data_parallel, .*; allowed: 0"):
            table_constraints(embedding, SCHEMA, Ranks(4))

    def test_data_parallel_tables_have_no_rowwise_adam(self):
        embedding = EmbeddingConfig(tables={"user": TableConfig(Sharding.data_parallel)})
        embedding.optimizer.kind = EmbeddingOptimizerKind.rowwise_adam
        with pytest.raises(ConfigError, match=r"kind=rowwise_adam: user is data_parallel, .*; allowed: .*, adam"):
            table_constraints(embedding, SCHEMA, Ranks(4))

    @pytest.mark.parametrize("sharding", [Sharding.row_wise, Sharding.table_row_wise, Sharding.grid_shard])
    def test_a_single_rank_holds_whole_tables(self, sharding):
        constraint = table_constraints(EmbeddingConfig(sharding=sharding), SCHEMA, Ranks(1))["user"]
        assert constraint.sharding_types == ["table_wise"]

    def test_a_table_that_the_data_does_not_have(self):
        embedding = EmbeddingConfig(tables={"movie": TableConfig()})
        with pytest.raises(ConfigError, match=r"embedding.tables.movie: no such table; the data set has: genres, user"):
            table_constraints(embedding, SCHEMA, Ranks(4))


@pytest.mark.parametrize(
    ("dim", "world_size", "columns"),
    [(64, 1, 64), (64, 2, 32), (64, 4, 16), (64, 3, 32), (64, 100, 4), (12, 2, 12), (12, 3, 4), (8, 8, 4)],
)
def test_columns_are_cut_into_no_more_shards_than_ranks(dim, world_size, columns):
    assert shard_columns(EmbeddingConfig(), dim, world_size) == columns


def test_configured_columns_of_a_shard_win():
    assert shard_columns(EmbeddingConfig(shard_columns=8), 64, 2) == 8


def test_the_plan_as_a_table():
    def shards(*pieces: tuple[int, int, int, int, int]) -> EnumerableShardingSpec:
        return EnumerableShardingSpec(
            [ShardMetadata([row, column], [rows, columns], f"rank:{r}/cpu") for row, column, rows, columns, r in pieces]
        )

    tables = {
        # Not in the order of the schema.
        "genres": ParameterSharding("table_wise", "fused", [1], shards((0, 0, 30, 4, 1))),
        "user": ParameterSharding("row_wise", "fused", [0, 1], shards((0, 0, 500, 8, 0), (500, 0, 500, 8, 1))),
    }
    embedding = EmbeddingConfig(dim=4, tables={"user": TableConfig(dim=8)})
    text = describe_plan(ShardingPlan({"tables": EmbeddingModuleShardingPlan(tables)}), SCHEMA, embedding)
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["table", "rows", "dim", "pooling", "sharding", "kernel", "ranks"]
    assert lines[1] == ["user", "1,000", "8", "1.00", "row_wise", "fused", "0,1"]
    assert lines[2] == ["genres", "30", "4", "2.50", "table_wise", "fused", "1"]
    assert [line[:2] for line in lines[4:]] == [["rank", "0:"], ["rank", "1:"]]


@pytest.fixture
def single_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single_rank")
class TestMakePlan:
    def plan(self, schema: DatasetSchema, sharding: Sharding) -> str:
        config = Config()
        config.embedding.sharding = sharding
        config.model.bottom_mlp = [64]
        model = build_model(config, schema, 1, CPU)
        plan = make_plan(config, schema, model, [make_sharder(config.embedding, CPU)], CPU)
        return describe_plan(plan, schema, config.embedding)

    @pytest.mark.parametrize("sharding", [Sharding.auto, Sharding.table_wise, Sharding.column_wise])
    def test_every_table_has_a_place(self, sharding):
        text = self.plan(SCHEMA, sharding)
        assert "user" in text
        assert "genres" in text
        assert "fused" in text
        assert "rank 0: 0.000 GiB" in text

    def test_a_table_of_which_each_rank_has_a_copy_is_no_reason_to_warn(self, caplog):
        assert "data_parallel" in self.plan(SCHEMA, Sharding.data_parallel)
        assert "Sharding spec" not in caplog.text

    @pytest.mark.parametrize(("kind", "fits"), [(EmbeddingOptimizerKind.sgd, True), (EmbeddingOptimizerKind.adagrad, False)])
    def test_states_of_elements_need_room(self, kind, fits):
        """256 MB of weights, as much of states, in 450 MB."""
        schema = DatasetSchema(("age",), (SparseFeature("user", 1_000_000, 1.0, False),))
        config = Config()
        config.embedding.optimizer.kind = kind
        config.model.bottom_mlp = [64]
        model = build_model(config, schema, 1, CPU)
        describe_table_optimizers(model, config.embedding)
        planner = planner_for(config, schema, Topology(world_size=1, compute_device="cpu", ddr_cap=450_000_000))
        with nullcontext() if fits else pytest.raises(PlannerError):
            planner.plan(model, [make_sharder(config.embedding, CPU)])

    def test_tables_that_fit_nowhere(self):
        huge = DatasetSchema(("age",), (SparseFeature("user", 2**40, 1.0, False),))
        with pytest.raises(ConfigError, match=r"embedding.sharding=table_wise: no plan for 1 ranks: .*") as failed:
            self.plan(huge, Sharding.table_wise)
        assert "\n" not in str(failed.value)


class TestSharder:
    @pytest.mark.parametrize("kind", [EmbeddingOptimizerKind.adam, EmbeddingOptimizerKind.rowwise_adam])
    def test_adam_is_for_gpus(self, kind):
        embedding = EmbeddingConfig()
        embedding.optimizer.kind = kind
        with pytest.raises(ConfigError, match=rf"embedding.optimizer.kind={kind.name}: .*GPUs only"):
            make_sharder(embedding, CPU)

    def test_weight_decay_without_counters_is_for_gpus(self):
        embedding = EmbeddingConfig()
        embedding.optimizer.weight_decay = 0.1
        with pytest.raises(ConfigError, match=r"weight_decay=0.1: .*counter_halflife only; allowed: 0"):
            make_sharder(embedding, CPU)
        assert make_sharder(embedding, torch.device("cuda")).fused_params["weight_decay_mode"] is WeightDecayMode.DECOUPLE

    @pytest.mark.parametrize("key", ["forward_wire", "backward_wire"])
    def test_gloo_does_not_send_bf16(self, key):
        embedding = EmbeddingConfig(**{key: WireDtype.bf16})
        with pytest.raises(ConfigError, match=rf"embedding.{key}=bf16: .*fp32, fp16"):
            make_sharder(embedding, CPU)

    @pytest.mark.parametrize(
        ("precision", "wire", "device", "chosen"),
        [
            (Precision.bf16, WireDtype.fp32, "cuda", OutputDtype.bf16),
            (Precision.fp8, WireDtype.fp32, "cuda", OutputDtype.bf16),
            (Precision.bf16, WireDtype.fp32, "cpu", OutputDtype.fp32),
            (Precision.bf16, WireDtype.fp16, "cuda", OutputDtype.fp32),
            (Precision.fp32, WireDtype.fp32, "cuda", OutputDtype.fp32),
        ],
    )
    def test_embeddings_have_by_default_the_dtype_in_which_the_dense_part_computes(self, precision, wire, device, chosen):
        config = Config(embedding=EmbeddingConfig(backward_wire=wire))
        config.training.precision = precision
        assert pooled_dtype(config, torch.device(device)) is chosen


class TestInitialWeights:
    SHAPE = (150_000, 8)  # more than two of the blocks that are drawn at once

    def fill(self, offsets: tuple[int, int], shape: tuple[int, int], seed: int = 1) -> torch.Tensor:
        weight = torch.full(shape, torch.nan)
        fill_uniform(weight, offsets, self.SHAPE, bound=0.5, seed=seed)
        return weight

    @pytest.mark.parametrize(
        ("offsets", "shape"), [((0, 0), (1, 8)), ((65_530, 0), (10, 8)), ((70_000, 4), (80_000, 4)), ((149_999, 0), (1, 4))]
    )
    def test_a_piece_is_part_of_the_whole(self, offsets, shape):
        (row, column), (rows, columns) = offsets, shape
        whole = self.fill((0, 0), self.SHAPE)
        assert torch.equal(self.fill(offsets, shape), whole[row : row + rows, column : column + columns])

    def test_uniform_within_the_bound(self):
        whole = self.fill((0, 0), self.SHAPE)
        assert whole.abs().max() <= 0.5
        assert whole.mean().item() == pytest.approx(0, abs=2e-3)
        assert whole.std().item() == pytest.approx(1 / 12**0.5, rel=1e-2)

    def test_seeds_and_blocks_differ(self):
        whole = self.fill((0, 0), self.SHAPE)
        assert not torch.equal(whole, self.fill((0, 0), self.SHAPE, seed=2))
        assert not torch.equal(whole[:1000], whole[65_536:66_536])


@pytest.mark.parametrize(
    ("ranks", "comm", "sharding", "expected"),
    [
        (((0, 1, 2, 3),), Comm.fused, Sharding.auto, 4),
        (((0,), (1,), (2,), (3,)), Comm.fused, Sharding.auto, 1),
        (((0, 1), (2, 3)), Comm.auto, Sharding.auto, 2),
        (((0,), (1, 2, 3)), Comm.auto, Sharding.auto, 1),
        # TorchRec adds up partial results within a machine, whatever our stores reach.
        (((0,), (1,), (2,), (3,)), Comm.fused, Sharding.table_row_wise, 4),
        (((0,), (1,), (2,), (3,)), Comm.baseline, Sharding.auto, 4),
    ],
)
def test_costs_are_those_of_ranks_that_reach_each_other_by_stores(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[tuple[int, ...], ...], comm: Comm, sharding: Sharding, expected: int
) -> None:
    """Four GPUs of one machine, with and without peer access."""
    monkeypatch.setattr(planning, "symmetric_group", lambda group, device: SimpleNamespace(hosts=Hosts(ranks, 0)))
    config = Config(comm=comm)
    config.embedding.sharding = sharding
    assert planning.ranks_by_stores(config, torch.device("cuda"), 4) == expected


def test_shards_are_on_the_devices_of_their_ranks_where_ranks_do_not_reach_each_other() -> None:
    """Four GPUs of one machine without peer access: a topology of four machines would put all shards on the first GPU."""
    config = Config(comm=Comm.fused)
    config.embedding.sharding = Sharding.row_wise
    machine, alone = (Topology(world_size=4, local_world_size=ranks, compute_device="cuda") for ranks in (4, 1))
    model = build_model(config, SCHEMA, 4, torch.device("meta"))
    planner = planner_for(config, SCHEMA, machine, alone)
    plan = planner.plan(model, [make_sharder(config.embedding, torch.device("cuda"), config.comm, False, OutputDtype.fp32)])
    placed = {
        str(shard.placement)
        for tables in plan.plan.values()
        for table in tables.values()
        for shard in table.sharding_spec.shards
    }
    assert placed == {f"rank:{rank}/cuda:{rank}" for rank in range(4)}


def test_plans_are_those_of_the_baseline_where_ranks_do_not_reach_each_other_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise CommunicationError("no memory")

    monkeypatch.setattr(planning, "symmetric_group", refuse)
    assert planning.ranks_by_stores(Config(comm=Comm.fused), torch.device("cuda"), 4) is None
