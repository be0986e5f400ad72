"""Whether a run starts, continues or is left alone, and which checkpoints it has."""

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dlrm_fused.config import Config, Sharding, TableConfig, Windows, flatten, load_config
from dlrm_fused.errors import CheckpointError, ConfigError
from dlrm_fused.training.checkpoint import CheckpointFolder, Progress
from dlrm_fused.training.run_folder import RunFolder


@pytest.fixture
def config(tmp_path) -> Config:
    config = Config(name="run", output_dir=str(tmp_path))
    config.data.path = "somewhere"
    return config


@pytest.fixture
def folder(config) -> RunFolder:
    return RunFolder(config.run_dir)


def add_checkpoint(
    folder: CheckpointFolder, config: Config, step: int, auc: float | None = None, evaluations_since_best: int = 0
) -> Path:
    path = folder.of(step)
    path.mkdir(parents=True)
    progress = Progress(step=step, samples=step, loss=0.5, world_size=1, validation_auc=auc, settings=flatten(config))
    progress = replace(progress, evaluations_since_best=evaluations_since_best)
    (path / "progress.json").write_text(json.dumps(asdict(progress)))
    return path


def add_damaged(folder: CheckpointFolder, step: int) -> CheckpointFolder:
    folder.of(step).mkdir(exist_ok=True)
    (folder.of(step) / "progress.json").write_text("{}")
    return folder


class TestStart:
    def test_a_new_run_begins_at_step_0_with_its_config_saved(self, folder, config):
        assert folder.prepare(config) == 0
        assert flatten(load_config(folder.path / "config.yaml")) == flatten(config)

    def test_its_config_is_in_utf_8_whatever_the_locale(self, folder, config):
        code = (
            "import sys; from dlrm_fused.config import TableConfig, load_config;"
            "from dlrm_fused.training.run_folder import RunFolder;"
            "config = load_config(sys.argv[1]); config.embedding.tables['\\xfc'] = TableConfig();"
            "RunFolder(config.run_dir).prepare(config)"
        )
        folder.prepare(config)
        ascii_locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        subprocess.run([sys.executable, "-c", code, str(folder.path / "config.yaml")], env=ascii_locale, check=True)
        assert list(load_config(folder.path / "config.yaml").embedding.tables) == ["ü"]

    def test_a_config_that_cannot_be_written_leaves_the_one_before(self, folder, config, monkeypatch):
        """As on a full disk; without its settings a run could be neither evaluated nor continued."""
        folder.prepare(config)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        config.training.max_steps = 7
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            folder.prepare(config)
        assert load_config(folder.path / "config.yaml").training.max_steps == Config().training.max_steps

    def test_a_run_with_a_checkpoint_continues_from_the_last(self, folder, config):
        for step in (10, 20):
            add_checkpoint(folder.checkpoints, config, step)
        assert folder.prepare(config) == 20

    def test_a_checkpoint_being_written_does_not_count(self, folder, config):
        add_checkpoint(folder.checkpoints, config, 10)
        (folder.path / "checkpoints/.writing_step_20").mkdir()
        assert folder.prepare(config) == 10

    def test_without_resume_the_old_run_is_put_aside(self, folder, config):
        config.checkpoint.resume = False
        for number in (1, 2):
            add_checkpoint(folder.checkpoints, config, 10)
            assert folder.prepare(config) == 0
            assert CheckpointFolder(folder.path.with_name(f"run.{number}") / "checkpoints").steps() == [10]
        assert folder.checkpoints.steps() == []

    def test_a_folder_that_cannot_be_written(self, folder, config):
        folder.path.write_text("a file")
        with pytest.raises(ConfigError, match=r"output_dir=.*/run cannot be written: File exists"):
            folder.prepare(config)


