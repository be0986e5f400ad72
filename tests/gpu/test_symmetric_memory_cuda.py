"""Symmetric memory of GPUs: what peers store arrives, blocks live as long as their tensors, and a lost rank ends waits."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric import BlockPool, Channel, SymmetricGroup, symmetric_group
from dlrm_fused.symmetric.cuda import mapped_bytes
from dlrm_fused.symmetric.device import polls_per_second, wait_until_ready
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import Ranks, run_ranks
from tests.gpu.all_ranks import process_group_of_checks

pytestmark = pytest.mark.gpu(1)
several_gpus = pytest.mark.gpu(2)
UNIT = 4096


def in_group(work: Callable[[SymmetricGroup], Any]) -> Any:
    rank = Rank.from_environment()
    device = torch.device("cuda", rank.index)
    torch.cuda.set_device(device)
    with process_group(rank, device):
        group = symmetric_group()
        assert group.device == device
        result = work(group)
        group.close()
        return result


def run(work: Callable[[SymmetricGroup], Any]) -> list[Any]:
    return run_ranks(min(4, torch.cuda.device_count()), in_group, work)


@pytest.fixture
def pool() -> Iterator[BlockPool]:
    group = symmetric_group(device="cuda")
    yield BlockPool(group, "pool", 4 * UNIT)
    group.close()


def write_to_all(group: SymmetricGroup) -> list[list[int]]:
    seen = []
    # Also small ones, one after the other: each has its own place.
    for size in (8, 64, 5 << 20):
        before = torch.cuda.memory_allocated() + mapped_bytes(group.device)
        memory = group.allocate(f"{size} bytes", size)
        assert torch.cuda.memory_allocated() + mapped_bytes(group.device) >= before + size
        assert mapped_bytes(group.device) >= size
        assert memory.addresses.device == group.device
        assert memory.addresses.tolist() == [memory.peer(rank).data_ptr() for rank in range(group.world_size)]
        assert not memory.local.any()
        dist.barrier()
        for peer in range(group.world_size):
            memory.peer(peer)[-1 - group.rank] = group.rank + 1
        torch.cuda.synchronize()
        dist.barrier()
        seen.append(memory.local[-group.world_size :].tolist())
    return seen


@several_gpus
def test_every_rank_can_write_the_memory_of_all() -> None:
    results = run(write_to_all)
    ranks = len(results)
    assert results == [[list(range(ranks, 0, -1))] * 3] * ranks


def map_in_groups(members: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return, by group, what this rank's memory has of the group's ranks after all have written there."""
    seen = []
    with process_group_of_checks(Rank.from_environment()) as device:
        for ranks in members:
            process_group = dist.new_group(ranks)
            if dist.get_rank() not in ranks:
                continue
            group = symmetric_group(process_group, device)
            memory = group.allocate("numbers", group.world_size)
            for peer in range(group.world_size):
                memory.peer(peer)[group.rank] = 1 + dist.get_rank()
            torch.cuda.synchronize()
            dist.barrier(process_group)
            seen.append(memory.local.tolist())
        dist.barrier()
    return seen


def test_ranks_that_have_mapped_unequal_numbers_of_blocks_map_one_together() -> None:
    assert run_ranks(3, map_in_groups, [[1, 2], [0, 1, 2], [0, 2], [2, 1, 0], [0, 1, 2]]) == [
        [[1, 2, 3], [1, 3], [1, 2, 3], [1, 2, 3]],
        [[2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]],
        [[2, 3], [1, 2, 3], [1, 3], [1, 2, 3], [1, 2, 3]],
    ]


def refuse(group: SymmetricGroup) -> list[int]:
    channel = Channel(group, "channel", 60.0)
    if group.rank == 1:
        channel.refuse()
        with pytest.raises(CommunicationError, match="did not take part because of an error"):
            channel.raise_fault()
    dist.barrier()
    words = channel.flags.local.view(torch.int64)
    return [int(words[1]), int(channel.state[2])]


@several_gpus
def test_a_rank_refuses_with_a_word_that_kernels_know() -> None:
    refused = 1 << 32 | 0xFFFFFFFF
    assert run(refuse)[:2] == [[refused, 0], [refused, 1]]


@triton.jit
def wait_for(channel, peer):
    wait_until_ready(channel, peer, 1, 0)


