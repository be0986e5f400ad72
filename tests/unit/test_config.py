"""Settings: what is accepted, and what the message says of what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_fused.config import Config, EmbeddingOptimizerKind, Sharding, flatten, known_keys, load_config, to_yaml
from dlrm_fused.config.schema import PARQUET_WINDOW_ROWS
from dlrm_fused.errors import ConfigError

Load = Callable[..., Config]
TRANSFORMER = ["model.kind=transformer", "data.synthetic.history_length=10"]

# Settings that are lists of int, and values that are none.
LISTS = ("model.bottom_mlp", "data.synthetic.pooling", "embedding.rows", "telemetry.profile_steps")
NO_LISTS = ("[[1]]", "[[[]]]", "[{a: 1}]", "{a: 1}", "{}", "${seed}", "${name}", "${runtime}", "abc ${seed}", "7", "[null]")


@pytest.fixture
def load(tmp_path) -> Load:
    def load(*overrides: str, yaml: str = "data: {source: synthetic}") -> Config:
        path = tmp_path / "config.yaml"
        path.write_text(yaml)
        return load_config(path, overrides)

    return load


def message(load: Load, *overrides: str, **yaml: str) -> str:
    with pytest.raises(ConfigError) as failed:
        load(*overrides, **yaml)
    assert "\n" not in str(failed.value)
    return str(failed.value)


class TestReading:
    def test_overrides_win_over_the_file_and_the_file_over_defaults(self, load):
        config = load("training.max_steps=7", yaml="data: {source: synthetic}\ntraining: {max_steps: 5, global_batch_size: 16}")
        assert config.training.max_steps == 7
        assert config.training.global_batch_size == 16
        assert config.name == Config().name

    def test_the_last_of_two_overrides_wins(self, load):
        assert load("seed=3", "seed=4").seed == 4

    def test_paths_begin_at_the_home_of_the_user(self, load, monkeypatch):
        """The shell has left the ~ as it is; a folder of that name is never meant."""
        monkeypatch.setenv("HOME", "/home/me")
        config = load("output_dir=~/runs", "data.path=~/mine", "checkpoint.warm_start=~/runs/a", yaml="name: b")
        assert (config.run_dir, config.data.path) == (Path("/home/me/runs/b"), "/home/me/mine")
        assert config.checkpoint.warm_start == "/home/me/runs/a"

    def test_parquet_has_a_smaller_window_unless_one_is_set(self, load):
        parquet = "data: {source: parquet, path: logs}"
        assert load(yaml=parquet).data.shuffle_window_rows == PARQUET_WINDOW_ROWS < Config().data.shuffle_window_rows
        assert load("data.source=prepared", yaml=parquet).data.shuffle_window_rows == Config().data.shuffle_window_rows
        assert load("data.shuffle_window_rows=16777216", yaml=parquet).data.shuffle_window_rows == 16_777_216
        assert load(yaml="data: {source: parquet, path: logs, shuffle_window_rows: 0}").data.shuffle_window_rows == 0

    def test_enumerations_lists_and_tables(self, load):
        config = load(
            "embedding.sharding=row_wise",
            "model.top_mlp=[8,1]",
            "embedding.tables.table_3.sharding=column_wise",
            "embedding.optimizer.kind=sgd",
        )
        assert config.embedding.sharding is Sharding.row_wise
        assert config.model.top_mlp == [8, 1]
        assert config.embedding.tables["table_3"].sharding is Sharding.column_wise
        assert config.embedding.tables["table_3"].pooling_factor == 0
        assert config.embedding.optimizer.kind is EmbeddingOptimizerKind.sgd

    def test_the_resolved_config_reads_back_as_itself(self, load, tmp_path):
        config = load("embedding.tables.table_3.sharding=column_wise", "telemetry.profile_steps=[3,5]", "output_dir=a b")
        (tmp_path / "resolved.yaml").write_text(to_yaml(config))
        assert load_config(tmp_path / "resolved.yaml") == config

    def test_flattened_keys_are_the_known_ones(self, load):
        assert set(flatten(load())) == set(known_keys())

    def test_names_that_scripts_rest_on(self):
        assert {
            "name",
            "output_dir",
            "seed",
            "comm",
            "comm_strict",
            "training.max_steps",
            "training.global_batch_size",
            "embedding.sharding",
        } <= set(known_keys())
        assert Config().output_dir == "runs"


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("override", "nearest"),
        [
            ("sead=1", "seed"),
            ("training.max_step=1", "training.max_steps"),
            ("training.batch_size=1", "training.global_batch_size"),
            ("embeding.sharding=auto", "embedding."),
            ("embedding.optimizer.lr=1", "embedding.optimizer."),
            ("data.synthetic.row=[1]", "data.synthetic.rows"),
            ("training.zense_optimizer.beta2=0.5", "training.dense_optimizer.beta2"),
            ("embeding.tables.table_3.sharding=row_wise", "embedding.tables.table_3.sharding"),
        ],
    )
    def test_the_nearest_one_is_named(self, load, override, nearest):
        found = message(load, override)
        assert "unknown setting" in found
        assert f"the nearest existing one is {nearest}" in found

    def test_all_of_a_path_is_compared_and_shown(self, load):
        """The misspelt part may stand before the last one."""
        assert message(load, "training.zense_optimizer.beta2=0.5") == (
            "training.zense_optimizer.beta2: unknown setting (from the command line); "
            "the nearest existing one is training.dense_optimizer.beta2"
        )

    def test_in_a_file_a_path_is_written_as_groups(self, load, tmp_path):
        found = message(load, yaml="training.max_steps: 3")
        assert found.startswith(f"training.max_steps: unknown setting (from {tmp_path / 'config.yaml'}); ")
        assert found.endswith("in a file, write it as {training: {max_steps: 3}}")

    def test_that_are_numbers(self, load):
        assert message(load, yaml="training: {1: 2}").startswith("training.1: unknown setting")

    def test_in_the_file_too(self, load, tmp_path):
        found = message(load, yaml="training:\n  max_stepz: 3")
        assert found.startswith(f"training.max_stepz: unknown setting (from {tmp_path / 'config.yaml'})")
        assert "training.max_steps" in found

    def test_of_a_table(self, load):
        assert message(load, "embedding.tables.table_3.shard=row_wise").startswith("embedding.tables.table_3.shard: unknown")


class TestWrongTypes:
    @pytest.mark.parametrize(
        ("override", "parts"),
        [
            ("training.max_steps=many", ("training.max_steps=many", "allowed: a whole number")),
            ("training.max_steps=1.5", ("training.max_steps=1.5", "allowed: a whole number")),
            (
                "training.dense_optimizer.learning_rate=fast",
                ("training.dense_optimizer.learning_rate=fast", "allowed: a number"),
            ),
            ("checkpoint.resume=perhaps", ("checkpoint.resume=perhaps", "allowed: true or false")),
            ("embedding.sharding=diagonal", ("embedding.sharding=diagonal", "table_wise, column_wise, row_wise")),
            ("comm=fast", ("comm=fast", "allowed: baseline, fused, auto")),
            ("model.top_mlp=[a,1]", ("model.top_mlp", "allowed: a list of whole numbers")),
            ("embedding=7", ("embedding=7", "allowed: a group of settings: dim, dtype")),
        ],
    )
    def test_key_value_and_what_is_allowed(self, load, override, parts):
        found = message(load, override)
        for part in parts:
            assert part in found

    # A class cannot use its own names in a comprehension.
    @pytest.mark.parametrize(
        ("key", "value"), [*((LISTS[0], value) for value in NO_LISTS), *((key, "[[1]]") for key in LISTS[1:])]
    )
    def test_of_lists(self, load, key, value):
        found = message(load, f"{key}={value}")
        assert found.startswith(key)
        assert "allowed: a list of whole numbers, such as [64,32]" in found

    @pytest.mark.parametrize("value", ["[1]", "row_wise", "${seed}", "${model}", "???"])
    @pytest.mark.parametrize("key", ["model", "model.experts", "embedding.tables", "embedding.tables.table_3"])
    def test_of_groups(self, load, key, value):
        found = message(load, f"{key}={value}")
        assert found.startswith(f"{key}=")
        assert "allowed: a group of settings" in found

    @pytest.mark.parametrize("value", ["[1]", "{a: 1}", "${data}", "${embedding.rows}"])
    @pytest.mark.parametrize(
        "key", ["seed", "embedding.init_std", "comm_strict", "name", "comm", "embedding.tables.t.sharding"]
    )
    def test_of_single_values(self, load, key, value):
        found = message(load, f"{key}={value}")
        assert found.startswith(key)
        assert "omegaconf" not in found

    @pytest.mark.parametrize(
        "override", ["seed=${nothing}", """model.top_mlp=["${nothing}"]""", "embedding.tables.t.sharding=${nothing}"]
    )
    def test_of_references_that_lead_nowhere(self, load, override):
        found = message(load, override)
        assert found.startswith(override.partition("=")[0])
        assert found.endswith("Interpolation key 'nothing' not found")

    def test_references_that_lead_to_the_right_type_are_followed(self, load):
        config = load("data.synthetic.pooling=${data.synthetic.rows}", "training.max_steps=${training.global_batch_size}")
        assert config.data.synthetic.pooling == config.data.synthetic.rows
        assert config.training.max_steps == config.training.global_batch_size

    @pytest.mark.parametrize("override", ["training.max_steps", "=3", "training max_steps=3", "--resume=1"])
    def test_what_is_no_override(self, load, override):
        assert message(load, override).startswith(f"override {override!r}: expected key=value")


class TestFiles:
    def test_that_do_not_exist(self):
        with pytest.raises(ConfigError, match=r"config nowhere.yaml: no such file; there are: "):
            load_config("nowhere.yaml")

    @pytest.mark.parametrize("yaml", ["training: [1, 2", "a: b: c", "\x00"])
    def test_that_are_no_yaml(self, load, yaml):
        assert "not readable as YAML" in message(load, yaml=yaml)

    def test_that_are_no_mapping(self, load):
        assert "expected a mapping of settings" in message(load, yaml="- 1\n- 2")

    def test_that_are_folders(self, tmp_path: Path):
        with pytest.raises(ConfigError, match="not readable as YAML"):
            load_config(tmp_path)


class TestContradictions:
    @pytest.mark.parametrize(
        ("overrides", "parts"),
        [
            (["model.bottom_mlp=[64,32]"], ("model.bottom_mlp=[64, 32]", "a last width of embedding.dim=64")),
            (["model.top_mlp=[8,2]"], ("model.top_mlp=[8, 2]", "last one 1")),
            (["model.kind=transformer"], ("data.synthetic.history_length=0", "1 or more with model.kind=transformer")),
            ([*TRANSFORMER, "model.heads=3"], ("model.d_model=64", "multiple of model.heads=3")),
            ([*TRANSFORMER, "model.tensor_parallel=3"], ("model.tensor_parallel=3", "divisor of model.heads=4")),
            ([*TRANSFORMER, "model.layers=0"], ("model.layers=0", "1 or more")),
            (
                [*TRANSFORMER, "data.source=criteo_npy", "data.path=x", "embedding.rows=[9]"],
                ("data.source=criteo_npy", "model.kind=transformer"),
            ),
            (["evaluation.patience=2"], ("evaluation.every_steps=0", "evaluation.patience=2")),
            (
                ["evaluation.patience=2", "evaluation.every_steps=5", "checkpoint.keep_best=false"],
                ("checkpoint.keep_best=false", "evaluation.patience=2"),
            ),
            (["training.target_auc=0.8"], ("evaluation.every_steps=0", "training.target_auc is checked by evaluations")),
            (["data.source=prepared"], ("data.path=''", "data.source=prepared")),
            (["data.source=criteo_npy", "data.path=x"], ("embedding.rows=[]", "data.source=criteo_npy")),
            (["data.synthetic.history_length=-1"], ("data.synthetic.history_length=-1", "0 or more")),
            (["data.synthetic.history_items=0"], ("data.synthetic.history_items=0", "1 to 2147483647")),
            (["data.synthetic.rows=[1,2]"], ("data.synthetic.rows=[1, 2]", "each of 26 tables")),
            (["embedding.dim=6", "model.bottom_mlp=[6]"], ("embedding.dim=6", "multiple of 4")),
            (["embedding.tables.table_3.dim=6"], ("embedding.tables.table_3.dim=6", "0, or a positive multiple of 4")),
            (["embedding.shard_columns=12"], ("embedding.shard_columns=12", "divides embedding.dim=64")),
            (
                ["embedding.shard_columns=32", "embedding.tables.table_3.dim=48"],
                ("embedding.shard_columns=32", "divides embedding.tables.table_3.dim=48"),
            ),
            (
                ["embedding.optimizer.kind=sgd", "embedding.optimizer.weight_decay=0.1"],
                ("embedding.optimizer.weight_decay=0.1", "embedding.optimizer.kind=sgd"),
            ),
            (
                ["embedding.optimizer.kind=sgd", "embedding.optimizer.counter_halflife=9"],
                ("embedding.optimizer.counter_halflife=9", "0 with embedding.optimizer.kind=sgd"),
            ),
            (
                ["embedding.optimizer.counter_halflife=9"],
                ("embedding.optimizer.weight_decay=0.0", "above 0"),
            ),
            (
                ["embedding.optimizer.counter_halflife=100", "embedding.optimizer.weight_decay=1.1"],
                ("embedding.optimizer.weight_decay=1.1", "up to 1 /", "= 1,"),
            ),
            (
                ["training.schedule.warmup_steps=10", "training.schedule.decay_steps=5"],
                ("training.schedule.decay_start_step=0", "training.schedule.warmup_steps=10 or more"),
            ),
            (["training.global_batch_size=0"], ("training.global_batch_size=0", "1 or more")),
            (["training.dense_optimizer.learning_rate=-1"], ("learning_rate=-1.0", "a positive number")),
            (["embedding.optimizer.learning_rate=nan"], ("embedding.optimizer.learning_rate=nan", "a finite number")),
            (["telemetry.profile_steps=[5]"], ("telemetry.profile_steps=[5]", "[first, last]")),
            (["runtime.device=tpu"], ("runtime.device=tpu", "auto, cpu, cuda")),
            (["name=a/b"], ("name=a/b", "letters, digits")),
            (["name=.."], ("name=..", "letters, digits")),
            (["seed=-1"], ("seed=-1", "0 to 2147483647")),
            (["checkpoint.keep_last=0"], ("checkpoint.keep_last=0", "1 or more")),
            (["training.schedule.floor=2"], ("training.schedule.floor=2.0", "0 to 1")),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_key_value_and_what_is_allowed(self, load, overrides, parts):
        found = message(load, *overrides)
        for part in (*parts, "allowed: "):
            assert part in found
