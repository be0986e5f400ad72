"""Flags by which ranks of one host tell each other, within an epoch, which pieces have come.

Pieces that a copy engine moves have no kernel that could signal behind them: a program beside a product might wait for a
multiprocessor until the product ends. So the copy engine moves the flag too, after the piece and in the same stream. A flag
holds the number of the epoch; it is never reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_fused.symmetric import Channel
from dlrm_fused.symmetric.device import (
    ARRIVAL,
    EPOCH,
    FAULT,
    begin,
    fault_kind,
    report_fault,
    signal,
    wait,
    wait_until_all_ready,
)


class PieceArgs(NamedTuple):
    """The flags, as one argument of a kernel that waits for pieces."""

    flags: Any  # int64 [ranks, of_rank], this rank's: of the pieces that come from each rank
    addresses: Any  # int64 [ranks], of the flags of all ranks
    of_rank: Any


@triton.jit(do_not_specialize=["fingerprint"])
def begin_kernel(stamp, channel, fingerprint):
    """Begin an epoch, and wait until all ranks are ready for it; then the stamp is its number. One program."""
    epoch = begin(channel, tl.zeros((), tl.int64), fingerprint)
    if wait_until_all_ready(channel, epoch, fingerprint):
        tl.store(stamp, epoch)


@triton.jit
def mark_kernel(flag_address, stamp):
    """Set a flag of a rank, where no copy engine does it. One program."""
    signal(tl.load(flag_address).to(tl.pointer_type(tl.int64)), tl.load(stamp))


@triton.jit(do_not_specialize=["source", "number"])
def gate_kernel(pieces, channel, source, number):
    """Wait until a piece of a rank has come, and so all that it sent before. One program."""
    wait_for_piece(channel, pieces, source, number)


@triton.jit
def complete_kernel(channel):
    """End the epoch of :func:`begin_kernel`: all pieces have been waited for. One program."""
    if tl.load(channel.state + FAULT) == 0:
        tl.store(channel.state + EPOCH, tl.load(channel.state + EPOCH) + 1)


@triton.jit
def wait_for_piece(channel, pieces, source, number):
    """Wait until piece ``number`` of rank ``source`` has come in the epoch that runs; the host hears of it if it does not."""
    epoch = tl.load(channel.state + EPOCH) + 1
    if wait(channel, pieces.flags + source * pieces.of_rank + number, epoch) < epoch:
        report_fault(channel, fault_kind(channel), source, epoch, ARRIVAL)


class PieceFlags:
    """The flags of one channel, and the steps of an epoch whose data a copy engine moves."""

    def __init__(self, channel: Channel, name: str, most: int) -> None:
        """Collective.

        Args:
            most: pieces from one rank to another in an epoch.
        """
        self.most = most
        self._channel, group = channel, channel.group
        self._memory = group.allocate(name, group.world_size * most * 8)
        self.stamp = torch.zeros(1, dtype=torch.int64, device=group.device)
        self.args = PieceArgs(self._memory.local.view(torch.int64), self._memory.addresses, most)

    def begin(self, fingerprint: int) -> None:
        """Tell the peers that this rank can receive, and wait for theirs; in the current stream, as all that follows."""
        begin_kernel[(1,)](self.stamp, self._channel.args, fingerprint, num_warps=1)

    def mark(self, peer: int, number: int) -> None:
        """Tell a peer that a piece of this rank has come; behind the copy that moved it."""
        place = self._channel.group.rank * self.most + number
        flag = self._memory.peer(peer).view(torch.int64)[place : place + 1]
        if flag.device.type == "cuda":
            flag.copy_(self.stamp, non_blocking=True)
        else:
            mark_kernel[(1,)](torch.tensor([flag.data_ptr()]), self.stamp, num_warps=1)

    def wait(self, source: int, number: int) -> None:
        """Let the current stream wait for a piece."""
        gate_kernel[(1,)](self.args, self._channel.args, source, number, num_warps=1)

    def complete(self) -> None:
        """After all waits."""
        complete_kernel[(1,)](self._channel.args, num_warps=1)


@triton.jit
def piece_of_row(ends, row):
    """The number of the piece that has a row.

    Args:
        ends: tuple, the end of each piece.
    """
    number = tl.zeros((), tl.int32)
    for i in tl.static_range(len(ends) - 1):
        number += tl.where(row >= ends[i], 1, 0)
    return number


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
