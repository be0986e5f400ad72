"""A channel: flags by which ranks agree who may store where, and when everything has arrived, in an exchange that is repeated.

One repetition is an epoch; all ranks take part in all epochs, in the same order. In an epoch, each rank

1. announces to every rank the offset at which it receives, as soon as nothing uses the memory there any more;
2. waits, before its first store into a peer's memory, for the peer's announcement;
3. stores;
4. signals every rank, when everything is stored;
5. waits for the signals of all ranks: everything is received.

Epochs are numbered from 1, flags hold the number of an epoch and are never reset, and a wait is for a number *at least* as
large. A rank announces an epoch only after it completed the one before, and only memory that it reads no more, so nothing is
overwritten too early however far ahead another rank is.

"Every rank" is every rank of the host. What belongs to ranks of other hosts goes in slices, :meth:`Channel.exchange`, under the
same time limit and with the same errors; a slice is received in memory that its receiver has chosen, so that needs no
announcement.

Kernels take part with the functions of :mod:`~dlrm_fused.symmetric.device`, host code on the CPU with
:meth:`Channel.run_epoch`, or its steps one by one; epochs of both kinds may follow each other on one channel.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_fused.compat.triton import host_atomics
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.lasting import lasting
from dlrm_fused.symmetric import device
from dlrm_fused.symmetric.call_order import CallOrder
from dlrm_fused.symmetric.device import channel_args, polls_per_second
from dlrm_fused.symmetric.futex import wait_for_change, wake
from dlrm_fused.symmetric.launches import Launches
from dlrm_fused.symmetric.memory import SymmetricGroup
from dlrm_fused.symmetric.messages import Exchange, LateRankError, Link, Why, without_empty

# Kernels and the host share these words and values; device.py says what each means.
_EPOCH, _FAULT = (word.value for word in (device.EPOCH, device.FAULT))
_KIND, _WAITING, _PEER, _FAULT_EPOCH, _AWAITED, _LOST = (
    word.value for word in (device.KIND, device.WAITING, device.PEER, device.FAULT_EPOCH, device.AWAITED, device.LOST)
)
_READY, _ARRIVAL, _TAKEN = device.READY.value, device.ARRIVAL.value, device.TAKEN.value
_AWAITED_FOR = {_READY: "to be ready to receive", _ARRIVAL: "to send its data", _TAKEN: "to take its data"}
OFFSET_UNIT, _REFUSED_OFFSET = device.OFFSET_UNIT.value, device.REFUSED_OFFSET.value

# The half of a ready word, and of an arrival word, that each epoch changes.
_HALF = {_READY: 1, _ARRIVAL: 0}

# Looks at a flag before the waiting process begins to sleep: many where every rank of the host has a core of its own, and waits
# for no other host, which takes longer than to wake up.
_MANY_YIELDS, _FEW_YIELDS = 100, 5
# Seconds between two looks of a sleeping process whether the rank that it waits for is gone.
_LOOK_SECONDS = 0.02
# Likewise of a rank that waits for all on the host, which is seldom.
_ASSEMBLY_LOOK_SECONDS = 0.001


class Channel:
    """The flags of one exchange between the ranks of a group.

    Attributes:
        flags: int64 words: [p] the ready word of rank p, [W + p] its arrival word, [2 W + p] its fingerprint; W ranks.
        state: int64 [8] on the device: the words EPOCH to ABORT of device.py; the rest is free for kernels.
        fault: int64 [1], the word FAULT of ``state``.
        control: int64 [8] in host memory that the device reads and writes: the words KIND to LOST of device.py.
        args: what a kernel is given of the channel, and hands on to the functions of device.py.
        launches: of kernels that are given ``args``.
    """

    @lasting
    def __init__(
        self, group: SymmetricGroup, name: str, timeout_seconds: float = 600.0, order: CallOrder | None = None
    ) -> None:
        """Collective.

        Args:
            name: of the exchange, in messages; the same on all ranks.
            timeout_seconds: the longest wait for a peer; longer than ranks differ in their time for a step, with the
                evaluation, checkpoint or compilation that only one of them may do between two.
            order: of calls that have epochs of several channels; default: one of this channel's own.

        Raises:
            UsageError: on all ranks, if names differ or the limit is not positive on one of them.
        """
        group.gather(lambda: _check_timeout(name, timeout_seconds))
        self.group = group
        self.name = name
        self.launches = Launches()
        self.timeout_seconds = timeout_seconds
        self._order = order or CallOrder(group.device)
        self._number = group.next_channel()
        has_cores = len(group.hosts.local) <= len(os.sched_getaffinity(0))
        self._yields = _MANY_YIELDS if has_cores and not group.hosts.are_many else _FEW_YIELDS
        self._link = group.open_link(self._number) if group.hosts.are_many else None
        self.flags = group.allocate(f"{name}.flags", 3 * group.world_size * 8)
        self.state = torch.zeros(8, dtype=torch.int64, device=group.device)
        self.fault = self.state[_FAULT : _FAULT + 1]
        on_gpu = group.device.type == "cuda"
        self.control = torch.zeros(8, dtype=torch.int64, pin_memory=on_gpu)
        # The looks at a flag that a kernel takes in that time; 0 if no kernels run.
        poll_limit = 0
        if on_gpu or os.environ.get("TRITON_INTERPRET") == "1":
            poll_limit = math.ceil(timeout_seconds * polls_per_second(group.device))
        flags = self.flags.local.view(torch.int64)
        self.args = channel_args(
            flags, self.flags.addresses, self.state, self.control.data_ptr(), poll_limit, group.rank, group.world_size
        )
        self._control = self.control.numpy()
        self._fingerprint = self._unit = 0
        self._has_given_up = False
        self._assemblies = 0
        self._is_released = False
        if not on_gpu:
            self._state = self.state.numpy()
            self._peers = [rank for rank in group.hosts.local if rank != group.rank]
            self._flags_of = {rank: self.flags.peer(rank).view(torch.int64).numpy() for rank in group.hosts.local}
            self._flags = self._flags_of[group.rank]
            self._halves = self._flags.view(np.uint32)
            self._peer_flags = self.flags.addresses.tolist()
        self._abort = _abort(self._control)
        group.peer_monitor.on_gone(self._abort)
        if self._link is not None:
            # A rank of another host may not be waited for, but by ranks that are.
            group.peer_monitor.on_refused(self._number, self._abort)

    def release(self) -> None:
        """Let go of flags and connections before the group is closed.

        Every rank does so on its own, once no epoch or exchange can still be running on any rank; none may follow.
        """
        self._is_released = True
        self.group.release(self.flags)
        self.group.peer_monitor.forget(self._abort, self._number)
        if self._link is not None:
            self.group.close_link(self._link)

    def begin_call(self) -> None:
        """Begin a call of one or more epochs on the current stream, before anything of it is launched.

        All ranks launch their calls in the same order. On GPUs they run in it, whatever streams they are on, since a call on
        another stream than the one before waits for that stream. So does the replay of a CUDA graph that has calls, if
        this comes before it.

        Raises:
            UsageError: the group is closed, or the channel is released.
            CommunicationError: the channel has failed.
        """
        self.raise_failure()
        self._order.follow()

    def raise_failure(self) -> None:
        """As :meth:`raise_fault`, and for what keeps other ranks from making a call of the channel.

        Raises:
            UsageError: the group is closed, or the channel is released.
            CommunicationError: the channel has failed, here or on another rank.
        """
        if self.group.is_closed:
            raise UsageError(f"channel {self.name}: its group is closed; make a group and a workspace for further calls")
        if self._is_released:
            raise UsageError(f"channel {self.name}: its workspace is released; make another one for further calls")
        self.raise_fault()
        monitor = self.group.peer_monitor
        # Who goes on would take what that rank has sent for a call that failed there.
        if (peer := monitor.failed_peer(self._number)) is not None:
            raise CommunicationError(f"channel {self.name}: a call has failed on {monitor.describe(peer)}; see its message")

    def assemble(self) -> None:
        """Wait on the host until all ranks have come here, before what is collective there and has no time limit of its own.

        Raises:
            UsageError: the group is closed, or the channel is released.
            CommunicationError: the wait exceeded the limit, or a peer is lost, has failed, or makes another call.
        """
        monitor, deadline = self.group.peer_monitor, self._deadline()
        self.raise_failure()
        self._assemblies += 1
        monitor.say_assembled(self._number)

        def has_come(peer: int) -> bool:
            return peer == self.group.rank or monitor.assemblies(self._number, peer) >= self._assemblies

        def raise_failure() -> None:
            self.raise_failure()
            if (refused := monitor.refused_peer(self._number)) is not None:
                self._fail(Why.has_refused, refused, _READY)

        for peer in range(self.group.world_size):
            while not has_come(peer):
                is_gone, is_late = monitor.is_gone(peer), time.monotonic() > deadline
                time.sleep(_ASSEMBLY_LOOK_SECONDS)  # in which the monitor's thread hears of those that have come
                raise_failure()
                if (is_gone or is_late) and not has_come(peer):
                    self._fail(Why.is_gone if is_gone else Why.is_late, peer, _READY)
        # Others may have waited for this rank too long.
        raise_failure()

    def raise_fault(self) -> None:
        """Raise what has gone wrong, if anything. Reads host memory only: a kernel's fault shows when the kernel has ended.

        Raises:
            CommunicationError: names the channel, the epoch, this rank and the peer with its host. The channel cannot be used
                any more.
        """
        link = self._link
        if not self._control[_KIND] and not self.group.peer_monitor.has_bad_news and (link is None or link.failure is None):
            return
        fault = self._fault()
        if fault is None:
            return
        kind, peer, awaited = fault
        if kind == Why.is_late and not self._has_given_up:  # of other faults all ranks hear by themselves
            self._has_given_up = True
            self.group.peer_monitor.say_failed(self._number)
        monitor, describe = self.group.peer_monitor, self.group.peer_monitor.describe
        where, here, lost = f"channel {self.name}", describe(self.group.rank), monitor.lost_peer()
        if self._control[_KIND] and len(self.group.hosts.local) > 1:  # else it has no epochs
            where += f", epoch {self._control[_FAULT_EPOCH]}"
        if kind == Why.has_refused:
            raise CommunicationError(f"{where}: {describe(peer)} did not take part because of an error; see its message")
        if lost is not None:
            raise CommunicationError(f"{where}: {monitor.describe_loss(lost)}")
        if kind == Why.differs:
            raise CommunicationError(
                f"{where}: {here} and {describe(peer)} differ in shapes or settings; all ranks must make the same calls"
            )
        what = _AWAITED_FOR[awaited]
        if kind == Why.is_gone:
            ended = describe(self._ended(peer))
            raise CommunicationError(
                f"{where}: {ended} has ended while {here} waited for {describe(peer)} {what}; see its messages"
            )
        raise CommunicationError(
            f"{where}: {here} waited for {describe(peer)} {what}, longer than {self.timeout_seconds:g} s; "
            "that rank is stuck, slower than the limit allows, or makes other calls than this one"
        )

    def _fault(self) -> tuple[int, int, int] | None:
        """Return a fault, of :class:`Why`, whose rank it is, and what it was awaited for."""
        kind, peer, awaited = (int(self._control[word]) for word in (_KIND, _PEER, _AWAITED))
        lost, refused = self.group.peer_monitor.lost_peer(), self.group.peer_monitor.refused_peer(self._number)
        # The host waits for none of NCCL's messages.
        link = self._link if self.is_by_nccl else None
        # A rank that refuses ends because of that.
        if refused is not None and kind == 0 and (link is not None or refused == lost):
            return Why.has_refused, refused, _READY
        if refused is not None and kind == Why.is_gone and (refused == self._ended(peer) or self._link is not None):
            return Why.has_refused, refused, awaited
        if kind == 0 and link is not None and link.failure is not None:
            return link.failure.why, link.failure.rank, _ARRIVAL
        return None if kind == 0 and lost is None else (kind, peer, awaited)

    def _ended(self, peer: int) -> int:
        """Return the rank whose end has ended a wait for a peer."""
        return int(self._control[_LOST]) - 1 if self._control[_LOST] else peer

    def watch(self) -> None:
        """After the replay of a CUDA graph with exchanges: see that they end within the time limit."""
        if self._link is not None:
            self._link.watch(self._deadline())

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout_seconds

    def exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], *, fingerprint: int, beside: bool = True
    ) -> ChannelExchange:
        """Begin to exchange slices with ranks of other hosts. Collective: NCCL waits for ranks that have none, too.

        Exchanges are to be received in the order in which they begin.

        Args:
            sent: by rank; contiguous, and unchanged until the exchange is finished. NCCL takes them to any rank of the group.
            received: by rank; contiguous, of the size that the rank sends.
            fingerprint: must be equal on both sides, which TCP compares.
            beside: whether a GPU may go on meanwhile. Without, the exchange is to be completed at once, and is a little faster.

        Raises:
            CommunicationError: the channel has failed.
            UsageError: of messages by TCP, while a CUDA graph is captured.
        """
        tag = zlib.crc32(f"{self._number} {fingerprint}".encode()) >> 1
        return self._began(lambda link: link.exchange(without_empty(sent), without_empty(received), tag, beside=beside))

    @property
    def is_by_nccl(self) -> bool:
        """Whether slices go to other hosts as messages of NCCL, which has sums as well."""
        return self._link is not None and self._link.is_nccl

    def all_reduce(self, values: Tensor, *, beside: bool = True) -> ChannelExchange:
        """Begin to sum over all ranks, in place; all get the same bits. Of a channel that :attr:`is_by_nccl`.

        Args:
            values: contiguous, of the same size on all ranks, and used by nothing else until the exchange is finished.
            beside: as of :meth:`exchange`.

        Raises:
            CommunicationError: the channel has failed.
        """
        return self._began(lambda link: link.all_reduce(values, beside=beside))

    def _began(self, begin: Callable[[Link], Exchange]) -> ChannelExchange:
        self.raise_fault()
        link = self._link
        assert link is not None, f"channel {self.name}: all ranks are on one host"
        if not link.is_nccl and self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(f"channel {self.name}: a CUDA graph cannot have messages by TCP; call this outside of one")
        try:
            return ChannelExchange(self, begin(link))
        except LateRankError as late:
            self._fail(late.why, late.rank, _ARRIVAL)

    def run_epoch(self, store: Callable[[int, int], object], *, offset: int = 0, fingerprint: int = 0) -> None:
        """One epoch, steps 1 to 5, with the next rank of the host first and this one last. Host code on the CPU.

        Args:
            store: ``store(peer, offset)`` writes what belongs to a peer into its memory, where ``offset`` is the byte at which
                that peer receives.
            offset, fingerprint: as in :meth:`announce`.

        Raises:
            UsageError, CommunicationError: as the steps do.
        """
        self.announce(offset, fingerprint)
        for peer in self.group.hosts.local_rotation:
            store(peer, self.wait_ready(peer))
            self.signal(peer)
        self.wait_arrivals()

    def announce(self, offset: int = 0, fingerprint: int = 0) -> None:
        """Step 1: begin the next epoch, and tell all ranks where this one receives. Host code on the CPU.

        Args:
            offset: bytes from the beginning of the memory in which this rank receives; a multiple of 4096.
            fingerprint: must be equal on all ranks, such as a hash of the shapes; :meth:`wait_ready` compares.

        Raises:
            UsageError: the offset is not a multiple of 4096, or the group is not on the CPU.
            CommunicationError: the channel has failed.
        """
        if offset < 0 or offset % OFFSET_UNIT or offset // OFFSET_UNIT >= _REFUSED_OFFSET:
            raise UsageError(f"channel {self.name}: offset={offset}: must be a multiple of {OFFSET_UNIT}, below 16 TB")
        self._announce(offset // OFFSET_UNIT, fingerprint)

    def refuse(self) -> None:
        """Instead of step 1: tell all ranks that this one takes no part in the next epoch, because of an error of its own.

        They raise an error at once instead of waiting. The channel cannot be used any more; nor can any other of the
        group, where NCCL carries messages between hosts. On a GPU it waits for the current stream, hence only tells ranks of
        other hosts while a CUDA graph is captured.
        """
        if self.group.device.type == "cpu":
            self.group.peer_monitor.say_refused(self._number)
            self._announce(_REFUSED_OFFSET, 0)
        elif torch.cuda.is_current_stream_capturing():
            self.group.peer_monitor.say_refused(self._number)
            return
        else:
            self._order.follow()
            word = self.state[_EPOCH] + 1 << 32 | _REFUSED_OFFSET
            for peer in self.group.hosts.local:
                self.flags.peer(peer).view(torch.int64)[self.group.rank].copy_(word)
            torch.cuda.synchronize(self.group.device)
            # Not before: other hosts give up the messages of all calls, also of those before this one.
            self.group.peer_monitor.say_refused(self._number)
        self._record(Why.has_refused, self.group.rank, _READY)

    def wait_ready(self, peer: int) -> int:
        """Step 2: wait for a rank's announcement; returns its offset in bytes. Host code on the CPU.

        Raises:
            CommunicationError: the wait exceeded the limit, a peer is lost, or that rank refused or has another fingerprint.
        """
        if peer == self.group.rank:
            return self._unit * OFFSET_UNIT
        epoch = self._next_epoch()
        word = self._wait(peer, epoch << 32, peer, _READY, time.monotonic() + self.timeout_seconds)
        offset = word & 0xFFFFFFFF
        if offset == _REFUSED_OFFSET:
            self._fail(Why.has_refused, peer, _READY)
        if int(self._flags[2 * self.group.world_size + peer]) != self._fingerprint:
            self._fail(Why.differs, peer, _READY)
        return offset * OFFSET_UNIT

    def signal(self, peer: int) -> None:
        """Step 4: tell a rank that everything is stored in its memory; to all ranks, also this one. Host code on the CPU."""
        if peer != self.group.rank:
            self._set(peer, self.group.world_size + self.group.rank, self._next_epoch(), _ARRIVAL)

    def wait_arrivals(self) -> None:
        """Step 5: wait until the signals of all ranks are there, which completes the epoch. Host code on the CPU.

        Raises:
            CommunicationError: the wait exceeded the limit, or a peer is lost.
        """
        epoch = self._next_epoch()
        deadline = time.monotonic() + self.timeout_seconds
        for peer in self._peers:
            self._wait(self.group.world_size + peer, epoch, peer, _ARRIVAL, deadline)
        self._state[_EPOCH] = epoch

    def _announce(self, unit: int, fingerprint: int) -> None:
        if self.group.device.type != "cpu":
            raise UsageError(f"channel {self.name}: device={self.group.device}: only kernels can announce and wait on a GPU")
        self.raise_fault()
        self._fingerprint, self._unit = fingerprint, unit
        rank, world_size = self.group.rank, self.group.world_size
        for peer in self._peers:
            self._flags_of[peer][2 * world_size + rank] = fingerprint
            self._set(peer, rank, self._next_epoch() << 32 | unit, _READY)

    def _next_epoch(self) -> int:
        return int(self._state[_EPOCH]) + 1

    def _word(self, peer: int, index: int) -> int:
        return int(self._peer_flags[peer]) + 8 * index

    def _set(self, peer: int, index: int, value: int, awaited: int) -> None:
        """Set a word of a rank's flags, and wake the rank if it waits for it."""
        word = self._word(peer, index)
        _store_release(word, value)
        wake(word + 4 * _HALF[awaited])

    def _wait(self, index: int, value: int, peer: int, awaited: int, deadline: float) -> int:
        """Wait until a word of this rank's flags is at least ``value``; returns it."""
        looks = 0
        half = 2 * index + _HALF[awaited]
        peer_monitor = self.group.peer_monitor
        while True:
            # Asked before the look: a peer may have signalled and then ended.
            gone = peer_monitor.lost_peer() is not None or peer_monitor.has_left(peer)
            gone |= self._link is not None and peer_monitor.refused_peer(self._number) is not None
            is_elsewhere = peer_monitor.assemblies(self._number, peer) > self._assemblies
            expired = time.monotonic() > deadline
            seen = int(self._halves[half])
            # The plain look is cheap, and the acquiring one orders what follows after it.
            if self._flags[index] >= value:
                return _load_acquire(self._word(self.group.rank, index))
            if gone or expired:
                self._fail(Why.is_gone if gone else Why.is_late, peer, awaited)
            if is_elsewhere:
                peer_monitor.say_failed(self._number)
                self._fail(Why.differs, peer, awaited)
            looks += 1
            if looks < self._yields:
                os.sched_yield()
            else:
                wait_for_change(self._word(self.group.rank, 0) + 4 * half, seen, _LOOK_SECONDS)

    def _record(self, kind: int, peer: int, awaited: int) -> None:
        epoch = int(self.state[_EPOCH]) + 1
        self._control[_WAITING : _AWAITED + 1] = (self.group.rank, peer, epoch, awaited)
        self._control[_KIND] = kind
        self.state[_FAULT] = 1

    def _fail(self, kind: int, peer: int, awaited: int) -> NoReturn:
        self._record(kind, peer, awaited)
        self.raise_fault()
        raise AssertionError("unreachable: a fault is recorded")


