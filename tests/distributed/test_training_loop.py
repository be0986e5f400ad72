"""The loop of the trainer: learning rates, pauses for evaluations, and ends that are failures."""

from __future__ import annotations

import shlex
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_fused.config import Comm, Config, Split, load_config, to_yaml
from dlrm_fused.config.schema import MAX_INT32
from dlrm_fused.datasets.batch import Batch
from dlrm_fused.datasets.loader import TrainLoader
from dlrm_fused.errors import ConfigError, TrainingError
from dlrm_fused.ops.embedding_all_to_all import kernel as embedding_kernel
from dlrm_fused.sharding.groups import expert_parallel_size
from dlrm_fused.training.evaluation import evaluate
from dlrm_fused.training.next_steps import next_steps
from dlrm_fused.training.pipeline import TrainingPipeline
from dlrm_fused.training.runtime import Rank
from dlrm_fused.training.step_timer import StepTimer
from tests.distributed.launch import (
    RankFailed,
    assembled,
    load_tables,
    losses,
    metrics,
    run_ranks,
    run_script,
    sharded_model,
    small_config,
    summary,
    train,
)
from tests.distributed.launch import evaluate as evaluate_run
from tests.unit.mlperf_rules import complaints

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dlrm_fused"
WEIGHTS = [f"table.table_{table}.weight" for table in range(4)]


def tables(folder: Path, step: int | None, *overrides: str) -> torch.Tensor:
    loaded = load_tables(small_config(folder, *overrides), 1, step)
    return torch.cat([assembled(loaded, weight) for weight in WEIGHTS])


class TestLearningRates:
    """The optimizer of embedding rows is fused into the backward pass, which a rate does not reach by itself."""

    @pytest.mark.parametrize(
        ("optimizer", "sharding"),
        [
            ("rowwise_adagrad", "table_wise"),
            ("adagrad", "data_parallel"),
            pytest.param("adagrad", "row_wise", marks=pytest.mark.slow),
            pytest.param("sgd", "column_wise", marks=pytest.mark.slow),
        ],
    )
    def test_rows_stand_still_when_the_rate_has_decayed_to_zero(self, tmp_path, optimizer, sharding):
        kind = f"embedding.optimizer.kind={optimizer}"
        schedule = [f"training.schedule.{setting}" for setting in ("decay_start_step=10", "decay_steps=5")]
        checkpoints = ("checkpoint.every_steps=5", "checkpoint.keep_last=9")
        train(tmp_path, 2, kind, f"embedding.sharding={sharding}", "training.max_steps=20", *schedule, *checkpoints)
        at = {step: tables(tmp_path, step, kind, "embedding.sharding=table_wise") for step in (5, 10, 15, 20)}
        assert not torch.equal(at[5], at[10])
        assert not torch.equal(at[10], at[15])
        assert torch.equal(at[15], at[20])

    @pytest.mark.parametrize("sharding", ["table_wise", "data_parallel"])
    def test_half_the_rate_moves_rows_half_as_far(self, tmp_path, sharding):
        optimizer = ("embedding.optimizer.kind=sgd", "embedding.optimizer.learning_rate=100")
        settings = (*optimizer, f"embedding.sharding={sharding}", "training.max_steps=1")
        steps = {}
        for warmup_steps in (1, 2):
            folder = tmp_path / f"{warmup_steps}"
            train(folder, 2, *settings, f"training.schedule.warmup_steps={warmup_steps}")
            steps[warmup_steps] = tables(folder, 1, *settings) - tables(folder, None, *settings)
        assert steps[1].abs().max() > 0.01
        torch.testing.assert_close(steps[2], steps[1] / 2, rtol=1e-4, atol=1e-7)


class Recording(Iterator[Batch]):
    """Keeps the labels of the batches that were taken from a loader."""

    def __init__(self, loader: TrainLoader) -> None:
        self.loader = loader
        self.labels: list[torch.Tensor] = []

    def __next__(self) -> Batch:
        batch = next(self.loader)
        self.labels.append(batch.labels)
        return batch


def train_pause_train(config: Config) -> tuple[int, int, bool]:
    """Batches taken before and after a pause in which the model is evaluated, and whether every one was trained in order."""
    rank, device = Rank.from_environment(), torch.device("cpu")
    with sharded_model(config, device) as (dataset, sharded):
        with TrainLoader(dataset, config, rank.index, rank.world_size, device) as loader:
            batches = Recording(loader)
            pipeline = TrainingPipeline(sharded.model, sharded.optimizer, device, StepTimer(device))
            trained = [pipeline.progress(batches).labels for _ in range(5)]
            taken_before = len(batches.labels)
            with pipeline.paused() as model:
                evaluate(model, dataset, Split.validation, config, device)
            taken_after = len(batches.labels)
            trained += [pipeline.progress(batches).labels for _ in range(5)]
            in_order = all(torch.equal(*pair) for pair in zip(trained, batches.labels[:10], strict=True))
        return taken_before, taken_after, in_order


