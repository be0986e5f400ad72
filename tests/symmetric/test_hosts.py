"""Which ranks reach each other by stores, and who talks to whom between hosts."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.compat.torch import RenumberingStore
from dlrm_fused.symmetric import Channel, cuda, symmetric_group
from dlrm_fused.symmetric.hosts import Host, Hosts
from tests.distributed.launch import on_hosts, run_ranks

CPU = torch.device("cpu")


def hosts_of(names: str, rank: int) -> Hosts:
    """A host for each letter, by rank."""
    return Hosts.of([Host(name, "boot", "processes") for name in names], rank)


def test_hosts_come_in_the_order_of_their_first_ranks() -> None:
    hosts = hosts_of("baab", rank=1)
    assert hosts.ranks == ((0, 3), (1, 2))
    assert (hosts.own, hosts.local, hosts.local_rotation, hosts.others) == (1, (1, 2), (2, 1), (0,))
    assert hosts.are_many
    assert not hosts_of("aa", 0).are_many


@pytest.mark.parametrize(
    "other", [Host("a", "another boot", "processes"), Host("a", "boot", "another container"), Host("b", "boot", "processes")]
)
def test_machines_and_containers_are_hosts_of_their_own(other: Host) -> None:
    assert Hosts.of([Host("a", "boot", "processes"), other], 0).are_many


def test_a_rank_talks_to_the_one_with_its_number_on_each_other_host() -> None:
    assert hosts_of("aabbcc", 1).counterparts() == (3, 5)
    assert hosts_of("aabbcc", 1).remote == (3, 2, 5, 4)
    assert hosts_of("aabbcc", 4).remote == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("hosts", "runs"),
    [
        (((0, 1, 2),), ()),
        (((0, 1), (2, 3)), (range(2, 4),)),
        (((0, 2), (1, 3)), (range(1, 2), range(3, 4))),
        (((1, 2), (0, 4), (3,)), (range(0, 1), range(3, 5))),
    ],
)
def test_ranks_of_other_hosts_that_are_neighbours_are_taken_together(
    hosts: tuple[tuple[int, ...], ...], runs: tuple[range, ...]
) -> None:
    assert Hosts(hosts, hosts[0][0]).remote_runs == runs


def test_every_rank_of_another_host_has_one_counterpart_that_serves_it() -> None:
    for names in ("aabb", "abbb", "abab", "aabbbcc"):
        ranks = range(len(names))
        for rank in ranks:
            hosts = hosts_of(names, rank)
            for host in hosts.others:
                (server,) = [other for other in hosts.ranks[host] if rank in hosts_of(names, other).served]
                assert server == hosts.counterpart(rank, host)
        assert hosts_of(names, 0).most_served == max(len(hosts_of(names, rank).served) for rank in ranks)


@pytest.mark.parametrize(
    ("unreachable", "ranks"),
    [
        ([[], [], [], []], ((0, 1, 2, 3),)),
        ([[2, 3], [2, 3], [0, 1], [0, 1]], ((0, 1), (2, 3))),  # two switches
        ([[], [], [], [0]], ((0, 1, 2), (3,))),  # one side is enough
        ([[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]], ((0,), (1,), (2,), (3,))),
    ],
)
def test_a_host_is_divided_until_all_ranks_of_a_part_reach_each_other(
    unreachable: list[list[int]], ranks: tuple[tuple[int, ...], ...]
) -> None:
    assert hosts_of("aaaa", 0).divided(unreachable).ranks == ranks


def send_once_more() -> list[float]:
    """What is received from the other host, each time with process groups that are made anew."""
    received = torch.zeros(2)
    store, rank = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["RANK"])
    for time in range(2):
        # In one and the same store torch's own groups may read the addresses of those that are gone.
        dist.init_process_group("gloo", store=dist.PrefixStore(str(time), store), rank=rank, world_size=2)
        group = symmetric_group()
        peer, number = 1 - group.rank, torch.tensor([10.0 * time + group.rank])
        channel = Channel(group, "numbers", 60.0)
        exchange = channel.exchange({peer: number}, {peer: received[time : time + 1]}, fingerprint=1)
        assert [rank for rank, _ in exchange.arrivals()] == [peer]
        exchange.finish()
        dist.barrier()
        dist.destroy_process_group()
    return received.tolist()


def test_groups_over_hosts_are_made_anew_after_the_end_of_all_process_groups() -> None:
    assert run_ranks(2, on_hosts, (0, 1), send_once_more) == [[1.0, 11.0], [0.0, 10.0]]


def make_up_gpus(has_peer_access: bool) -> None:
    """On a rank: its device is one of a GPU for each rank."""
    gpus = [SimpleNamespace(uuid=f"GPU-{index}") for index in range(int(os.environ["WORLD_SIZE"]))]
    torch.cuda.device_count = lambda: len(gpus)
    own = gpus[int(os.environ["RANK"])]
    torch.cuda.get_device_properties = lambda gpu: own if gpu == CPU else gpus[gpu]
    torch.cuda.can_device_access_peer = lambda device, other: has_peer_access
    cuda.symmetric_memory_backend = lambda device: None
    dist.init_process_group("gloo")


def hosts_of_gpus(has_peer_access: bool, setting: str) -> tuple[list[tuple[tuple[int, ...], ...]], list[str]]:
    """On a rank: the hosts of two groups of GPUs, and what the log says."""
    os.environ["NCCL_P2P_DISABLE"] = setting
    said: list[str] = []
    logging.disable(logging.NOTSET)
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dlrm_fused").addHandler(handler)
    make_up_gpus(has_peer_access)
    made = [cuda.CudaGroup(group, CPU) for group in (dist.group.WORLD, dist.new_group([0, 1]))]
    return [group.hosts.ranks for group in made], [line for line in said if "peer access" in line]


@pytest.mark.parametrize(
    ("has_peer_access", "setting", "ranks", "why"),
    [
        (True, "0", ((0, 1),), None),
        (True, "1", ((0,), (1,)), "NCCL_P2P_DISABLE=1"),
        (False, "0", ((0,), (1,)), "`nvidia-smi topo -p2p r` shows why"),
    ],
)
def test_gpus_without_peer_access_are_hosts_of_their_own_which_is_said_once(
    has_peer_access: bool, setting: str, ranks: tuple[tuple[int, ...], ...], why: str | None
) -> None:
    (found, said), (_, said_by_other) = run_ranks(2, hosts_of_gpus, has_peer_access, setting)
    assert found == [ranks, ranks]
    assert said_by_other == []
    if why is None:
        assert said == []
    else:
        (line,) = said
        assert line.startswith(f"GPUs of one host have no peer access ({why}), so each counts as a host of its own")
        assert line.endswith("comm=auto measures both and takes the faster")


def make_up_memory() -> None:
    """On a rank: ranks that would map each other's memory meet under their name, and map memory of their own."""
    torch.cuda.device, torch.cuda.synchronize = nullcontext, lambda _: None  # type: ignore[assignment, misc]
    torch.cuda.mem_get_info = lambda _: (1 << 40, 1 << 40)
    cuda.zeros_symmetric = lambda size, _: torch.zeros(size, dtype=torch.uint8)

    def rendezvous(block: Tensor, name: Any) -> Any:
        group = dist.distributed_c10d._resolve_process_group(name)
        exchange(group, f"CUDASymmetricMemory/{next(numbers)}")
        blocks = [block if rank == group.rank() else torch.zeros_like(block) for rank in range(group.size())]
        return SimpleNamespace(get_buffer=lambda place, *_: blocks[place], buffer_ptrs=[block.data_ptr() for block in blocks])

    # As torch numbers the exchanges of a process, whatever its ranks.
    numbers = itertools.count()
    torch._C._distributed_c10d._SymmetricMemory = SimpleNamespace(rendezvous=rendezvous)  # type: ignore[misc, assignment]