class ChannelExchange:
    """Slices that are on their way between hosts; see :meth:`Channel.exchange`."""

    def __init__(self, channel: Channel, exchange: Exchange) -> None:
        self._channel, self._exchange = channel, exchange

    def arrivals(self) -> Iterator[tuple[int, Tensor]]:
        """The ranks and their slices as they arrive. On GPUs the current stream waits for them, not the host.

        Raises:
            CommunicationError: the wait exceeded the limit, or a peer is lost, has refused, has left or makes other calls.
        """
        try:
            yield from self._exchange.arrivals(self._channel._deadline())
        except LateRankError as late:
            self._fail(late, _ARRIVAL)

    def finish(self) -> None:
        """Wait until the slices that were sent may be changed.

        Raises:
            CommunicationError: as :meth:`arrivals`.
        """
        try:
            self._exchange.finish(self._channel._deadline())
        except LateRankError as late:
            self._fail(late, _TAKEN)

    def wait_arrivals(self) -> None:
        """Wait until all has arrived where it belongs. Raises as :meth:`arrivals`."""
        for _ in self.arrivals():
            pass

    def complete(self) -> None:
        """Wait for all that arrives, and until what was sent may be changed. Raises as :meth:`arrivals`."""
        self.wait_arrivals()
        self.finish()

    def _fail(self, late: LateRankError, awaited: int) -> NoReturn:
        self._channel._fail(late.why, late.rank, awaited)


