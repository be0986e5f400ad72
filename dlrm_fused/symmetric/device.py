"""Triton functions with which a kernel talks to other ranks: a public extension to write one's own fused kernels with.

A kernel is given tables of addresses (:class:`~dlrm_fused.symmetric.memory.SymmetricMemory`) and the
:class:`ChannelArgs` of a :class:`~dlrm_fused.symmetric.channel.Channel`, and takes part in one epoch::

    epoch = begin(channel, offset, fingerprint)                          # program 0 tells all peers: ready to receive there
    offset = wait_until_ready(channel, peer, epoch, fingerprint)         # before the first store into a peer's memory
    tl.store(peer_pointer(addresses, peer, offset, dtype), values)       # data, straight into its place
    finish(channel, epoch)      # the last program tells all peers that everything is there, and waits for theirs

The same source runs on GPUs and, under ``TRITON_INTERPRET=1``, in processes on the CPU. There the programs of a grid run one
after the other, hence none may wait for a later one of its own grid.

Ranks of other hosts take no part in an epoch: their addresses are 0 in all tables, and kernels store nothing there. Slices go
to them, by :meth:`~dlrm_fused.symmetric.channel.Channel.exchange`.

Memory order: the stores of a program precede its barrier, the barrier its count (``acq_rel``, device scope), the last count the
signal (``release``, system scope); who sees the signal (``acquire``, system scope) sees all of them.
"""

from __future__ import annotations

import functools
import operator
import time
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from dlrm_fused.compat.torch import is_rocm

# Words of Channel.state.
EPOCH = tl.constexpr(0)  # the last epoch completed
PROGRAMS_DONE = tl.constexpr(1)  # of the running launch
FAULT = tl.constexpr(2)  # 1 after a fault: nothing is sent or awaited any more
ABORT = tl.constexpr(3)  # the word LOST, as the first program that waits has seen it

# Words of Channel.control: the first fault of a channel.
KIND = tl.constexpr(0)
WAITING = tl.constexpr(1)  # the rank that waited
PEER = tl.constexpr(2)  # the rank for which it waited
FAULT_EPOCH = tl.constexpr(3)
AWAITED = tl.constexpr(4)
LOST = tl.constexpr(7)  # rank + 1 of a peer that the host knows to be lost; the host alone writes it

# Kinds of faults, the word KIND.
LIMIT_EXCEEDED = tl.constexpr(1)
ABORTED = tl.constexpr(2)
REFUSED = tl.constexpr(3)
MISMATCH = tl.constexpr(4)

# Awaited events, the word AWAITED.
READY = tl.constexpr(0)
ARRIVAL = tl.constexpr(1)
TAKEN = tl.constexpr(2)  # a slice by its receiver

# A ready word is epoch << 32 | offset / OFFSET_UNIT; this offset says that the rank has refused to take part.
REFUSED_OFFSET = tl.constexpr(0xFFFFFFFF)
OFFSET_UNIT = tl.constexpr(4096)
# Polls between two looks whether to give up: less than a millisecond of a GPU, of which the look itself takes two microseconds.
ABORT_CHECK = tl.constexpr(64 if triton.knobs.runtime.interpret else 1024)


