"""Slices to ranks on other hosts, which stores do not reach: messages of the process group's own backend, gloo or NCCL.

A slice is contiguous and finished when it is sent; both sides know its size. Slices travel while later ones are computed: the
sender goes on at once, and the receiver waits for what it needs next.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.compat.torch import default_store
from dlrm_fused.symmetric.calls import Calls
from dlrm_fused.symmetric.peer_monitor import PeerMonitor

# Between two looks whether a peer that is waited for is gone.
_LOOK_SECONDS = 0.05
# Waited in vain, before the sender is asked whether it makes the same call.
_ASK_SECONDS = 1.0
# Of NCCL's own watchdog, which ends the process.
_NCCL_TIMEOUT = timedelta(minutes=10)
# Longer than the limit of any channel, which ends a wait.
_GLOO_TIMEOUT = timedelta(days=365)


class Why(Enum):
    """Why a rank is waited for in vain."""

    is_gone = auto()  # lost, or has left
    has_refused = auto()  # to take part, because of an error of its own
    differs = auto()  # in its calls
    is_late = auto()


class LateRankError(Exception):
    """A rank is waited for in vain.

    Attributes:
        rank: the one at fault, which may be another than the one that was waited for.
        why: it is not there.
    """

    def __init__(self, rank: int, why: Why) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


class Messages:
    """What takes slices between the ranks of a group. Making one is collective.

    Messages have a backend of their own, so that they neither wait for other collectives nor are taken for theirs.

    Args:
        process_group: its ranks are those of the messages.
        device: of the slices.
        name: the same on all ranks, and of no other messages.

    Attributes:
        backend: ``gloo`` or ``nccl``.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, peer_monitor: PeerMonitor, name: str) -> None:
        self._peer_monitor = peer_monitor
        self._calls = Calls(peer_monitor)
        self.backend = "nccl" if device.type == "cuda" and "nccl" in dist.get_backend_config(process_group) else "gloo"
        store = dist.PrefixStore(f"dlrm_fused messages {name}", default_store())
        rank, world_size = process_group.rank(), process_group.size()
        self._backend: Any
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NCCL_TIMEOUT
            self._backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
            # Ends kernels of NCCL that wait for a rank that is gone.
            peer_monitor.on_gone(lambda _: self._backend.abort())
        else:
            self._backend = dist.ProcessGroupGloo(store, rank, world_size, _GLOO_TIMEOUT)

    def exchange(
        self, channel: int, tag: int, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], waiter: Waiter
    ) -> Exchange:
        """Begin to send and to receive. Slices from one rank to another arrive in the order in which they are sent.

        Args:
            channel: number of the channel whose exchanges follow each other in the same order on all ranks.
            tag: 31 bits, equal on both sides; with gloo, ranks with different tags hear of that after a second.
            sent: by rank; contiguous, and unchanged until :meth:`Exchange.finish`. Empty slices are not sent.
            received: by rank; contiguous, of the size that the rank sends.
            waiter: of one thread's exchanges, which wait for one after the other.
        """
        sent = {rank: slice_ for rank, slice_ in sent.items() if slice_.numel()}
        received = {rank: slice_ for rank, slice_ in received.items() if slice_.numel()}
        if self.backend == "nccl":
            return _NcclExchange(self._backend, sent, received)
        numbers = self._calls.begin(channel, tag, sent.keys(), received.keys())
        ask = {rank: partial(self._peer_monitor.say_expected, rank, channel, number, tag) for rank, number in numbers.items()}
        return _GlooExchange(self._backend, waiter, self._peer_monitor, ask, channel, tag, sent, received)

    def close(self) -> None:
        """Let go of the connections."""
        self._backend = None


class Exchange(ABC):
    """Slices that are on their way."""

    def __init__(self, received: Mapping[int, Tensor]) -> None:
        self._received = received

    def arrivals(self, deadline: float) -> Iterator[tuple[int, Tensor]]:
        """The ranks and their slices, one after the other as they arrive. On GPUs the current stream waits, not the host.

        Args:
            deadline: of :func:`time.monotonic`.

        Raises:
            LateRankError: if a slice does not arrive.
        """
        for rank, slice_ in self._received.items():
            self._await_arrival(rank, deadline)
            yield rank, slice_

    @abstractmethod
    def _await_arrival(self, rank: int, deadline: float) -> None: ...

    @abstractmethod
    def finish(self, deadline: float) -> None:
        """Wait until what was sent may be changed.

        Raises:
            LateRankError: if a rank takes nothing.
        """