@contextmanager
def abort_peers_on_error(channel: Channel) -> Iterator[None]:
    """Around the checks of a call: a rank whose inputs are wrong, or no tensors, tells the others, which would wait for it."""
    try:
        yield
    except CommunicationError:
        raise
    except Exception:
        channel.refuse()
        raise


def _check_timeout(name: str, timeout_seconds: float) -> None:
    if not timeout_seconds > 0:
        raise UsageError(f"channel {name}: timeout_seconds={timeout_seconds}: must be positive")


def _abort(control: NDArray[np.int64]) -> Callable[[int], None]:
    """Return a function that ends the waits of kernels when a peer is gone. It holds the words, not the channel."""

    def abort(rank: int) -> None:
        control[_LOST] = rank + 1

    return abort


# Plain stores of Python become visible in order on x86, but not on ARM, where the data may follow the flag. The functions with
# which Triton's interpreter carries out `tl.atomic_*` are real atomic operations on any address, with a memory order.
_ONE = np.ones(1, dtype=bool)


def _store_release(address: int, value: int) -> None:
    host_atomics.atomic_rmw(
        host_atomics.RMW_OP.XCHG,
        np.array([address], dtype=np.uint64),
        np.array([value], dtype=np.int64),
        _ONE,
        host_atomics.MEM_SEMANTIC.RELEASE,
    )


def _load_acquire(address: int) -> int:
    before = host_atomics.atomic_rmw(
        host_atomics.RMW_OP.ADD,
        np.array([address], dtype=np.uint64),
        np.zeros(1, dtype=np.int64),
        _ONE,
        host_atomics.MEM_SEMANTIC.ACQUIRE,
    )
    return int(before[0])