def round_up(size: int, unit: int = OFFSET_UNIT.value) -> int:
    """Return the next multiple of a unit, by default of that in which ranks announce where they receive."""
    return -(-size // unit) * unit


class ChannelArgs(NamedTuple):
    """The arguments that every kernel of a channel carries, as one argument; the attributes of a Channel say more of each.

    Triton passes a tuple field by field, so it costs a launch no more than the fields would.
    """

    flags: Any  # int64 tensor, this rank's flags
    flag_addresses: Any  # int64 tensor [world], of the flags of all ranks
    state: Any  # int64 tensor [8]
    control: Any  # address of int64 [8] in host memory
    poll_limit: Any  # looks at a flag before a wait is given up
    rank: Any  # tl.constexpr, as the rest
    world: Any
    lanes: Any  # power of two, at least world


class _InterpretedConstant(tl.constexpr):
    """A constant inside a tuple, for the interpreter, which unwraps constants only where they are arguments of their own.

    Combined with a tensor it gives a tensor, where ``tl.constexpr`` would give a constant that holds one.
    """


def _combine(name: str) -> Any:
    operation = getattr(operator, name)

    def forward(self: _InterpretedConstant, other: Any) -> Any:
        return operation(self.value, getattr(other, "value", other))

    def reflected(self: _InterpretedConstant, other: Any) -> Any:
        return operation(getattr(other, "value", other), self.value)

    return forward, reflected


for _name in ("add", "sub", "mul", "mod", "floordiv"):
    for _method, _function in zip((f"__{_name}__", f"__r{_name}__"), _combine(_name), strict=True):
        setattr(_InterpretedConstant, _method, _function)


def constant(value: int) -> Any:
    """Return a field of a tuple that is a constant to the compiler."""
    return _InterpretedConstant(value) if triton.knobs.runtime.interpret else tl.constexpr(value)


def channel_args(
    flags: torch.Tensor, flag_addresses: torch.Tensor, state: torch.Tensor, control: int, poll_limit: int, rank: int, world: int
) -> ChannelArgs:
    """Return the fields as kernels want them; what does not change while a channel lives is a constant to the compiler.

    The limit is rounded up to a multiple of 16: Triton compiles a kernel anew for a 1, and for what 16 does not divide.
    """
    lanes = triton.next_power_of_2(world)
    poll_limit = round_up(poll_limit, 16)
    return ChannelArgs(flags, flag_addresses, state, control, poll_limit, constant(rank), constant(world), constant(lanes))


def no_channel(tensor: torch.Tensor) -> ChannelArgs:
    """Return the argument for a kernel that does not communicate; any tensor stands for those that it does not read."""
    return channel_args(tensor, tensor, tensor, 0, 0, 0, 1)


@triton.jit
def peer_pointer(addresses, peer, offset, dtype: tl.constexpr, alignment: tl.constexpr = 16):
    """Pointer to byte ``offset`` of rank ``peer``'s block.

    Args:
        addresses: int64 [world_size], ``SymmetricMemory.addresses``; or uint8, the block itself, whoever the peer is.
        offset: bytes, a multiple of ``alignment``.
        dtype: element type of the pointer.
        alignment: lets the compiler make wide stores.
    """
    address = addresses.to(tl.int64) if addresses.dtype.element_ty == tl.uint8 else tl.load(addresses + peer)
    return tl.multiple_of((address + offset).to(tl.pointer_type(dtype)), alignment)


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
def look_at(word):
    """Return what an int64 that others write holds now: relaxed, system scope.

    Every warp of the program gets the same. Each warp makes a plain load by itself, at its own time: where what it sees decides
    about a branch or a loop, some warps could go on and others not, and the next barrier would be another one for each.
    """
    return tl.atomic_add(word, 0, sem="relaxed", scope="sys")


@triton.jit
def wait(channel, word, value):
    """Wait until the int64 at ``word`` (own memory) is at least ``value``: acquire, system scope.

    Returns:
        What was seen; less than ``value`` if the limit is exceeded or the host has aborted the exchange.
    """
    seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
    polls = tl.zeros((), tl.int64)
    while (seen < value) & (polls < channel.poll_limit):
        seen = tl.atomic_add(word, 0, sem="acquire", scope="sys")
        polls += 1
        if polls % ABORT_CHECK == 0:
            polls = tl.where(must_stop(channel), channel.poll_limit, polls)
    return seen


@triton.jit
def order_bulk_loads(HAS_ASYNC_PROXY: tl.constexpr):
    """After a :func:`wait`, before loads by descriptors (TMA): they go another way than plain loads, which the wait orders.

    Source: "Proxies" in NVIDIA's *PTX ISA*, ``fence.proxy.async``.

    Args:
        HAS_ASYNC_PROXY: whether it is so on this device; false under the interpreter too.
    """
    if HAS_ASYNC_PROXY:
        tl.inline_asm_elementwise("fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def must_stop(channel):
    """Whether the host has aborted the epoch, or another program has met a fault.

    The host says so in its own memory, without a call to the driver. Such a call would wait as long as this kernel, if another
    thread waits for a copy to pageable memory, as ``tensor.cpu()`` does: the driver lets one at a time pass.
    """
    lost = tl.load(_control(channel) + LOST, volatile=True)
    # One thread's look becomes that of all warps, see `look_at`.
    tl.atomic_max(channel.state + ABORT, lost, sem="relaxed", scope="gpu")
    return (look_at(channel.state + ABORT) != 0) | (tl.atomic_add(channel.state + FAULT, 0, sem="relaxed", scope="gpu") != 0)


@triton.jit
def report_fault(channel, kind, peer, epoch, awaited):
    """Record the first fault of a channel where the host reads it, and stop all later kernels of the channel."""
    first = tl.atomic_cas(channel.state + FAULT, tl.zeros((), tl.int64), tl.full((), 1, tl.int64), sem="relaxed", scope="gpu")
    if first == 0:
        record = _control(channel)
        tl.store(record + WAITING, tl.full((), channel.rank, tl.int64))
        tl.store(record + PEER, peer + tl.zeros((), tl.int64))
        tl.store(record + FAULT_EPOCH, epoch)
        tl.store(record + AWAITED, awaited)
        tl.debug_barrier()
        tl.store(record + KIND, kind)


@triton.jit
def _control(channel):
    """Pointer to the words of :attr:`Channel.control`."""
    # Triton passes an address below 2^31, as of the heap of some Pythons, in 32 bits.
    return channel.control.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def fault_kind(channel):
    return tl.where(look_at(channel.state + ABORT) != 0, ABORTED, LIMIT_EXCEEDED).to(tl.int64)


@triton.jit
def _flags_of_ranks(channel):
    """int64 [lanes]: addresses of the ranks' flags, 0 for ranks of other hosts."""
    ranks = tl.arange(0, channel.lanes)
    return tl.load(channel.flag_addresses + ranks, mask=ranks < channel.world, other=0)


@triton.jit
def next_epoch(channel):
    """Return the number of the epoch that is next, int64; for kernels whose epoch :func:`begin` does not begin.

    The load goes around the L1 cache, which is coherent between kernels only where none begins before the last one has ended;
    with programmatic dependent launch they do.
    """
    return tl.load(channel.state + EPOCH, volatile=True) + 1


@triton.jit
def _announce(channel, epoch, offset, fingerprint):
    if look_at(channel.state + FAULT) == 0:
        lanes: tl.constexpr = channel.lanes
        addresses = _flags_of_ranks(channel)
        words, there = addresses.to(tl.pointer_type(tl.int64)), addresses != 0
        tl.store(words + 2 * channel.world + channel.rank, fingerprint + tl.zeros((lanes,), tl.int64), mask=there)
        value = (epoch << 32) + offset // OFFSET_UNIT
        tl.debug_barrier()
        ready = words + channel.rank
        tl.atomic_xchg(ready, value + tl.zeros((lanes,), tl.int64), mask=there, sem="release", scope="sys")


@triton.jit
def begin(channel, offset, fingerprint):
    """Begin the next epoch: tell every rank of the host that this one is ready to receive at ``offset``.

    All programs may call; program 0 tells.

    Args:
        channel: :class:`ChannelArgs`.
        offset: int64, bytes, a multiple of 4096, where peers shall store.
        fingerprint: int64 that must be equal on all ranks, such as a hash of the shapes.

    Returns:
        The epoch, int64.
    """
    epoch = next_epoch(channel)
    if tl.program_id(0) == 0:
        _announce(channel, epoch, offset, fingerprint)
    return epoch


@triton.jit
def wait_until_ready(channel, peer, epoch, fingerprint):
    """Wait until ``peer`` is ready to receive in this epoch.

    Returns:
        The offset at which it receives, in bytes; negative after a fault, in which case nothing may be stored.
    """
    offset = tl.full((), -1, tl.int64)
    seen = wait(channel, channel.flags + peer, epoch << 32)
    unit = seen & 0xFFFFFFFF
    if seen < (epoch << 32):
        report_fault(channel, fault_kind(channel), peer, epoch, READY)
    elif unit == REFUSED_OFFSET:
        report_fault(channel, REFUSED, peer, epoch, READY)
    elif look_at(channel.flags + 2 * channel.world + peer) != fingerprint:
        report_fault(channel, MISMATCH, peer, epoch, READY)
    else:
        offset = unit * OFFSET_UNIT
    return offset


@triton.jit
def wait_until_all_ready(channel, epoch, fingerprint):
    """:func:`wait_until_ready` for all ranks of the host at once, for kernels that store to every one of them.

    Returns:
        Whether all are ready; false after a fault, in which case nothing may be stored. :func:`announced_offset` tells
        where a rank receives.
    """
    lanes: tl.constexpr = channel.lanes
    peers, there = tl.arange(0, lanes), _flags_of_ranks(channel) != 0
    seen = _wait_for_all(channel, channel.flags + peers, there, epoch << 32)
    late = there & (seen < (epoch << 32))
    refused = there & (seen >= (epoch << 32)) & ((seen & 0xFFFFFFFF) == REFUSED_OFFSET)
    theirs = tl.load(channel.flags + 2 * channel.world + peers, mask=there, other=0, volatile=True)
    differs = there & (theirs != fingerprint)
    faulty = tl.min(tl.where(late, peers, lanes), axis=0)
    kind = fault_kind(channel)
    if faulty == lanes:
        faulty = tl.min(tl.where(refused, peers, lanes), axis=0)
        kind = tl.full((), REFUSED, tl.int64)
    if faulty == lanes:
        faulty = tl.min(tl.where(differs, peers, lanes), axis=0)
        kind = tl.full((), MISMATCH, tl.int64)
    if faulty < lanes:
        report_fault(channel, kind, faulty, epoch, READY)
    return faulty == lanes


@triton.jit
def _wait_for_all(channel, words, there, value):
    """:func:`wait` for one word of each rank that is ``there``; returns what was seen, [lanes]."""
    lanes: tl.constexpr = channel.lanes
    nothing = tl.zeros((lanes,), tl.int64)
    seen = tl.zeros((lanes,), tl.int64)
    missing = tl.full((), 1, tl.int32)
    polls = tl.zeros((), tl.int64)
    while (missing > 0) & (polls < channel.poll_limit):
        seen = tl.atomic_add(words, nothing, mask=there, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(there & (seen < value), 1, 0), axis=0)
        polls += 1
        if polls % ABORT_CHECK == 0:
            polls = tl.where(must_stop(channel), channel.poll_limit, polls)
    return seen


@triton.jit
def announced_offset(channel, peer):
    """Return the bytes at which ``peer`` receives in this epoch; only after :func:`wait_until_ready` in the same program.

    A plain load, which the L1 cache serves: loops look here for each tile, and loads that go around the cache would all meet at
    one line of L2, behind the tile's stores. It sees what has been announced, since the program's wait is an acquire.
    """
    return (tl.load(channel.flags + peer) & 0xFFFFFFFF) * OFFSET_UNIT


@triton.jit
def finish(channel, epoch):
    """End the epoch; every program of the launch calls it after its last store.

    The last program to arrive signals all ranks of the host, waits for the signals of all, and completes the epoch: when the
    kernel has ended, everything that they stored is in this rank's memory.
    """
    tl.debug_barrier()
    done = tl.atomic_add(channel.state + PROGRAMS_DONE, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.atomic_xchg(channel.state + PROGRAMS_DONE, tl.zeros((), tl.int64), sem="relaxed", scope="gpu")
        if tl.atomic_add(channel.state + FAULT, 0, sem="relaxed", scope="gpu") == 0:
            lanes: tl.constexpr = channel.lanes
            addresses = _flags_of_ranks(channel)
            words, there = addresses.to(tl.pointer_type(tl.int64)), addresses != 0
            arrival = words + channel.world + channel.rank
            tl.atomic_xchg(arrival, epoch + tl.zeros((lanes,), tl.int64), mask=there, sem="release", scope="sys")
            _wait_for_arrivals(channel, epoch)


@triton.jit
def _wait_for_arrivals(channel, epoch):
    lanes: tl.constexpr = channel.lanes
    peers, there = tl.arange(0, lanes), _flags_of_ranks(channel) != 0
    seen = _wait_for_all(channel, channel.flags + channel.world + peers, there, epoch)
    first_late = tl.min(tl.where(there & (seen < epoch), peers, lanes), axis=0)
    if first_late == lanes:
        tl.atomic_xchg(channel.state + EPOCH, epoch, sem="relaxed", scope="gpu")
    else:
        report_fault(channel, fault_kind(channel), first_late, epoch, ARRIVAL)


@triton.jit
def _poll(channel, word):
    wait(channel, word, 1)


def uses_kernels(device: torch.device) -> bool:
    """Return whether Triton kernels run on tensors of this device: on NVIDIA's GPUs, and anywhere under its interpreter.

    On AMD's GPUs none has been run, so torch's own operators compute there.
    """
    return (device.type == "cuda" and not is_rocm()) or bool(triton.knobs.runtime.interpret)


@functools.cache
def polls_per_second(device: torch.device, poll: Any = _poll) -> float:
    """Return how many times per second :func:`wait` looks at its word, measured; it turns a time limit into ``poll_limit``.

    Args:
        poll: another kernel ``poll(channel, word)`` that waits in vain for the int64 at ``word`` to be 1.
    """
    words = torch.zeros(8, dtype=torch.int64, device=device)
    looks = 100 if device.type == "cpu" else 20_000

    def wait_in_vain(looks: int) -> None:
        poll[(1,)](channel_args(words, words, words, words.data_ptr(), looks, 0, 1), words, num_warps=1)

    wait_in_vain(looks)  # compiles
    torch.get_device_module(device).synchronize(device)
    begin_time = time.perf_counter()
    wait_in_vain(looks)
    torch.get_device_module(device).synchronize(device)
    return looks / (time.perf_counter() - begin_time)
