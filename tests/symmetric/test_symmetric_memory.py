"""Symmetric memory on the CPU: memory that all ranks write, epochs of a channel, and what is said when a rank is missing."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.network import Hosts
from dlrm_fused.errors import CommunicationError, UsageError, UserError
from dlrm_fused.symmetric import BlockPool, Channel, SymmetricGroup, factory, gloo_threads, shared, symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import Ranks, free_port, on_hosts, run_ranks
from tests.distributed.network import needs_hosts

CPU = torch.device("cpu")
Work = Callable[[SymmetricGroup], Any]


def run(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``work(group, *arguments)`` on so many ranks; what it returned, by rank."""
    return run_ranks(ranks, in_group, work, *arguments)


def in_group(work: Callable[..., Any], *arguments: Any) -> Any:
    with process_group(Rank.from_environment(), CPU):
        group = symmetric_group()
        result = work(group, *arguments)
        group.close()
        return result


def message_of(error: type[UserError], work: Callable[[], Any]) -> str:
    with pytest.raises(error) as raised:
        work()
    return str(raised.value)


# Of what happens at once: far less than the limit of 60 s for waits, and enough for a busy machine.
SOON_SECONDS = 15.0


def within(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


# Memory


def write_to_all(group: SymmetricGroup) -> list[list[int]]:
    memory = group.allocate("numbers", 8)
    seen = [memory.local.tolist()]
    dist.barrier()
    for peer in range(group.world_size):
        memory.peer(peer)[group.rank] = group.rank + 1
    dist.barrier()
    return [*seen, memory.local.tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_can_write_the_memory_of_all(ranks: int) -> None:
    expected = [[0] * 8, [*range(1, ranks + 1), *[0] * (8 - ranks)]]
    assert run(ranks, write_to_all) == [expected] * ranks


def addresses_are_those_of_the_blocks(group: SymmetricGroup) -> None:
    memory = group.allocate("block", 10_000)
    assert memory.addresses.dtype == torch.int64
    assert memory.addresses.tolist() == [memory.peer(rank).data_ptr() for rank in range(group.world_size)]
    assert memory.peer(group.rank).data_ptr() == memory.local.data_ptr()
    assert (memory.name, memory.size) == ("block", 10_000)


def test_the_addresses_of_all_blocks_are_given() -> None:
    run(2, addresses_are_those_of_the_blocks)


def open_files() -> set[str]:
    """What the descriptors of this process refer to."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def is_nothing_left(before: set[str]) -> bool:
    """Whether no descriptor is new but sockets, which torch.distributed opens and closes in threads of its own."""
    return not [file for file in open_files() - before if not file.startswith("socket:")]


def mappings(name: str) -> int:
    # memfd: a file without a name in any folder.
    return Path("/proc/self/maps").read_text().count(f"/memfd:dlrm_fused {name} ")


def leave_nothing(group: SymmetricGroup) -> None:
    def named() -> set[str]:
        return set(os.listdir("/dev/shm"))

    files, before = named(), open_files()
    memory = group.allocate("temporary", 100_000)
    assert mappings("temporary") == group.world_size
    within(SOON_SECONDS, lambda: is_nothing_left(before))  # other threads may have files open for a moment
    group.release(memory)
    del memory
    assert mappings("temporary") == 0
    group.close()
    within(SOON_SECONDS, lambda: named() <= files)
    closed = [file for file in before - open_files() if file.startswith("socket:")]
    assert len(closed) >= group.world_size - 1 + 2  # the peer monitor's: one for each peer, and two that wake its thread


def test_nothing_is_left_of_memory_and_group() -> None:
    run(3, leave_nothing)


def same_on_both_ranks(work: Callable[[SymmetricGroup], Any]) -> Any:
    first, second = run(2, work)
    assert first == second
    return first


def allocate_differently(group: SymmetricGroup) -> list[str]:
    rank = group.rank
    messages = [
        message_of(UsageError, lambda: group.allocate("gradients", 100 + rank)),
        message_of(UsageError, lambda: group.allocate(f"memory_{rank}", 100)),
        message_of(UsageError, lambda: group.allocate("nothing", 0)),
        message_of(UsageError, lambda: Channel(group, f"channel_{rank}")),
        message_of(UsageError, lambda: Channel(group, "channel", timeout_seconds=-1.0 if rank == 1 else 1.0)),
    ]
    assert write_to_all(group)[1][:2] == [1, 2]  # the group is still of use
    return messages


def test_what_differs_between_ranks_is_the_same_error_on_all() -> None:
    told = same_on_both_ranks(allocate_differently)
    must = "symmetric memory must be allocated with the same name and size on all ranks, in the same order; got "
    assert told == [
        f"{must}rank 0: gradients with 100 bytes, rank 1: gradients with 101 bytes",
        f"{must}rank 0: memory_0 with 100 bytes, rank 1: memory_1 with 100 bytes",
        "symmetric memory nothing: size=0: must be positive",
        f"{must}rank 0: channel_0.flags with 48 bytes, rank 1: channel_1.flags with 48 bytes",
        "channel channel: timeout_seconds=-1.0: must be positive",
    ]


def allocate_too_much(group: SymmetricGroup) -> list[str]:
    before = open_files()
    messages = [message_of(CommunicationError, lambda: group.allocate("huge", 10**15))]
    if group.rank == 1:  # one rank alone meets the end of the memory
        shared._available_memory = lambda: 10**6
    messages.append(message_of(CommunicationError, lambda: group.allocate("tables", 10**6)))
    messages.append(message_of(CommunicationError, lambda: BlockPool(group, "pool", 2**60)))
    within(SOON_SECONDS, lambda: is_nothing_left(before))
    return messages


def test_too_little_memory_is_the_same_error_on_all_ranks_with_the_sizes() -> None:
    told = same_on_both_ranks(allocate_too_much)
    assert re.fullmatch(
        r"symmetric memory huge: 1.0 PB on each of 2 ranks are 2.0 PB, but this host has [\d.]+ [MGT]B available; "
        "use fewer ranks or a smaller batch",
        told[0],
    )
    assert told[1] == (
        "symmetric memory tables: 1.0 MB on each of 2 ranks are 2.0 MB, but this host has 1.0 MB available; "
        "use fewer ranks or a smaller batch"
    )
    assert told[2].startswith("symmetric memory pool: 1152.9 PB on each of 2 ranks are 2305.8 PB, ")


def reserve_in_vain(group: SymmetricGroup) -> str:
    def no_space(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    if group.rank == 1:
        os.posix_fallocate = no_space
    return message_of(CommunicationError, lambda: group.allocate("tables", 10**6))


def test_memory_that_the_kernel_refuses_is_an_error_not_a_bus_error() -> None:
    expected = (
        "symmetric memory tables: no room for 1.0 MB on this host: No space left on device; use fewer ranks or a smaller batch"
    )
    assert run(2, reserve_in_vain) == [expected] * 2


def fail_to_open(group: SymmetricGroup) -> str:
    def forbidden(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    if group.rank == 1:
        os.stat = forbidden
    return message_of(CommunicationError, lambda: group.allocate("tables", 10**6))


def test_memory_of_a_peer_that_may_not_be_opened_is_an_error_on_all_ranks() -> None:
    told = same_on_both_ranks(fail_to_open)
    assert re.fullmatch(
        r"symmetric memory tables: process \d+ may not open the memory of process \d+ \(/proc/\d+/fd/\d+: Permission denied\); "
        "run all ranks as one user, in one container",
        told,
    )


# Groups


def reach_stores(group: SymmetricGroup) -> tuple[tuple[tuple[int, ...], ...], list[bool]]:
    memory = group.allocate("buffer", 4096)
    return group.hosts.ranks, [address != 0 for address in memory.addresses.tolist()]


def test_ranks_of_a_host_map_each_others_memory_and_those_of_other_hosts_have_no_address() -> None:
    hosts = ((0, 1), (2,))
    seen = run_ranks(3, on_hosts, (0, 0, 1), in_group, reach_stores)
    assert seen == [(hosts, [True, True, False]), (hosts, [True, True, False]), (hosts, [False, False, True])]


def lose_a_rank_meanwhile(group: SymmetricGroup) -> str | None:
    if group.rank == 1:
        return None  # and ends
    return message_of(CommunicationError, lambda: group.allocate("tables", 100))


def test_a_rank_that_ends_instead_of_allocating_is_an_error_of_the_others() -> None:
    message, _ = run_ranks(2, without_end_of_group, lose_a_rank_meanwhile)
    assert message.startswith("rank 0: a rank gave no answer, it may have ended: ")


def without_end_of_group(work: Work) -> Any:
    rank = Rank.from_environment()
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.world_size)
    return work(symmetric_group())


def be_the_same(group: SymmetricGroup) -> bool:
    return symmetric_group() is group and symmetric_group(dist.group.WORLD, "cpu") is group


def test_the_group_of_a_process_group_is_made_once() -> None:
    assert run(2, be_the_same) == [True, True]


def use_subgroups() -> list[int]:
    with process_group(Rank.from_environment(), CPU):
        own, _ = dist.new_subgroups(2)
        everyone, pair = symmetric_group(), symmetric_group(own)
        sums = []
        channels = [Channel(everyone, "all", 60.0), Channel(pair, "pair", 60.0)]
        pools = [BlockPool(everyone, "all", 4 * 4096), BlockPool(pair, "pair", 4 * 4096)]
        pairs = list(zip(channels, pools, strict=True))
        for epoch in range(20):
            received = [exchange(channel, pool, 100 * dist.get_rank() + epoch) for channel, pool in pairs]
            sums = [int(tensor.sum()) for tensor in received]
        stranger = dist.new_group([0, 1])
        if dist.get_rank() > 1:
            assert "this process is not a member of it" in message_of(UsageError, lambda: symmetric_group(stranger))
        everyone.close()
        pair.close()
        return sums


def exchange(channel: Channel, pool: BlockPool, value: int) -> Tensor:
    """One epoch in which each rank tells all a number; int64 [world_size], by rank."""
    group = channel.group
    received = pool.take((group.world_size,), torch.int64)
    assert received is not None, "too many outputs are held"
    channel.announce(pool.offset_of(received))
    for shift in range(group.world_size):
        peer = (group.rank + 1 + shift) % group.world_size
        offset = channel.wait_ready(peer)
        pool.memory.peer(peer)[offset:].view(torch.int64)[group.rank] = value
        channel.signal(peer)
    channel.wait_arrivals()
    return received


def test_groups_of_some_ranks_and_of_all_work_side_by_side() -> None:
    assert run_ranks(4, use_subgroups) == [[676, 138], [676, 138], [676, 538], [676, 538]]


def begin_again() -> None:
    for attempt in range(2):
        # Each needs a part of the store of its own: a rank would meet the peers' addresses of the one before.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        with process_group(Rank.from_environment(), CPU):
            write_to_all(symmetric_group())  # and is not closed
    assert len(factory._groups) == 1


def test_the_group_of_a_destroyed_process_group_gives_way_to_that_of_the_next() -> None:
    run_ranks(2, begin_again)


# Epochs


def exchange_many_times(group: SymmetricGroup, epochs: int, delays: Sequence[float], held_outputs: int) -> None:
    chance = random.Random(group.rank)
    channels = [Channel(group, name, 60.0) for name in ("first", "second")]
    pools = [BlockPool(group, name, (held_outputs + 1) * 4096) for name in ("first", "second")]
    held: list[tuple[int, int, Tensor]] = []
    for epoch in range(epochs):
        for number, (channel, pool) in enumerate(zip(channels, pools, strict=True)):
            received = exchange(channel, pool, 1000 * epoch + 10 * number + group.rank)
            held.append((epoch, number, received))
            if chance.random() < 0.2:
                time.sleep(delays[group.rank] * chance.random())
        # Tensors of earlier epochs are as they were, and given back in another order than they were taken.
        for held_epoch, number, tensor in held:
            assert tensor.tolist() == [1000 * held_epoch + 10 * number + rank for rank in range(group.world_size)]
        del tensor, received
        while len(held) > 2 * (held_outputs - 1):
            held.pop(chance.randrange(len(held)) if len(held) < held_outputs else 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_held_outputs_keep_their_values_however_ranks_differ_in_speed(ranks: int) -> None:
    run(ranks, exchange_many_times, 100, [0.0, 0.02, 0.002, 0.0], 3)


def count_epochs(group: SymmetricGroup) -> list[int]:
    channel, pool = Channel(group, "counted", 60.0), BlockPool(group, "counted", 4096)
    for epoch in range(5):
        assert channel.state[0] == epoch
        exchange(channel, pool, 0)
    channel.raise_fault()
    return [*channel.state.tolist(), *channel.control.tolist()]


def test_the_state_counts_completed_epochs() -> None:
    assert run(2, count_epochs) == [[5, *[0] * 15]] * 2


def announce_wrongly(group: SymmetricGroup) -> list[str]:
    announce = Channel(group, "channel", 60.0).announce
    return [message_of(UsageError, partial(announce, offset)) for offset in (100, -4096, 1 << 44)]


def test_an_offset_that_a_ready_word_cannot_hold_is_an_error() -> None:
    needed = "must be a multiple of 4096, below 16 TB"
    assert run(1, announce_wrongly) == [[f"channel channel: offset={offset}: {needed}" for offset in (100, -4096, 1 << 44)]]


# Faults


def wait_too_long(group: SymmetricGroup, awaited: str) -> str | None:
    channel = Channel(group, "embedding.forward", timeout_seconds=0.5)
    pool = BlockPool(group, "embedding.forward", 4096)
    exchange(channel, pool, 0)
    if group.rank == 1:
        if awaited == "arrival":
            channel.announce()
        dist.barrier()
        return group.peer_monitor.describe(1)
    channel.announce()
    channel.wait_ready(0)
    began = time.monotonic()
    message = message_of(CommunicationError, lambda: channel.wait_ready(1) if awaited == "ready" else end(channel))
    assert 0.4 < time.monotonic() - began < 20
    assert message_of(CommunicationError, channel.raise_fault) == message
    assert message_of(CommunicationError, channel.announce) == message
    assert channel.control.tolist() == [1, 0, 1, 2, int(awaited == "arrival"), 0, 0, 0]
    assert channel.state[2] == 1
    dist.barrier()
    return message


def end(channel: Channel) -> None:
    channel.signal(0)
    channel.wait_arrivals()


@pytest.mark.parametrize(("awaited", "words"), [("ready", "to be ready to receive"), ("arrival", "to send its data")])
def test_a_wait_ends_at_its_limit_with_an_error_that_says_who_waited_for_whom(awaited: str, words: str) -> None:
    message, late = run(2, wait_too_long, awaited)
    assert re.fullmatch(
        rf"channel embedding.forward, epoch 2: rank 0 on \S+ \(pid \d+\) waited for {re.escape(late)} {words}, "
        "longer than 0.5 s; that rank is stuck, slower than the limit allows, or makes other calls than this one",
        message,
    )


def refuse(group: SymmetricGroup) -> str:
    channel = Channel(group, "channel", 60.0)
    exchange(channel, BlockPool(group, "pool", 4096), 0)
    if group.rank == 1:
        channel.refuse()
        message = message_of(CommunicationError, channel.raise_fault)
    else:
        channel.announce()
        message = message_of(CommunicationError, lambda: channel.wait_ready(1))
    dist.barrier()
    return message


def test_a_rank_that_refuses_does_not_keep_the_others_waiting() -> None:
    for message in run(3, refuse):
        assert re.fullmatch(
            r"channel channel, epoch 2: rank 1 on \S+ \(pid \d+\) did not take part because of an error; see its message",
            message,
        )


def announce_different_fingerprints(group: SymmetricGroup) -> str:
    channel = Channel(group, "channel", 60.0)
    channel.announce(0, fingerprint=-7 + group.rank // 2)
    assert channel.wait_ready(group.rank) == 0
    message = message_of(CommunicationError, lambda: channel.wait_ready(2 if group.rank < 2 else 0))
    dist.barrier()
    return message


def test_ranks_that_call_with_different_shapes_are_told() -> None:
    for message in run(3, announce_different_fingerprints):
        assert re.fullmatch(
            r"channel channel, epoch 1: rank \d on \S+ and rank \d on \S+ differ in shapes or settings; "
            "all ranks must make the same calls",
            re.sub(r" \(pid \d+\)", "", message),
        )


# Ranks that are gone


def outlive(how: str) -> tuple[float, str, str]:
    """Rank 2 ends; the others say when and how they heard of it."""
    rank = Rank.from_environment()
    dist.init_process_group("gloo", rank=rank.index, world_size=rank.world_size)
    group = symmetric_group()
    channel, pool = Channel(group, "step", 60.0), BlockPool(group, "pool", 4 * 4096)
    exchange(channel, pool, 0)
    told: list[int] = []
    group.peer_monitor.on_gone(told.append)
    if rank.index == 2:
        if how == "killed with a living child" and os.fork() == 0:
            time.sleep(2 * SOON_SECONDS)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    if how == "killed while others compute":
        within(SOON_SECONDS, lambda: group.peer_monitor.lost_peer() == 2)
        message = message_of(CommunicationError, channel.raise_fault)
    else:
        message = message_of(CommunicationError, lambda: exchange(channel, pool, 1))
    seconds = time.monotonic() - began
    within(SOON_SECONDS, lambda: told == [2])
    within(SOON_SECONDS, lambda: channel.control[7] == 3)
    assert message_of(CommunicationError, lambda: exchange(channel, pool, 1)).startswith("channel step")
    late: list[int] = []
    group.peer_monitor.on_gone(late.append)
    assert late == [2]
    group.close()
    return seconds, message, group.peer_monitor.describe(2)


@pytest.mark.parametrize("how", ["killed while others wait", "killed while others compute", "killed with a living child"])
def test_a_killed_process_is_noticed_at_once_and_named(how: str) -> None:
    ranks = Ranks(3, outlive, how)
    # The answer of the rank that is killed never comes.
    answers = [ranks._answers[rank].recv_bytes() for rank in range(2)]
    ranks.kill()
    for answer in answers:
        result, failure = pickle.loads(answer)
        assert failure is None, failure
        seconds, message, lost = result
        assert seconds < SOON_SECONDS
        assert re.fullmatch(
            rf"channel step(, epoch 2)?: {re.escape(lost)} is lost, its process ended or its host cannot be reached; "
            r"rank \d on \S+ \(pid \d+\) cannot go on without it",
            message,
        )


def leave_early(group: SymmetricGroup) -> str | None:
    channel, pool = Channel(group, "step", 60.0), BlockPool(group, "pool", 4096)
    exchange(channel, pool, 0)
    if group.rank == 1:
        group.close()
        dist.barrier()
        return None
    within(SOON_SECONDS, lambda: group.peer_monitor.has_left(1))
    assert group.peer_monitor.lost_peer() is None
    channel.raise_fault()
    # Who then still waits for that rank would wait in vain.
    began = time.monotonic()
    message = message_of(CommunicationError, lambda: exchange(channel, pool, 1))
    assert time.monotonic() - began < SOON_SECONDS
    dist.barrier()
    return message


def test_a_rank_that_leaves_in_good_order_is_not_lost() -> None:
    message, _ = run(2, leave_early)
    assert re.fullmatch(
        r"channel step, epoch 2: rank 1 on \S+ \(pid \d+\) has ended while rank 0 on \S+ \(pid \d+\) waited for "
        r"rank 1 on \S+ \(pid \d+\) to be ready to receive; see its messages",
        message,
    )


def rest(group: SymmetricGroup) -> float:
    dist.barrier()
    began = time.process_time()
    time.sleep(1.0)
    return time.process_time() - began


def test_the_watch_takes_no_time_of_the_processor() -> None:
    assert max(run(3, rest)) < 0.02


# Whole programs: `python -c` with the environment of torchrun. Rank 0 holds the store.

END_EARLY = """
import sys, time
import torch.distributed as dist
from dlrm_fused.symmetric import Channel, symmetric_group

dist.init_process_group("gloo")
group = symmetric_group()
if group.rank == 1:
    dist.destroy_process_group()
    sys.exit()  # without close()
deadline = time.monotonic() + 100
while not group.peer_monitor.has_left(1):
    assert group.peer_monitor.lost_peer() is None
    assert time.monotonic() < deadline
    time.sleep(0.01)
dist.destroy_process_group()
print("left in good order")
"""

# Its ranks end while gloo's threads drop many tensors, for each of which they need Python's lock.
END_AFTER_A_COLLECTIVE = """
import os, sys, tempfile
import torch
import torch.distributed as dist
from dlrm_fused.symmetric import symmetric_group

def ranks():
    for number in range(int(sys.argv[1])):
        store = tempfile.NamedTemporaryFile()
        children = []
        for rank in range(2):
            if not (child := os.fork()):
                return rank, store.name
            children.append(child)
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)
    return None

if (own := ranks()) is not None:
    rank, store = own
    dist.init_process_group("gloo", init_method=f"file://{store}.meeting", rank=rank, world_size=2)
    symmetric_group()
    dist.all_reduce_coalesced([torch.zeros(1) for _ in range(50_000)])
    if sys.argv[2] == "destroys":
        dist.destroy_process_group()
"""
ENDS = int(os.environ.get("DLRM_FUSED_TEST_ENDS", "2"))

WATCH_OVER_HOSTS = """
import time
import torch.distributed as dist
from dlrm_fused.symmetric import symmetric_group

dist.init_process_group("gloo")
peer_monitor = symmetric_group().peer_monitor
print("watching", peer_monitor.describe(1 - dist.get_rank()), flush=True)
while peer_monitor.lost_peer() is None:
    time.sleep(0.01)
print("lost", peer_monitor.lost_peer(), "at", time.monotonic(), flush=True)
"""


def environment(rank: int, address: str, port: int = 29411) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.getcwd(),
    }


def programs(command: list[str], **settings: str) -> list[subprocess.Popen[str]]:
    """Start two ranks."""
    port = free_port()
    return [
        subprocess.Popen(
            command,
            env={**os.environ, **environment(rank, "127.0.0.1", port), **settings},
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]


def test_a_program_that_ends_without_closing_its_group_is_not_lost() -> None:
    ranks = programs([sys.executable, "-c", END_EARLY])
    outputs = [program.communicate(timeout=200)[0] for program in ranks]
    assert [program.returncode for program in ranks] == [0, 0]
    assert outputs == ["left in good order\n", ""]


@pytest.mark.parametrize("ending", [pytest.param("destroys", marks=pytest.mark.slow), "leaves"])
def test_programs_that_end_right_after_a_collective_are_not_aborted(ending: str) -> None:
    """With its process group destroyed, and with all left to the end of Python."""
    command = [sys.executable, "-W", "ignore", "-c", END_AFTER_A_COLLECTIVE, str(ENDS), ending]
    ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, capture_output=True, check=True)
    assert ended.stdout.splitlines() == ["0 0"] * ENDS, ended.stderr


def name_gloo_threads(group: SymmetricGroup) -> int:
    return len(gloo_threads._gloo_threads())


def test_gloos_threads_are_found_by_their_name() -> None:
    assert min(run(2, name_gloo_threads)) > 0


def watch_over(hosts: Hosts) -> list[subprocess.Popen[str]]:
    """A rank on each host, that watches the other one."""
    programs = [
        hosts.popen(
            host, [sys.executable, "-u", "-c", WATCH_OVER_HOSTS], environment(host, hosts.names[0]), stdout=subprocess.PIPE
        )
        for host in range(2)
    ]
    for rank, program in enumerate(programs):
        assert program.stdout is not None
        assert program.stdout.readline().startswith(f"watching rank {1 - rank} on {hosts.names[1 - rank]} (pid ")
    return programs


def noticed(watcher: subprocess.Popen[str], lost: int) -> float:
    """When it noticed the loss of that rank, by the clock that the hosts share. Its own end may take long under load."""
    match = re.fullmatch(rf"lost {lost} at ([\d.]+)\n", watcher.communicate(timeout=120)[0])
    assert match
    assert watcher.returncode == 0
    return float(match[1])


@needs_hosts
def test_a_killed_process_on_another_host_is_noticed_at_once(hosts: Hosts) -> None:
    survivor, other = watch_over(hosts)
    began = time.monotonic()
    other.kill()
    assert noticed(survivor, 1) - began < 4


@needs_hosts
@pytest.mark.slow
def test_a_host_that_is_cut_off_is_noticed(hosts: Hosts) -> None:
    programs = watch_over(hosts)
    began = time.monotonic()
    hosts.cut(1)
    for rank, program in enumerate(programs):
        assert noticed(program, 1 - rank) - began < 30
