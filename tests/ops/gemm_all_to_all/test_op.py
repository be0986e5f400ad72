"""GEMM + All-to-All between processes on the CPU: its results, its gradients, and its behaviour as an operator of PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.gemm_all_to_all import reference, routed_reference
from dlrm_fused.ops.gemm_all_to_all.schedule import SCHEDULES
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import run_ranks
from tests.ops.checked_calls import check_reference
from tests.ops.gemm_all_to_all.cases import (
    GROUPS,
    OPERATOR,
    SLOTS,
    TILE_ROWS,
    Case,
    Inputs,
    check,
    draw,
    new_workspace,
    routes_of,
)

EQUAL, ROUTED = Case(72, 40, rows=24), Case(40, 24)
LIBRARY = Case(72, 40, rows=24, schedule="library")


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_and_gradients_with_a_straggler(ranks: int) -> None:
    check([EQUAL, ROUTED, LIBRARY, Case(40, 32, rows=12, fp8=True)], ranks, calls=32, with_gradients=True)


def test_sixteen_bits() -> None:
    check([EQUAL, LIBRARY, ROUTED], ranks=2, calls=6, dtype=torch.bfloat16, with_gradients=True)


def unfused(case: Case, own: Inputs) -> Tensor:
    if case.is_routed:
        return routed_reference(dist.group.WORLD, own.x, own.weight, routes_of(own))
    return reference(dist.group.WORLD, own.x, own.weight)


@pytest.mark.parametrize("case", [EQUAL, ROUTED], ids=["equal blocks", "routed"])
def test_the_reference_is_the_same(case: Case) -> None:
    check_reference(OPERATOR, unfused, case, ranks=2)


def opcheck() -> None:
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        workspace = new_workspace(group)
        operator = torch.ops.dlrm_fused.gemm_all_to_all.default
        own = draw(EQUAL, rank.world_size, 1, torch.float32)[rank.index]
        inputs = own.x.requires_grad_(), own.weight.requires_grad_(), None
        for schedule in SCHEDULES:
            torch.library.opcheck(operator, (*inputs, None, None, None, 0, 0, schedule, workspace.handle))
        own = draw(ROUTED, rank.world_size, 1, torch.float32)[rank.index]
        tiles = [torch.tensor(numbers, dtype=torch.int32) for numbers in (own.bounds, own.local_from)]
        assert len(own.local_from) == GROUPS
        # Slots where nothing belongs are not initialized, and so differ from call to call.
        utilities = ["test_schema", "test_autograd_registration", "test_faketensor"]
        inputs = own.x.requires_grad_(), own.weight.requires_grad_(), None
        arguments = (*inputs, *tiles, own.destinations, TILE_ROWS, SLOTS, "auto", workspace.handle)
        torch.library.opcheck(operator, arguments, test_utils=utilities)
        group.close()


def test_opcheck() -> None:
    run_ranks(2, opcheck)
