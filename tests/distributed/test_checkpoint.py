"""Checkpoints outlive their number of ranks and their plan, and are not trusted."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from dlrm_fused.config import Config, Split, flatten
from dlrm_fused.errors import CheckpointError
from dlrm_fused.training.checkpoint import CheckpointFolder, CheckpointWriter, Progress, RawReader, restore_model
from dlrm_fused.training.offline_evaluation import evaluate_run
from dlrm_fused.training.runtime import ErrorStore, Rank
from tests.distributed.launch import (
    Pieces,
    RankFailed,
    assembled,
    evaluate,
    load_tables,
    losses,
    metrics,
    run_ranks,
    sharded_model,
    small_config,
    summary,
    train,
)

ADAGRAD = "embedding.optimizer.kind=adagrad"
ROWWISE_ADAGRAD = "embedding.optimizer.kind=rowwise_adagrad"
HALF, STEPS = 10, 20


def plan(name: str) -> str:
    return f"embedding.sharding={name}"


def until(step: int) -> str:
    return f"training.max_steps={step}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Callable[..., Path]:
    """The uninterrupted run on one rank, made once for each set of overrides."""
    made: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in made:
            made[overrides] = train(tmp_path_factory.mktemp("straight"), 1, until(STEPS), *overrides)
        return made[overrides]

    return run


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory) -> Path:
    """A run on 2 ranks with whole tables."""
    return train(tmp_path_factory.mktemp("two"), 2, until(HALF), plan("table_wise"))


@pytest.fixture
def run(tmp_path, of_two_ranks) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(of_two_ranks, tmp_path / "run"))


def evaluated_where_rank_1_sees_the_first(run: Path) -> None:
    """On a rank."""
    rank = Rank.from_environment()
    if rank.index == 1:
        CheckpointFolder.last = lambda self: self.steps()[0]  # type: ignore[method-assign]
    evaluate_run(run, "last", Split.test, (), None, rank, ErrorStore(rank))


class TestEvaluation:
    @pytest.mark.parametrize(
        ("ranks", "sharding"),
        [
            (1, "table_wise"),
            (3, "table_wise"),
            (2, "row_wise"),
            (3, "row_wise"),
            (2, "column_wise"),
            (2, "data_parallel"),
        ],
    )
    def test_quality_does_not_depend_on_ranks_and_plan(self, run, ranks, sharding):
        expected = summary(run)
        found = evaluate(run, ranks, plan(sharding))
        assert found["auc"] == pytest.approx(expected["test_auc"], abs=1e-6)
        assert found["log_loss"] == pytest.approx(expected["log_loss"], abs=1e-6)
        assert found["samples"] == 1501
        assert found["step"] == HALF

    def test_any_checkpoint_can_be_chosen(self, tmp_path):
        run = train(tmp_path, 1, until(12), "checkpoint.every_steps=3", "checkpoint.keep_last=9", "evaluation.every_steps=3")
        in_training = {line["step"]: line["auc"] for line in metrics(run, "evaluation")}
        best = max(in_training, key=lambda step: in_training[step])
        for chosen, step in (("best", best), ("last", 12), ("6", 6)):
            found = evaluate(run, 1, checkpoint=chosen, split="validation")
            assert found["step"] == step
            assert found["auc"] == pytest.approx(in_training[step], abs=1e-6)

    def test_ranks_that_see_another_last_one_take_that_of_rank_0(self, tmp_path):
        """A run that still trains has written one since, or removed one."""
        run = train(tmp_path, 2, until(12), "checkpoint.every_steps=6", "embedding.optimizer.learning_rate=9")
        run_ranks(2, evaluated_where_rank_1_sees_the_first, run)
        assert json.loads((run / "eval.json").read_text())["auc"] == summary(run)["test_auc"]

    def test_a_checkpoint_that_is_not_there(self, run):
        with pytest.raises(RankFailed) as failed:
            evaluate(run, 1, checkpoint="7")
        assert_refused(failed.value, "--checkpoint 7", f"steps there: {HALF}")


class TestResume:
    @pytest.mark.parametrize(
        ("optimizer", "before", "after"),
        [
            (ROWWISE_ADAGRAD, (2, "table_wise"), (3, "row_wise")),
            pytest.param(ROWWISE_ADAGRAD, (3, "row_wise"), (1, "table_wise"), marks=pytest.mark.slow),
            pytest.param(ROWWISE_ADAGRAD, (2, "data_parallel"), (2, "row_wise"), marks=pytest.mark.slow),
            (ROWWISE_ADAGRAD, (2, "table_wise"), (2, "data_parallel")),
            (ADAGRAD, (2, "column_wise"), (3, "table_wise")),
            pytest.param(ADAGRAD, (2, "row_wise"), (2, "column_wise"), marks=pytest.mark.slow),
            (ADAGRAD, (2, "data_parallel"), (2, "column_wise")),
            pytest.param(ADAGRAD, (2, "column_wise"), (1, "data_parallel"), marks=pytest.mark.slow),
        ],
    )
    def test_losses_go_on_on_other_ranks_and_plans(self, tmp_path, straight, optimizer, before, after):
        for step, (ranks, sharding) in ((HALF, before), (STEPS, after)):
            run = train(tmp_path, ranks, until(step), optimizer, plan(sharding))
        assert losses(run) == pytest.approx(losses(straight(optimizer)), rel=1e-5, abs=0)

    @pytest.mark.parametrize(
        "dense_optimizer",
        [
            pytest.param(("adagrad", 0.0), id="adagrad", marks=pytest.mark.slow),
            pytest.param(("adam", 0.0), id="adam"),
            pytest.param(("sgd", 0.0), id="sgd", marks=pytest.mark.slow),
            pytest.param(("sgd", 0.9), id="sgd with momentum"),
        ],
    )
    def test_the_dense_optimizer_goes_on_bit_by_bit(self, tmp_path, straight, dense_optimizer):
        kind, momentum = dense_optimizer
        settings = (f"training.dense_optimizer.kind={kind}", f"training.dense_optimizer.momentum={momentum}")
        train(tmp_path, 1, until(HALF), *settings)
        run = train(tmp_path, 1, until(STEPS), *settings)
        assert losses(run) == losses(straight(*settings))

    def test_tables_of_half_precision_go_on_bit_by_bit(self, tmp_path, straight):
        train(tmp_path, 1, until(HALF), "embedding.dtype=fp16")
        run = train(tmp_path, 1, until(STEPS), "embedding.dtype=fp16")
        assert losses(run) == losses(straight("embedding.dtype=fp16"))

    def test_tables_that_differ_in_columns_go_on_under_another_plan(self, tmp_path, straight):
        dims = ("embedding.tables.table_0.dim=4", "embedding.tables.table_2.dim=16")
        train(tmp_path, 2, until(HALF), *dims, plan("table_wise"))
        run = train(tmp_path, 2, until(STEPS), *dims, plan("row_wise"))
        assert losses(run) == pytest.approx(losses(straight(*dims)), rel=1e-5, abs=0)

    def test_the_schedule_and_the_samples_seen_go_on(self, tmp_path):
        run = train(tmp_path, 2, until(HALF), "training.schedule.warmup_steps=15")
        assert CheckpointFolder(run / "checkpoints").progress(HALF).samples == HALF * 64
        train(tmp_path, 2, until(STEPS), "training.schedule.warmup_steps=15")
        for line in metrics(run, "train"):
            assert line["learning_rate"] == pytest.approx(0.02 * min(1, line["step"] / 15))
            assert line["embedding_learning_rate"] == pytest.approx(0.05 * min(1, line["step"] / 15))

    def test_another_setting_that_decides_the_outcome_is_refused(self, run):
        with pytest.raises(RankFailed) as failed:
            train(run.parent, 2, until(STEPS), plan("table_wise"), "training.global_batch_size=32")
        assert_refused(failed.value, "training.global_batch_size=32", "started with 64", "checkpoint.resume=false")

    def test_without_resume_the_old_run_is_put_aside(self, run):
        train(run.parent, 1, until(5), "checkpoint.resume=false", "training.global_batch_size=32")
        assert list(losses(run)) == [1, 2, 3, 4, 5]
        assert summary(run.with_name("run.1"))["steps"] == HALF


class TestRowwiseState:
    """A rowwise optimizer keeps one number for the columns of a shard."""

    def load(self, folder: Path, ranks: int, sharding: str) -> list[Pieces]:
        return load_tables(small_config(folder, plan(sharding)), ranks, HALF)

    def test_loading_into_fewer_shards_takes_the_mean_over_their_columns(self, tmp_path):
        train(tmp_path, 2, until(HALF), ROWWISE_ADAGRAD, plan("column_wise"))
        cut, whole = self.load(tmp_path, 2, "column_wise"), self.load(tmp_path, 1, "table_wise")
        for table in range(4):
            weight, state = f"table.table_{table}.weight", f"table.table_{table}.momentum1"
            assert torch.equal(assembled(whole, weight), assembled(cut, weight))
            assert assembled(cut, state).size(1) == 2
            assert not torch.equal(*assembled(cut, state).unbind(1))
            assert torch.equal(assembled(whole, state), assembled(cut, state).mean(dim=1, keepdim=True))

    def test_loading_into_more_shards_gives_each_the_number_of_the_whole(self, run):
        cut, whole = self.load(run.parent, 2, "column_wise"), self.load(run.parent, 1, "table_wise")
        for table in range(4):
            weight, state = f"table.table_{table}.weight", f"table.table_{table}.momentum1"
            assert torch.equal(assembled(whole, weight), assembled(cut, weight))
            assert assembled(whole, state).max() > 0
            assert torch.equal(assembled(cut, state), assembled(whole, state).expand(-1, 2))


def checkpoint_of(run: Path) -> Path:
    return CheckpointFolder(run / "checkpoints").of(HALF)


def data_file(run: Path, rank: int) -> Path:
    return next(checkpoint_of(run).glob(f"__{rank}_*"))


def assert_refused(failure: RankFailed, *parts: str) -> None:
    assert isinstance(failure.error, CheckpointError), failure
    for part in parts:
        assert part in str(failure.error)


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.witness}",)


class TestDistrust:
    """No code of a checkpoint runs."""

    @pytest.fixture
    def witness(self, tmp_path) -> Path:
        return tmp_path / "code-was-executed"

    def assert_refused(self, run: Path, witness: Path, *parts: str) -> None:
        for act in (lambda: evaluate(run, 1), lambda: train(run.parent, 1, until(STEPS), plan("table_wise"))):
            with pytest.raises(RankFailed) as failed:
                act()
            assert_refused(failed.value, *parts)
            assert not witness.exists()

    def test_the_payload_works(self, witness):
        pickle.loads(pickle.dumps(Payload(witness)))
        assert witness.exists()

    @pytest.fixture
    def run(self, run) -> Path:
        """As a release before tensors.json has written it."""
        write_pickled_metadata(checkpoint_of(run))
        return run

    def test_code_as_metadata(self, run, witness):
        (checkpoint_of(run) / ".metadata").write_bytes(pickle.dumps(Payload(witness)))
        self.assert_refused(run, witness, ".metadata", "system")

    def test_code_within_metadata(self, run, witness):
        path = checkpoint_of(run) / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        metadata.planner_data = Payload(witness)
        path.write_bytes(pickle.dumps(metadata))
        self.assert_refused(run, witness, ".metadata", "system")

    def test_an_object_in_place_of_a_tensor(self, run, witness):
        """DCP itself unpickles the content of such an entry."""
        path = checkpoint_of(run) / ".metadata"
        metadata = pickle.loads(path.read_bytes())
        key = next(iter(metadata.state_dict_metadata))
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        path.write_bytes(pickle.dumps(metadata))
        torch.save(Payload(witness), data_file(run, 0))
        self.assert_refused(run, witness, ".metadata", key, "only tensors")

    def test_code_in_place_of_data(self, run, witness):
        for rank in range(2):
            torch.save(Payload(witness), data_file(run, rank))
        self.assert_refused(run, witness, str(checkpoint_of(run)))


class TestOfAnEarlierRelease:
    """Their metadata is a pickle, and they have no checksums."""

    def test_a_run_goes_on_bit_by_bit(self, tmp_path, run, of_two_ranks):
        write_pickled_metadata(checkpoint_of(run))
        train(tmp_path, 2, until(STEPS), plan("table_wise"))
        straight = shutil.copytree(of_two_ranks, tmp_path / "straight/run")
        train(straight.parent, 2, until(STEPS), plan("table_wise"))
        assert losses(run) == losses(straight)

    def test_that_damage_cannot_be_seen_is_told(self, run, caplog):
        write_pickled_metadata(checkpoint_of(run))
        CheckpointFolder(run / "checkpoints").progress(HALF)
        assert "written by an earlier release, without checksums" in caplog.text


def write_pickled_metadata(checkpoint: Path) -> None:
    """Replace the records of a checkpoint by those of the release before, with DCP's own class for a place in a file."""
    metadata = RawReader(checkpoint).read_metadata()
    metadata.storage_data = {index: _StorageInfo(s.file, s.begin, s.length) for index, s in metadata.storage_data.items()}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    for name in ("tensors.json", "checksums.json"):
        (checkpoint / name).unlink()


