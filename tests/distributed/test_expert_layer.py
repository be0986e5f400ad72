"""The expert layer between processes on the CPU: equal to plain loops over tokens, whoever gets how many of them."""

from __future__ import annotations

import pytest
import torch

from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.expert_world import CASES, Results, draw, expected, make_exchange, run_fused, run_reference
from tests.distributed.launch import run_ranks


def all_cases(ranks: int) -> list[tuple[Results, Results]]:
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        seen = []
        for number, case in enumerate(CASES[ranks]):
            exchange = make_exchange(group, case, f"experts_{number}")
            seen.append((run_fused(exchange, draw(case, number)[rank.index]), run_reference(draw(case, number)[rank.index])))
        group.close()
        return seen


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fused_and_reference_are_the_dense_computation(ranks: int) -> None:
    by_rank = run_ranks(ranks, all_cases, ranks)
    for number, case in enumerate(CASES[ranks]):
        for rank, wanted in enumerate(expected(case, number)):
            for own in by_rank[rank][number]:
                assert own.keys() == wanted.keys()
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
