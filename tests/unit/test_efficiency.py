"""Utilization, bandwidths and the floor of a step, by hand: of given work, and the work of given plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from dlrm_fused.config import Config, EmbeddingOptimizerKind, Precision, TableConfig, TableDtype, WireDtype
from dlrm_fused.datasets.schema import DatasetSchema, SparseFeature
from dlrm_fused.ops.common.gpus import H100
from dlrm_fused.training.efficiency import StepWork, efficiency, pooled_bytes, row_bytes

GPU = replace(H100, bf16=100e12, tf32=50e12, fp32=10e12, memory=2e12, nvlink=400e9)
CPU = torch.device("cpu")


class TestEfficiency:
    def test_is_the_work_over_the_time_that_it_took(self) -> None:
        work = StepWork(flops=1e12, hbm_bytes=20e9, link_bytes=2e9)
        assert efficiency(work, GPU, Precision.bf16, step_seconds=0.04) == pytest.approx(
            {"model_flops_utilization": 0.25, "hbm_gb_per_second": 500, "link_gb_per_second": 50, "floor_ms": 10}
        )

    @pytest.mark.parametrize(("precision", "utilization"), [("fp8", 0.005), ("bf16", 0.01), ("tf32", 0.02), ("fp32", 0.1)])
    def test_the_peak_is_that_of_the_precision(self, precision: str, utilization: float) -> None:
        values = efficiency(StepWork(1e12, 0, 0), GPU, Precision[precision], step_seconds=1)
        assert values["model_flops_utilization"] == pytest.approx(utilization)

    @pytest.mark.parametrize(
        ("work", "floor_ms"),
        [((3e11, 2e9, 4e8), 3), ((1e11, 8e9, 4e8), 4), ((1e11, 2e9, 2e9), 5)],
        ids=["flops", "hbm", "link"],
    )
    def test_the_floor_is_the_longest_of_three_times(self, work: tuple[float, float, float], floor_ms: float) -> None:
        assert efficiency(StepWork(*work), GPU, Precision.bf16, 1)["floor_ms"] == pytest.approx(floor_ms)

    def test_what_there_is_none_of_is_left_out(self) -> None:
        assert efficiency(StepWork(None, 1e9, 0), GPU, Precision.bf16, 1).keys() == {"hbm_gb_per_second", "floor_ms"}

    def test_nothing_is_said_of_a_device_whose_data_sheet_is_unknown(self) -> None:
        assert efficiency(StepWork(1e12, 1e9, 1e9), None, Precision.bf16, 1) == {}


RANKS, BATCH, DIM = 4, 80, 8
SCHEMA = DatasetSchema(
    dense_features=("d",),
    sparse_features=(SparseFeature("big", 1000, 2.5), SparseFeature("small", 30, 1.0)),
    token_features=(SparseFeature("token", 5000, 0.5),),
    history_length=9,
)


@pytest.fixture
def config() -> Config:
    config = Config()
    config.embedding.dim = DIM
    config.training.global_batch_size = BATCH
    return config


def placed(kind: str, rows: int, row_cuts: int = 1, column_cuts: int = 1, kernel: str = "fused") -> ParameterSharding:
    """A table in equal shards, each on a rank of its own."""
    height, width = rows // row_cuts, DIM // column_cuts
    places = [(i * height, j * width) for i in range(row_cuts) for j in range(column_cuts)]
    shards = [ShardMetadata(list(place), [height, width], f"rank:{rank}/cpu") for rank, place in enumerate(places)]
    spec = None if kind == "data_parallel" else EnumerableShardingSpec(shards)
    return ParameterSharding(kind, kernel, list(range(len(shards))), spec)


def plan(**tables: ParameterSharding) -> ShardingPlan:
    return ShardingPlan({"tables": EmbeddingModuleShardingPlan(tables)})


class TestRows:
    def test_are_read_and_for_the_update_read_and_written(self, config: Config) -> None:
        ids = 80 * 2.5
        assert row_bytes(config, SCHEMA, plan(big=placed("table_wise", 1000)), RANKS) == ids / RANKS * DIM * 4 * 3

    def test_of_a_small_table_are_not_more_than_it_has(self, config: Config) -> None:
        assert row_bytes(config, SCHEMA, plan(small=placed("table_wise", 30)), RANKS) == 30 / RANKS * DIM * 4 * 3

    def test_of_tokens_are_those_of_a_whole_history(self, config: Config) -> None:
        ids = 80 * 10 * 0.5
        assert row_bytes(config, SCHEMA, plan(token=placed("table_wise", 5000)), RANKS) == ids / RANKS * DIM * 4 * 3

    def test_have_the_columns_of_their_own_table(self, config: Config) -> None:
        config.embedding.tables = {"small": TableConfig(dim=3 * DIM)}
        tables = plan(big=placed("table_wise", 1000), small=placed("table_wise", 30))
        assert row_bytes(config, SCHEMA, tables, RANKS) == (80 * 2.5 + 3 * 30) / RANKS * DIM * 4 * 3

    def test_are_as_many_however_a_table_is_cut(self, config: Config) -> None:
        cuts = [placed("table_wise", 1000), placed("row_wise", 1000, 4), placed("column_wise", 1000, 1, 4)]
        assert len({row_bytes(config, SCHEMA, plan(big=cut), RANKS) for cut in cuts}) == 1

    def test_of_a_data_parallel_table_are_all_on_each_rank(self, config: Config) -> None:
        assert row_bytes(config, SCHEMA, plan(big=placed("data_parallel", 1000)), RANKS) == 1000 * DIM * 4 * 3

    @pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
    def test_in_the_hosts_memory_are_not_in_hbm(self, config: Config, kernel: str) -> None:
        assert row_bytes(config, SCHEMA, plan(big=placed("table_wise", 1000, kernel=kernel)), RANKS) == 0

    @pytest.mark.parametrize(
        ("optimizer", "dtype", "bytes_of_a_weight"),
        [("sgd", "fp32", 12), ("rowwise_adagrad", "fp16", 6), ("adagrad", "fp32", 20), ("adam", "fp16", 22)],
    )
    def test_have_states_of_their_width(self, config: Config, optimizer: str, dtype: str, bytes_of_a_weight: int) -> None:
        config.embedding.optimizer.kind = EmbeddingOptimizerKind[optimizer]
        config.embedding.dtype = TableDtype[dtype]
        found = row_bytes(config, SCHEMA, plan(big=placed("table_wise", 1000)), RANKS)
        assert found == 80 * 2.5 / RANKS * DIM * bytes_of_a_weight

    def test_follow_a_pooling_factor_of_the_config(self, config: Config) -> None:
        config.embedding.tables["big"] = TableConfig(pooling_factor=5.0)
        assert row_bytes(config, SCHEMA, plan(big=placed("table_wise", 1000)), RANKS) == 80 * 5 / RANKS * DIM * 4 * 3


class TestPooledEmbeddings:
    def sent(self, config: Config, device: torch.device = CPU, ranks: int = RANKS, **tables: ParameterSharding) -> float:
        return pooled_bytes(config, SCHEMA, plan(**tables), ranks, device)

    def test_go_to_all_other_ranks_and_their_gradients_come_back(self, config: Config) -> None:
        own = 80 / RANKS * DIM  # of a rank's samples
        assert self.sent(config, big=placed("table_wise", 1000)) == own * 3 / 4 * (4 + 4)

    def test_are_sent_for_each_piece_of_the_rows_and_once_for_columns(self, config: Config) -> None:
        whole = self.sent(config, big=placed("table_wise", 1000))
        assert self.sent(config, big=placed("column_wise", 1000, 1, 4)) == whole
        assert self.sent(config, big=placed("row_wise", 1000, 4)) == 4 * whole

    def test_of_tokens_are_as_many_as_tokens(self, config: Config) -> None:
        of_sample = self.sent(config, big=placed("table_wise", 1000))
        assert self.sent(config, token=placed("table_wise", 5000)) == 10 * of_sample

    def test_of_a_data_parallel_table_and_on_one_rank_stay(self, config: Config) -> None:
        assert self.sent(config, big=placed("data_parallel", 1000)) == 0
        assert self.sent(config, ranks=1, big=placed("table_wise", 1000)) == 0

    def test_have_their_format_on_the_wire(self, config: Config) -> None:
        whole = self.sent(config, big=placed("table_wise", 1000))
        config.embedding.forward_wire = WireDtype.fp16
        assert self.sent(config, big=placed("table_wise", 1000)) == 3 / 4 * whole
        config.embedding.forward_wire = WireDtype.fp32
        config.training.precision = Precision.bf16  # which on GPUs gives 16-bit embeddings
        assert self.sent(config, torch.device("cuda"), big=placed("table_wise", 1000)) == whole / 2
