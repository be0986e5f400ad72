"""A new run that begins with the weights of another one, whose vocabularies have grown."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute
import pytest
import torch

from dlrm_fused.config import Config, load_config
from dlrm_fused.datasets.preparation import cli
from dlrm_fused.datasets.transformation import FIRST_KEPT, TRANSFORMATION, Transformation
from dlrm_fused.errors import CheckpointError
from dlrm_fused.training.checkpoint import CheckpointFolder, LocalShards, model_state
from dlrm_fused.training.run_folder import RunFolder
from dlrm_fused.training.warm_start import warm_start
from tests.distributed.launch import (
    Pieces,
    RankFailed,
    load_tables,
    losses,
    run_ranks,
    sharded_model,
    start_training,
    whole,
)
from tests.unit.tables import random_table, write_table

FEATURES = ("user", "color", "tags")
STEPS = ("training.max_steps=6", "evaluation.every_steps=3", "embedding.optimizer.learning_rate=1")


def prepared(folder: Path, table: pa.Table, *options: str) -> Path:
    """A set made of a table; returns its folder."""
    source = write_table(table, folder.with_suffix(".parquet"))
    columns = ["--label", "clicked", "--dense", "price,age", "--sparse", ",".join(FEATURES), "--min-frequency", "2"]
    assert cli.main(["table", "--input", str(source), "--output", str(folder), *columns, *options]) == 0
    return folder


def config_of(data: Path, name: str, *overrides: str) -> Config:
    fixed = [f"output_dir={data.parent}", f"name={name}", "runtime.device=cpu", *STEPS]
    return load_config(data / "config.yaml", [*fixed, *overrides])


def going_on(old_run: Path, data: Path, name: str, *overrides: str) -> Config:
    """The config of the old run's data set, with newer data: tables have the columns that they had."""
    warm = [f"data.path={data}", f"output_dir={data.parent}", f"checkpoint.warm_start={old_run}"]
    return config_of(old_run.parent / "set", name, *warm, *overrides)


