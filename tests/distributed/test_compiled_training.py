"""training.compile=always gives the losses of eager mode, with evaluations in between.

The backend aot_eager runs what torch.compile traces without generating code, which takes minutes on a CPU; tests/gpu has that.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dlrm_fused.config import Config
from dlrm_fused.datasets import open_dataset
from dlrm_fused.models import build_model
from dlrm_fused.sharding.parallel import shard
from dlrm_fused.training import trainer
from dlrm_fused.training.checkpoint import RawReader
from dlrm_fused.training.run_folder import RunFolder
from dlrm_fused.training.runtime import ErrorStore, Rank, process_group
from tests.distributed.launch import WITHOUT_AMPLIFIED_ROUNDING, RankFailed, losses, metrics, run_ranks, small_config, train


def _train(config: Config) -> tuple[int, int]:
    """Numbers of graphs and of graph breaks."""
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    rank = Rank.from_environment()
    trainer.train(config, rank, ErrorStore(rank))
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize(
    ("ranks", "model", "graphs"),
    [
        (2, ["model.kind=dcnv2", "comm=fused"], 1),
        (1, ["model.kind=dlrm", "comm=baseline"], 1),
        (2, ["model.kind=dlrm", "comm=fused", "embedding.tables.table_1.dim=4"], 1),
        # What is before the experts, and what is after them.
        pytest.param(
            2, ["model.kind=dcnv2", "comm=fused", "model.top_mlp=[16,16,1]", "model.experts.count=4"], 2, marks=pytest.mark.slow
        ),
    ],
    ids=["dcnv2", "dlrm", "dlrm of unequal tables", "experts"],
)
def test_losses_are_those_of_eager_mode(tmp_path: Path, ranks: int, model: list[str], graphs: int) -> None:
    settings = [
        *WITHOUT_AMPLIFIED_ROUNDING,
        "training.max_steps=10",
        *model,
        "evaluation.every_steps=4",
    ]
    config = small_config(tmp_path / "compiled", *settings, "training.compile=always")
    assert run_ranks(ranks, _train, config) == [(graphs, 0)] * ranks
    eager = train(tmp_path / "eager", ranks, *settings, "training.compile=never")
    assert losses(config.run_dir) == pytest.approx(losses(eager), rel=1e-5)
    of_evaluations = [[line["auc"] for line in metrics(run, "evaluation")] for run in (config.run_dir, eager)]
    assert of_evaluations[0] == pytest.approx(of_evaluations[1], abs=1e-5)


def _kinds_of_data_parallelism(config: Config) -> tuple[str, str]:
    """Of a model whose dense part uses all dense parameters, and of one with another parameter."""
    kinds = []
    with process_group(Rank.from_environment(), torch.device("cpu")):
        for has_another in (False, True):
            dataset = open_dataset(config, torch.device("cpu"))
            task = build_model(config, dataset.schema, 1, torch.device("cpu"))
            if has_another:
                task.register_parameter("temperature", torch.nn.Parameter(torch.ones(1)))
            sharded = shard(task, config, dataset.schema, torch.device("cpu"))
            kinds.append(type(sharded.model._dmp_wrapped_module).__name__)
    return kinds[0], kinds[1]


def test_a_parameter_beside_the_compiled_part_is_averaged_by_ddp(tmp_path: Path) -> None:
    config = small_config(tmp_path, "training.compile=always")
    assert run_ranks(1, _kinds_of_data_parallelism, config) == [("RankingTask", "DistributedDataParallel")]


def test_a_model_that_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"training\.compile=always: model\.kind=transformer is not compiled"):
        train(tmp_path, 1, "training.compile=always", "model.kind=transformer", "data.synthetic.history_length=5")


@pytest.mark.slow
def test_checkpoints_are_those_of_eager_mode_and_are_continued(tmp_path: Path) -> None:
    settings = [*WITHOUT_AMPLIFIED_ROUNDING, "model.kind=dcnv2", "training.dense_optimizer.kind=adam"]
    for steps in (10, 20):
        compiled = small_config(tmp_path / "compiled", *settings, "training.compile=always", f"training.max_steps={steps}")
        run_ranks(2, _train, compiled)
    eager = small_config(tmp_path / "eager", *settings, "training.compile=never", "training.max_steps=20")
    run_ranks(2, _train, eager)
    assert losses(compiled.run_dir) == pytest.approx(losses(eager.run_dir), rel=1e-5)
    assert _saved(compiled, step=20) == _saved(eager, step=20)


def _saved(config: Config, step: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors."""
    metadata = RawReader(RunFolder(config.run_dir).checkpoints.of(step)).read_metadata().state_dict_metadata
    return {key: tuple(value.size) for key, value in metadata.items() if isinstance(value, TensorStorageMetadata)}
