"""comm=fused gives the run that comm=baseline gives, for every plan and number of ranks."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_fused.config import Config
from dlrm_fused.training import trainer
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import losses, metrics, run_ranks, small_config, summary, train

# All are compared over STEPS in `make test-hosts`.
STEPS, FEW_STEPS = 60, 10
SLOW_SECONDS = 0.4
ROWWISE_ADAGRAD, ADAGRAD, SGD = (f"embedding.optimizer.kind={kind}" for kind in ("rowwise_adagrad", "adagrad", "sgd"))
MIXED = [f"embedding.tables.table_{i}.sharding={kind}" for i, kind in enumerate(("row_wise", "column_wise", "table_wise"))]
BESIDE_DATA_PARALLEL = [
    f"embedding.tables.table_{i}.sharding={kind}" for i, kind in enumerate(("table_wise", "data_parallel", "row_wise"))
]
OWN_RATES = [f"embedding.tables.table_{i}.learning_rate={rate}" for i, rate in ((0, 0.1), (2, 0.02), (3, 0.02))]

DIMS = [f"embedding.tables.table_{i}.dim={dim}" for i, dim in enumerate((4, 16, 12))]

ONE_RANK_HAS_ALL = ["embedding.sharding=table_wise", "embedding.output_dtype=fp16", ROWWISE_ADAGRAD]

# Up to two ranks, sums of partial results do not depend on their order.
BIT_IDENTICAL = [
    (1, ["embedding.sharding=table_wise", ROWWISE_ADAGRAD]),
    (1, ["embedding.sharding=table_wise", "embedding.forward_wire=fp16", "embedding.backward_wire=fp16"]),
    (2, ["embedding.sharding=column_wise", "embedding.shard_columns=4", ROWWISE_ADAGRAD]),
    (2, ["embedding.sharding=row_wise", ROWWISE_ADAGRAD]),
    (2, [*MIXED, "embedding.tables.table_3.sharding=table_column_wise", SGD]),
    (2, ["embedding.sharding=table_wise", "embedding.forward_wire=fp16", "embedding.backward_wire=fp16"]),
    (2, ["embedding.sharding=table_wise", "embedding.dtype=fp16", ROWWISE_ADAGRAD]),
    (2, [*MIXED, "embedding.output_dtype=fp16", ROWWISE_ADAGRAD]),
    # A rank has no tables.
    (2, ["data.synthetic.tables=1", "data.synthetic.rows=[700]", "data.synthetic.pooling=[3]", *ONE_RANK_HAS_ALL]),
    (2, [*MIXED, *OWN_RATES, "training.schedule.warmup_steps=5", ROWWISE_ADAGRAD]),
    (2, [*MIXED, *DIMS, ROWWISE_ADAGRAD]),
    (2, ["embedding.sharding=row_wise", "model.kind=dcnv2", *DIMS, SGD]),
    # Three ranks have four tables of unequal sizes.
    (3, ["embedding.sharding=table_wise", ROWWISE_ADAGRAD]),
]
# Other numbers of ranks, or optimizers, for what is above.
MORE_BIT_IDENTICAL = [
    (1, ["embedding.sharding=column_wise", SGD]),
    (2, ["embedding.sharding=table_wise", ROWWISE_ADAGRAD]),
    (4, ["embedding.sharding=column_wise", "embedding.shard_columns=4", SGD]),
    (2, ["embedding.sharding=table_column_wise", ADAGRAD]),
    (2, [*BESIDE_DATA_PARALLEL, "embedding.tables.table_3.sharding=column_wise", ROWWISE_ADAGRAD]),
    (2, [*BESIDE_DATA_PARALLEL, "embedding.tables.table_3.sharding=table_column_wise", *DIMS, SGD]),
    (3, ["embedding.sharding=table_wise", *DIMS, ROWWISE_ADAGRAD]),
]
# The order in which gloo adds partial results is its own.
EQUAL_BUT_FOR_THE_ORDER_OF_ADDITION = [
    (3, ["embedding.sharding=row_wise", ROWWISE_ADAGRAD]),
    (4, [*MIXED, "embedding.tables.table_3.sharding=row_wise", SGD]),
]

WITH_STEPS = pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)])


def name_of(case: object) -> str:
    if isinstance(case, list):
        return "-".join(override.rsplit("=", 1)[-1] for override in case)
    return str(case)


@pytest.fixture
def both(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """The same run with comm=fused and comm=baseline."""

    def run(ranks: int, overrides: list[str], steps: int = FEW_STEPS) -> tuple[Path, Path]:
        settings = [f"training.max_steps={steps}", f"evaluation.every_steps={steps // 2}", *overrides]
        fused = train(tmp_path / "fused", ranks, "comm=fused", *settings)
        return fused, train(tmp_path / "baseline", ranks, *settings)

    return run


@pytest.mark.parametrize(
    ("ranks", "overrides", "steps"),
    [
        *((*case, FEW_STEPS) for case in BIT_IDENTICAL),
        *(pytest.param(*case, FEW_STEPS, marks=pytest.mark.slow) for case in MORE_BIT_IDENTICAL),
        *(pytest.param(*case, STEPS, marks=pytest.mark.exhaustive) for case in BIT_IDENTICAL + MORE_BIT_IDENTICAL),
    ],
    ids=name_of,
)
def test_losses_and_metrics_are_the_same_bits(both, ranks, overrides, steps):
    fused, baseline = both(ranks, overrides, steps)
    assert " fused" in (fused / "plan.txt").read_text()
    assert losses(fused) == losses(baseline)
    assert [line["auc"] for line in metrics(fused, "evaluation")] == [line["auc"] for line in metrics(baseline, "evaluation")]
    assert summary(fused)["test_auc"] == summary(baseline)["test_auc"]


@WITH_STEPS
@pytest.mark.parametrize(("ranks", "overrides"), EQUAL_BUT_FOR_THE_ORDER_OF_ADDITION, ids=name_of)
def test_losses_are_the_same_up_to_the_order_of_addition(both, ranks, overrides, steps):
    fused, baseline = both(ranks, overrides, steps)
    assert losses(fused) == pytest.approx(losses(baseline), rel=1e-6, abs=0)
    assert summary(fused)["test_auc"] == pytest.approx(summary(baseline)["test_auc"], abs=1e-5)


def test_the_plan_names_the_path_of_each_table_and_why(both):
    fused, baseline = both(2, [*BESIDE_DATA_PARALLEL, "embedding.tables.table_3.sharding=table_row_wise"])
    lines = (fused / "plan.txt").read_text().splitlines()[1:5]
    assert [line.split()[-1] if line.endswith("fused") else line[line.index("torchrec") :] for line in lines] == [
        "fused",
        "torchrec: sharding type data_parallel",
        "fused",
        "torchrec: sharding type table_row_wise",
    ]
    assert "torchrec" not in (baseline / "plan.txt").read_text()


def test_auto_measures_and_gives_the_same_losses(tmp_path):
    overrides = [f"training.max_steps={FEW_STEPS}", *BESIDE_DATA_PARALLEL]
    auto = train(tmp_path / "auto", 2, "comm=auto", *overrides)
    baseline = train(tmp_path / "baseline", 2, *overrides)
    assert losses(auto) == losses(baseline)
    paths = json.loads((auto / "summary.json").read_text())["table_paths"]
    measured = {table: path for table, path in paths.items() if re.fullmatch(r"\w+: [\d.]+ ms, \w+ [\d.]+ ms", path)}
    assert set(paths.values()) - set(measured.values()) == {"torchrec: sharding type data_parallel"}
    for path in measured.values():
        assert f" {path}\n" in (auto / "plan.txt").read_text()


@pytest.mark.parametrize("comm", ["baseline", "fused", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_share_of_the_embedding_stage_has_the_wait_for_results_of_other_ranks(tmp_path, comm):
    """It means the same whatever carries the results: here, another rank is slow to look up."""
    config = small_config(tmp_path, "training.max_steps=4", "embedding.sharding=table_wise", f"comm={comm}")
    run_ranks(2, _train_with_slow_lookups_on_rank_1, config)
    lines = metrics(config.run_dir, "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["embedding_share"] == line["embedding_ms"] / line["step_ms"] < 1 for line in lines)
    assert median(line["embedding_ms"] for line in lines) > 0.6 * SLOW_SECONDS * 1e3
    assert median(line["embedding_share"] for line in lines) > 0.6
    events = EventAccumulator(str(config.run_dir / "tensorboard")).Reload()
    shown = [event.value for event in events.Scalars("time/embedding_share")]
    assert shown == pytest.approx([line["embedding_share"] for line in lines], rel=1e-6)


def test_hosts_with_different_numbers_of_ranks_train_by_a_plan_that_does_not_divide_tables_within_them(tmp_path):
    config = small_config(tmp_path, "comm=baseline", "embedding.sharding=auto", "training.max_steps=10")
    run_ranks(3, _train_beside_two_ranks_of_another_host, config)
    assert "table_row_wise" not in (config.run_dir / "plan.txt").read_text()
    assert len(losses(config.run_dir)) == 10


def _train_beside_two_ranks_of_another_host(config: Config) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1" if os.environ["RANK"] == "0" else "2"
    rank = Rank.from_environment()
    trainer.train(config, rank, ErrorStore(rank))


def _train_with_slow_lookups_on_rank_1(config: Config) -> None:
    rank, look_up = Rank.from_environment(), SplitTableBatchedEmbeddingBagsCodegen.forward

    def look_up_slowly(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(SLOW_SECONDS * rank.index)
        return look_up(*arguments, **keywords)

    SplitTableBatchedEmbeddingBagsCodegen.forward = look_up_slowly
    trainer.train(config, rank, ErrorStore(rank))
