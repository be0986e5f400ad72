"""Messages between hosts on GPUs end when a rank takes no part in them: all others name it, and their GPUs go on working.

Two ranks, each with a GPU, are declared to be two hosts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.training.runtime import Rank
from tests.distributed.launch import run_ranks
from tests.gpu.all_ranks import process_group_of_checks

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(200)]
ROWS, WIDTH = 64, 128
TIMEOUT_SECONDS = 4.0
MOST_SECONDS = 30.0


def two_hosts(group: dist.ProcessGroup | None, device: torch.device) -> SymmetricGroup:
    os.environ["DLRM_FUSED_HOST"] = f"host{dist.get_rank()}"
    return symmetric_group(group, device)


def checked_products(group: SymmetricGroup) -> tuple[GemmWorkspace, torch.Tensor, torch.Tensor]:
    """A workspace, and the operands of a product that was right."""
    workspace = GemmWorkspace(
        group, name="messages", max_rows=ROWS, max_columns=WIDTH, dtype=torch.bfloat16, timeout_seconds=TIMEOUT_SECONDS
    )
    x, weight = (torch.ones(rows, WIDTH, dtype=torch.bfloat16, device=group.device) for rows in (ROWS, WIDTH))
    assert gemm_all_to_all(workspace, x, weight).eq(WIDTH).all()
    return workspace, x, weight


def between_hosts(fault: Callable[[GemmWorkspace, torch.Tensor, int], None]) -> tuple[str, float]:
    """On a rank: what it is told when rank 1 has made a fault, and after how many seconds."""
    with process_group_of_checks(Rank.from_environment()) as device:
        group = two_hosts(dist.new_group([0, 1]), device)
        workspace, x, weight = checked_products(group)
        torch.cuda.synchronize()
        pids = [0, 0]
        dist.all_gather_object(pids, os.getpid())
        began = time.monotonic()
        said = ""
        if group.rank == 1:
            fault(workspace, x, pids[0])
        else:
            while not said and time.monotonic() < began + 2 * MOST_SECONDS:
                try:
                    gemm_all_to_all(workspace, x, weight)
                    torch.cuda.synchronize()
                    workspace.raise_fault()
                except CommunicationError as error:
                    said = str(error)
            assert float(torch.ones(1000, device=device).sum()) == 1000.0
        seconds = time.monotonic() - began
        if group.rank == 0:
            os.kill(pids[1], signal.SIGCONT)
        return said, seconds


def refuse(workspace: GemmWorkspace, x: torch.Tensor, _: int) -> None:
    with pytest.raises(UsageError):
        gemm_all_to_all(workspace, x, x.float())


def sleep(workspace: GemmWorkspace, *_: object) -> None:
    time.sleep(3 * TIMEOUT_SECONDS)


def stop(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(refuse, "did not take part because of an error"), (sleep, "longer than 4 s"), (stop, "longer than 4 s")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_other_host_names_the_rank(fault: Callable[..., None], reason: str) -> None:
    (said, seconds), _ = run_ranks(2, between_hosts, fault)
    assert reason in said
    assert "rank 1 on" in said
    assert seconds < MOST_SECONDS


def multiply_with_unequal_groups() -> None:
    with process_group_of_checks(Rank.from_environment()) as device:
        if dist.get_rank() == 1:
            # With NCCL this rank would wait for the other one in ncclCommSplit, before anything of ours is called.
            dist.new_group([1], backend="gloo", use_local_synchronization=True)
        checked_products(two_hosts(dist.group.WORLD, device))


def test_ranks_may_have_made_unequal_numbers_of_groups() -> None:
    run_ranks(2, multiply_with_unequal_groups)
