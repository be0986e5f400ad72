"""Triton functions with which a kernel talks to other ranks: a public extension to write one's own fused kernels with.

A kernel is given tables of addresses (:class:`~dlrm_fused.symmetric.memory.SymmetricMemory`) and the words of a
:class:`~dlrm_fused.symmetric.channel.Channel`, and takes part in one epoch of an exchange::

    epoch = begin(...)                      # program 0 tells all peers: ready to receive, at this offset
    offset = wait_until_ready(peer, ...)    # before the first store into a peer's memory
    tl.store(peer_pointer(...), values)     # data, straight into its place
    finish(...)                             # the last program tells all peers that everything is there, and waits for theirs

The same source runs on GPUs and, under ``TRITON_INTERPRET=1``, in processes on the CPU. There the programs of a grid run one
after the other, hence none may wait for a later one of its own grid.

Memory order: the stores of a program precede its barrier, the barrier its count (``acq_rel``, device scope), the last count the
signal (``release``, system scope); who sees the signal (``acquire``, system scope) sees all of them.
"""

# Kernels follow Triton's ways: constants in capitals, no types but theirs.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import time
from typing import Any

import torch
import triton
import triton.language as tl

# Words of Channel.state.
EPOCH = tl.constexpr(0)  # the last epoch completed
PROGRAMS_DONE = tl.constexpr(1)  # of the running launch
FAULT = tl.constexpr(2)  # 1 after a fault: nothing is sent or awaited any more
ABORT = tl.constexpr(3)  # rank + 1 of a peer that the host knows to be lost

# Kinds of faults, word 0 of Channel.control.
LIMIT_EXCEEDED = tl.constexpr(1)
ABORTED = tl.constexpr(2)
REFUSED = tl.constexpr(3)
MISMATCH = tl.constexpr(4)

# What was awaited, word 4 of Channel.control.
READY = tl.constexpr(0)
ARRIVAL = tl.constexpr(1)

# A ready word is epoch << 32 | offset / 4096; this offset says that the rank has refused to take part.
REFUSED_OFFSET = tl.constexpr(0xFFFFFFFF)
OFFSET_UNIT = tl.constexpr(4096)
_ABORT_CHECK = tl.constexpr(64)  # polls between two looks at the abort word


@triton.jit
def peer_pointer(addresses, peer, offset, dtype: tl.constexpr, alignment: tl.constexpr = 16):
    """Pointer to byte ``offset`` of rank ``peer``'s block.

    Args:
        addresses: int64 [world_size], ``SymmetricMemory.addresses``.
        offset: bytes, a multiple of ``alignment``.
        dtype: element type of the pointer.
        alignment: lets the compiler make wide stores.
    """
    pointer = (tl.load(addresses + peer) + offset).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, alignment)


@triton.jit
def signal(word, value):
    """Store ``value`` where ``word`` points (local or at a peer) after every store of this program: release, system scope.

    Args:
        word: int64 pointer, or a block of pointers.
        value: int64; grows from epoch to epoch.
    """
    tl.debug_barrier()
    tl.atomic_xchg(word, value, sem="release", scope="sys")


@triton.jit
def wait(word, value, state, poll_limit):
    """Wait until the int64 at ``word`` (own memory) is at least ``value``: acquire, system scope.

    Returns:
        What was seen; less than ``value`` if the limit is exceeded or the host has aborted the exchange.
    """
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    polls = tl.zeros((), tl.int64)
    while (seen < value) & (polls < poll_limit):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % _ABORT_CHECK == 0:
            polls = tl.where(must_stop(state), poll_limit, polls)
    return seen


@triton.jit
def must_stop(state):
    """Whether the host has aborted the exchange, or another program has met a fault."""
    aborted = tl.atomic_add(state + ABORT, 0, sem="relaxed", scope="sys")
    return (aborted != 0) | (tl.atomic_add(state + FAULT, 0, sem="relaxed", scope="gpu") != 0)


