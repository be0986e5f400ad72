"""Checkpoints of comm=fused and comm=baseline are the same: each continues the other's."""

from __future__ import annotations

import pytest

from tests.distributed.launch import assembled, evaluate, load_tables, losses, small_config, summary, train

PLAN = ["embedding.sharding=column_wise", "embedding.shard_columns=4", "embedding.tables.table_1.sharding=table_wise"]
SETTINGS = ["checkpoint.every_steps=20", "embedding.optimizer.kind=rowwise_adagrad", *PLAN]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(tmp_path_factory.mktemp("uninterrupted"), 2, "training.max_steps=40", *SETTINGS)


@pytest.mark.parametrize(("first", "then"), [("fused", "baseline"), ("baseline", "fused"), ("fused", "fused")])
def test_a_run_continues_with_the_other(tmp_path, uninterrupted, first, then):
    train(tmp_path, 2, "training.max_steps=20", f"comm={first}", *SETTINGS)
    run = train(tmp_path, 2, "training.max_steps=40", f"comm={then}", *SETTINGS)
    assert losses(run) == losses(uninterrupted)
    assert summary(run)["test_auc"] == summary(uninterrupted)["test_auc"]


def test_weights_and_optimizer_states_are_saved_alike(tmp_path, uninterrupted):
    train(tmp_path, 2, "training.max_steps=40", "comm=fused", *SETTINGS)
    fused, baseline = (
        load_tables(small_config(folder, *SETTINGS, f"comm={comm}"), 2, step=40)
        for folder, comm in ((tmp_path, "baseline"), (uninterrupted.parent, "fused"))
    )
    keys = {key for pieces in baseline for key in pieces}
    assert {"table.table_0.weight", "table.table_0.momentum1"} <= keys
    assert {key for pieces in fused for key in pieces} == keys
    for key in keys:
        assert assembled(fused, key).equal(assembled(baseline, key))


def test_an_evaluation_may_use_either(uninterrupted):
    by_comm = [evaluate(uninterrupted, ranks, f"comm={comm}") for comm in ("fused", "baseline") for ranks in (1, 2)]
    assert len({result["auc"] for result in by_comm}) == 1
