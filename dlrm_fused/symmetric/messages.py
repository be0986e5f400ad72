"""Slices to ranks on other hosts, which stores do not reach, as messages.

A slice is contiguous and finished when it is sent; both sides know its size. Slices travel while later ones are computed: the
sender goes on at once, and the receiver waits for what it needs next.

Between CPU processes messages go by TCP, :mod:`~dlrm_fused.symmetric.tcp`, between GPUs by NCCL if the process group has it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.compat.torch import (
    current_stream,
    default_store,
    let_captures_be,
    nccl_backend,
    sleep_on_device,
)
from dlrm_fused.symmetric import device
from dlrm_fused.symmetric.peer_monitor import PeerMonitor

logger = logging.getLogger("dlrm_fused")

# The time limit of NCCL's own watchdog, which only logs it.
_NCCL_TIMEOUT = timedelta(minutes=10)
# Between two looks at an exchange that is watched.
_LOOK_SECONDS = 0.02
# From a refusal to the end of NCCL's messages, in which those of earlier calls arrive.
_REFUSAL_SECONDS = 2.0
# For ranks to say how many exchanges they have begun.
_ANSWER_SECONDS = 2.0
# For a call of NCCL to return before the communicator is aborted.
_CALL_SECONDS = 1.0
# NCCL's kernels have it before what the current stream computes next. Programs of products and lookups may hold all
# multiprocessors until they end, and a message beside them would begin only then.
# (``torch.distributed._symmetric_memory`` gives products a late start, too.)
_HEAD_START_SECONDS = 1e-6


class Why(IntEnum):
    """Why a rank is waited for in vain: the kinds of faults that kernels report, too."""

    is_late = device.LIMIT_EXCEEDED.value
    is_gone = device.ABORTED.value  # lost, or has left
    has_refused = device.REFUSED.value  # to take part, because of an error of its own
    differs = device.MISMATCH.value  # in its calls


class LateRankError(Exception):
    """A rank is waited for in vain.

    Attributes:
        rank: the one at fault, which may be another than the one that was waited for.
    """

    def __init__(self, rank: int, why: Why) -> None:
        super().__init__(rank, why)
        self.rank, self.why = rank, why


class Exchange(ABC):
    """Slices that are on their way."""

    @abstractmethod
    def arrivals(self, deadline: float) -> Iterator[tuple[int, Tensor]]:
        """The ranks and their slices, one after the other as they arrive. On GPUs the current stream waits, not the host.

        Args:
            deadline: of :func:`time.monotonic`.

        Raises:
            LateRankError: if a slice does not arrive.
        """

    @abstractmethod
    def finish(self, deadline: float) -> None:
        """Wait until what was sent may be changed.

        Raises:
            LateRankError: if a rank takes nothing.
        """


class Link(ABC):
    """A channel that transfers slices. One thread at a time begins exchanges; all ranks begin all of them, in the same order.

    Attributes:
        is_nccl: whether messages are NCCL's: a CUDA graph can have them, they can go to this rank, too, and there are sums.
        failure: what ended the exchanges that nobody waits for on the host; None as long as nothing has.
    """

    is_nccl = False
    failure: LateRankError | None = None

    @abstractmethod
    def exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int, *, beside: bool = True
    ) -> Exchange:
        """Begin to send and to receive. Collective: a rank that has nothing to send or receive begins it as well, since NCCL's
        All-to-All waits for all ranks. Slices from one rank to another arrive in the order in which they are sent.

        Args:
            sent: by rank; contiguous, not empty, and unchanged until :meth:`Exchange.finish`.
            received: by rank; contiguous, of the size that the rank sends.
            tag: 32 bits, equal on both sides, which TCP compares.
            beside: whether a GPU may go on meanwhile; without, NCCL is in the current stream, and a little faster.
        """

    def all_reduce(self, values: Tensor, *, beside: bool = True) -> Exchange:
        """Begin to sum values over all ranks, in place; ranks have the same bits. By NCCL alone.

        Args:
            values: contiguous, of the same size on all ranks, and used by nothing else until :meth:`Exchange.finish`.
            beside: as of :meth:`exchange`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sums")

    def watch(self, deadline: float) -> None:  # noqa: B027
        """End the exchanges that the current stream has begun if they are not done by then, of :func:`time.monotonic`.

        For those of a CUDA graph; the others are watched from their start.
        """

    def close(self) -> None:  # noqa: B027
        """Let go of connections that only this link has; no exchange is running, or all have failed."""


