"""Slices put to ranks of other hosts: right and in order however late and mixed up puts arrive, with flow control, and errors.

The mutants have one rule of the protocol broken; that these tests see them says that they look where it hurts.
"""

# Kernels follow Triton's ways: no types but theirs.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric import Channel, device_puts, puts, symmetric_group
from dlrm_fused.symmetric import channel as channel_module
from dlrm_fused.symmetric.channel import abort_peers_on_error
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import RankFailed, cpu_group, on_hosts, run_program, run_ranks
from tests.symmetric.put_model import Network, use_model

pytestmark = pytest.mark.interpreted

HOSTS = (0, 0, 1, 1)
# Bytes of an inbox slot, and of a program of the kernels that copy, in these tests.
SLOT, BLOCK = 64, 16


def slice_of(sender: int, receiver: int, epoch: int) -> Tensor:
    """fp32, of a length that both ends know: empty, a part of a slot, or many slots; no number is sent twice in a row."""
    length = random.Random(1000 * epoch + 10 * sender + receiver).choice([0, 1, 5, 16, 16, 33, 90])
    if sender == 1:
        length = 0  # only receives
    return torch.arange(length) + 100.0 * epoch + 7 * sender


def exchange(epochs: int, mutant: str | None) -> int:
    """Epochs of two exchanges each, the second begun before the first is received; returns how many slices were wrong."""
    network = use_model()
    if mutant is not None:
        MUTANTS[mutant](network)
    make_small_slots()
    wrong = 0
    with cpu_group() as group:
        pause = random.Random(group.rank)
        channel = Channel(group, "slices", timeout_seconds=30.0 if mutant is None else 3.0)
        for epoch in range(epochs):
            started = []
            for number in (2 * epoch, 2 * epoch + 1):
                sent = {peer: slice_of(group.rank, peer, number) for peer in group.hosts.remote}
                received = {peer: torch.full_like(slice_of(peer, group.rank, number), -1.0) for peer in group.hosts.remote}
                started.append((number, channel.exchange(sent, received, fingerprint=number)))
            if group.rank in (1, 2):
                time.sleep(pause.uniform(0, 0.01))
            for number, begun in started:
                for peer, slice_ in begun.arrivals():
                    wrong += not torch.equal(slice_, slice_of(peer, group.rank, number))
                begun.finish()
    return wrong


def make_small_slots() -> None:
    """So that a slice goes through several slots, and several programs copy a part of it."""
    channel_module._PIECE_BYTES, puts._ALIGNMENT, puts._BLOCK_BYTES = SLOT, SLOT, BLOCK


@pytest.mark.parametrize("epochs", [8, pytest.param(200, marks=pytest.mark.exhaustive)])
def test_slices_of_all_sizes_with_stragglers_and_a_rank_that_only_receives(epochs: int) -> None:
    assert run_ranks(4, on_hosts, HOSTS, exchange, epochs, None) == [0] * 4


_release_slice = device_puts.release_slice
_put_slice = device_puts.put_slice


@triton.jit
def put_before_it_is_complete(channel, args, peer, items, needed, size, fingerprint):
    _put_slice(channel, args, peer, items, tl.maximum(needed - 1, 1), size, fingerprint)


@triton.jit
def count_twice(channel, args, peer, items, needed, size, fingerprint):
    # An odd number would never be reached, and the receiver wait for nothing else.
    _put_slice(channel, args, peer, 2 * items, needed + needed % 2, size, fingerprint)


@triton.jit
def accept_the_slice_before(channel, args, peer, fingerprint):
    number = tl.load(args.counts + channel.world + peer) + 1
    word = device_puts.signal_word(channel, args, device_puts.ARRIVED, number, peer).to(tl.pointer_type(tl.int64))
    device_puts.wait(channel, word, (number - args.slots) << 32)
    return device_puts.slot_address(channel, args, args.inbox, 1, number, peer)


@triton.jit
def open_without_credit(channel, args, peer):
    number = tl.load(args.counts + peer) + 1
    return device_puts.slot_address(channel, args, args.outbox, 1, number, peer)


def signal_before_data(network: Network) -> None:
    network.signals_first = True