class TestSettings:
    @pytest.mark.parametrize("is_of_earlier_release", [False, True])
    def test_a_run_of_epochs_does_not_go_on_with_windows(self, folder, config, is_of_earlier_release):
        progress = add_checkpoint(folder.checkpoints, config, 10) / "progress.json"
        if is_of_earlier_release:  # which knew no windows
            content = json.loads(progress.read_text())
            del content["settings"]["data.windows"]
            progress.write_text(json.dumps(content))
        assert folder.prepare(config) == 10
        config.data.windows = Windows.day
        with pytest.raises(CheckpointError, match=r"data.windows=day: the run in .* was started with none"):
            folder.prepare(config)

    def test_what_decides_the_outcome_must_be_the_same(self, folder, config):
        add_checkpoint(folder.checkpoints, config, 10)
        config.training.dense_optimizer.learning_rate = 0.5
        with pytest.raises(
            CheckpointError, match=r"training.dense_optimizer.learning_rate=0.5: .* started with 0.01; .*resume=false"
        ):
            folder.prepare(config)

    def test_where_the_work_is_done_and_when_it_stops_may_change(self, folder, config):
        add_checkpoint(folder.checkpoints, config, 10)
        config.embedding.sharding = Sharding.row_wise
        config.training.max_steps = 99
        config.evaluation.every_steps = 7
        config.checkpoint.keep_last = 5
        config.data.path = "elsewhere"
        assert folder.prepare(config) == 10

    def test_a_table_may_be_sharded_otherwise(self, folder, config):
        config.embedding.tables = {"user": TableConfig(dim=16)}
        add_checkpoint(folder.checkpoints, config, 10)
        config.embedding.tables = {"user": TableConfig(Sharding.row_wise, dim=16), "item": TableConfig(pooling_factor=3)}
        assert folder.prepare(config) == 10

    @pytest.mark.parametrize(("before", "now"), [({"user": 16}, {"user": 8}), ({"user": 16}, {}), ({}, {"user": 16})])
    def test_a_table_keeps_its_columns(self, folder, config, before, now):
        config.embedding.tables = {name: TableConfig(dim=dim) for name, dim in before.items()}
        add_checkpoint(folder.checkpoints, config, 10)
        config.embedding.tables = {name: TableConfig(dim=dim) for name, dim in now.items()}
        message = f"embedding.tables.user.dim={now.get('user', 0)}: .* started with {before.get('user', 0)}"
        with pytest.raises(CheckpointError, match=message):
            folder.prepare(config)

    def test_a_setting_that_the_saved_run_does_not_know_is_no_obstacle(self, folder, config):
        path = add_checkpoint(folder.checkpoints, config, 10) / "progress.json"
        progress = json.loads(path.read_text())
        del progress["settings"]["seed"]
        path.write_text(json.dumps(progress))
        assert folder.prepare(config) == 10


class TestIsFinished:
    def write_summary(self, folder: RunFolder, steps: int, **ended_by: bool) -> None:
        folder.path.mkdir()
        (folder.path / "summary.json").write_text(json.dumps({"steps": steps, **ended_by}))

    def test_without_a_summary(self, folder, config):
        assert not folder.is_finished(config)

    def test_with_all_steps_made(self, folder, config):
        self.write_summary(folder, config.training.max_steps)
        assert folder.is_finished(config)

    def test_more_steps_are_wanted_now(self, folder, config):
        self.write_summary(folder, config.training.max_steps - 1)
        assert not folder.is_finished(config)

    def test_the_target_was_reached(self, folder, config):
        self.write_summary(folder, 1, reached_target=True)
        assert folder.is_finished(config)

    def test_a_target_that_was_raised_is_not_reached(self, folder, config):
        self.write_summary(folder, 10, reached_target=True)
        add_checkpoint(folder.checkpoints, config, 10, auc=0.7)
        config.training.target_auc = 0.7
        assert folder.is_finished(config)
        config.training.target_auc = 0.8
        assert not folder.is_finished(config)

    def test_patience_was_lost_until_more_is_wanted(self, folder, config):
        self.write_summary(folder, 10, lost_patience=True)
        assert folder.is_finished(config)
        add_checkpoint(folder.checkpoints, config, 10, auc=0.7, evaluations_since_best=2)
        config.evaluation.patience = 2
        assert folder.is_finished(config)
        config.evaluation.patience = 3
        assert not folder.is_finished(config)

    def test_a_last_checkpoint_that_was_set_aside_is_made_again(self, folder, config):
        steps = config.training.max_steps
        self.write_summary(folder, steps)
        for step in (steps - 1, steps):
            add_checkpoint(folder.checkpoints, config, step)
        assert folder.is_finished(config)
        folder.checkpoints.set_aside(steps)
        assert not folder.is_finished(config)

    @pytest.mark.parametrize("content", ['{"steps": 1', "", "[]", '{"steps": "5"}', '{"steps": null}', '{"reached_target": 1}'])
    def test_a_damaged_summary_is_told_and_counts_as_none(self, folder, config, content, caplog):
        folder.path.mkdir()
        (folder.path / "summary.json").write_text(content)
        assert not folder.is_finished(config)
        assert "summary.json: damaged" in caplog.text

    def test_continuing_removes_the_old_summary(self, folder, config):
        self.write_summary(folder, 1)
        folder.prepare(config)
        assert folder.summary() is None


