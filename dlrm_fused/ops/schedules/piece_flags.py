"""Flags by which ranks of one host tell each other, within an epoch, which pieces have come.

Pieces that a copy engine moves have no kernel that could signal behind them: a program beside a product might wait for a
multiprocessor until the product ends. So the copy engine moves the flag too, after the piece and in the same stream. A flag
holds the number of the epoch; it is never reset.

Where memory is for such epochs alone, a rank tells its peers at the end of one that they may send in the next: no send waits
for a message that crosses the links first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.device import (
    ABORT_CHECK,
    ARRIVAL,
    EPOCH,
    FAULT,
    MISMATCH,
    READY,
    REFUSED,
    REFUSED_OFFSET,
    begin,
    fault_kind,
    must_stop,
    peer_pointer,
    report_fault,
    signal,
    wait,
    wait_until_all_ready,
)


class PieceArgs(NamedTuple):
    """The flags, as one argument of a kernel."""

    # int64, this rank's: [ranks, of_rank] of the pieces that come from each rank, [ranks] the last epoch that each has
    # completed, [2, ranks] which call each makes, in epochs of even and of odd numbers.
    flags: Any
    addresses: Any  # int64 [ranks], of the flags of all ranks
    stamp: Any  # int64 [1], the epoch in which this rank may send
    of_rank: Any


@triton.jit(do_not_specialize=["fingerprint"])
def begin_kernel(pieces, channel, fingerprint, EARLY: tl.constexpr):
    """Begin an epoch, and wait until all ranks can receive in it; then the stamp is its number. One program.

    Args:
        EARLY: whether a rank can receive when its last epoch is complete.
    """
    epoch = tl.load(channel.state + EPOCH) + 1
    if tl.load(channel.state + FAULT) == 0:
        for i in tl.static_range(1, channel.world):
            flags = peer_pointer(pieces.addresses, (channel.rank + i) % channel.world, 0, tl.int64)
            # Plain stores suffice for a word that says all by itself, and need no answer from the peer.
            tl.store(flags + _place_of_call(channel, pieces, channel.rank, epoch), (epoch << 32) + fingerprint)
    if EARLY:
        can_send = wait_for_ends(channel, pieces, epoch - 1)
    else:
        begin(channel, tl.zeros((), tl.int64), fingerprint)
        can_send = wait_until_all_ready(channel, epoch, fingerprint)
    if can_send:
        tl.store(pieces.stamp, epoch)


@triton.jit
def _place_of_call(channel, pieces, rank, epoch):
    """A rank may be one epoch ahead, never two, hence two places."""
    return channel.world * (pieces.of_rank + 1 + epoch % 2) + rank


@triton.jit
def wait_for_ends(channel, pieces, epoch):
    """Wait until all ranks have completed an epoch.

    Returns:
        Whether they have.
    """
    have_ended = tl.full((), 1, tl.int1)
    for i in tl.static_range(1, channel.world):
        peer = (channel.rank + i) % channel.world
        if wait(channel, pieces.flags + channel.world * pieces.of_rank + peer, epoch) < epoch:
            report_fault(channel, fault_kind(channel), peer, epoch + 1, READY)
            have_ended = tl.zeros((), tl.int1)
    return have_ended


@triton.jit
def mark_kernel(pieces, channel, peer, number):
    """Tell a peer that a piece of this rank has come, where no copy engine does it. One program."""
    mark_piece(channel, pieces, peer, number)


@triton.jit
def mark_piece(channel, pieces, peer, number):
    """Tell a peer that a piece of this rank, stored by this program or before it, has come."""
    flags = peer_pointer(pieces.addresses, peer, 0, tl.int64)
    signal(flags + channel.rank * pieces.of_rank + number, tl.load(pieces.stamp))


@triton.jit(do_not_specialize=["source", "number", "fingerprint"])
def gate_kernel(pieces, channel, source, number, fingerprint):
    """Wait until a piece of a rank has come, and so all that it sent before. One program."""
    wait_for_piece(channel, pieces, source, number, fingerprint)


@triton.jit
def wait_for_piece(channel, pieces, source, number, fingerprint):
    """Wait until piece ``number`` of rank ``source`` has come in the epoch that runs; the host hears of it if it does not."""
    epoch = tl.load(channel.state + EPOCH) + 1
    # Only a rank that makes the same call sends the piece.
    call = _wait_for_call(channel, pieces.flags + _place_of_call(channel, pieces, source, epoch), source, epoch)
    if call < epoch << 32:
        kind = tl.where(_has_refused(channel, source, epoch), REFUSED, fault_kind(channel))
        report_fault(channel, kind.to(tl.int64), source, epoch, READY)
    elif call != (epoch << 32) + fingerprint:
        report_fault(channel, MISMATCH, source, epoch, READY)
    else:
        seen = wait(channel, pieces.flags + source * pieces.of_rank + number, epoch)
        if seen < epoch:
            report_fault(channel, fault_kind(channel), source, epoch, ARRIVAL)


@triton.jit
def _has_refused(channel, source, epoch):
    return tl.atomic_add(channel.flags + source, 0, sem="relaxed", scope="sys") == (epoch << 32) + REFUSED_OFFSET


@triton.jit
def _wait_for_call(channel, word, source, epoch):
    """As :func:`~dlrm_fused.symmetric.device.wait`, for a rank that may refuse."""
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    polls = tl.zeros((), tl.int64)
    while (seen < epoch << 32) & (polls < channel.poll_limit):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % ABORT_CHECK == 0:
            stops = must_stop(channel) | _has_refused(channel, source, epoch)
            polls = tl.where(stops, channel.poll_limit, polls)
    return seen


@triton.jit
def complete_kernel(pieces, channel, EARLY: tl.constexpr):
    """End the epoch of :func:`begin_kernel`: all pieces have been waited for, and are needed no more. One program."""
    if tl.load(channel.state + FAULT) == 0:
        epoch = tl.load(channel.state + EPOCH) + 1
        tl.store(channel.state + EPOCH, epoch)
        if EARLY:
            for i in tl.static_range(1, channel.world):
                flags = peer_pointer(pieces.addresses, (channel.rank + i) % channel.world, 0, tl.int64)
                tl.store(flags + channel.world * pieces.of_rank + channel.rank, epoch)


class PieceFlags:
    """The flags of one channel, and the steps of an epoch whose data a copy engine moves. Steps are in the current stream."""

    def __init__(self, channel: Channel, name: str, most: int, *, has_own_memory: bool) -> None:
        """Collective.

        Args:
            most: pieces from one rank to another in an epoch.
            has_own_memory: whether the memory in which pieces come, and the channel, are for such epochs alone.
        """
        self.most = most
        self._channel, self._early, group = channel, has_own_memory, channel.group
        self._memory = group.allocate(name, group.world_size * (most + 3) * 8)
        self._stamp = torch.zeros(1, dtype=torch.int64, device=group.device)
        self.args = PieceArgs(self._memory.local.view(torch.int64), self._memory.addresses, self._stamp, most)

    def begin(self, fingerprint: int) -> None:
        """Tell the peers which call this is, and wait until they can receive."""
        begin_kernel[(1,)](self.args, self._channel.args, fingerprint, EARLY=self._early, num_warps=1)

    def meet(self, fingerprint: int) -> None:
        """Begin an epoch of empty pieces, which waits for the calls of all peers."""
        group = self._channel.group
        peers = [(group.rank + shift) % group.world_size for shift in range(1, group.world_size)]
        self.begin(fingerprint)
        for peer in peers:
            self.mark(peer, 0)
        for peer in peers:
            self.wait(peer, 0, fingerprint)

    def mark(self, peer: int, number: int) -> None:
        """Tell a peer that a piece of this rank has come; behind the copy that moved it."""
        if self._stamp.device.type == "cuda":
            place = self._channel.group.rank * self.most + number
            self._memory.peer(peer).view(torch.int64)[place : place + 1].copy_(self._stamp, non_blocking=True)
        else:
            mark_kernel[(1,)](self.args, self._channel.args, peer, number, num_warps=1)

    def wait(self, source: int, number: int, fingerprint: int) -> None:
        """Wait for a piece."""
        gate_kernel[(1,)](self.args, self._channel.args, source, number, fingerprint, num_warps=1)

    def complete(self) -> None:
        """After all waits, when what has come is needed no more."""
        complete_kernel[(1,)](self.args, self._channel.args, EARLY=self._early, num_warps=1)


@triton.jit
def end_of_piece(ends, number):
    """Where piece ``number`` ends; 0 for -1."""
    end = tl.zeros((), tl.int32)
    for i in tl.static_range(len(ends)):
        end = tl.where(number == i, ends[i], end)
    return end


def ends_of(bounds: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """For kernels, the ends of pieces that follow each other."""
    return tuple(last for _, last in bounds)
