"""Messages between hosts: what arrives, and what is said when a rank does not take part. Ranks are told which host they are on.

That a whole host is lost: tests/distributed/test_own_trainer_on_two_hosts.py.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused import EmbeddingWorkspace, ExchangeLayout, LookupLayout, pooled_all_to_all
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric import Channel, SymmetricGroup, abort_peers_on_error, symmetric_group
from dlrm_fused.symmetric.messages import LateRankError, Link, Why
from tests.distributed.launch import Ranks, on_hosts, run_ranks

APART, TWO_AND_TWO = (0, 1), (0, 0, 1, 1)
# Of what happens at once: less than the limit of 60 s.
SOON_SECONDS = 15.0
CHANNEL, TAG = 0, 7


def run(hosts: tuple[int, ...], work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``work(group, *arguments)`` on a rank of each of these hosts; what it returned, by rank."""
    return list(run_ranks(len(hosts), on_hosts, hosts, in_group, work, *arguments))


def in_group(work: Callable[..., Any], *arguments: Any) -> Any:
    dist.init_process_group("gloo")
    group = symmetric_group()
    result = work(group, *arguments)
    dist.barrier()
    group.close()
    dist.destroy_process_group()
    return result


def link_of(group: SymmetricGroup, channel: int = CHANNEL) -> Link:
    return group.open_link(channel)


def in_seconds(seconds: float) -> float:
    return time.monotonic() + seconds


# What arrives


def send_many(group: SymmetricGroup) -> list[tuple[int, list[float]]]:
    """Each rank sends three slices to each rank of the other host before it receives any."""
    link, exchanges = link_of(group), []
    for number in range(3):
        sent = {rank: torch.full((4,), 100.0 * number + 10 * group.rank + rank) for rank in group.hosts.remote}
        exchanges.append(link.exchange(sent, {rank: torch.empty(4) for rank in sent}, TAG))
    arrived = []
    for exchange in exchanges:
        arrived += [(rank, slice_.tolist()) for rank, slice_ in exchange.arrivals(in_seconds(60))]
        exchange.finish(in_seconds(60))
    return arrived


def test_slices_of_one_rank_arrive_in_the_order_in_which_they_are_sent() -> None:
    for own, arrived in enumerate(run(TWO_AND_TWO, send_many)):
        remote = {0: [2, 3], 1: [3, 2], 2: [0, 1], 3: [1, 0]}[own]
        assert arrived == [(rank, [100.0 * number + 10 * rank + own] * 4) for number in range(3) for rank in remote]


def send_large(group: SymmetricGroup) -> list[float]:
    """More than the kernel's buffers take, twice, before anything is received; rank 0 begins to receive a while later."""
    link, count = link_of(group), 3_000_000
    exchanges = []
    for number in range(2):
        sent = {rank: torch.arange(count, dtype=torch.float32) + 10 * group.rank + number for rank in group.hosts.remote}
        exchanges.append(link.exchange(sent, {rank: torch.empty(count) for rank in sent}, TAG))
    if group.rank == 0:
        time.sleep(0.5)
    offsets = []
    for exchange in exchanges:
        for _, slice_ in exchange.arrivals(in_seconds(60)):
            assert torch.equal(slice_ - slice_[0], torch.arange(count, dtype=torch.float32))
            offsets.append(slice_[0].item())
        exchange.finish(in_seconds(60))
    return offsets


def test_slices_larger_than_all_buffers_arrive() -> None:
    for own, offsets in enumerate(run(TWO_AND_TWO, send_large)):
        remote = {0: [2, 3], 1: [3, 2], 2: [0, 1], 3: [1, 0]}[own]
        assert offsets == [10.0 * rank + number for number in range(2) for rank in remote]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8])
def test_slices_have_any_dtype(dtype: torch.dtype) -> None:
    assert run(APART, send_numbers, dtype) == [[1, 2, 3]] * 2


def send_numbers(group: SymmetricGroup, dtype: torch.dtype) -> list[int]:
    peer, received = 1 - group.rank, torch.empty(1, 3, dtype=dtype)
    exchange = link_of(group).exchange({peer: torch.tensor([[1, 2, 3]], dtype=dtype)}, {peer: received}, TAG)
    assert [rank for rank, _ in exchange.arrivals(in_seconds(60))] == [peer]
    exchange.finish(in_seconds(60))
    return received[0].int().tolist()


