"""embedding.optimizer.counter_halflife: the weights of a row decay by how rarely it occurs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.config import Config
from dlrm_fused.sharding.parallel import ShardedModel
from dlrm_fused.training.checkpoint import LocalShards, model_state
from tests.distributed.launch import Pieces, losses, run_ranks, sharded_model, small_config, train, whole

RATE, DECAY, HALFLIFE, EPS = 0.05, 0.3, 20, 1e-8
RANKS, SAMPLES, STEPS = 2, 6, 12
SETTINGS = [
    f"embedding.optimizer.learning_rate={RATE}",
    f"embedding.optimizer.weight_decay={DECAY}",
    f"embedding.optimizer.counter_halflife={HALFLIFE}",
    f"embedding.optimizer.eps={EPS}",
]
FEATURES = ("table_0", "table_1", "table_2", "table_3")
DIM = 8


@dataclass(frozen=True)
class Step:
    """Of one rank: bags of a feature after those of the one before, and the gradient of their pooled embeddings.

    Attributes:
        lengths: [features, samples].
        ids: [all lengths]; few, so that they occur again after some steps, and twice in a bag.
        upstream: [samples, features, DIM].
    """

    lengths: Tensor
    ids: Tensor
    upstream: Tensor

    @staticmethod
    def drawn(step: int, rank: int) -> Step:
        generator = torch.Generator().manual_seed(step * RANKS + rank)
        lengths = torch.randint(0, 4, (len(FEATURES), SAMPLES), generator=generator)
        ids = torch.randint(0, 20, (int(lengths.sum()),), generator=generator)
        return Step(lengths, ids, torch.randn(SAMPLES, len(FEATURES), DIM, generator=generator))


def trained(config: Config) -> tuple[Pieces, Pieces]:
    """This rank's pieces of all tables before and after the steps."""
    with sharded_model(config, torch.device("cpu")) as (_, sharded):
        before = {key: [(at, piece.clone()) for at, piece in pieces] for key, pieces in tables(sharded).items()}
        look_up = sharded.model.module.embedding_stage
        for step in (Step.drawn(number, torch.distributed.get_rank()) for number in range(STEPS)):
            pooled = look_up(KeyedJaggedTensor(list(FEATURES), step.ids, lengths=step.lengths.flatten()))
            pooled.backward(step.upstream.flatten(1))
        return before, tables(sharded)


def tables(sharded: ShardedModel) -> Pieces:
    return {key: value.shards for key, value in model_state(sharded).items() if isinstance(value, LocalShards)}


def reference(weight: Tensor, feature: int) -> Tensor:
    """The same for a whole table, as the setting is documented, in plain torch."""
    weight, sums = weight.clone(), torch.zeros(len(weight))
    counts, last = torch.zeros(len(weight)), torch.zeros(len(weight))
    for number in range(1, STEPS + 1):
        gradient, occurs = torch.zeros_like(weight), torch.zeros(len(weight), dtype=torch.bool)
        for rank in range(RANKS):
            step = Step.drawn(number - 1, rank)
            ids = step.ids.split(step.lengths.sum(1).tolist())[feature]
            samples = torch.arange(SAMPLES).repeat_interleave(step.lengths[feature])
            gradient.index_add_(0, ids, step.upstream[samples, feature] / RANKS)  # the mean over ranks
            occurs[ids] = True
        forgotten = 2 ** (-(number - last[occurs]) / HALFLIFE)
        counts[occurs] = 1 + forgotten * counts[occurs]
        last[occurs] = number
        sums[occurs] += gradient[occurs].square().mean(1)
        kept = 1 - DECAY * RATE * HALFLIFE / counts[occurs]
        step_size = RATE / (sums[occurs].sqrt() + EPS)
        weight[occurs] = kept[:, None] * weight[occurs] - step_size[:, None] * gradient[occurs]
    return weight


@pytest.mark.parametrize("comm", ["baseline", "fused"])
@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
def test_weights_are_those_of_the_definition(tmp_path: Path, comm: str, sharding: str) -> None:
    config = small_config(tmp_path, *SETTINGS, f"comm={comm}", f"embedding.sharding={sharding}", "embedding.init_std=0.5")
    before, after = zip(*run_ranks(RANKS, trained, config), strict=True)
    for number, feature in enumerate(FEATURES):
        begun, ended = (whole(list(pieces), f"table.{feature}.weight") for pieces in (before, after))
        torch.testing.assert_close(ended, reference(begun, number), rtol=1e-5, atol=1e-6)
        assert torch.equal(ended[20:], begun[20:]), "rows that never occur stay as they are"


class TestSteps:
    """Occurrences are counted by training steps: whatever else looks rows up leaves no trace."""

    @pytest.fixture(scope="class")
    def straight(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return train(tmp_path_factory.mktemp("straight"), RANKS, *SETTINGS, "training.max_steps=16")

    def test_evaluations_in_between(self, straight: Path, tmp_path: Path) -> None:
        run = train(tmp_path, RANKS, *SETTINGS, "training.max_steps=16", "evaluation.every_steps=4")
        assert losses(run) == losses(straight)

    def test_measurements_of_auto(self, straight: Path, tmp_path: Path) -> None:
        assert losses(train(tmp_path, RANKS, *SETTINGS, "training.max_steps=16", "comm=auto")) == losses(straight)

    def test_a_run_that_is_continued_under_another_plan(self, straight: Path, tmp_path: Path) -> None:
        train(tmp_path, RANKS, *SETTINGS, "training.max_steps=8", "evaluation.every_steps=4")
        run = train(tmp_path, RANKS, *SETTINGS, "training.max_steps=16", "embedding.sharding=row_wise")
        assert losses(run) == pytest.approx(losses(straight), rel=1e-5, abs=0)

    def test_it_is_not_the_run_without_counters(self, straight: Path, tmp_path: Path) -> None:
        run = train(tmp_path, RANKS, SETTINGS[0], SETTINGS[3], "training.max_steps=16")
        assert losses(run) != pytest.approx(losses(straight), rel=1e-3)
