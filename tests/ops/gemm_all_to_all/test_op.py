"""GEMM + All-to-All between processes on the CPU: its results, its gradients, and its behaviour as an operator of PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.gemm_all_to_all import reference
from dlrm_fused.ops.gemm_all_to_all.schedule import SCHEDULES
from tests.distributed.launch import cpu_group, run_ranks
from tests.ops.checked_calls import check_reference
from tests.ops.gemm_all_to_all.cases import (
    OPERATOR,
    Case,
    Inputs,
    check,
    draw,
    new_workspace,
)

EQUAL = Case(72, 40, rows=24)


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_and_gradients_with_a_straggler(ranks: int) -> None:
    check([EQUAL, Case(40, 32, rows=12, fp8=True)], ranks, calls=32, with_gradients=True)


def test_sixteen_bits() -> None:
    check([EQUAL], ranks=2, calls=6, dtype=torch.bfloat16, with_gradients=True)


def unfused(case: Case, own: Inputs) -> Tensor:
    return reference(dist.group.WORLD, own.x, own.weight)


def test_the_reference_is_the_same() -> None:
    check_reference(OPERATOR, unfused, EQUAL, ranks=2)


def opcheck() -> None:
    with cpu_group() as group:
        workspace = new_workspace(group)
        operator = torch.ops.dlrm_fused.gemm_all_to_all.default
        own = draw(EQUAL, group.world_size, 1, torch.float32)[group.rank]
        inputs = own.x.requires_grad_(), own.weight.requires_grad_(), None
        for schedule in SCHEDULES:
            torch.library.opcheck(operator, (*inputs, schedule, workspace.handle))


def test_opcheck() -> None:
    run_ranks(2, opcheck)
