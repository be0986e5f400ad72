"""The same run, however it is spread: number of ranks, sharding plan, evaluations in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.launch import assert_same_run, losses, metrics, summary, train

STEPS = 200
# Of runs that are quick to compare; all are compared over STEPS in `make test-hosts`.
FEW_STEPS = 21

ROWWISE_ADAGRAD = "embedding.optimizer.kind=rowwise_adagrad"
ADAGRAD = "embedding.optimizer.kind=adagrad"
SGD = "embedding.optimizer.kind=sgd"
DLRM, DCNV2 = "model.kind=dlrm", "model.kind=dcnv2"

# Rowwise Adagrad keeps one moment for the columns of a shard, so cutting columns makes it another optimizer: plans that cut
# columns are compared with optimizers that treat every weight alike.
SPREADS = [
    (4, "row_wise", DLRM, ROWWISE_ADAGRAD),
    (2, "auto", DLRM, ROWWISE_ADAGRAD),
    (2, "data_parallel", DLRM, ROWWISE_ADAGRAD),
    (2, "table_row_wise", DLRM, ROWWISE_ADAGRAD),
    (2, "table_column_wise", DLRM, ADAGRAD),
    (2, "grid_shard", DLRM, ADAGRAD),
    (2, "column_wise", DCNV2, ADAGRAD),
    # A global batch of 64 does not divide by 3.
    (3, "table_wise", DLRM, ROWWISE_ADAGRAD),
    (3, "row_wise", DCNV2, SGD),
]
# Other numbers of ranks, or optimizers, for what is above.
MORE_SPREADS = [
    (1, "column_wise", DLRM, ADAGRAD),
    (2, "column_wise", DLRM, ADAGRAD),
    (2, "table_wise", DLRM, ROWWISE_ADAGRAD),
    (2, "row_wise", DLRM, ROWWISE_ADAGRAD),
    (4, "table_wise", DLRM, ROWWISE_ADAGRAD),
    (4, "column_wise", DLRM, ADAGRAD),
    (2, "column_wise", DLRM, SGD),
    (2, "data_parallel", DLRM, ADAGRAD),
    (2, "table_wise", DCNV2, ROWWISE_ADAGRAD),
    (4, "row_wise", DCNV2, ADAGRAD),
    (3, "row_wise", DLRM, ROWWISE_ADAGRAD),
]

WITH_STEPS = pytest.mark.parametrize("steps", [FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run on one rank with tables as a whole, made once for each set of overrides."""
    made: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in made:
            made[overrides] = train(tmp_path_factory.mktemp("alone"), 1, *overrides)
        return made[overrides]

    return run


@pytest.mark.parametrize(
    ("ranks", "sharding", "model", "optimizer", "steps"),
    [
        pytest.param(*spread, steps, id="-".join(str(part).rsplit("=", 1)[-1] for part in (*spread, steps)), marks=marks)
        for spreads, steps, marks in (
            (SPREADS, FEW_STEPS, ()),
            (MORE_SPREADS, FEW_STEPS, pytest.mark.slow),
            (SPREADS[:1], STEPS, pytest.mark.slow),
            (SPREADS[1:] + MORE_SPREADS, STEPS, pytest.mark.exhaustive),
        )
        for spread in spreads
    ],
)
def test_losses_do_not_depend_on_ranks_and_plan(tmp_path, alone, ranks, sharding, model, optimizer, steps):
    length = f"training.max_steps={steps}"
    run = train(tmp_path, ranks, model, optimizer, length, f"embedding.sharding={sharding}")
    plan = (run / "plan.txt").read_text()
    assert sharding == "auto" or f" {sharding} " in plan
    assert sharding == "data_parallel" or all(f"rank {rank}: " in plan for rank in range(ranks))
    assert_same_run(run, alone(model, optimizer, length), steps)


@pytest.mark.parametrize("dims", [(8, 8, 8, 8), (4, 16, 12, 8)], ids=["of one dim", "of several dims"])
def test_each_table_may_have_a_plan_of_its_own(tmp_path, alone, dims):
    plans = ("row_wise", "column_wise", "data_parallel", "table_wise")
    settings = [f"embedding.tables.table_{table}.sharding={plan}" for table, plan in enumerate(plans)]
    own_dims = [f"embedding.tables.table_{table}.dim={dim}" for table, dim in enumerate(dims)]
    length = f"training.max_steps={FEW_STEPS}"
    run = train(tmp_path, 2, DLRM, ADAGRAD, length, *settings, *own_dims)
    lines = (run / "plan.txt").read_text().splitlines()
    assert [(int(dim), kind) for _, _, dim, _, kind, *_ in map(str.split, lines[1:5])] == list(zip(dims, plans, strict=True))
    assert_same_run(run, alone(DLRM, ADAGRAD, length, *own_dims), FEW_STEPS)


def test_training_learns(alone):
    """Otherwise equal losses would mean little."""
    by_step = losses(alone(DLRM, ROWWISE_ADAGRAD))
    assert sum(by_step[step] for step in range(181, 201)) < 0.9 * sum(by_step[step] for step in range(1, 21))
    assert summary(alone(DLRM, ROWWISE_ADAGRAD))["test_auc"] > 0.75


@WITH_STEPS
def test_evaluations_in_between_leave_no_trace_in_training(tmp_path, steps):
    length = f"training.max_steps={steps}"
    quiet = train(tmp_path / "quiet", 2, length)
    evaluated = train(tmp_path / "evaluated", 2, length, "evaluation.every_steps=7")
    assert len(metrics(evaluated, "evaluation")) == steps // 7
    assert losses(evaluated) == losses(quiet)
    assert summary(evaluated)["test_auc"] == summary(quiet)["test_auc"]


@WITH_STEPS
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_half_precision_on_the_wire_changes_little_but_something(tmp_path, alone, sharding, steps):
    wire = ("embedding.forward_wire=fp16", "embedding.backward_wire=fp16")
    length = f"training.max_steps={steps}"
    half = losses(train(tmp_path, 2, length, *wire, f"embedding.sharding={sharding}"))
    full = losses(alone(DLRM, ROWWISE_ADAGRAD, length))
    assert half == pytest.approx(full, rel=5e-3)
    assert half != pytest.approx(full, rel=1e-5)