def save_twice_and_remove_the_folder_between(config: Config) -> list[str]:
    """Return the lines of the log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)  # ranks of tests are silent
    logging.getLogger("dlrm_fused").addHandler(handler)
    device, folder = torch.device("cpu"), CheckpointFolder(config.run_dir / "checkpoints")
    with sharded_model(config, device) as (_, sharded):
        writer = CheckpointWriter(folder, config.checkpoint, device)
        for step in (1, 2):
            writer.save(sharded, Progress(step, step, 0.5, 1, None, flatten(config)))
            writer.wait()
            if step == 1:
                shutil.rmtree(folder.path)
        restore_model(folder.of(2), sharded)
    return said


def test_that_checkpoints_were_removed_while_a_run_trains_is_told(tmp_path):
    config = small_config(tmp_path)
    [said] = run_ranks(1, save_twice_and_remove_the_folder_between, config)
    assert any("checkpoints: was removed while the run trains; it is made anew" in line for line in said)
    assert CheckpointFolder(config.run_dir / "checkpoints").steps() == [2]


class TestDamage:
    """Each ends with the checkpoint's name and what is wrong."""

    def error_of_evaluation(self, run: Path, *overrides: str) -> str:
        with pytest.raises(RankFailed) as failed:
            evaluate(run, 2, *overrides)
        assert_refused(failed.value, str(checkpoint_of(run)))
        assert "\n" not in str(failed.value.error)
        return str(failed.value.error)

    def test_a_file_cut_off(self, run):
        os.truncate(data_file(run, 1), 100)
        assert data_file(run, 1).name in self.error_of_evaluation(run)

    def test_a_missing_file(self, run):
        name = data_file(run, 0).name
        data_file(run, 0).unlink()
        assert name in self.error_of_evaluation(run)

    def test_missing_metadata(self, run):
        (checkpoint_of(run) / "tensors.json").unlink()
        assert "tensors.json: missing" in self.error_of_evaluation(run)

    def test_metadata_cut_off(self, run):
        os.truncate(checkpoint_of(run) / "tensors.json", 1000)
        assert "tensors.json: damaged" in self.error_of_evaluation(run)

    def test_a_zeroed_half(self, run):
        path = data_file(run, 0)
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        assert f"{path.name}: damaged: its bytes are not those that were written" in self.error_of_evaluation(run)

    def test_files_of_two_ranks_exchanged(self, run):
        first, second = data_file(run, 0), data_file(run, 1)
        content = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(content)
        assert "__" in self.error_of_evaluation(run)

    def test_damaged_progress(self, run):
        (checkpoint_of(run) / "progress.json").write_text("{")
        with pytest.raises(RankFailed) as failed:
            train(run.parent, 1, until(STEPS), plan("table_wise"))
        assert_refused(failed.value, "progress.json", "damaged", "checkpoint.on_damage=fallback")

    def test_another_number_of_rows(self, run):
        error = self.error_of_evaluation(run, "data.synthetic.rows=[50,120,300,701]")
        assert "table.table_3.weight has shape [700, 8], the model's has [701, 8]" in error

    def test_another_width_of_a_layer(self, run):
        error = self.error_of_evaluation(run, "model.top_mlp=[17,1]")
        assert "has shape [16" in error
        assert "model's has [17" in error

    def test_another_model(self, run):
        assert "it belongs to a model or optimizer of other settings" in self.error_of_evaluation(run, "model.kind=dcnv2")