def outlive() -> float:
    """Rank 1 is killed; how long another one waits in a kernel, and its host for a copy to pageable memory behind that."""
    rank = Rank.from_environment()
    torch.cuda.set_device(rank.index)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank.index, world_size=rank.world_size)
    group = symmetric_group()
    channel = Channel(group, "channel", 60.0)
    dist.barrier()
    if rank.index == 1:
        time.sleep(1.0)  # until the other one waits
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    wait_for[(1,)](channel.args, 1, num_warps=4)
    channel.state.cpu()
    seconds = time.monotonic() - began
    assert channel.control[7] == 2
    with pytest.raises(CommunicationError, match=r"channel channel, epoch 1: rank 1 on .* is lost"):
        channel.raise_fault()
    return seconds


@several_gpus
def test_the_kernels_of_others_are_told_of_a_killed_process() -> None:
    ranks = Ranks(2, outlive)
    result, failure = pickle.loads(ranks._answers[0].recv_bytes())
    ranks.kill()
    assert failure is None, failure
    assert result < 5


def test_two_ranks_on_one_gpu_are_an_error_on_both() -> None:
    first, second = run_ranks(2, share_a_gpu)
    assert first == second
    assert first.startswith("ranks 0 and 1 use the same GPU (")


def share_a_gpu() -> str:
    rank = Rank.from_environment()
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.world_size)  # NCCL itself would refuse
    with pytest.raises(UsageError) as raised:
        symmetric_group(device="cuda:0")
    return str(raised.value)


def test_a_block_is_lent_as_long_as_its_storage_lives(pool: BlockPool) -> None:
    weight = torch.ones(UNIT // 4, device="cuda", requires_grad=True)
    taken = pool.take((UNIT // 4,), torch.float32)
    assert taken is not None
    assert taken.device == weight.device
    assert pool.offset_of(taken) == 0
    loss = (weight * taken.fill_(3.0)).sum()
    del taken
    assert pool.free_bytes() == 3 * UNIT
    loss.backward()
    assert pool.free_bytes() == 4 * UNIT
    assert weight.grad is not None
    assert weight.grad.eq(3.0).all()


def test_another_stream_waits_for_the_last_use_of_a_block(pool: BlockPool) -> None:
    source = torch.ones(UNIT, device="cuda")
    copies = torch.zeros(UNIT, device="cuda")
    first = pool.take((UNIT,), torch.float32)
    assert first is not None
    first.copy_(source)
    torch.cuda._sleep(1 << 28)
    copies.copy_(first)  # late, after the sleep
    del first
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        second = pool.take((UNIT,), torch.float32)
        assert second is not None
        second.fill_(7.0)
    torch.cuda.synchronize()
    assert copies.eq(1.0).all()


def test_a_block_taken_while_a_graph_is_captured_stays_the_graphs(pool: BlockPool) -> None:
    result = torch.zeros(UNIT // 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken = pool.take((UNIT // 4,), torch.float32)
        assert taken is not None
        taken.fill_(3.0)
        result.copy_(taken)
        del taken
    assert pool.free_bytes() == 3 * UNIT
    others = [pool.take((UNIT // 4,), torch.float32) for _ in range(3)]
    for other in others:
        assert other is not None
        other.fill_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    assert result.eq(3.0).all()
    assert all(other is not None and other.eq(1.0).all() for other in others)


def test_memory_cannot_be_allocated_while_a_graph_is_captured(pool: BlockPool) -> None:
    group = symmetric_group(device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        with pytest.raises(UsageError, match="cannot be allocated while a CUDA graph is captured"):
            group.allocate("late", UNIT)


def test_too_little_memory_is_an_error_with_the_sizes(pool: BlockPool) -> None:
    group = symmetric_group(device="cuda")
    with pytest.raises(CommunicationError, match=r"symmetric memory huge: 1.0 PB needed, but cuda:0 of rank 0 has .* free"):
        group.allocate("huge", 10**15)


def first_and_second_measurement() -> tuple[float, float]:
    device = torch.device("cuda", 0)
    return polls_per_second.__wrapped__(device), polls_per_second.__wrapped__(device)


def test_compiling_the_wait_is_not_part_of_its_measured_speed() -> None:
    ((first, second),) = run_ranks(1, first_and_second_measurement)  # in a new process, which has to load the kernel
    assert first == pytest.approx(second, rel=0.5)
