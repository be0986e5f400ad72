"""Triton functions that send finished slices to ranks of other hosts by put-with-signal, from within a kernel.

A kernel is given the :class:`ChannelArgs` of a channel and the :class:`PutArgs` of a
:class:`~dlrm_fused.symmetric.puts.Puts`. The sender::

    place = open_slice(channel, puts, peer)               # where the next slice for a rank is written, once that is free
    tl.store(...)                                         # some items of the slice; not if `place` is negative
    put_slice(channel, puts, peer, 1, needed, size, fingerprint)    # the program that completes the slice puts it

and the receiver, in the same order of slices::

    place = wait_for_slice(channel, puts, peer, fingerprint)        # where the next slice of a rank lies, once it is there
    tl.load(...)                                                    # not if `place` is negative
    release_slice(channel, puts, peer, 1, tl.num_programs(0))       # the last program tells the sender that it is read

Slices from one rank to another are numbered from 1. Slice n goes through slot ``n % slots`` of the sender's outbox and of the
receiver's inbox, and is opened only when the receiver has returned the credit of slice ``n - slots``: then that slice has left
the outbox and is no longer read in the inbox. Each slot has signal words of its own, as puts of different slots may overtake
each other.

Memory order: the stores of a program precede its barrier, the barrier its count (``acq_rel``), the last count the put, the data
of a put its signal; who sees the signal (``acquire``) sees the slice. So nothing is sent before it is complete.

Source: the API of NVSHMEM, "Signaling operations": ``nvshmemx_putmem_signal_block`` and ``nvshmem_signal_wait_until``, as
PyTorch binds them for Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dlrm_fused.symmetric.device import (
    ARRIVAL,
    FAULT,
    MISMATCH,
    READY,
    constant,
    fault_kind,
    next_epoch,
    report_fault,
    wait,
)

# Rows of PutArgs.counts, a word for each rank: slices put, slices read; items stored of the next slice, and of the one that is
# read those done with.
_PUT, _READ, _STORED, _DONE = map(tl.constexpr, range(4))
# Rows of PutArgs.ranks.
_PE, _OWN_BOX, _BOX_THERE = map(tl.constexpr, range(3))
# Kinds of signal words in a rank's block, each [slots, world]: slices that arrived, as number << 32 | fingerprint, and numbers
# of slices whose credit came back.
ARRIVED, CREDIT = map(tl.constexpr, range(2))

# NVSHMEM_SIGNAL_SET and NVSHMEM_CMP_GE as NVSHMEM's headers have them (3.4.5: nvshmem_common_transport.h, nvshmem_constants.h).
# The docstrings of PyTorch's bindings say 0 and 3, which NVSHMEM takes for something else.
_SIGNAL_SET = tl.constexpr(9)
_GREATER_OR_EQUAL = tl.constexpr(5)

# PyTorch's bindings of NVSHMEM; set by bind_nvshmem(), since their import initializes CUDA.
_bindings: Any = None


class PutArgs(NamedTuple):
    """The parts of a :class:`~dlrm_fused.symmetric.puts.Puts` that a kernel needs, as one argument."""

    memory: Any  # address of this rank's block: signal words, a scratch word, inbox, outbox
    counts: Any  # int64 tensor [4 * world]
    ranks: Any  # int64 tensor [3 * world]: NVSHMEM's number of each rank, its box here, and this rank's box there
    slot_size: Any  # bytes
    slots: Any  # tl.constexpr, as the rest
    scratch: Any  # byte in the block
    inbox: Any
    outbox: Any


def put_args(
    memory: int, counts: Any, ranks: Any, slot_size: int, slots: int, scratch: int, inbox: int, outbox: int
) -> PutArgs:
    """Return the fields as kernels want them."""
    return PutArgs(memory, counts, ranks, slot_size, constant(slots), constant(scratch), constant(inbox), constant(outbox))


def bind_nvshmem(bindings: Any) -> None:
    """Have the functions of this module call NVSHMEM; before the first kernel that uses them is compiled."""
    global _bindings
    _bindings = bindings


@triton.jit
def put_with_signal(destination, source, size, word, value, pe):
    """Copy memory of this rank into another's, then set a signal word there. All threads of the program take part.

    It returns when the source may be changed. The variant that returns at once may leave a put unsent until others follow:
    NVSHMEM_IBGDA_NUM_REQUESTS_IN_BATCH.

    Args:
        destination, word: int64, addresses in this rank's block, for the same places in the other's.
        source: int64 address in symmetric memory, which the network card can read.
        size: int64 bytes, positive.
        value: int64.
        pe: int32, NVSHMEM's number of the rank.
    """
    _bindings.putmem_signal_block(destination, source, size, word, value, _SIGNAL_SET, pe)


@triton.jit
def order_after_signal(word, value):
    """After a signal has been seen to be at least ``value``: what it stands for is seen from here on.

    Returns at once: it is NVSHMEM's own wait, which on some networks does more than to look at the word.
    """
    _bindings.signal_wait_until(word, _GREATER_OR_EQUAL, value)


@triton.jit
def signal_word(channel, puts, kind, number, rank):
    """int64 address of the word of slice ``number`` and a rank, in this rank's block."""
    return puts.memory + 8 * ((kind * puts.slots + number % puts.slots) * channel.world + rank)


@triton.jit
def slot_address(channel, puts, box_begin, boxes, number, peer):
    """int64 address of the slot of slice ``number``."""
    box = tl.load(puts.ranks + boxes * channel.world + peer)
    return puts.memory + box_begin + (box * puts.slots + number % puts.slots) * puts.slot_size