def exchange(group: dist.ProcessGroup, key: str) -> None:
    store = group.get_group_store()
    keys = [f"{key}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], "is here")
    store.wait(keys, timedelta(seconds=10))
    assert store.multi_get(keys) == [b"is here"] * len(keys)


def allocate_on_gpus() -> list[str]:
    """On a rank: the memory of a group of GPUs, which torch's symmetric memory would map."""
    make_up_gpus(has_peer_access=True)
    make_up_memory()
    group = cuda.CudaGroup(dist.group.WORLD, CPU)
    names = [group.allocate(f"memory {number}", 4096).name for number in range(3)]
    group.close()
    dist.barrier()
    return names


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1), (0, 1, 1), (0, 1, 0, 2)])
def test_a_rank_alone_on_its_host_allocates_with_ranks_that_are_not(hosts: tuple[int, ...]) -> None:
    assert run_ranks(len(hosts), on_hosts, hosts, allocate_on_gpus) == [["memory 0", "memory 1", "memory 2"]] * len(hosts)


def groups_of_pairs(makers: Sequence[int]) -> list[dict[int, int]]:
    """On a rank of two hosts with GPUs: by group, the bytes that it sees of each rank of its host."""
    make_up_gpus(has_peer_access=True)
    make_up_memory()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    own = [pairs[dist.get_rank() // 2]] if dist.get_rank() in makers else []
    seen = []
    for process_group in (*own, dist.group.WORLD):
        group = cuda.CudaGroup(process_group, CPU)
        memory = group.allocate("memory", 4096)
        seen.append({rank: len(memory.peer(rank)) for rank in group.hosts.local})
        dist.barrier(process_group)
        group.close()
    return seen


def test_ranks_that_count_exchanges_differently_find_each_others_keys() -> None:
    """Called from C++, as torch's symmetric memory does."""
    common = dist.HashStore()
    stores = [RenumberingStore(common) for _ in range(2)]
    called = [dist.PrefixStore("of a group", store) for store in stores]
    for rendezvous in range(2):
        for store in stores:
            store.begin()
        for number in range(2):
            keys = [[f"CUDASymmetricMemory/{first + number}/{rank}" for rank in range(2)] for first in (7 + rendezvous, 3)]
            for rank, store in enumerate(called):
                store.set(keys[rank][rank], f"{rendezvous} {number} {rank}")
            for rank, store in enumerate(called):
                assert store.multi_get(keys[rank]) == [f"{rendezvous} {number} {other}".encode() for other in range(2)]
    assert stores[0].renumbered("a key without a number") == "a key without a number"


def test_a_group_of_gpus_over_hosts_takes_its_own_ranks_alone() -> None:
    """As with ``model.tensor_parallel=2`` on two hosts of three GPUs: torch makes a group of some ranks with all of them, and
    counts those that each is in."""
    found = run_ranks(6, on_hosts, (0, 0, 0, 1, 1, 1), groups_of_pairs, (2, 3, 4, 5))
    of_hosts = [dict.fromkeys(ranks, 4096) for ranks in ((0, 1, 2), (3, 4, 5))]
    alone, both = {0: 4096}, {0: 4096, 1: 4096}
    assert found == [
        [of_hosts[0]],
        [of_hosts[0]],
        [alone, of_hosts[0]],
        [{1: 4096}, of_hosts[1]],
        [both, of_hosts[1]],
        [both, of_hosts[1]],
    ]