def use_in_kernels(name: str, function: object) -> Callable[[Network], None]:
    def use(network: Network) -> None:
        setattr(device_puts, name, function)

    return use


def wait_for_the_slice_before(network: Network) -> None:
    network.longest_delay = 0.02
    device_puts.wait_for_slice = accept_the_slice_before


@triton.jit
def release_at_once(channel, args, peer, items, needed):
    _release_slice(channel, args, peer, items, tl.maximum(needed - 1, 1))


MUTANTS: dict[str, Callable[[Network], None]] = {
    "signal before data": signal_before_data,
    "put before it is complete": use_in_kernels("put_slice", put_before_it_is_complete),
    "slice counted twice": use_in_kernels("put_slice", count_twice),
    "wait for the slice before": wait_for_the_slice_before,
    "no credit": use_in_kernels("open_slice", open_without_credit),
    "credit before it is read": use_in_kernels("release_slice", release_at_once),
}


# Ranks poll for a long time until these are noticed.
LONG = {"signal before data", "slice counted twice", "wait for the slice before"}


@pytest.mark.parametrize("mutant", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in MUTANTS])
def test_a_broken_protocol_is_noticed(mutant: str) -> None:
    try:
        wrong = run_ranks(4, on_hosts, HOSTS, exchange, 30, mutant)
    except RankFailed as failed:
        # Slices that are lost or overtaken are waited for in vain, or found to be those of another call.
        if not isinstance(failed.error, CommunicationError):
            raise
        return
    assert sum(wrong) > 0


def meet_trouble(trouble: str) -> str:
    """What a rank is told when rank 2 does not do what the others wait for."""
    use_model()
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        channel = Channel(group, "slices", timeout_seconds=1.5)
        told = error_of_trouble(channel, trouble)
        if trouble == "lost":
            time.sleep(4)
        else:
            dist.barrier()  # who ends earlier is named by those that still wait
    return told


def error_of_trouble(channel: Channel, trouble: str) -> str:
    group, fingerprint = channel.group, 1
    if group.rank == 2:
        if trouble == "lost":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trouble == "late":
            return ""
        elif trouble == "refuses":
            with suppress(UsageError), abort_peers_on_error(channel):
                raise UsageError("its own")
            return ""
        fingerprint = 2
    slices = {peer: torch.ones(4) for peer in group.hosts.remote}
    try:
        begun = channel.exchange(slices, {peer: torch.ones(4) for peer in slices}, fingerprint=fingerprint)
        for _ in begun.arrivals():
            pass
        begun.finish()
    except CommunicationError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("late", r"waited for rank 2 on \S+ \(pid \d+\) to send its data, longer than 1.5 s"),
        ("refuses", r"rank 2 on \S+ \(pid \d+\) did not take part because of an error"),
        ("other call", r"rank 0 on .* and rank 2 on .* differ in shapes or settings"),
    ],
)
def test_a_rank_that_does_not_send_is_named(trouble: str, message: str) -> None:
    found = run_ranks(4, on_hosts, HOSTS, meet_trouble, trouble)
    assert re.search(message, found[0])


def print_trouble(trouble: str) -> None:
    print(meet_trouble(trouble))


def test_a_lost_rank_is_named(tmp_path: Path) -> None:
    ended = run_program(4, tmp_path, 60.0, on_hosts, HOSTS, print_trouble, "lost")
    assert ended.statuses[2] == -signal.SIGKILL
    told = re.findall(r"rank 2 on \S+ \(pid \d+\) is lost.*?; rank (\d) on", ended.output)
    # Rank 3, on its host, waits for the others alone, and may have heard from them before.
    assert {"0", "1"} <= set(told), ended.output


@pytest.mark.parametrize(
    ("transport", "message"),
    [("nvshmem", "DLRM_FUSED_TRANSPORT=nvshmem: on cpu it is one of: messages"), ("x", "DLRM_FUSED_TRANSPORT=x: on cpu")],
)
def test_a_transport_that_the_device_has_not_is_an_error(monkeypatch: pytest.MonkeyPatch, transport: str, message: str) -> None:
    monkeypatch.setenv("DLRM_FUSED_TRANSPORT", transport)
    with pytest.raises(UsageError, match=message):
        symmetric_group(device="cpu")
