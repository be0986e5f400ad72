"""Kernels and host code take turns in the epochs of one channel."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
import triton

from dlrm_fused.errors import CommunicationError
from dlrm_fused.symmetric import BlockPool, Channel, symmetric_group
from dlrm_fused.symmetric.device import begin, finish, wait_until_ready
from tests.distributed.launch import run_program
from tests.symmetric.test_symmetric_memory import exchange

pytestmark = pytest.mark.interpreted


@triton.jit
def epoch_without_data(channel):
    epoch = begin(channel, 0, 5)
    for number in range(2):
        wait_until_ready(channel, triton.language.program_id(0) + number, epoch, 5)
    finish(channel, epoch)


def take_turns_until_rank_1_is_killed() -> None:
    dist.init_process_group("gloo")
    group = symmetric_group()
    channel, pool = Channel(group, "both", 60.0), BlockPool(group, "pool", 4096)
    assert channel.args.poll_limit > 0
    for epoch in range(10):
        epoch_without_data[(1,)](channel.args)
        received = exchange(channel, pool, 10 * epoch + group.rank)
        assert received.tolist() == [10 * epoch, 10 * epoch + 1]
        del received
    channel.raise_fault()
    assert channel.state[0] == 20
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    epoch_without_data[(1,)](channel.args)
    assert time.monotonic() - began < 30, "the kernel waited on"
    try:
        channel.raise_fault()
    except CommunicationError as error:
        print(error, flush=True)


def test_kernels_and_host_code_share_a_channel_and_a_killed_rank_ends_the_wait_of_a_kernel(tmp_path: Path) -> None:
    ended = run_program(2, tmp_path, 240.0, take_turns_until_rank_1_is_killed)
    assert ended.statuses == [0, -signal.SIGKILL], ended.output
    assert re.fullmatch(
        r"channel both, epoch 21: rank 1 on \S+ \(pid \d+\) is lost, its process ended or its host cannot be reached; "
        r"rank 0 on \S+ \(pid \d+\) cannot go on without it\n",
        ended.output,
    )