@triton.jit
def open_slice(channel, puts, peer):
    """Wait until the next slice for ``peer`` may be written.

    Returns:
        int64 address of its first byte, a multiple of 16; negative after a fault, in which case nothing may be stored.
    """
    number = tl.load(puts.counts + _PUT * channel.world + peer) + 1
    place = tl.full((), -1, tl.int64)
    word = signal_word(channel, puts, CREDIT, number, peer).to(tl.pointer_type(tl.int64))
    if wait(channel, word, number - puts.slots) < number - puts.slots:
        report_fault(channel, fault_kind(channel), peer, next_epoch(channel), READY)
    else:
        place = slot_address(channel, puts, puts.outbox, _OWN_BOX, number, peer)
    return place


@triton.jit
def put_slice(channel, puts, peer, items, needed, size, fingerprint):
    """Count ``items`` of the open slice for ``peer`` as stored by this program; who completes it puts it.

    Args:
        needed: items of the slice, of all programs and launches.
        size: bytes of the slice, positive.
        fingerprint: of the call, 31 bits; must be the receiver's.
    """
    number = _count(channel, puts, _STORED, _PUT, peer, items, needed)
    if number > 0:
        put_with_signal(
            slot_address(channel, puts, puts.inbox, _BOX_THERE, number, peer),
            slot_address(channel, puts, puts.outbox, _OWN_BOX, number, peer),
            size + tl.zeros((), tl.int64),
            signal_word(channel, puts, ARRIVED, number, channel.rank),
            (number << 32) + fingerprint,
            tl.load(puts.ranks + _PE * channel.world + peer).to(tl.int32),
        )


@triton.jit
def wait_for_slice(channel, puts, peer, fingerprint):
    """Wait for the next slice of ``peer``.

    Returns:
        int64 address of its first byte, a multiple of 16; negative after a fault, in which case it must not be read.
    """
    number = tl.load(puts.counts + _READ * channel.world + peer) + 1
    epoch = next_epoch(channel)
    place = tl.full((), -1, tl.int64)
    address = signal_word(channel, puts, ARRIVED, number, peer)
    seen = wait(channel, address.to(tl.pointer_type(tl.int64)), number << 32)
    if seen < (number << 32):
        report_fault(channel, fault_kind(channel), peer, epoch, ARRIVAL)
    elif (seen & 0xFFFFFFFF) != fingerprint:
        report_fault(channel, MISMATCH, peer, epoch, ARRIVAL)
    else:
        order_after_signal(address, number << 32)
        place = slot_address(channel, puts, puts.inbox, _OWN_BOX, number, peer)
    return place


@triton.jit
def release_slice(channel, puts, peer, items, needed):
    """Count ``items`` of the slice of ``peer`` as read by this program; who completes it returns its credit.

    Args:
        needed: items that are counted, by all programs and launches that read the slice.
    """
    number = _count(channel, puts, _DONE, _READ, peer, items, needed)
    if number > 0:
        # NVSHMEM's call for a signal alone would be made by every thread. The data is a word that nobody reads.
        scratch = puts.memory + puts.scratch
        put_with_signal(
            scratch,
            scratch,
            tl.full((), 8, tl.int64),
            signal_word(channel, puts, CREDIT, number, channel.rank),
            number,
            tl.load(puts.ranks + _PE * channel.world + peer).to(tl.int32),
        )


@triton.jit
def _count(channel, puts, item_row, slice_row, peer, items, needed):
    """Count ``items`` of a slice, and the slice when they complete it; rows of ``puts.counts``.

    Returns:
        int64 number of the slice that these items complete; 0 if they do not, or after a fault, when nothing may be put.
    """
    tl.debug_barrier()
    counted = puts.counts + item_row * channel.world + peer
    number = tl.zeros((), tl.int64)
    # The scope is the system's, since the network card reads.
    if tl.atomic_add(counted, items + tl.zeros((), tl.int64), sem="acq_rel", scope="sys") + items == needed:
        tl.atomic_xchg(counted, tl.zeros((), tl.int64), sem="relaxed", scope="gpu")
        # A load and a store would not do: a thread that comes late would load what another has stored.
        number = tl.atomic_add(puts.counts + slice_row * channel.world + peer, 1, sem="relaxed", scope="gpu") + 1
        if tl.atomic_add(channel.state + FAULT, 0, sem="relaxed", scope="gpu") != 0:
            number = tl.zeros((), tl.int64)
    return number


@triton.jit(do_not_specialize=["size", "peer", "fingerprint"])
def put_bytes_kernel(source, size, peer, channel, puts, fingerprint, BLOCK: tl.constexpr):
    """Put ``size`` bytes, at most a slot, as the next slice for ``peer``."""
    place = open_slice(channel, puts, peer)
    to = tl.multiple_of(place.to(tl.pointer_type(tl.uint8)), 16)
    _copy(to, source, size, place >= 0, BLOCK)
    put_slice(channel, puts, peer, 1, tl.num_programs(0), size, fingerprint)


@triton.jit(do_not_specialize=["size", "peer", "fingerprint"])
def read_bytes_kernel(destination, size, peer, channel, puts, fingerprint, BLOCK: tl.constexpr):
    """Read ``size`` bytes, the next slice of ``peer``."""
    place = wait_for_slice(channel, puts, peer, fingerprint)
    source = tl.multiple_of(place.to(tl.pointer_type(tl.uint8)), 16)
    _copy(destination, source, size, place >= 0, BLOCK)
    release_slice(channel, puts, peer, 1, tl.num_programs(0))


@triton.jit
def _copy(destination, source, size, is_there, BLOCK: tl.constexpr):
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0).to(tl.int64) * BLOCK):
        byte = begin + tl.arange(0, BLOCK)
        inside = (byte < size) & is_there
        tl.store(destination + byte, tl.load(source + byte, mask=inside, other=0), mask=inside)
