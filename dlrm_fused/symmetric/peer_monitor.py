"""Notices that the process of another rank is gone.

Every two ranks hold a TCP connection on which next to nothing is sent. When a process ends, however it ends, the kernel of its
host closes the connection, and the peers know at once; a process that is merely slow, or holds its interpreter's lock for
minutes, is not taken for lost. A host that vanishes is noticed by TCP keepalive, in about 20 seconds; all connections of this
process to it are then ended, so that collectives of gloo do not wait for it either.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from dlrm_fused.errors import CommunicationError
from dlrm_fused.symmetric.connections import Address, connect_ranks, hang_up

logger = logging.getLogger("dlrm_fused")

_GRACE_SECONDS = 5.0
# After a connection broke, a monitor hears in this time which rank is gone.
_HEARSAY_SECONDS = 2.0
_LOOK_SECONDS = 0.05
_KEEPALIVE_IDLE_SECONDS = 5
_KEEPALIVE_PROBES = 3
# In NCCL's errors when a host or its network has failed. (ncclRemoteError and ncclSystemError, by ncclGetErrorString.)
_NETWORK_ERRORS = "remote process exited", "unhandled system error"
_SILENCE_SECONDS = _KEEPALIVE_IDLE_SECONDS * (1 + _KEEPALIVE_PROBES)
# (kind, rank, channel), of which not all kinds need all. A rank says goodbye before it leaves in good order, and tells others
# of a loss that it has noticed. So when it then ends because of that loss, however abruptly, its peers have already read which
# rank was the first. A rank that takes no part in an exchange because of an error of its own tells those whom its flags do not
# reach; and one that makes no more calls, since a call has failed there, tells all. So does one that waits for all on the host.
# One that waits for messages in vain asks all how many they have begun; its number takes the place of the channel's.
_MESSAGE = struct.Struct("!iiq")
_GOODBYE = 0
_LOST = 1
_REFUSED = 2
_FAILED = 3
_ASSEMBLED = 4
_ASKED = 5
_BEGUN = 6


class PeerMonitor:
    """Knows which ranks are gone; one per symmetric group, with a daemon thread that sleeps until something happens."""

    def __init__(self, rank: int, world_size: int, gather: Callable[[Callable[[], Any]], list[Any]]) -> None:
        """Collective.

        Args:
            gather: as :meth:`~dlrm_fused.symmetric.memory.SymmetricGroup.gather`.

        Raises:
            CommunicationError: on all ranks, if two of them cannot connect.
        """
        self._rank = rank
        self._lost: int | None = None
        self._left: set[int] = set()
        self._refused: dict[int, int] = {}  # by channel, the first rank
        self._failed: dict[int, int] = {}  # likewise
        self._assemblies: Counter[tuple[int, int]] = Counter()  # by channel and rank
        self._count_begun: Callable[[], int] = int
        self._begun: dict[int, int] = {}  # by rank, as they answered
        self._gone: set[int] = set()  # that were told to callbacks
        self._gone_callbacks: list[Callable[[int], None]] = []
        self._refused_callbacks: dict[int, Callable[[int], None]] = {}  # by channel
        self._lock = threading.Lock()
        self._closing = False
        self._peers: Mapping[int, socket.socket] = {}
        self._thread: threading.Thread | None = None
        if world_size == 1:
            self._addresses = [Address.of_this_process()]
            return
        others = [peer for peer in range(world_size) if peer != rank]
        self._addresses, self._peers = connect_ranks(rank, others, gather)
        for connection in self._peers.values():
            _set_up(connection)
        self._wake_reader, self._wake = socket.socketpair()
        _monitors.add(self)
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="dlrm_fused peer monitor", daemon=True)
        self._thread.start()

    def lost_peer(self) -> int | None:
        """Return the first rank whose process was lost; None if there is none. Ranks that closed their group are not lost."""
        return self._lost

    def hear_of_loss(self, error: Exception | None = None) -> int | None:
        """Like :meth:`lost_peer`, for who has met a broken connection: waits until the monitor hears which rank is gone, two
        seconds at most; after an error by which NCCL says that a host may be cut off, until TCP notices that, too."""
        found = _hear_of_loss([self], error)
        return None if found is None else found[1]

    def has_left(self, rank: int) -> bool:
        """Return whether that rank has closed its group, in good order."""
        return rank in self._left

    def is_gone(self, rank: int) -> bool:
        """Return whether it is of no use to wait for that rank any more, see :meth:`on_gone`."""
        return rank in self._gone

    def refused_peer(self, channel: int) -> int | None:
        """Return the first rank that has refused to take part in an exchange of a channel; None if there was none."""
        return self._refused.get(channel)

    @property
    def has_other_hosts(self) -> bool:
        """Whether some ranks are on other hosts."""
        return any(address.host != self._addresses[self._rank].host for address in self._addresses)

    @property
    def has_bad_news(self) -> bool:
        """Whether a rank is lost, or has refused."""
        return self._lost is not None or bool(self._refused)

    def on_refused(self, channel: int, callback: Callable[[int], None]) -> None:
        """Call ``callback(rank)`` when a rank refuses to take part in an exchange of a channel."""
        self._refused_callbacks[channel] = callback

    def any_refused(self) -> int | None:
        """Return the first rank that has refused to take part in an exchange of some channel; None if there was none."""
        return next(iter(self._refused.values()), None)

    def say_refused(self, channel: int) -> None:
        """Tell all ranks that this one refuses to take part in an exchange of a channel."""
        self._tell(_REFUSED, self._rank, self._peers, channel)

    def say_failed(self, channel: int) -> None:
        """Tell all ranks that this one makes no more calls of a channel, since one has failed."""
        self._tell(_FAILED, self._rank, self._peers, channel)

    def failed_peer(self, channel: int) -> int | None:
        """Return the first rank that makes no more calls of a channel, since one has failed there; None if there was none."""
        return self._failed.get(channel)

    def say_assembled(self, channel: int) -> None:
        """Tell all ranks that this one waits for all of them, on the host, in a call of a channel."""
        self._tell(_ASSEMBLED, self._rank, self._peers, channel)

    def assemblies(self, channel: int, rank: int) -> int:
        """Return how often a rank has said so of a channel."""
        return self._assemblies[channel, rank]

    def answer_with(self, count_begun: Callable[[], int]) -> None:
        """Answer ranks that ask with the number of messages that this one has begun. The monitor's thread calls it."""
        self._count_begun = count_begun

    def ask_begun(self, seconds: float) -> dict[int, int]:
        """Ask all ranks how many messages they have begun; return the numbers of those that answer in that time, by rank.

        A rank answers also while it computes or waits, but not if its process is stopped.
        """
        self._begun = {}
        self._tell(_ASKED, self._rank, self._peers)
        until = time.monotonic() + seconds
        while len(self._begun) < len(self._peers) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        return dict(self._begun)

    def on_gone(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(rank)`` when it is of no use to wait for a peer any more: it is lost, or has left 5 seconds ago.

        A rank that leaves has completed its last epoch, so every other rank will do so very soon; who then still waits does
        something that the rank which left did not do. May be called for several ranks.
        """
        with self._lock:
            self._gone_callbacks.append(callback)
            gone = list(self._gone)
        for rank in gone:
            callback(rank)

    def forget(self, callback: Callable[[int], None], channel: int) -> None:
        """Do not call ``callback`` any more, nor that of a channel."""
        with self._lock:
            self._refused_callbacks.pop(channel, None)
            if callback in self._gone_callbacks:
                self._gone_callbacks.remove(callback)

    def describe(self, rank: int) -> str:
        """Return a rank's name, such as ``rank 3 on host (pid 123)``."""
        return self._addresses[rank].describe(rank)

    def describe_loss(self, rank: int) -> str:
        """Return a message such as ``rank 3 on host (pid 123) is lost, ...``, which says that this rank cannot go on."""
        return (
            f"{self.describe(rank)} is lost, its process ended or its host cannot be reached; "
            f"{self.describe(self._rank)} cannot go on without it"
        )

    def close(self) -> None:
        """Say goodbye to the peers and stop watching. May be called again."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        atexit.unregister(self.close)
        _monitors.discard(self)  # a loss after the end says nothing about what fails later
        if self._thread is None:
            return
        self._tell(_GOODBYE, self._rank, self._peers)
        self._wake.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        rank_of = {connection.fileno(): rank for rank, connection in self._peers.items()}
        unread = dict.fromkeys(self._peers, b"")
        leaving: deque[tuple[float, int]] = deque()  # (when it is gone, rank)
        poll = select.poll()
        for descriptor in (self._wake_reader.fileno(), *rank_of):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(_milliseconds_until(leaving[0][0]) if leaving else None)]
            if self._wake_reader.fileno() in ready:
                break
            for descriptor in ready:
                peer = rank_of[descriptor]
                if not self._read(peer, unread):
                    poll.unregister(descriptor)
                    if peer in self._left:
                        leaving.append((time.monotonic() + _GRACE_SECONDS, peer))
            while leaving and leaving[0][0] <= time.monotonic():
                self._tell_gone(leaving.popleft()[1])
        self._close_sockets()
        self._wake_reader.close()

    def _read(self, peer: int, unread: dict[int, bytes]) -> bool:
        """Read what a peer has to say; False when it says nothing more."""
        is_unreachable = False
        try:
            received = self._peers[peer].recv(4096)
        except BlockingIOError:
            return True
        except OSError as error:
            # Other errors come from keepalive: the end of a process resets the connection.
            is_unreachable = not isinstance(error, ConnectionError)
            received = b""
        unread[peer] += received
        while len(unread[peer]) >= _MESSAGE.size:
            kind, rank, channel = _MESSAGE.unpack(unread[peer][: _MESSAGE.size])
            unread[peer] = unread[peer][_MESSAGE.size :]
            if kind == _GOODBYE:
                self._left.add(rank)
            elif kind == _REFUSED:
                self._refused.setdefault(channel, rank)
                self._refused_callbacks.get(channel, _ignore)(rank)
            elif kind == _FAILED:
                self._failed.setdefault(channel, rank)
            elif kind == _ASSEMBLED:
                self._assemblies[channel, rank] += 1
            elif kind == _ASKED:
                self._tell(_BEGUN, self._rank, [rank], self._count_begun())
            elif kind == _BEGUN:
                self._begun[rank] = channel
            else:
                self._lose(rank)
        if received and peer not in self._left:
            return True
        if peer not in self._left:
            self._lose(peer)
        if is_unreachable:
            logger.warning("%s cannot be reached; connections to its host are ended", self.describe(peer))
            hang_up(self._addresses[peer].interfaces - self._addresses[self._rank].interfaces)
        return False

    def _lose(self, rank: int) -> None:
        with self._lock:
            if self._lost is not None or self._closing or rank == self._rank:
                return
        # Before this rank can end because of it. Not the ranks of another host that may have vanished: what is sent there would
        # put off the moment at which TCP notices that, and if it has not, its own kernel tells them.
        lost_host = self._addresses[rank].host
        is_here = lost_host == self._addresses[self._rank].host
        self._tell(_LOST, rank, (peer for peer in self._peers if is_here or self._addresses[peer].host != lost_host))
        with self._lock:
            self._lost = rank
        self._tell_gone(rank)

    def _tell_gone(self, rank: int) -> None:
        with self._lock:
            self._gone.add(rank)
            callbacks = self._gone_callbacks[:]
        for callback in callbacks:
            try:
                callback(rank)
            except Exception:
                logger.exception("to tell that %s is gone failed", self.describe(rank))

    def _tell(self, kind: int, rank: int, peers: Iterable[int], channel: int = 0) -> None:
        message = _MESSAGE.pack(kind, rank, channel)
        for peer in peers:
            # Fails if the peer is gone. Does not block: there is always room for the few bytes that are ever sent.
            with suppress(OSError):
                self._peers[peer].send(message)

    def _close_sockets(self) -> None:
        for connection in self._peers.values():
            connection.close()

    def _abandon(self) -> None:
        """Close the connections in a forked child: its copy must not keep them open when the parent ends."""
        self._closing = True
        atexit.unregister(self.close)
        self._close_sockets()
        self._wake.close()
        self._wake_reader.close()


def _ignore(_: int) -> None:
    pass


_monitors: weakref.WeakSet[PeerMonitor] = weakref.WeakSet()


@contextmanager
def name_lost_peer() -> Iterator[None]:
    """Around collectives of torch, whose errors name no rank.

    Raises:
        CommunicationError: instead of a RuntimeError, if a peer in a symmetric group of this process is lost: names that rank.
    """
    try:
        yield
    except RuntimeError as error:
        found = _hear_of_loss(_monitors, error)
        if found is None:
            raise
        monitor, lost = found
        raise CommunicationError(f"{monitor.describe_loss(lost)}: {error}") from error


def _hear_of_loss(monitors: Collection[PeerMonitor], error: Exception | None) -> tuple[PeerMonitor, int] | None:
    is_of_network = any(words in str(error) for words in _NETWORK_ERRORS)
    may_be_cut_off = is_of_network and any(monitor.has_other_hosts for monitor in monitors)
    until = time.monotonic() + _HEARSAY_SECONDS + (_SILENCE_SECONDS if may_be_cut_off else 0.0)
    while monitors:
        for monitor in list(monitors):
            if (lost := monitor.lost_peer()) is not None:
                return monitor, lost
        if time.monotonic() > until:
            break
        time.sleep(_LOOK_SECONDS)
    return None


def _abandon_all() -> None:
    for monitor in list(_monitors):
        monitor._abandon()


os.register_at_fork(after_in_child=_abandon_all)


def _milliseconds_until(moment: float) -> float:
    return max(0.0, 1000 * (moment - time.monotonic()) + 1)


def _set_up(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    # Likewise when something has been sent, for which TCP does not use keepalive.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_SECONDS)