@triton.jit
def report_fault(state, control, kind, rank, peer, epoch, awaited):
    """Record the first fault of a channel where the host reads it, and stop all later kernels of the channel."""
    first = tl.atomic_cas(state + FAULT, tl.zeros((), tl.int64), tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")
    if first == 0:
        record = control.to(tl.pointer_type(tl.int64))
        tl.store(record + 1, rank)
        tl.store(record + 2, peer + tl.zeros((), tl.int64))
        tl.store(record + 3, epoch)
        tl.store(record + 4, awaited)
        tl.debug_barrier()
        tl.store(record, kind)


@triton.jit
def fault_kind(state):
    aborted = tl.atomic_add(state + ABORT, 0, sem="relaxed", scope="sys")
    return tl.where(aborted != 0, ABORTED, LIMIT_EXCEEDED).to(tl.int64)


@triton.jit
def begin(offset, fingerprint, flag_addresses, state, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr):
    """Begin the next epoch: tell every rank that this one is ready to receive at ``offset``. Program 0 tells, all may call.

    Args:
        offset: int64, bytes, a multiple of 4096, where peers shall store.
        fingerprint: int64 that must be equal on all ranks, such as a hash of the shapes.
        flag_addresses: ``Channel.flags.addresses``.
        LANES: power of two, at least WORLD.

    Returns:
        The epoch, int64.
    """
    epoch = tl.load(state + EPOCH) + 1
    if (tl.program_id(0) == 0) & (tl.load(state + FAULT) == 0):
        peers = tl.arange(0, LANES)
        there = peers < WORLD
        words = tl.load(flag_addresses + peers, mask=there, other=0).to(tl.pointer_type(tl.int64))
        tl.store(words + 2 * WORLD + RANK, fingerprint + tl.zeros((LANES,), tl.int64), mask=there)
        value = (epoch << 32) + offset // OFFSET_UNIT
        tl.debug_barrier()
        tl.atomic_xchg(words + RANK, value + tl.zeros((LANES,), tl.int64), mask=there, sem="release", scope="sys")
    return epoch


@triton.jit
def wait_until_ready(peer, epoch, fingerprint, flags, state, control, poll_limit, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Wait until ``peer`` is ready to receive in this epoch.

    Args:
        flags: int64 pointer to this rank's flags, ``Channel.flags.local``.

    Returns:
        The offset at which it receives, in bytes; negative after a fault, in which case nothing may be stored.
    """
    offset = tl.full((), -1, tl.int64)
    seen = wait(flags + peer, epoch << 32, state, poll_limit)
    unit = seen & 0xFFFFFFFF
    if seen < (epoch << 32):
        report_fault(state, control, fault_kind(state), tl.full((), RANK, tl.int64), peer, epoch, READY)
    elif unit == REFUSED_OFFSET:
        report_fault(state, control, REFUSED, tl.full((), RANK, tl.int64), peer, epoch, READY)
    elif tl.load(flags + 2 * WORLD + peer, volatile=True) != fingerprint:
        report_fault(state, control, MISMATCH, tl.full((), RANK, tl.int64), peer, epoch, READY)
    else:
        offset = unit * OFFSET_UNIT
    return offset


@triton.jit
def wait_until_all_ready(
    epoch, fingerprint, flags, state, control, poll_limit, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr
):
    """:func:`wait_until_ready` for all ranks at once, for kernels that store to every one of them.

    Returns:
        Whether all are ready; false after a fault, in which case nothing may be stored. :func:`announced_offset` tells
        where a rank receives.
    """
    peers = tl.arange(0, LANES)
    there = peers < WORLD
    seen = tl.zeros((LANES,), tl.int64)
    missing = tl.full((), 1, tl.int32)
    polls = tl.zeros((), tl.int64)
    while (missing > 0) & (polls < poll_limit):
        seen = tl.atomic_add(flags + peers, tl.zeros((LANES,), tl.int64), mask=there, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(there & (seen < (epoch << 32)), 1, 0), axis=0)
        polls += 1
        if polls % _ABORT_CHECK == 0:
            polls = tl.where(must_stop(state), poll_limit, polls)
    late = there & (seen < (epoch << 32))
    refused = there & (seen >= (epoch << 32)) & ((seen & 0xFFFFFFFF) == REFUSED_OFFSET)
    theirs = tl.load(flags + 2 * WORLD + peers, mask=there, other=0, volatile=True)
    differs = there & (theirs != fingerprint)
    faulty = tl.min(tl.where(late, peers, LANES), axis=0)
    kind = fault_kind(state)
    if faulty == LANES:
        faulty = tl.min(tl.where(refused, peers, LANES), axis=0)
        kind = tl.full((), REFUSED, tl.int64)
    if faulty == LANES:
        faulty = tl.min(tl.where(differs, peers, LANES), axis=0)
        kind = tl.full((), MISMATCH, tl.int64)
    if faulty < LANES:
        report_fault(state, control, kind, tl.full((), RANK, tl.int64), faulty, epoch, READY)
    return faulty == LANES


@triton.jit
def announced_offset(peer, flags):
    """Where ``peer`` receives in this epoch, in bytes; only after :func:`wait_until_ready` for it in the same program."""
    return (tl.load(flags + peer) & 0xFFFFFFFF) * OFFSET_UNIT


@triton.jit
def finish(
    epoch, flags, flag_addresses, state, control, poll_limit, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr
):
    """End the epoch; every program of the launch calls it after its last store.

    The last program to arrive signals all ranks, waits for the signals of all, and completes the epoch: when the kernel has
    ended, everything that peers sent is in this rank's memory.
    """
    tl.debug_barrier()
    done = tl.atomic_add(state + PROGRAMS_DONE, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.atomic_xchg(state + PROGRAMS_DONE, tl.zeros((), tl.int64), sem="relaxed", scope="gpu")
        if tl.atomic_add(state + FAULT, 0, sem="relaxed", scope="gpu") == 0:
            peers = tl.arange(0, LANES)
            there = peers < WORLD
            words = tl.load(flag_addresses + peers, mask=there, other=0).to(tl.pointer_type(tl.int64))
            values = epoch + tl.zeros((LANES,), tl.int64)
            tl.atomic_xchg(words + WORLD + RANK, values, mask=there, sem="release", scope="sys")
            _wait_for_arrivals(epoch, flags, state, control, poll_limit, RANK, WORLD, LANES)


@triton.jit
def _wait_for_arrivals(epoch, flags, state, control, poll_limit, RANK: tl.constexpr, WORLD: tl.constexpr, LANES: tl.constexpr):
    peers = tl.arange(0, LANES)
    there = peers < WORLD
    nothing = tl.zeros((LANES,), tl.int64)
    missing = tl.full((), 1, tl.int32)
    polls = tl.zeros((), tl.int64)
    late = tl.zeros((LANES,), tl.int32)
    while (missing > 0) & (polls < poll_limit):
        seen = tl.atomic_add(flags + WORLD + peers, nothing, mask=there, sem="acquire", scope="sys")
        late = tl.where(there & (seen < epoch), 1, 0)
        missing = tl.sum(late, axis=0)
        polls += 1
        if polls % _ABORT_CHECK == 0:
            polls = tl.where(must_stop(state), poll_limit, polls)
    if missing == 0:
        tl.atomic_xchg(state + EPOCH, epoch, sem="relaxed", scope="gpu")
    else:
        first_late = tl.min(tl.where(late == 1, peers, LANES), axis=0)
        report_fault(state, control, fault_kind(state), tl.full((), RANK, tl.int64), first_late, epoch, ARRIVAL)


@triton.jit
def _poll(word, state, polls):
    wait(word, 1, state, polls)


def uses_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of this device: on GPUs, and anywhere under its interpreter."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def polls_per_second(device: torch.device) -> float:
    """How often :func:`wait` looks at its word per second, measured; turns a time limit into ``poll_limit``."""
    return measured_polls_per_second(_poll, device)


def measured_polls_per_second(poll: Any, device: torch.device) -> float:
    """Looks per second of a kernel ``poll(word, state, looks)`` that waits in vain for the int64 at ``word`` to be 1."""
    words = torch.zeros(8, dtype=torch.int64, device=device)
    looks = 100 if device.type == "cpu" else 20_000
    poll[(1,)](words, words, 1, num_warps=1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin_time = time.perf_counter()
    poll[(1,)](words, words, looks, num_warps=1)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return looks / (time.perf_counter() - begin_time)
