"""Flags by which ranks of one host tell each other, within an epoch, which pieces have come.

Pieces that a copy engine moves have no kernel that could signal behind them: a program beside a product might wait for a
multiprocessor until the product ends. So the copy engine moves the flag too, after the piece and in the same stream. A flag
holds the number of the epoch; it is never reset.

A rank that begins an epoch needs what came in the epoch before no more: its reads are earlier in its stream. So ranks meet at
the beginning of an epoch, and nothing has to be said at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    look_at,
    must_stop,
    next_epoch,
    peer_pointer,
    report_fault,
    signal,
    wait,
    wait_until_all_ready,
)


class PieceArgs(NamedTuple):
    """The flags, as one argument of a kernel."""

    # int64, this rank's: [ranks, of_rank] of the pieces that come from each rank, [ranks] the last call that each has begun, as
    # epoch << 32 | fingerprint.
    flags: Any
    addresses: Any  # int64 [ranks], of the flags of all ranks
    stamp: Any  # int64 [1], the epoch in which copy engines of this rank send
    of_rank: Any


@triton.jit(do_not_specialize=["fingerprint"])
def begin_kernel(pieces, channel, fingerprint, OWN: tl.constexpr):
    """Begin an epoch when all ranks do; then the stamp is its number. One program.

    Args:
        OWN: whether the channel has no epochs but these.
    """
    if OWN:
        epoch = next_epoch(channel)
        tell_call(channel, pieces, epoch, fingerprint)
        can_send = wait_for_calls(channel, pieces, epoch, fingerprint)
    else:
        epoch = begin(channel, tl.zeros((), tl.int64), fingerprint)
        can_send = wait_until_all_ready(channel, epoch, fingerprint)
    if can_send:
        tl.store(pieces.stamp, epoch)
        tl.store(channel.state + EPOCH, epoch)


@triton.jit
def begin_epoch(channel, counter):
    """Begin an epoch of a channel of its own in a kernel that moves pieces; every program of the launch calls it first.

    Args:
        counter: int64, 0 before and after.

    Returns:
        The epoch, in which programs :func:`tell_call` and :func:`wait_for_calls` before they store at a peer.
    """
    epoch = next_epoch(channel)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:  # all have read it
        tl.atomic_xchg(counter, tl.zeros((), tl.int64), sem="relaxed", scope="gpu")
        tl.store(channel.state + EPOCH, epoch)
    return epoch


@triton.jit
def tell_call(channel, pieces, epoch, fingerprint):
    """Tell all peers that this rank begins an epoch, and with which call."""
    if look_at(channel.state + FAULT) == 0:
        for i in tl.static_range(1, channel.world):
            flags = peer_pointer(pieces.addresses, (channel.rank + i) % channel.world, 0, tl.int64)
            # Plain stores suffice for a word that says all by itself, and need no answer from the peer.
            tl.store(flags + channel.world * pieces.of_rank + channel.rank, (epoch << 32) + fingerprint)


@triton.jit
def wait_for_calls(channel, pieces, epoch, fingerprint):
    """Wait until all peers have begun an epoch; the host hears of it if one does not, or makes another call.

    Returns:
        Whether they have, and so can receive.
    """
    have_begun = tl.full((), 1, tl.int1)
    for i in tl.static_range(1, channel.world):
        peer = (channel.rank + i) % channel.world
        call = _wait_for_call(channel, pieces.flags + channel.world * pieces.of_rank + peer, peer, epoch)
        # A peer that is further on has compared the calls itself.
        if call < epoch << 32:
            kind = tl.where(_has_refused(channel, peer, epoch), REFUSED, fault_kind(channel))
            report_fault(channel, kind.to(tl.int64), peer, epoch, READY)
            have_begun = tl.zeros((), tl.int1)
        elif (call < (epoch + 1) << 32) & (call != (epoch << 32) + fingerprint):
            report_fault(channel, MISMATCH, peer, epoch, READY)
            have_begun = tl.zeros((), tl.int1)
    return have_begun


@triton.jit
def _has_refused(channel, source, epoch):
    return look_at(channel.flags + source) == (epoch << 32) + REFUSED_OFFSET


@triton.jit
def _wait_for_call(channel, word, source, epoch):
    """Wait as :func:`~dlrm_fused.symmetric.device.wait` does, for a rank that may refuse."""
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
def mark_kernel(pieces, channel, peer, number):
    """Tell a peer that a piece of this rank has come, where no copy engine does it. One program."""
    mark_piece(channel, pieces, peer, number, tl.load(pieces.stamp))


@triton.jit
def mark_piece(channel, pieces, peer, number, epoch):
    flags = peer_pointer(pieces.addresses, peer, 0, tl.int64)
    signal(flags + channel.rank * pieces.of_rank + number, epoch)


@triton.jit(do_not_specialize=["source", "number"])
def gate_kernel(pieces, channel, source, number):
    """Wait until a piece of a rank has come, and so all that it sent before. One program."""
    wait_for_piece(channel, pieces, source, number, tl.load(pieces.stamp))


@triton.jit
def wait_for_piece(channel, pieces, source, number, epoch):
    """Wait until piece ``number`` of rank ``source`` has come in an epoch; the host hears of it if it does not."""
    # Only a rank that makes the same call sends the piece.
    seen = wait(channel, pieces.flags + source * pieces.of_rank + number, epoch)
    if seen < epoch:
        report_fault(channel, fault_kind(channel), source, epoch, ARRIVAL)


class PieceFlags:
    """The flags of one channel, and the steps of an epoch whose data a copy engine moves. Steps are in the current stream."""

    def __init__(self, channel: Channel, name: str, most: int, *, has_own_channel: bool) -> None:
        """Collective.

        Args:
            most: pieces from one rank to another in an epoch.
            has_own_channel: whether the channel has no epochs but these: then ranks meet by words of this object, which say
                all at once, else by those of the channel.
        """
        self.most = most
        self._channel, self._own, group = channel, has_own_channel, channel.group
        self._memory = group.allocate(name, group.world_size * (most + 1) * 8)
        self._stamp = torch.zeros(1, dtype=torch.int64, device=group.device)
        self.args = PieceArgs(self._memory.local.view(torch.int64), self._memory.addresses, self._stamp, most)
        self._marks: dict[tuple[int, int], Tensor] = {}  # by peer and number: the flag there of a piece of this rank

    def release(self) -> None:
        """Let go of the flags; no epoch follows."""
        self._channel.group.release(self._memory)

    def begin(self, fingerprint: int) -> None:
        """Meet the peers: they make the same call, and need what came before no more."""
        self._launch(begin_kernel, fingerprint, OWN=self._own)

    def mark(self, peer: int, number: int) -> None:
        """Tell a peer that a piece of this rank has come; behind the copy that moved it."""
        if self._stamp.device.type == "cuda":
            mark = self._marks.get((peer, number))
            if mark is None:
                place = self._channel.group.rank * self.most + number
                mark = self._marks[peer, number] = self._memory.peer(peer).view(torch.int64)[place : place + 1]
            mark.copy_(self._stamp, non_blocking=True)
        else:
            mark_kernel[(1,)](self.args, self._channel.args, peer, number, num_warps=1)

    def wait(self, source: int, number: int) -> None:
        """Wait for a piece."""
        self._launch(gate_kernel, source, number)

    def _launch(self, kernel: Any, *numbers: int, **constants: bool) -> None:
        """Launch one program of a kernel that is compiled alike for all numbers."""
        layout = self.most, self._own
        self._channel.launches(layout, kernel, (1,), self.args, self._channel.args, *numbers, **constants, num_warps=1)


@triton.jit
def end_of_piece(ends, number):
    """Return the row at which piece ``number`` ends; 0 for -1."""
    end = tl.zeros((), tl.int32)
    for i in tl.static_range(len(ends)):
        end = tl.where(number == i, ends[i], end)
    return end


def ends_of(bounds: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the ends of pieces that follow each other, as kernels take them."""
    return tuple(last for _, last in bounds)