class TestCheckpoints:
    @pytest.fixture
    def checkpoints(self, tmp_path, config) -> CheckpointFolder:
        folder = CheckpointFolder(tmp_path / "checkpoints")
        for step, auc in ((100, 0.5), (20, 0.7), (30, None), (1000, 0.6)):
            add_checkpoint(folder, config, step, auc)
        return folder

    def test_steps_ascend(self, checkpoints):
        assert checkpoints.steps() == [20, 30, 100, 1000]

    def test_last_and_best(self, checkpoints):
        assert checkpoints.last() == 1000
        assert checkpoints.best() == 20

    def test_the_later_of_two_equals_is_best(self, checkpoints, config):
        add_checkpoint(checkpoints, config, 40, 0.7)
        assert checkpoints.best() == 40

    def test_an_auc_that_is_not_a_number_is_not_the_best(self, checkpoints, config):
        add_checkpoint(checkpoints, config, 10, float("nan"))
        assert checkpoints.best() == 20

    def test_without_an_auc_that_is_a_number_the_last_one_evaluated_is_the_best(self, tmp_path, config):
        folder = CheckpointFolder(tmp_path / "other")
        for step, auc in ((10, float("nan")), (20, float("nan")), (30, None)):
            add_checkpoint(folder, config, step, auc)
        assert folder.best() == folder.select("best") == 20

    def test_select(self, checkpoints):
        assert [checkpoints.select(which) for which in ("last", "best", "30")] == [1000, 20, 30]

    @pytest.mark.parametrize("which", ["31", "first", "-1", ""])
    def test_select_what_is_not_there(self, checkpoints, which):
        with pytest.raises(CheckpointError, match=rf"--checkpoint {which}: .*steps there: 20, 30, 100, 1000"):
            checkpoints.select(which)

    def test_best_of_a_run_without_evaluations(self, tmp_path, config):
        folder = CheckpointFolder(tmp_path / "other")
        add_checkpoint(folder, config, 10)
        with pytest.raises(CheckpointError, match=r"--checkpoint best: .*steps there: 10"):
            folder.select("best")

    def test_an_empty_folder(self, tmp_path):
        folder = CheckpointFolder(tmp_path / "none")
        assert folder.last() is None
        assert folder.best() is None
        with pytest.raises(CheckpointError, match="steps there: none"):
            folder.select("last")

    def test_pruning_keeps_the_newest_and_the_best(self, checkpoints):
        checkpoints.prune(keep_last=1, keep_best=True)
        assert checkpoints.steps() == [20, 1000]
        assert {path.name for path in checkpoints.path.iterdir()} == {"step_000000020", "step_000001000"}

    @pytest.mark.parametrize(
        "name",
        ["step_\u00b2", "step_5", "step_0000000x5", "step_", "step_" + 9 * "\u0665"],
    )
    def test_a_folder_of_another_name_is_no_checkpoint(self, checkpoints, name):
        (checkpoints.path / name).mkdir()
        assert checkpoints.steps() == [20, 30, 100, 1000]

    @pytest.mark.parametrize("which", ["\u00b2", "\u0665", "-5", "5.0"])
    def test_a_text_that_is_no_step_is_refused(self, checkpoints, which):
        with pytest.raises(CheckpointError, match="has no such checkpoint; steps there: 20, 30, 100, 1000"):
            checkpoints.select(which)

    def test_an_older_damaged_one_does_not_keep_a_run_from_going_on(self, checkpoints, caplog):
        (checkpoints.of(20) / "progress.json").write_text("{}")
        assert checkpoints.best_readable() == 1000
        assert "step_000000020/progress.json: damaged" in caplog.text
        checkpoints.prune(keep_last=1, keep_best=True)
        with pytest.raises(CheckpointError, match=r"step_000000020/progress.json: damaged"):
            add_damaged(checkpoints, 20).best()

    def test_a_checkpoint_in_the_folder_of_another_step_is_told(self, checkpoints):
        checkpoints.of(20).rename(checkpoints.of(21))
        with pytest.raises(CheckpointError, match=r"step_000000021/progress.json: is of step 20, in the folder of step 21"):
            checkpoints.progress(21)

    def test_a_damaged_one_is_set_aside_under_a_name_of_its_own(self, checkpoints, config):
        assert checkpoints.set_aside(1000).name == "damaged_step_000001000"
        add_checkpoint(checkpoints, config, 1000)
        assert checkpoints.set_aside(1000).name == "damaged_step_000001000.1"
        assert checkpoints.steps() == [20, 30, 100]

    def test_damaged_progress_is_named(self, checkpoints):
        (checkpoints.of(30) / "progress.json").write_text('{"step": 30}')
        with pytest.raises(CheckpointError, match=r"000030/progress.json: damaged: samples is missing; .*on_damage=fallback"):
            checkpoints.progress(30)


def test_a_checkpoint_that_was_to_be_replaced_and_was_not_is_there_again(tmp_path: Path) -> None:
    """A run that is killed between two renames has no checkpoint of that name."""
    checkpoints = CheckpointFolder(tmp_path)
    for step in (10, 20):
        checkpoints.of(step).mkdir()
        (checkpoints.of(step) / "old").touch()
    assert checkpoints.step_aside(30) is None
    for step in (10, 20):
        assert checkpoints.step_aside(step)
    assert checkpoints.steps() == []
    checkpoints.of(20).mkdir()
    checkpoints.remove_unfinished()
    assert checkpoints.steps() == [10, 20]
    assert {path.name for path in tmp_path.iterdir()} == {"step_000000010", "step_000000020"}
    assert (checkpoints.of(10) / "old").exists()
    assert not (checkpoints.of(20) / "old").exists()
