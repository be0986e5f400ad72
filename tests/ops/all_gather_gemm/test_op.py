"""AllGather + GEMM and GEMM + ReduceScatter between processes on the CPU: results, gradients, faults, and as operators of
PyTorch."""

from __future__ import annotations

import gc
import itertools
import os
import re
import signal
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.all_gather_gemm import all_gather_gemm, reference, scatter_reference
from dlrm_fused.ops.all_gather_gemm.op import AUTO, NAMES
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import cpu_group, on_hosts, run_program, run_ranks
from tests.ops.all_gather_gemm.cases import OPERATOR, Case, Inputs, call, check, draw, new_workspace
from tests.ops.checked_calls import check_reference

GATHER, SCATTER = Case(Pair.all_gather_gemm, 24, 72, 40), Case(Pair.gemm_reduce_scatter, 24, 72, 40)
# Without kernels, and between hosts, all schedules are one.
CASES = [
    Case(pair, rows, columns, depth, AUTO)
    for pair in (Pair.all_gather_gemm, Pair.gemm_reduce_scatter)
    for rows, columns, depth in ((24, 72, 40), (5, 8, 16))
]


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_and_gradients_with_a_straggler(ranks: int) -> None:
    check(CASES, ranks, calls=4 * len(CASES), with_gradients=True)


def test_sixteen_bits() -> None:
    check(CASES, ranks=2, calls=len(CASES), dtype=torch.bfloat16, with_gradients=True)


def unfused(case: Case, own: Inputs) -> Tensor:
    return (reference if case.pair.moves_first else scatter_reference)(dist.group.WORLD, own.x, own.weight)


@pytest.mark.parametrize("case", [GATHER, SCATTER], ids=["all_gather_gemm", "gemm_reduce_scatter"])
def test_the_reference_is_the_same(case: Case) -> None:
    check_reference(OPERATOR, unfused, case, ranks=3)


def opcheck() -> None:
    with cpu_group() as group:
        workspace = new_workspace(group)
        for case in (GATHER, SCATTER):
            operator = getattr(torch.ops.dlrm_fused, case.pair).default
            own = draw(case, group.world_size, 1, torch.float32)[group.rank]
            x, weight = own.x.requires_grad_(), own.weight.requires_grad_()
            for schedule in (AUTO, *NAMES[case.pair]):
                torch.library.opcheck(operator, (x, weight, schedule, workspace.handle))


def test_opcheck() -> None:
    run_ranks(2, opcheck)


def error_of_a_call(case: Case, is_refused: bool) -> str:
    """What a rank is told when rank 1 gives x in fp64, or a weight of other columns."""
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        workspace = new_workspace(symmetric_group())
        own = draw(case, rank.world_size, 1, torch.float32)[rank.index]
        if rank.index == 1:
            own = replace(own, x=own.x.double()) if is_refused else replace(own, weight=own.weight[:-4])
        answer = "no error"
        try:
            call(workspace, case, own)
        except (UsageError, CommunicationError) as error:
            answer = f"{type(error).__name__}: {error}"
        dist.barrier()  # who ends earlier is taken for lost
        return answer


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: f"{case.pair} {case.schedule}")
def test_a_rank_that_refuses_a_call_is_named(case: Case) -> None:
    first, second, third = run_ranks(3, error_of_a_call, case, True)
    assert second.startswith("UsageError: layers: x is torch.float64")
    for told in (first, third):
        assert told.startswith("CommunicationError")
        assert "rank 1 on" in told
        assert "did not take part" in told


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: f"{case.pair} {case.schedule}")
def test_ranks_that_make_other_calls_are_told_at_once(case: Case) -> None:
    for told in run_ranks(2, error_of_a_call, case, False):
        assert told.startswith("CommunicationError")
        assert "differ in shapes or settings" in told


def call_until_rank_1_is_killed() -> None:
    """Forward and backward, by both operators and both paths; prints what this rank is told."""
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        workspace = new_workspace(symmetric_group())
        for number, case in enumerate(itertools.cycle(CASES)):
            if rank.index == 1 and number == 2 * len(CASES) + 3:
                os.kill(os.getpid(), signal.SIGKILL)
            own = draw(case, rank.world_size, number, torch.float32)[rank.index]
            for leaf in (own.x, own.weight):
                leaf.requires_grad_()
            try:
                call(workspace, case, own).sum().backward()
            except CommunicationError as error:
                print(error, flush=True)
                os._exit(0)  # the process group would wait for the rank that is gone


def test_every_other_rank_names_a_rank_that_is_killed(tmp_path: Path) -> None:
    ended = run_program(3, tmp_path, 240.0, call_until_rank_1_is_killed)
    assert ended.statuses == [0, -signal.SIGKILL, 0], ended.output
    assert len(re.findall(r"rank 1 on \S+ \(pid \d+\) is lost", ended.output)) == 2, ended.output


def memory_that_stays() -> bool:
    with cpu_group() as group:
        workspace = new_workspace(group)
        x, weight = torch.ones(8, 16), torch.ones(16, 16)
        assert (all_gather_gemm(workspace, x, weight) == 16).all()
        memory = weakref.ref(workspace.gathered)
        workspace.release()
        del workspace
        gc.collect()
        stays = memory() is not None
        dist.barrier()
        return stays


def test_a_released_workspace_gives_its_memory_free_before_the_group_does() -> None:
    assert run_ranks(2, memory_that_stays) == [False, False]


def told_while_rank_0_differentiates(refuses: bool) -> tuple[str, float]:
    """On a rank: its error when rank 1 makes another call than the backward pass, or refuses it, after how many seconds."""
    with cpu_group() as group:
        workspace, own = new_workspace(group), draw(GATHER, group.world_size, 0, torch.float32)[group.rank]
        out = all_gather_gemm(workspace, own.x.requires_grad_(), own.weight)
        began = time.monotonic()
        with pytest.raises(UsageError if refuses and group.rank == 1 else CommunicationError) as raised:
            if group.rank == 0:
                out.sum().backward()
            else:
                all_gather_gemm(workspace, own.x.detach()[:, :3] if refuses else own.x, own.weight)
        seconds = time.monotonic() - began
        dist.barrier()
        return str(raised.value), seconds


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@pytest.mark.parametrize(("refuses", "reason"), [(False, "differ in shapes"), (True, "did not take part because of an error")])
def test_a_rank_that_differentiates_hears_at_once_of_one_that_does_not(
    refuses: bool, reason: str, hosts: tuple[int, ...]
) -> None:
    (told, seconds), _ = run_ranks(2, on_hosts, hosts, told_while_rank_0_differentiates, refuses)
    assert "rank 1 on" in told
    assert reason in told
    assert seconds < 10.0