class NcclLink(Link):
    """Messages between GPUs, of all channels: NCCL keeps the order of its launches. Making one is collective.

    They have a backend of their own, so that they neither wait for other collectives nor are taken for theirs. NCCL's kernels
    wait without end for a rank that does not take part; a thread looks after them, and aborts them all. Until then it asks for
    events alone: while another thread waits for a copy to pageable memory, as ``tensor.cpu()`` does, the driver lets no other
    call pass, not even one that lets go of an event. Hence events are kept, and serve later exchanges.

    Args:
        process_group: its ranks are those of the messages.
        device: this rank's GPU, with an index.
        name: the same on all ranks, and of no other messages.
    """

    is_nccl = True

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, peer_monitor: PeerMonitor, name: str) -> None:
        store = default_store()
        self._device, self._is_closed = device, False
        self._nothing = torch.empty(0, device=device)
        self._rank, self._size, self._monitor = process_group.rank(), process_group.size(), peer_monitor
        self._nccl: Any = nccl_backend(
            dist.PrefixStore(f"dlrm_fused messages {name}", store), self._rank, self._size, _NCCL_TIMEOUT
        )
        # All ranks connect now: pairs, and the rings and trees of sums. In the first call of each the host would wait for ranks
        # that have not come, without end, and nothing would watch it.
        self._nccl.alltoall([self._nothing] * self._size, [self._nothing] * self._size).wait()
        self._nccl.allreduce([torch.zeros(1, device=device)]).wait()
        self._count = 0  # of exchanges that this rank has begun
        peer_monitor.answer_with(lambda: self._count)
        self._gone: LateRankError | None = None
        self._calls = threading.Lock()
        peer_monitor.on_gone(self._end)
        self._watched: queue.SimpleQueue[tuple[torch.cuda.Event, float] | None] = queue.SimpleQueue()
        self._events: deque[torch.cuda.Event] = deque()  # that nobody waits for
        self._thread = threading.Thread(target=self._watch_all, name="dlrm_fused messages", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int, *, beside: bool = True
    ) -> Exchange:
        self._count += 1
        # One call takes the host less than one for each message. Torch has NCCL send what is empty, too (pytorch/pytorch,
        # torch/csrc/cuda/nccl.cpp, _nccl_should_send_recv): a rank that left out this call would keep the others waiting.
        to, from_ = [self._nothing] * self._size, [self._nothing] * self._size
        for rank, slice_ in sent.items():
            to[rank] = slice_
        for rank, slice_ in received.items():
            from_[rank] = slice_
        with self.call():
            work = self._nccl.alltoall(from_, to, _options(dist.AllToAllOptions, beside))
        return self._begun(work, sent, received, beside)

    def all_reduce(self, values: Tensor, *, beside: bool = True) -> Exchange:
        self._count += 1
        with self.call():
            work = self._nccl.allreduce([values], _options(dist.AllreduceOptions, beside))
        return self._begun(work, {self._rank: values}, {}, beside)

    def _begun(self, work: dist.Work, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], beside: bool) -> Exchange:
        if beside:
            sleep_on_device(_HEAD_START_SECONDS)
        return _NcclExchange(self, work if beside else None, sent, received)

    def watch(self, deadline: float) -> None:
        self._count += 1
        self.watch_begun(deadline)

    def watch_begun(self, deadline: float) -> None:
        """As :meth:`watch`, of an exchange that :meth:`exchange` or :meth:`all_reduce` has begun."""
        event = self._events.popleft() if self._events else torch.cuda.Event()
        event.record(current_stream(self._device))
        self._watched.put((event, deadline))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._is_closed = True
        self._watched.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call of NCCL: nobody aborts its communicator meanwhile, since the call would go on in memory that is free.

        Raises:
            LateRankError: as :meth:`names_failure`; also if the messages have been aborted before.
        """
        self._raise_failure()  # who holds the lock for an abort may need long for it
        with self.names_failure(), self._calls:
            self._raise_failure()
            yield

    def _raise_failure(self) -> None:
        if failure := self.failure or self._gone:
            raise failure

    @contextmanager
    def names_failure(self) -> Iterator[None]:
        """Around what fails by NCCL.

        Raises:
            LateRankError: in place of NCCL's error: why the messages have been aborted, or whose loss NCCL has noticed.
        """
        try:
            yield
        except RuntimeError as error:
            failure = self.failure or self._gone
            if failure is None and (lost := self._monitor.hear_of_loss(error)) is not None:  # NCCL may know of it first
                failure = LateRankError(lost, Why.is_gone)
            if failure is None:
                raise
            raise failure from error

    def _end(self, rank: int) -> None:
        """A rank is gone. Whether it is waited for, or has left in good order at the end, the thread knows."""
        self._gone = self._gone or LateRankError(rank, Why.is_gone)
        # Not here: the driver may hold it back until kernels have ended that wait for what the monitor tells next.
        threading.Thread(target=self._abort, name="dlrm_fused abort", daemon=True).start()

    def _abort(self) -> None:
        """End all messages."""
        # A call that does not return is stuck in the driver: kernels of NCCL that wait for a rank fill its queue.
        has_ended = self._calls.acquire(timeout=_CALL_SECONDS)
        try:
            self._nccl.abort()
        finally:
            if has_ended:
                self._calls.release()

    def _watch_all(self) -> None:
        if self._device.type == "cuda":
            let_captures_be()
        while self.failure is None and (watched := self._watched.get()) is not None:
            try:
                self.failure = self._wait(*watched)
            except RuntimeError:  # of the device, on which nothing can be waited for any more
                logger.exception("messages to other hosts are given up")
                self._abort()
                return
            self._events.append(watched[0])
        if self.failure is not None:
            self._abort()

    def _wait(self, done: torch.cuda.Event, deadline: float) -> LateRankError | None:
        """Wait for an exchange; return why it has to be ended."""
        refused_at = None
        while not self._is_closed and not done.query():
            time.sleep(_LOOK_SECONDS)
            now, refused = time.monotonic(), self._monitor.any_refused()
            if refused is not None:
                refused_at = refused_at or now
                if now > refused_at + _REFUSAL_SECONDS:
                    return LateRankError(refused, Why.has_refused)
            if now > deadline:
                return LateRankError(self._late_rank(), Why.is_late)
        return self._gone  # which has aborted it

    def _late_rank(self) -> int:
        """Return the rank that has begun the fewest exchanges, first of all one that does not say how many."""
        said = self._monitor.ask_begun(_ANSWER_SECONDS)
        others = [(self._rank + shift) % self._size for shift in range(1, self._size)]
        return min(others, key=lambda rank: said.get(rank, -1))


@functools.cache
def _options(kind: Callable[[], Any], beside: bool) -> Any:
    options = kind()
    options.asyncOp = beside
    return options


class _NcclExchange(Exchange):
    """Args:
    work: what the current stream has to wait for; None if NCCL is in it.
    """

    def __init__(
        self, link: NcclLink, work: dist.Work | None, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> None:
        self._link, self._work, self._received, self._kept = link, work, received, sent
        self._is_finished = False

    def arrivals(self, deadline: float) -> Iterator[tuple[int, Tensor]]:
        self.finish(deadline)
        yield from self._received.items()

    def finish(self, deadline: float) -> None:
        if self._is_finished:
            return
        if self._work is not None:
            with self._link.names_failure():
                self._work.wait()
        if not torch.cuda.is_current_stream_capturing():
            self._link.watch_begun(deadline)
        self._is_finished, self._work, self._kept = True, None, {}


def raise_fault(monitor: PeerMonitor, rank: int, channel: int) -> None:
    """Raise LateRankError if it is known that a rank is waited for in vain."""
    # A rank that refused ends because of it, and others because of that.
    refused = monitor.refused_peer(channel)
    if refused is not None:
        raise LateRankError(refused, Why.has_refused)
    if monitor.lost_peer() is not None:
        raise LateRankError(rank, Why.is_gone)
    # A rank that has just left does not count: what it sent before may still be on its way.
    if monitor.is_gone(rank):
        raise LateRankError(rank, Why.is_gone)


def without_empty(slices: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Empty slices are neither sent nor waited for."""
    return {rank: slice_ for rank, slice_ in slices.items() if slice_.numel()}
