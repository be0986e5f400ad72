"""comm=fused on several hosts gives the run that comm=baseline gives on the same ranks.

Ranks are processes of this machine that are told which host they are on; tests/distributed/test_two_hosts.py has hosts that
only a network joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.config import Config
from dlrm_fused.ops.embedding_all_to_all import DistinctRows, EmbeddingWorkspace, pooled_all_to_all
from dlrm_fused.sharding import cpu_path, paths
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import ErrorStore, Rank
from dlrm_fused.training.trainer import train as run_trainer
from tests.distributed.launch import (
    WITHOUT_AMPLIFIED_ROUNDING,
    losses,
    measure_briefly,
    metrics,
    on_hosts,
    run_ranks,
    small_config,
    summary,
    train,
)
from tests.distributed.test_transformer_training import SETTINGS as TRANSFORMER

STEPS, FEW_STEPS = 200, 10
# The host of each rank: two with two each, one rank beside three, and three hosts.
TWO_AND_TWO, ONE_AND_THREE, THREE_HOSTS = (0, 0, 1, 1), (0, 1, 1, 1), (0, 0, 1, 1, 2, 2)
# As GPUs of one machine are without peer access.
ALL_ALONE = (0, 1)
MIXED = [
    f"embedding.tables.table_{table}.sharding={sharding}"
    for table, sharding in enumerate(("table_wise", "column_wise", "row_wise", "row_wise"))
]

EXPERTS = ["model.experts.count=8", "model.experts.top_k=2", "model.experts.hidden=16", *WITHOUT_AMPLIFIED_ROUNDING]


def train_on_hosts(folder: Path, hosts: Sequence[int], *overrides: str) -> Path:
    config = small_config(folder, "comm=fused", "comm_strict=true", *overrides)
    run_ranks(len(hosts), on_hosts, hosts, _train, config)
    return config.run_dir


def _train(config: Config) -> None:
    measure_briefly()
    rank = Rank.from_environment()
    run_trainer(config, rank, ErrorStore(rank))


def hosts_of_group() -> tuple[tuple[int, ...], ...]:
    dist.init_process_group("gloo")
    group = symmetric_group()
    group.close()
    return group.hosts.ranks


def test_ranks_are_where_they_are_told_to_be() -> None:
    assert run_ranks(4, on_hosts, ONE_AND_THREE, hosts_of_group) == [((0,), (1, 2, 3))] * 4


# Tables of 4, 8 and 12 columns.
SEVERAL_WIDTHS = ["embedding.tables.table_0.dim=4", "embedding.tables.table_3.dim=12"]


@pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("hosts", "overrides"),
    [
        # Six ranks have four tables: two have none.
        (THREE_HOSTS, ["embedding.sharding=table_wise"]),
        (TWO_AND_TWO, MIXED),
        (ONE_AND_THREE, [*MIXED, *SEVERAL_WIDTHS]),
        pytest.param(ONE_AND_THREE, ["embedding.sharding=row_wise"], marks=pytest.mark.slow),
        (ALL_ALONE, [*MIXED, "model.kind=dcnv2"]),
        pytest.param(TWO_AND_TWO, ["embedding.sharding=column_wise", "embedding.shard_columns=4"], marks=pytest.mark.slow),
        pytest.param(ONE_AND_THREE, MIXED, marks=pytest.mark.slow),
        pytest.param(THREE_HOSTS, ["embedding.sharding=row_wise"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_are_those_of_the_baseline(tmp_path: Path, hosts: tuple[int, ...], overrides: list[str], steps: int) -> None:
    """Bags are jagged, and no number of ranks divides the batch."""
    settings = [*WITHOUT_AMPLIFIED_ROUNDING, f"training.max_steps={steps}", f"evaluation.every_steps={steps // 2}", *overrides]
    fused = train_on_hosts(tmp_path / "fused", hosts, *settings)
    baseline = train(tmp_path / "baseline", len(hosts), *settings)
    assert len(losses(fused)) == steps
    assert losses(fused) == pytest.approx(losses(baseline), rel=1e-5, abs=0)
    assert [line["auc"] for line in metrics(fused, "evaluation")] == pytest.approx(
        [line["auc"] for line in metrics(baseline, "evaluation")], abs=1e-5
    )
    assert summary(fused)["test_auc"] == pytest.approx(summary(baseline)["test_auc"], abs=1e-5)
    plan = (fused / "plan.txt").read_text()
    assert " fused" in plan
    assert "torchrec" not in plan


@pytest.mark.parametrize(
    ("hosts", "overrides"),
    [
        # Groups that share weights inside hosts, one over both, and two of which only one lies on both.
        (TWO_AND_TWO, [*TRANSFORMER, "model.tensor_parallel=2"]),
        pytest.param(TWO_AND_TWO, [*TRANSFORMER, "model.tensor_parallel=4"], marks=pytest.mark.slow),
        pytest.param(ONE_AND_THREE, [*TRANSFORMER, "model.tensor_parallel=2"], marks=pytest.mark.slow),
        (TWO_AND_TWO, EXPERTS),
        (ALL_ALONE, [*TRANSFORMER, "model.tensor_parallel=2"]),
        (ALL_ALONE, EXPERTS),
        pytest.param(ONE_AND_THREE, [*EXPERTS, "model.experts.parallel=2"], marks=pytest.mark.slow),
    ],
    ids=[
        "weights inside hosts",
        "weights over hosts",
        "weights of some over hosts",
        "experts",
        "weights of ranks alone",
        "experts of ranks alone",
        "experts of some over hosts",
    ],
)
def test_losses_of_layers_that_ranks_share_are_those_of_the_baseline(
    tmp_path: Path, hosts: tuple[int, ...], overrides: list[str]
) -> None:
    settings = [*overrides, f"training.max_steps={FEW_STEPS}"]
    fused = train_on_hosts(tmp_path / "fused", hosts, *settings)
    baseline = train(tmp_path / "baseline", len(hosts), *settings)
    assert losses(fused) == pytest.approx(losses(baseline), rel=1e-5, abs=0)
    assert summary(fused)["test_auc"] == pytest.approx(summary(baseline)["test_auc"], abs=1e-5)


def train_and_list_exchanges(config: Config) -> list[bool]:
    """Train, fused communication being the faster; of each of its exchanges, whether rows that several bags have went once."""
    sent_once: list[bool] = []

    def listed(
        workspace: EmbeddingWorkspace, pooled: list[Tensor], sizes: list[int], distinct: DistinctRows | None, scale: float
    ) -> Tensor:
        sent_once.append(distinct is not None)
        return pooled_all_to_all(workspace, pooled, sizes, distinct, scale)

    cpu_path.pooled_all_to_all = listed
    paths.on_slowest_rank = lambda *_: [0.5, 1.0]  # type: ignore[attr-defined]
    _train(config)
    return sent_once


@pytest.mark.parametrize("widths", [[], SEVERAL_WIDTHS], ids=["one width", "several widths"])
def test_auto_measures_what_then_runs_with_the_network_in_it_and_gives_the_same_losses(
    tmp_path: Path, widths: list[str]
) -> None:
    settings = [*WITHOUT_AMPLIFIED_ROUNDING, "embedding.sharding=table_wise", f"training.max_steps={FEW_STEPS}", *widths]
    config = small_config(tmp_path / "auto", *settings, "comm=auto")
    for sent_once in run_ranks(4, on_hosts, TWO_AND_TWO, train_and_list_exchanges, config):
        # Batches whose features were sent before the path had its turn have no keys: two each time.
        assert len(sent_once) >= FEW_STEPS - 2, "two steps took TorchRec's path"
        assert all(sent_once[4:])
    auto = config.run_dir
    assert losses(auto) == pytest.approx(losses(train(tmp_path / "baseline", 4, *settings)), rel=1e-5, abs=0)


@pytest.mark.parametrize("comm", ["fused", pytest.param("baseline", marks=pytest.mark.slow)])
def test_a_run_of_four_ranks_that_is_started_again_has_the_bits_of_one_that_was_not(tmp_path: Path, comm: str) -> None:
    settings = [f"comm={comm}", f"checkpoint.every_steps={FEW_STEPS // 2}", "embedding.sharding=table_wise"]

    def train_for(steps: int, folder: Path) -> Path:
        config = small_config(folder, *settings, f"training.max_steps={steps}")
        run_ranks(4, on_hosts, TWO_AND_TWO, _train, config)
        return config.run_dir

    train_for(FEW_STEPS // 2, tmp_path / "twice")
    assert losses(train_for(FEW_STEPS, tmp_path / "twice")) == losses(train_for(FEW_STEPS, tmp_path / "once"))