def grown_table() -> pa.Table:
    """More rows of more users, and a color that is new and the most frequent one."""
    table = random_table(900, seed=1)
    users = pa.compute.if_else(pa.compute.greater(table["age"], 60), pa.compute.add(table["user"], 7), table["user"])
    colors = pa.compute.if_else(pa.compute.less(table["age"], 50), pa.scalar("violet"), table["color"])
    table = table.set_column(table.schema.get_field_index("user"), "user", users)
    return table.set_column(table.schema.get_field_index("color"), "color", colors)


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on two ranks."""
    config = config_of(prepared(tmp_path_factory.mktemp("old") / "set", random_table()), "old")
    start_training(config, ranks=2).wait()
    return config.run_dir


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("new") / "set", grown_table())


def beginning(config: Config) -> Pieces:
    """On a rank: the tables of a model that has begun with the weights of another run."""
    with sharded_model(config, torch.device("cpu")) as (dataset, sharded):
        warm_start(config, sharded, dataset.schema)
        return {key: value.shards for key, value in model_state(sharded).items() if isinstance(value, LocalShards)}


def best_step(run: Path) -> int:
    step = RunFolder(run).checkpoints.best()
    assert step is not None
    return step


def values_of(data: Path, feature: str) -> dict[object, int]:
    """The id of each value that has one of its own."""
    transformation = Transformation.load(data / TRANSFORMATION)
    (encoding,) = (own for own in transformation.sparse if own.column.name == feature)
    assert encoding.vocabulary is not None
    return {int(key): int(own) for key, own in zip(encoding.vocabulary.keys, encoding.vocabulary.ids, strict=True)}


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise", "column_wise"])
def test_values_keep_their_rows_under_new_ids_and_new_values_begin_anew(old_run: Path, grown: Path, sharding: str) -> None:
    config = going_on(old_run, grown, f"new_{sharding}", f"embedding.sharding={sharding}")
    begun, initial = run_ranks(2, beginning, config), load_tables(config, 2, None)
    old = load_tables(load_config(old_run / "config.yaml"), 1, best_step(old_run))
    for feature in FEATURES:
        key = f"table.{feature}.weight"
        new_rows, cold_rows, old_rows = (whole(loaded, key) for loaded in (begun, initial, old))
        old_ids, new_ids = values_of(old_run.parent / "set", feature), values_of(grown, feature)
        kept, added = new_ids.keys() & old_ids.keys(), new_ids.keys() - old_ids.keys()
        assert kept
        assert added or feature == "tags"
        assert torch.equal(new_rows[:FIRST_KEPT], old_rows[:FIRST_KEPT])
        for value in kept:
            assert torch.equal(new_rows[new_ids[value]], old_rows[old_ids[value]])
        for value in added:
            assert torch.equal(new_rows[new_ids[value]], cold_rows[new_ids[value]])
    assert values_of(grown, "color") != values_of(old_run.parent / "set", "color"), "ids have moved"


def test_a_table_with_columns_of_its_own_goes_on(tmp_path: Path, old_run: Path, grown: Path) -> None:
    """Here on two ranks, of which one has nothing of it."""
    dim = "embedding.tables.color.dim=12"
    old_config = config_of(old_run.parent / "set", "old", f"output_dir={tmp_path}", dim)
    start_training(old_config, ranks=2).wait()
    own = [f"checkpoint.warm_start={old_config.run_dir}", dim, "embedding.sharding=table_wise"]
    begun = run_ranks(2, beginning, going_on(old_run, grown, "new", *own))
    key = "table.color.weight"
    new_rows, old_rows = whole(begun, key), whole(load_tables(old_config, 1, best_step(old_config.run_dir)), key)
    old_ids, new_ids = values_of(old_run.parent / "set", "color"), values_of(grown, "color")
    assert new_rows.shape[1] == 12
    for value in new_ids.keys() & old_ids.keys():
        assert torch.equal(new_rows[new_ids[value]], old_rows[old_ids[value]])


def beginning_where_rank_1_takes_the_last(config: Config) -> Pieces:
    if int(os.environ["RANK"]) == 1:
        CheckpointFolder.best = CheckpointFolder.last  # type: ignore[method-assign]
    return beginning(config)


def test_ranks_that_see_another_best_one_take_that_of_rank_0(old_run: Path, grown: Path) -> None:
    """The other run still trains, and has written one since."""
    config = going_on(old_run, grown, "agreed", "embedding.sharding=row_wise")
    assert best_step(old_run) != RunFolder(old_run).checkpoints.last()
    agreed, begun = (run_ranks(2, work, config) for work in (beginning_where_rank_1_takes_the_last, beginning))
    for feature in FEATURES:
        key = f"table.{feature}.weight"
        assert torch.equal(whole(agreed, key), whole(begun, key))


def test_a_run_begins_and_continues(old_run: Path, grown: Path) -> None:
    config = going_on(old_run, grown, "warm")
    start_training(config, ranks=2).wait()
    assert set(losses(config.run_dir))
    more = going_on(old_run, grown, "warm", "training.max_steps=9")
    start_training(more, ranks=2).wait()
    assert max(losses(more.run_dir)) == 9


def hashed(folder: Path) -> list[str]:
    return [f"data.path={prepared(folder / 'set', random_table(), '--hash-buckets', 'user=17')}"]


def without_transformation(folder: Path) -> list[str]:
    data = prepared(folder / "set", random_table())
    shutil.rmtree(data / TRANSFORMATION)
    return [f"data.path={data}"]


def users_as_text(folder: Path) -> list[str]:
    table = random_table()
    text = table.set_column(table.schema.get_field_index("user"), "user", table["user"].cast(pa.string()))
    return [f"data.path={prepared(folder / 'set', text)}"]


def features_in_another_order(folder: Path) -> list[str]:
    return [f"data.path={prepared(folder / 'set', random_table(), '--sparse', 'color,user,tags')}"]


def dense_features_in_another_order(folder: Path) -> list[str]:
    return [f"data.path={prepared(folder / 'set', random_table(), '--dense', 'age,price')}"]


@pytest.mark.parametrize("kind", ["transformer", "dlrm"])
def test_histories_of_another_length_are_named_where_they_are_read(tmp_path: Path, kind: str) -> None:
    history = ("--history", "user", "time", "color", "--history-length")
    shorter, longer = (prepared(tmp_path / f"set_{length}", random_table(), *history, f"{length}") for length in (3, 4))
    settings = f"model.kind={kind}", "model.d_model=8", "model.heads=2", "model.tensor_parallel=1"
    config = config_of(shorter, "old", *settings)
    start_training(config, ranks=1).wait()
    warm = config_of(longer, "new", *settings, f"checkpoint.warm_start={config.run_dir}")
    if kind == "dlrm":
        run_ranks(1, beginning, warm)
        return
    with pytest.raises(RankFailed, match="with histories of another length; take the same columns in the same order, and "):
        run_ranks(1, beginning, warm)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: [f"checkpoint.warm_start={folder}"], "holds no checkpoint; name the folder of a run, such as runs/a"),
        (lambda folder: ["embedding.dim=8", "model.bottom_mlp=[64,8]"], "it belongs to other settings"),
        (lambda folder: ["embedding.tables.user.dim=12"], "it belongs to other settings"),
        (
            lambda folder: ["embedding.max_rows=5"],
            r"user has 5 rows for \d+ ids; allowed: embedding.max_rows=0",
        ),
        (hashed, "user had integer values there, and has hashed integer values now: rows cannot be matched"),
        (without_transformation, "the data of this run has no transformation, .*: rows cannot be matched"),
        (users_as_text, "user had integer values there, and has text values now: rows cannot be matched"),
        (features_in_another_order, "the same columns in the same order"),
        (dense_features_in_another_order, "the same columns in the same order"),
    ],
    ids=[
        "no run",
        "another dim",
        "another dim of a table",
        "fewer rows than ids",
        "hashed now",
        "no transformation",
        "another type",
        "another order",
        "another order of numbers",
    ],
)
def test_what_cannot_go_on_is_said_in_one_line(
    tmp_path: Path, old_run: Path, grown: Path, change: Callable[[Path], list[str]], message: str
) -> None:
    config = going_on(old_run, grown, "refused", f"output_dir={tmp_path}", *change(tmp_path))
    with pytest.raises(RankFailed, match=message) as failed:
        run_ranks(1, beginning, config)
    assert isinstance(failed.value.error, CheckpointError)
    assert str(failed.value.error).startswith(f"checkpoint.warm_start={config.checkpoint.warm_start}: ")
    assert "\n" not in str(failed.value.error)