def test_a_pause_keeps_the_batches_in_flight(tmp_path):
    for taken_before, taken_after, in_order in run_ranks(2, train_pause_train, small_config(tmp_path)):
        assert taken_before > 5  # some are in flight
        assert taken_after == taken_before
        assert in_order


def way_to_the_lookup_kernel(config: Config) -> list[tuple[str, str]]:
    """The package's frames, each a file and a function, between a step of the pipeline and the first lookup kernel."""
    rank, device, found = Rank.from_environment(), torch.device("cpu"), list[traceback.FrameSummary]()
    launched = embedding_kernel.lookup_and_scatter_kernel

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            found[:] = found or traceback.extract_stack()
            return launched[grid]

    with (
        sharded_model(config, device) as (dataset, sharded),
        TrainLoader(dataset, config, rank.index, rank.world_size, device) as loader,
        pytest.MonkeyPatch.context() as patch,
    ):
        pipeline = TrainingPipeline(sharded.model, sharded.optimizer, device, StepTimer(device))
        patch.setattr(embedding_kernel, "lookup_and_scatter_kernel", Recorded())
        pipeline.progress(loader)
    ours = [(Path(frame.filename), frame.name) for frame in found]
    return [(path.name, name) for path, name in ours if PACKAGE in path.parents]


@pytest.mark.interpreted
def test_a_newcomer_follows_a_step_to_its_kernel_through_few_files(tmp_path):
    for frames in run_ranks(2, way_to_the_lookup_kernel, small_config(tmp_path, "comm=fused", "training.max_steps=1")):
        assert frames[0] == ("pipeline.py", "_forward")
        assert frames[-1] == ("kernel.py", "lookup_and_scatter")
        assert len(frames) <= 12, frames
        assert len({file for file, _ in frames}) <= 7, frames


def failure(folder: Path, ranks: int, *overrides: str) -> BaseException:
    with pytest.raises(RankFailed) as failed:
        train(folder, ranks, *overrides)
    return failed.value.error


class TestFailures:
    def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(self, tmp_path):
        error = failure(tmp_path, 2, "training.dense_optimizer.kind=sgd", "training.dense_optimizer.learning_rate=1e30")
        assert isinstance(error, TrainingError)
        assert "the loss is not finite" in str(error)
        assert "training.dense_optimizer.learning_rate=1e+30" in str(error)
        last = max(losses(tmp_path / "run"))
        assert f"step {last + 1}:" in str(error)

    def test_the_step_is_named_also_when_losses_are_read_rarely(self, tmp_path):
        settings = ("training.dense_optimizer.kind=sgd", "training.dense_optimizer.learning_rate=1e30")
        each = failure(tmp_path / "each", 2, *settings)
        rarely = failure(tmp_path / "rarely", 2, *settings, "telemetry.log_every_steps=20")
        assert str(rarely).split(":")[0] == str(each).split(":")[0]
        assert not metrics(tmp_path / "rarely" / "run", "train")

    def test_a_constant_prediction_stops_the_run(self, tmp_path):
        # Steps that are far too long kill all units of a layer.
        error = failure(tmp_path, 2, "training.dense_optimizer.learning_rate=1e4")
        assert isinstance(error, TrainingError)
        assert "predicts" in str(error)
        assert "for every sample" in str(error)

    def test_fewer_samples_than_ranks(self, tmp_path):
        error = failure(tmp_path, 3, "training.global_batch_size=2")
        assert isinstance(error, ConfigError)
        assert "training.global_batch_size=2: allowed: at least the number of ranks, 3" in str(error)

    def test_an_unknown_table(self, tmp_path):
        error = failure(tmp_path, 1, "embedding.tables.table_9.sharding=row_wise")
        assert isinstance(error, ConfigError)
        assert "embedding.tables.table_9: no such table" in str(error)

    def test_an_output_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "run").write_text("a file, not a folder")
        error = failure(tmp_path, 1)
        assert isinstance(error, ConfigError)
        assert f"output_dir={tmp_path}: {tmp_path / 'run'} cannot be written: File exists" in str(error)


