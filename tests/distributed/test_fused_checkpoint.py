"""Checkpoints of comm=fused and comm=baseline are the same: each continues the other's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import evaluate, load_tables, losses, run_script, small_config, summary

TRAIN = Path(__file__).parents[2] / "train.py"
PLAN = ("row_wise", "table_wise", "column_wise", "table_wise")
SETTINGS = [
    "checkpoint.every_steps=8",
    "embedding.optimizer.kind=rowwise_adagrad",
    "embedding.shard_columns=4",
    *(f"embedding.tables.table_{i}.sharding={kind}" for i, kind in enumerate(PLAN)),
]


def train(folder: Path, steps: int, comm: str) -> Path:
    """Run train.py on two ranks; a run that is there continues."""
    run = small_config(folder).run_dir
    overrides = [f"output_dir={folder}", f"training.max_steps={steps}", f"comm={comm}", *SETTINGS]
    ended = run_script(2, TRAIN, ["--config", str(folder / "small.yaml"), *overrides], folder, timeout=240)
    assert ended.statuses == [0, 0], ended.output
    return run


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("uninterrupted"), 16, "baseline")


@pytest.mark.parametrize(("first", "then"), [("fused", "baseline"), ("baseline", "fused"), ("fused", "fused")])
def test_a_run_continues_with_the_other(tmp_path, uninterrupted, first, then):
    train(tmp_path, 8, first)
    run = train(tmp_path, 16, then)
    assert list(losses(run)) == list(range(1, 17))
    assert losses(run) == losses(uninterrupted)
    assert summary(run)["test_auc"] == summary(uninterrupted)["test_auc"]


def test_weights_and_optimizer_states_are_saved_alike(tmp_path, uninterrupted):
    folder = train(tmp_path, 16, "fused").parent
    fused, baseline = (
        load_tables(small_config(of, *SETTINGS, f"comm={comm}"), 2, step=16)
        for of, comm in ((folder, "baseline"), (uninterrupted.parent, "fused"))
    )
    for ours, theirs in zip(fused, baseline, strict=True):
        assert {"table.table_0.weight", "table.table_0.momentum1"} <= ours.keys() == theirs.keys()
        for key, pieces in ours.items():
            for (place, tensor), (their_place, their_tensor) in zip(pieces, theirs[key], strict=True):
                assert place == their_place
                assert tensor.equal(their_tensor)


def test_an_evaluation_may_use_either(uninterrupted):
    by_comm = [evaluate(uninterrupted, ranks, f"comm={comm}") for comm in ("fused", "baseline") for ranks in (1, 2)]
    assert len({result["auc"] for result in by_comm}) == 1
