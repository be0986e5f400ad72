"""Messages between hosts on GPUs end when a rank takes no part in them: all others name it, and their GPUs go on working.

Two ranks, each with a GPU, are declared to be two hosts. With ``TRITON_INTERPRET=1`` they run on the CPU.
``FAULTS=20 pytest tests/gpu/test_messages_cuda.py`` for so many of each fault.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.compat.torch import default_store
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.training.runtime import Rank
from tests.distributed.launch import run_program, run_ranks
from tests.gpu.all_ranks import HALF, MARKS, process_group_of_checks, small_tiles_without_gpus, synchronize
from tests.gpu.test_transports_cuda import OPERATORS, Results

pytestmark = [*MARKS, pytest.mark.timeout(300)]
ROWS, WIDTH = 64, 128
TIMEOUT_SECONDS = 4.0
MOST_SECONDS = 30.0
MOST_EPOCHS = 10  # before the fault
LIMIT_SECONDS = 250.0  # of a case, most of which is compiling
FAULTS = int(os.environ.get("FAULTS", "1"))
# In turn, with what the other rank is told.
TOLD = {"asleep": "longer than 4 s", "stopped": "longer than 4 s", "killed": "is lost"}
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}


def two_hosts(group: dist.ProcessGroup | None, device: torch.device) -> SymmetricGroup:
    small_tiles_without_gpus()
    os.environ["DLRM_FUSED_HOST"] = f"host{dist.get_rank()}"
    return symmetric_group(group, device)


def wait_as_users_do(results: Results) -> None:
    """Copy results to pageable memory: as long as that takes, the driver lets few calls of other threads pass."""
    for result in (*results.same, *results.sums, *results.products):
        result.cpu()


def call_until_rank_1_fails(name: str, fault: str, moment: random.Random, device: torch.device) -> None:
    """Rank 1 takes part in some epochs of an operator; rank 0 prints what it is told, and after how many seconds.

    A rank that is asleep or stopped goes on when rank 0 has been told.
    """
    group, store = two_hosts(dist.new_group([0, 1]), device), default_store()
    call = OPERATORS[name](group, TIMEOUT_SECONDS)
    epochs, late = moment.randrange(1, MOST_EPOCHS), moment.uniform(0.0, 0.01)
    for number in range(epochs):
        call(number)
    synchronize()
    dist.barrier()
    if group.rank == 1:
        store.set("pid", str(os.getpid()))
        time.sleep(late)
        if fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault])
        store.wait([f"{fault} is told"], timedelta(seconds=2 * MOST_SECONDS))
        return
    began = time.monotonic()
    try:
        for number in itertools.count(epochs):
            wait_as_users_do(call(number))
            assert time.monotonic() < began + 2 * MOST_SECONDS
    except CommunicationError as error:
        print(f"{fault}: after {time.monotonic() - began:.1f} s: {error}", flush=True)
    assert float(torch.ones(1000, device=device).sum()) == 1000.0
    with suppress(ProcessLookupError):
        os.kill(int(store.get("pid")), signal.SIGCONT)
    store.set(f"{fault} is told", "")


def faults_of_rank_1(name: str, seed: int) -> None:
    """On a rank: one fault after the other, each with groups of its own; the last one ends rank 1."""
    moment = random.Random(seed)
    with process_group_of_checks(Rank.from_environment()) as device:
        compiles = OPERATORS[name](two_hosts(dist.new_group([0, 1]), device), LIMIT_SECONDS)
        for number in range(MOST_EPOCHS + 1):
            compiles(number)  # ranks may wait for each other's compiler for longer than a call may
        for fault in TOLD:
            call_until_rank_1_fails(name, fault, moment, device)
        os._exit(0)  # the process group would wait for the rank that is gone


@pytest.mark.parametrize("seed", range(FAULTS))
@pytest.mark.parametrize("name", OPERATORS)
def test_the_other_host_names_a_rank_that_is_asleep_stopped_or_killed(name: str, seed: int, tmp_path: Path) -> None:
    ended = run_program(2, tmp_path, LIMIT_SECONDS, faults_of_rank_1, name, seed)
    assert ended.statuses == [0, -signal.SIGKILL], ended.output
    for fault, reason in TOLD.items():
        told = re.search(fault + r": after ([\d.]+) s: .*rank 1 on .*" + reason, ended.output)
        assert told, ended.output
        assert float(told[1]) < MOST_SECONDS


def checked_products(group: SymmetricGroup) -> tuple[GemmWorkspace, torch.Tensor, torch.Tensor]:
    """A workspace, and the operands of a product that was right."""
    workspace = GemmWorkspace(
        group, name="messages", max_rows=ROWS, max_columns=WIDTH, dtype=HALF, timeout_seconds=TIMEOUT_SECONDS
    )
    x, weight = (torch.ones(rows, WIDTH, dtype=HALF, device=group.device) for rows in (ROWS, WIDTH))
    assert gemm_all_to_all(workspace, x, weight).eq(WIDTH).all()
    return workspace, x, weight


def told_of_a_refusal() -> tuple[str, float]:
    """On a rank: the error that it gets after rank 1 has refused a call, and after how many seconds."""
    with process_group_of_checks(Rank.from_environment()) as device:
        group = two_hosts(dist.new_group([0, 1]), device)
        workspace, x, weight = checked_products(group)
        began = time.monotonic()
        with pytest.raises(UsageError if group.rank == 1 else CommunicationError) as raised:
            while True:
                gemm_all_to_all(workspace, x, weight.double() if group.rank == 1 else weight)
                synchronize()
                workspace.raise_fault()
        seconds = time.monotonic() - began
        dist.barrier()  # the default group is another one
        return str(raised.value), seconds


def test_the_other_host_names_a_rank_that_refuses() -> None:
    (told, seconds), _ = run_ranks(2, told_of_a_refusal)
    assert "rank 1 on" in told
    assert "did not take part because of an error" in told
    assert seconds < MOST_SECONDS
