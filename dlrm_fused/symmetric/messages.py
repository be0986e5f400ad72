"""Slices to ranks on other hosts, which stores do not reach, as messages.

A slice is contiguous and finished when it is sent; both sides know its size. Slices travel while later ones are computed: the
sender goes on at once, and the receiver waits for what it needs next.

Between CPU processes messages go by TCP, :mod:`~dlrm_fused.symmetric.tcp`, between GPUs by NCCL if the process group has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dlrm_fused.compat.torch import coalesced, default_store, nccl_backend
from dlrm_fused.symmetric import device
from dlrm_fused.symmetric.peer_monitor import PeerMonitor

# The time limit of NCCL's own watchdog, which ends the process.
_NCCL_TIMEOUT = timedelta(minutes=10)


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
    """A channel that transfers slices. One thread at a time begins its exchanges, in the same order on all ranks.

    Attributes:
        can_be_captured: whether a CUDA graph can have exchanges.
    """

    can_be_captured = False

    @abstractmethod
    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int) -> Exchange:
        """Begin to send and to receive. Slices from one rank to another arrive in the order in which they are sent.

        Args:
            sent: by rank; contiguous, not empty, and unchanged until :meth:`Exchange.finish`.
            received: by rank; contiguous, of the size that the rank sends.
            tag: 32 bits, equal on both sides, which TCP compares.
        """

    def close(self) -> None:  # noqa: B027
        """Let go of connections that only this link has; no exchange is running, or all have failed."""


class NcclLink(Link):
    """Messages between GPUs, of all channels: NCCL keeps the order of its launches. Making one is collective.

    They have a backend of their own, so that they neither wait for other collectives nor are taken for theirs.

    Args:
        process_group: its ranks are those of the messages.
        name: the same on all ranks, and of no other messages.
    """

    can_be_captured = True

    def __init__(self, process_group: dist.ProcessGroup, peer_monitor: PeerMonitor, name: str) -> None:
        store = dist.PrefixStore(f"dlrm_fused messages {name}", default_store())
        self._nccl: Any = nccl_backend(store, process_group.rank(), process_group.size(), _NCCL_TIMEOUT)
        nccl = self._nccl
        # Ends kernels of NCCL that wait for a rank that is gone.
        peer_monitor.on_gone(lambda _: nccl.abort())

    def exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int) -> Exchange:
        return _NcclExchange(self._nccl, sent, received)


class _NcclExchange(Exchange):
    def __init__(self, backend: Any, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        self._received, self._kept = received, sent
        self._work: dist.Work | None = None
        if sent or received:
            # All are one launch, in which the order does not matter.
            with coalesced(backend) as works:
                for rank, slice_ in sent.items():
                    backend.send([slice_], rank, 0)
                for rank, slice_ in received.items():
                    backend.recv([slice_], rank, 0)
            (self._work,) = works

    def arrivals(self, deadline: float) -> Iterator[tuple[int, Tensor]]:
        self.finish(deadline)
        yield from self._received.items()

    def finish(self, deadline: float) -> None:
        if self._work is not None:
            self._work.wait()
        self._work, self._kept = None, {}


def raise_fault(monitor: PeerMonitor, rank: int, channel: int) -> None:
    """Raise LateRankError if it is known that a rank is waited for in vain."""
    if monitor.lost_peer() is not None:
        raise LateRankError(rank, Why.is_gone)
    # A rank that refused is named before ranks that have left, which end because of it.
    refused = monitor.refused_peer(channel)
    if refused is not None:
        raise LateRankError(refused, Why.has_refused)
    # A rank that has just left does not count: what it sent before may still be on its way.
    if monitor.is_gone(rank):
        raise LateRankError(rank, Why.is_gone)


def without_empty(slices: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Empty slices are neither sent nor waited for."""
    return {rank: slice_ for rank, slice_ in slices.items() if slice_.numel()}