def test_the_end_of_a_run_says_what_to_do_next(tmp_path):
    """And it can be done as it is printed: the evaluation, and the same run with fused communication."""
    small_config(tmp_path)
    settings = ["--config", str(tmp_path / "small.yaml"), f"output_dir={tmp_path}", "training.max_steps=3"]
    said = _end_of_script("train.py", settings, tmp_path)
    steps = said.split("what to do next:\n")[1].splitlines()[:3]
    assert [step.split(": ")[0].strip() for step in steps] == ["see it", "evaluate it", "compare with comm=fused"]
    see, evaluate_it, compare = [shlex.split(step.split(": ", 1)[1]) for step in steps]
    assert see[1:] == ["--logdir", str(tmp_path)]
    assert Path(see[0]).name == "tensorboard"
    assert [Path(word).name for word in evaluate_it[:2]] == ["python", "eval.py"]
    assert "auc" in _end_of_script("eval.py", evaluate_it[2:], tmp_path)
    assert (Path(compare[0]).name, *compare[1:3]) == ("torchrun", "--standalone", "--nproc-per-node=1")
    assert "compare with comm=baseline" in _end_of_script("train.py", compare[4:], tmp_path)
    assert load_config(tmp_path / "run_fused/config.yaml", []).comm is Comm.fused


def test_the_largest_seed_trains(tmp_path):
    assert losses(train(tmp_path, 1, f"seed={MAX_INT32}", "training.max_steps=1", "data.synthetic.history_length=2"))


def test_what_to_do_next_is_allowed_after_a_strict_run_whose_ranks_share_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = small_config(tmp_path, "comm=fused", "comm_strict=true", "model.experts.count=4", "model.experts.parallel=2")
    config.run_dir.mkdir()
    (config.run_dir / "config.yaml").write_text(to_yaml(config))
    _, evaluate_it, compare = (shlex.split(step.split(": ", 1)[1]) for step in next_steps(config, 2).splitlines())
    one_process, baseline = (
        load_config(config.run_dir / "config.yaml", [word for word in command if "=" in word and not word.startswith("-")])
        for command in (evaluate_it, compare)
    )
    assert expert_parallel_size(one_process.model.experts, world_size=1) == 1
    assert baseline.comm is Comm.baseline


def _end_of_script(script: str, arguments: list[str], folder: Path) -> str:
    ended = run_script(1, ROOT / script, arguments, folder, timeout=200)
    assert ended.statuses == [0], ended.output
    return ended.output


def test_the_run_ends_at_the_target(tmp_path):
    """And its log in MLPerf's lines keeps the rules of the open division, but that of caches, which no trainer clears."""
    steps = ("evaluation.every_steps=10", "telemetry.log_every_steps=50")
    run = train(tmp_path, 2, "model.kind=dcnv2", "training.target_auc=0.7", *steps, "telemetry.mlperf_log=true")
    aucs = [line["auc"] for line in metrics(run, "evaluation")]
    assert aucs[-1] >= 0.7
    assert all(auc < 0.7 for auc in aucs[:-1])
    assert max(losses(run)) == 10 * len(aucs)
    assert complaints(run / "mlperf.log") == ["cache_clear"]
    assert '"status": "success"' in (run / "mlperf.log").read_text().splitlines()[-1]


def test_the_run_ends_when_its_auc_does_not_rise_any_more(tmp_path):
    """Nothing is learned at such rates. What ended so is left alone, and needs no more steps when it is continued."""
    nothing = ("training.dense_optimizer.learning_rate=1e-12", "embedding.optimizer.learning_rate=1e-12")
    settings = ("evaluation.patience=2", "evaluation.every_steps=5", "training.max_steps=500", *nothing)
    run = train(tmp_path, 2, *settings)
    aucs = [line["auc"] for line in metrics(run, "evaluation")]
    since_best = [number - max(range(number + 1), key=lambda i: aucs[i]) for number in range(len(aucs))]
    assert since_best[-1] == 2
    assert max(since_best[:-1]) < 2
    assert summary(run)["lost_patience"]
    assert summary(run)["steps"] == 5 * len(aucs)
    (run / "summary.json").unlink()
    train(tmp_path, 2, *settings)
    assert summary(run)["steps"] == 5 * len(aucs)


def test_a_whole_split_is_evaluated_after_training_unless_the_command_limits_it(tmp_path):
    run = train(tmp_path, 1, "training.max_steps=5", "evaluation.max_samples=100", "evaluation.every_steps=5")
    assert evaluate_run(run, 1)["samples"] == 1_501
    for limit in ("evaluation.max_samples=100", "evaluation={max_samples: 100}"):
        assert evaluate_run(run, 2, limit)["samples"] == 100