def send_empty(group: SymmetricGroup) -> list[int]:
    """Rank 0 sends nothing, in an empty slice; rank 1 sends something."""
    sizes = {0: 0, 1: 3}
    peer = 1 - group.rank
    channel = Channel(group, "step", 60.0)
    exchange = channel.exchange({peer: torch.ones(sizes[group.rank])}, {peer: torch.empty(sizes[peer])}, fingerprint=TAG)
    arrived = [rank for rank, _ in exchange.arrivals()]
    exchange.finish()
    return arrived


def test_empty_slices_are_neither_sent_nor_waited_for() -> None:
    assert run(APART, send_empty) == [[1], []]


def send_on_channels(group: SymmetricGroup) -> list[float]:
    """Two channels: rank 0 uses one first, rank 1 the other."""
    links, peer = [link_of(group, channel) for channel in (0, 1)], 1 - group.rank
    received: dict[int, Tensor] = {}
    exchanges = {}
    for channel in (0, 1) if group.rank == 0 else (1, 0):
        received[channel] = torch.empty(1)
        exchanges[channel] = links[channel].exchange({peer: torch.tensor([float(channel)])}, {peer: received[channel]}, TAG)
    for exchange in exchanges.values():
        list(exchange.arrivals(in_seconds(60)))
        exchange.finish(in_seconds(60))
    return [received[0].item(), received[1].item()]


def test_channels_may_be_used_in_another_order_by_each_rank() -> None:
    assert run(APART, send_on_channels) == [[0.0, 1.0]] * 2


# Who is waited for in vain


def wait_in_vain(group: SymmetricGroup, other_does: str) -> tuple[int, Why, float] | None:
    link = link_of(group)
    if group.rank == 1:
        if other_does == "leave":
            group.close()
        elif other_does == "refuse":
            group.peer_monitor.say_refused(CHANNEL)
        elif other_does == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        elif other_does == "call with another tag":
            link.exchange({0: torch.ones(1)}, {}, TAG + 1).finish(in_seconds(60))
        elif other_does == "call with another size":
            link.exchange({0: torch.ones(2)}, {}, TAG).finish(in_seconds(60))
        return None
    exchange = link.exchange({}, {1: torch.empty(1)}, TAG)
    began = time.monotonic()
    with pytest.raises(LateRankError) as raised:
        list(exchange.arrivals(in_seconds(2 if other_does == "stay silent" else 60)))
    return raised.value.rank, raised.value.why, time.monotonic() - began


def wait_to_send(group: SymmetricGroup, other_does: str) -> tuple[int, Why, float] | None:
    link = link_of(group)
    if group.rank == 1:
        time.sleep(1)
        if other_does == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        return None
    exchange = link.exchange({1: torch.ones(10_000_000)}, {}, TAG)
    began = time.monotonic()
    with pytest.raises(LateRankError) as raised:
        exchange.finish(in_seconds(2 if other_does == "stay silent" else 60))
    return raised.value.rank, raised.value.why, time.monotonic() - began


@pytest.mark.parametrize(
    ("other_does", "why"),
    [
        ("leave", Why.is_gone),
        ("refuse", Why.has_refused),
        ("end", Why.is_gone),
        ("call with another tag", Why.differs),
        ("call with another size", Why.differs),
        ("stay silent", Why.is_late),
    ],
)
def test_a_rank_that_is_waited_for_in_vain_is_named_soon(other_does: str, why: Why) -> None:
    check_named_soon(wait_in_vain, other_does, why)


@pytest.mark.parametrize(("other_does", "why"), [("end", Why.is_gone), ("stay silent", Why.is_late)])
def test_a_rank_that_does_not_take_what_is_sent_is_named_soon(other_does: str, why: Why) -> None:
    check_named_soon(wait_to_send, other_does, why)


def check_named_soon(work: Callable[..., Any], other_does: str, why: Why) -> None:
    ranks = Ranks(2, on_hosts, APART, wait_and_end, work, other_does)
    answer = ranks._answers[0].recv_bytes()
    ranks.kill()
    result, failure = pickle.loads(answer)
    assert failure is None, failure
    rank, seen, seconds = result
    assert (rank, seen) == (1, why)
    assert seconds < SOON_SECONDS


def wait_and_end(work: Callable[..., Any], other_does: str) -> Any:
    """Without what is collective at the end, in which the other rank takes no part."""
    dist.init_process_group("gloo")
    result = work(symmetric_group(), other_does)
    if dist.get_rank() == 1:
        time.sleep(2 * SOON_SECONDS)
    return result