class _NcclExchange(Exchange):
    def __init__(self, backend: Any, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        super().__init__(received)
        self._work, self._kept = None, sent
        if sent or received:
            # One launch, whose order is of no importance.
            backend._start_coalescing()
            for rank, slice_ in sent.items():
                backend.send([slice_], rank, 0)
            for rank, slice_ in received.items():
                backend.recv([slice_], rank, 0)
            self._work = backend._end_coalescing()

    def _await_arrival(self, rank: int, deadline: float) -> None:
        self.finish(deadline)

    def finish(self, deadline: float) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


class _GlooExchange(Exchange):
    """Slices of GPUs go through the memory of their hosts."""

    def __init__(
        self,
        backend: Any,
        waiter: Waiter,
        peer_monitor: PeerMonitor,
        ask: Mapping[int, Callable[[], None]],
        channel: int,
        tag: int,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
    ) -> None:
        super().__init__(received)
        self._peer_monitor, self._ask, self._channel = peer_monitor, dict(ask), channel
        self._on_host = {rank: _beside(slice_) for rank, slice_ in received.items()}
        self._kept = {rank: slice_.cpu() for rank, slice_ in sent.items()}
        # One wait for all slices: each of its own would take the two threads longer than the slices take.
        self._arrived = waiter.begin(self._on_host, lambda slice_, rank: backend.recv([slice_], rank, tag))
        self._left = waiter.begin(self._kept, lambda slice_, rank: backend.send([slice_], rank, tag))

    def _await_arrival(self, rank: int, deadline: float) -> None:
        self._wait(self._arrived, deadline)
        on_host, slice_ = self._on_host[rank], self._received[rank]
        if on_host is not slice_:
            slice_.copy_(on_host)

    def finish(self, deadline: float) -> None:
        self._wait(self._left, deadline)
        self._kept = {}

    def _wait(self, works: _Wait, deadline: float) -> None:
        ask_at = time.monotonic() + _ASK_SECONDS
        while not works.wait(_LOOK_SECONDS):
            rank, now = works.rank, time.monotonic()
            self._raise_fault(rank)
            if now > deadline:
                raise LateRankError(rank, Why.is_late)
            if now > ask_at and rank in self._ask:
                self._ask.pop(rank)()
        if not works.are_well:
            self._peer_monitor.hear_of_loss()
            self._raise_fault(works.rank)
            raise LateRankError(works.rank, Why.is_gone)

    def _raise_fault(self, rank: int) -> None:
        """Raise if that rank is waited for in vain."""
        monitor = self._peer_monitor
        if monitor.lost_peer() is not None:
            raise LateRankError(rank, Why.is_gone)
        # Before who has left: other ranks end because of it.
        refused = monitor.refused_peer(self._channel)
        if refused is not None:
            raise LateRankError(refused, Why.has_refused)
        # Not when a rank has just left: what it sent before may still be on its way.
        if monitor.is_gone(rank):
            raise LateRankError(rank, Why.is_gone)
        if monitor.makes_other_calls(rank, self._channel):
            raise LateRankError(rank, Why.differs)


def _beside(slice_: Tensor) -> Tensor:
    """Host memory for a slice: its own, if it is there."""
    return slice_ if slice_.device.type == "cpu" else torch.empty(slice_.shape, dtype=slice_.dtype, pin_memory=True)


class _Wait(threading.Event):
    """Set when works have ended; ``are_well`` is whether all succeeded, ``rank`` whose is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.works: dict[int, dist.Work] = {}
        self.rank, self.are_well = -1, True

    def run(self) -> None:
        """Wait."""
        for self.rank, work in self.works.items():  # noqa: B020 - read by who waits for this
            try:
                work.wait()
            except RuntimeError:  # a connection that broke
                self.are_well = False
                break
        self.works = {}
        self.set()


class Waiter:
    """Waits for works of gloo in a thread: nothing ends such a wait, and whether a work is done cannot be asked."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Wait | None] | None = None

    def begin(self, slices: Mapping[int, Tensor], post: Callable[[Tensor, int], dist.Work]) -> _Wait:
        """Post slices, by rank, and wait for the works one after the other, after those of earlier calls."""
        wait = _Wait()
        try:
            for wait.rank, slice_ in slices.items():
                wait.works[wait.rank] = post(slice_, wait.rank)
        except RuntimeError:  # a connection that broke before
            wait.are_well, wait.works = False, {}
        if not wait.works:
            wait.set()
            return wait
        if self._queue is None:
            self._queue = queue.SimpleQueue()
            threading.Thread(target=_run_all, args=(self._queue,), name="dlrm_fused messages", daemon=True).start()
        self._queue.put(wait)
        return wait

    def __del__(self) -> None:
        if self._queue is not None:
            self._queue.put(None)


def _run_all(waits: queue.SimpleQueue[_Wait | None]) -> None:
    while (wait := waits.get()) is not None:
        wait.run()
        del wait
