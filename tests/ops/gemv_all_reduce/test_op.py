"""GEMV + AllReduce between processes on the CPU: its sums, its gradients, and its behaviour as an operator of PyTorch."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce, reference
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import cpu_group, run_ranks

ROWS, COLUMNS, DEPTH = 70, 24, 8


def draw(rank: int, seed: int) -> dict[str, Tensor]:
    """Arguments with gradients; x and weight differ between ranks, the others do not."""
    own, common = torch.Generator().manual_seed(1000 * seed + rank), torch.Generator().manual_seed(seed)
    arguments = {
        "x": torch.randn(ROWS, DEPTH, generator=own),
        "weight": torch.randn(COLUMNS, DEPTH, generator=own),
        "bias": torch.randn(COLUMNS, generator=common),
        "residual": torch.randn(ROWS, COLUMNS, generator=common),
        "norm_weight": torch.randn(COLUMNS, generator=common),
    }
    return {name: tensor.requires_grad_() for name, tensor in arguments.items()}


def results_and_gradients(schedule: str | None) -> dict[str, Tensor]:
    """By the operator, or without a schedule by the reference."""
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        arguments = draw(rank.index, seed=1)
        if schedule:
            group = symmetric_group()
            workspace = GemvWorkspace(group, name="sum", max_columns=COLUMNS, max_rows=ROWS, dtype=torch.float32)
            out, normed = gemv_all_reduce(workspace, **arguments, schedule=schedule)
        else:
            out, normed = reference(dist.group.WORLD, **arguments)
        assert normed is not None
        (out.sin().sum() + normed.cos().sum()).backward()
        gradients = {f"d{name}": tensor.grad for name, tensor in arguments.items()}
        if schedule:
            group.close()
        return {"out": out.detach(), "normed": normed.detach(), **gradients}


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_and_gradients_are_those_of_the_reference(ranks: int) -> None:
    fused = run_ranks(ranks, results_and_gradients, "auto")
    expected = run_ranks(ranks, results_and_gradients, None)
    for own, wanted in zip(fused, expected, strict=True):
        assert own.keys() == wanted.keys()
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=1e-5)
    for own in fused[1:]:
        assert torch.equal(own["out"], fused[0]["out"])
        assert torch.equal(own["normed"], fused[0]["normed"])


def many_calls(calls: int) -> list[Tensor]:
    with cpu_group() as group:
        workspace = GemvWorkspace(group, name="sum", max_columns=COLUMNS, dtype=torch.float32)
        delays = random.Random(group.rank)
        sums = []
        for call in range(calls):
            time.sleep(delays.choice([0, 0, 0.005]))
            rows, columns = 1 + call % 5, COLUMNS - call % 3
            x = torch.full((rows, 2), float(call + group.rank))
            sums.append(gemv_all_reduce(workspace, x, torch.ones(columns, 2))[0])
        return sums


def test_no_call_sees_parts_of_another_however_late_a_rank_is() -> None:
    for sums in run_ranks(3, many_calls, 200):
        for call, own in enumerate(sums):
            assert own.shape == (1 + call % 5, COLUMNS - call % 3)
            assert (own == 2 * (3 * call + 3)).all(), f"call {call}"


def opcheck() -> None:
    with cpu_group() as group:
        workspace = GemvWorkspace(group, name="sum", max_columns=COLUMNS, max_rows=ROWS, dtype=torch.float32)
        arguments = draw(group.rank, seed=1).values()
        torch.library.opcheck(torch.ops.dlrm_fused.gemv_all_reduce.default, (*arguments, 1e-6, workspace.handle))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_opcheck(ranks: int) -> None:
    run_ranks(ranks, opcheck)