# The same with a channel, whose error names the ranks


def error_of(work: Callable[[], object]) -> str:
    began = time.monotonic()
    with pytest.raises(CommunicationError) as raised:
        work()
    assert time.monotonic() - began < SOON_SECONDS
    return re.sub(r" \(pid \d+\)", "", str(raised.value)).replace("on " + os.uname().nodename, "here")


def exchange_with_all(channel: Channel, fingerprint: int) -> None:
    slices = {rank: torch.ones(2) for rank in channel.group.hosts.remote}
    exchange = channel.exchange(slices, {rank: torch.empty(2) for rank in slices}, fingerprint=fingerprint)
    list(exchange.arrivals())
    exchange.finish()


def call_with_other_fingerprint(group: SymmetricGroup) -> str:
    channel = Channel(group, "step", 60.0)
    for fingerprint in range(3):
        exchange_with_all(channel, fingerprint)
    return error_of(lambda: exchange_with_all(channel, 100 + group.rank))


def test_ranks_of_two_hosts_with_other_fingerprints_are_told() -> None:
    for rank, message in enumerate(run(APART, call_with_other_fingerprint)):
        assert message == (
            f"channel step: rank {rank} here and rank {1 - rank} here differ in shapes or settings; "
            "all ranks must make the same calls"
        )


def call_with_other_batch_sizes(group: SymmetricGroup) -> str:
    layout = ExchangeLayout(tuple((LookupLayout(columns=(8 * rank,), dims=(8,)),) for rank in range(2)), columns=16)
    workspace = EmbeddingWorkspace(group, layout, name="embedding", timeout_seconds=60.0)
    pooled = [torch.ones(5, 8)]
    pooled_all_to_all(workspace, pooled, [3, 2])
    return error_of(lambda: pooled_all_to_all(workspace, pooled, [3, 2] if group.rank == 0 else [2, 3]))


def test_ranks_of_two_hosts_with_other_batch_sizes_are_told() -> None:
    for rank, message in enumerate(run(APART, call_with_other_batch_sizes)):
        assert f"rank {rank} here and rank {1 - rank} here differ in shapes or settings" in message


def be_late(group: SymmetricGroup) -> None:
    channel = Channel(group, "step", 60.0)
    for fingerprint in range(2):
        if group.rank == fingerprint:
            time.sleep(2.5)  # the other one asks after a second
        exchange_with_all(channel, fingerprint)


def test_a_rank_that_is_merely_late_makes_no_other_calls() -> None:
    run(APART, be_late)


def refuse(group: SymmetricGroup) -> str:
    channel = Channel(group, "step", 60.0)
    exchange_with_all(channel, 0)
    if group.rank == 3:
        with pytest.raises(UsageError), abort_peers_on_error(channel):
            raise UsageError("a wrong shape")
        return error_of(channel.raise_fault)
    if group.rank == 2:
        return error_of(lambda: channel.run_epoch(lambda *_: None))
    return error_of(lambda: exchange_with_all(channel, 1))


def test_a_usage_error_of_one_rank_is_an_error_of_all_that_names_it() -> None:
    for message in run(TWO_AND_TWO, refuse):
        assert re.fullmatch(
            r"channel step, epoch \d: rank 3 here did not take part because of an error; see its message", message
        )


def refuse_and_end() -> str:
    """Rank 1 refuses, and ends by its error: its process says no goodbye."""
    dist.init_process_group("gloo")
    group = symmetric_group()
    channel = Channel(group, "channel", 60.0)
    if group.rank == 1:
        channel.refuse()
        return ""
    until = time.monotonic() + SOON_SECONDS
    while group.peer_monitor.lost_peer() is None and time.monotonic() < until:
        time.sleep(0.01)
    assert group.peer_monitor.lost_peer() == 1
    return error_of(lambda: exchange_with_all(channel, 1))


@pytest.mark.parametrize("hosts", [APART, (0, 1, 1)], ids=str)
def test_a_rank_that_refuses_and_then_ends_is_not_said_to_be_lost(hosts: tuple[int, ...]) -> None:
    first, _, *others = run_ranks(len(hosts), on_hosts, hosts, refuse_and_end)
    for message in (first, *others):
        assert re.fullmatch(
            r"channel channel(, epoch \d)?: rank 1 here did not take part because of an error; see its message", message
        )
