"""FusedEmbeddingBagCollectionSharder on GPUs, in place of TorchRec's: columns in the same order, and tables that move."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import DataType

from tests.distributed.launch import run_ranks
from tests.distributed.test_drop_in import PER_FEATURE, TRAIN, Case, differences, group_of, odd_case, shard
from tests.distributed.test_resharding import CASE, MOVES, fused_sharder, reshard, step, train_and_move

pytestmark = pytest.mark.gpu(2)
CASES = 40


def on_gpus(case: Case) -> Case:
    """Without what amplifies or randomizes rounding: sums have another order there."""
    plain = {"optimizer": EmbOptimType.EXACT_SGD, "weights": DataType.FP32, "output": SparseType.FP32}
    return replace(case, device_type="cuda", **plain)


@pytest.mark.parametrize("weighted", [False, True])
def test_odd_cases_have_the_columns_of_torchrecs_sharder(weighted: bool) -> None:
    cases = {seed: on_gpus(case) for seed in range(CASES) if (case := odd_case(seed)).ranks == 2}
    own = {seed: case for seed, case in cases.items() if PER_FEATURE not in case.events and case.weighted == weighted}
    assert len(own) > CASES // 10
    for found in run_ranks(2, differences, own):
        assert {seed: names for seed, names in found.items() if names} == {}


# Enough steps between the moves for a capture, and its replay.
MOVING = on_gpus(replace(CASE, events=(TRAIN,) * 6))


@pytest.mark.parametrize("mode", ["fused", "auto"])
def test_after_every_move_outputs_and_tables_are_those_of_torchrecs_sharder(mode: str) -> None:
    assert run_ranks(2, train_and_move, replace(MOVING, options={"mode": mode})) == [[], []]


def test_moves_let_go_of_the_symmetric_memory_that_they_replace() -> None:
    for first, *after in run_ranks(2, memory_after_moves, MOVING):
        assert first > 0
        assert after[len(MOVES) - 1 :: len(MOVES)] == [first] * 2  # the tables are where they were


def memory_after_moves(case: Case) -> list[int]:
    """Bytes of the group's symmetric memory, before the tables move and after each move."""
    found = []
    with group_of(case):
        model, now = shard(case, fused_sharder(case)), case
        group = get_unwrapped_module(model).collections[0]._group
        for ranks in (None, *MOVES, *MOVES):
            now = now if ranks is None else reshard(model, now, ranks)
            for _ in range(6):
                step(model, case)
            found.append(sum(memory.size for memory in group._memories))
    return found
