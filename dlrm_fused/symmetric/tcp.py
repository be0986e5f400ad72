"""Messages between hosts by TCP, with one connection for each channel and pair of ranks.

Whoever sends writes at once what the kernel's buffers take; a thread writes the rest while the caller computes. Whoever
receives waits itself, for all connections together, and reads into the tensors. So a message costs each side one or two system
calls, and no thread has to be woken, where gloo wakes one or two of its own for every message; and every wait can end: gloo's
cannot, when a rank does not take part.
"""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from dlrm_fused.symmetric.messages import Exchange, LateRankError, Link, Why, raise_fault
from dlrm_fused.symmetric.peer_monitor import PeerMonitor

# Tag and number of bytes; ranks that differ in them make different calls.
_HEADER = struct.Struct("!IQ")
# Size of the socket's buffers; the kernel may allow less. A slice that fits is written at once, before anybody reads.
_BUFFER_BYTES = 1 << 22
# Seconds between two looks whether a rank that is waited for is gone.
_LOOK_SECONDS = 0.05


class TcpLink(Link):
    """Messages of one channel, between processes or, through the memory of their hosts, GPUs.

    Args:
        connections: by rank, to those of other hosts; used by nobody else, and closed by this.
        channel: its number, by which the monitor knows who has refused to take part.
    """

    def __init__(self, connections: Mapping[int, socket.socket], peer_monitor: PeerMonitor, channel: int) -> None:
        self._connections, self._monitor, self._channel = connections, peer_monitor, channel
        self._incoming: dict[int, deque[_Incoming]] = {rank: deque() for rank in connections}
        self._writer = _Writer()
        for connection in connections.values():
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                connection.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)

    def exchange(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], tag: int, *, beside: bool = True
    ) -> Exchange:
        incoming = {}
        for rank, slice_ in received.items():
            incoming[rank] = _Incoming(slice_, tag)
            self._incoming[rank].append(incoming[rank])
        outgoing = {rank: self._writer.write(self._connections[rank], slice_, tag) for rank, slice_ in sent.items()}
        return _TcpExchange(self, incoming, outgoing)

    def close(self) -> None:
        self._writer.close()
        for connection in self._connections.values():
            connection.close()

    def receive(self, rank: int, message: _Incoming, deadline: float) -> None:
        """Read what arrives, from all ranks, until a message from one of them is there."""
        while not message.is_complete:
            has_read = False
            for sender, expected in self._incoming.items():
                if expected:
                    has_read |= self._read(sender)
            if not has_read:
                self._sleep(rank, deadline)

    def wait_until_sent(self, rank: int, message: _Outgoing, deadline: float) -> None:
        """Wait until a message to a rank is written."""
        while not message.is_sent.wait(_LOOK_SECONDS):
            self._look(rank, deadline)
        if message.is_lost:
            self._raise_broken(rank)

    def _sleep(self, rank: int, deadline: float) -> None:
        """Until something arrives; a rank is waited for."""
        poll = select.poll()
        for sender, expected in self._incoming.items():
            if expected:
                poll.register(self._connections[sender], select.POLLIN)
        if not poll.poll(1000 * _LOOK_SECONDS):
            self._look(rank, deadline)

    def _look(self, rank: int, deadline: float) -> None:
        raise_fault(self._monitor, rank, self._channel)
        if time.monotonic() > deadline:
            raise LateRankError(rank, Why.is_late)

    def _read(self, rank: int) -> bool:
        """Read from one rank what is there and expected; whether there was anything."""
        expected, connection = self._incoming[rank], self._connections[rank]
        has_read = False
        while expected:
            try:
                count = connection.recvmsg_into(expected[0].buffers())[0]
            except BlockingIOError:
                break
            except OSError:
                count = 0
            if not count:
                self._raise_broken(rank)
            has_read = True
            if not expected[0].take(count):
                raise LateRankError(rank, Why.differs)
            if expected[0].is_complete:
                expected.popleft()
        return has_read

    def _raise_broken(self, rank: int) -> NoReturn:
        self._monitor.hear_of_loss()
        raise_fault(self._monitor, rank, self._channel)
        raise LateRankError(rank, Why.is_gone)


class _TcpExchange(Exchange):
    def __init__(self, link: TcpLink, incoming: Mapping[int, _Incoming], outgoing: Mapping[int, _Outgoing]) -> None:
        self._link, self._incoming, self._outgoing = link, incoming, outgoing

    def arrivals(self, deadline: float) -> Iterator[tuple[int, Tensor]]:
        for rank, message in self._incoming.items():
            self._link.receive(rank, message, deadline)
            yield rank, message.slice()

    def finish(self, deadline: float) -> None:
        for rank, message in self._outgoing.items():
            self._link.wait_until_sent(rank, message, deadline)


class _Incoming:
    """A message that is expected in a tensor."""

    def __init__(self, slice_: Tensor, tag: int) -> None:
        self._slice = slice_
        is_here = slice_.device.type == "cpu"
        self._on_host = slice_ if is_here else torch.empty(slice_.shape, dtype=slice_.dtype, device="cpu", pin_memory=True)
        self._data = _bytes(self._on_host)
        self._header = bytearray(_HEADER.size)
        self._expected_header = _HEADER.pack(tag, len(self._data))
        self._taken = 0

    @property
    def is_complete(self) -> bool:
        return self._taken == _HEADER.size + len(self._data)

    def buffers(self) -> list[memoryview]:
        """Return buffers for the bytes that are still to come."""
        if self._taken < _HEADER.size:
            return [memoryview(self._header)[self._taken :], self._data]
        return [self._data[self._taken - _HEADER.size :]]

    def take(self, count: int) -> bool:
        """Take note of ``count`` bytes read; return whether they are those of the expected message."""
        self._taken += count
        return self._taken < _HEADER.size or self._header == self._expected_header

    def slice(self) -> Tensor:
        """Return the tensor, when the message is complete."""
        return self._slice if self._slice is self._on_host else self._slice.copy_(self._on_host, non_blocking=True)


class _Outgoing:
    """The unwritten rest of a message; sets ``is_sent`` at the end, with ``is_lost`` if the connection broke."""

    def __init__(self, connection: socket.socket, slice_: Tensor, tag: int) -> None:
        self._connection = connection
        data = _bytes(slice_.cpu())
        self._rest = [memoryview(_HEADER.pack(tag, len(data))), data]
        self.is_sent, self.is_lost = threading.Event(), False

    def write(self) -> None:
        """Write what the kernel takes."""
        try:
            while self._rest:
                count = self._connection.sendmsg(self._rest)
                while self._rest and count >= len(self._rest[0]):
                    count -= len(self._rest.pop(0))
                if self._rest:
                    self._rest[0] = self._rest[0][count:]
        except BlockingIOError:
            return
        except OSError:
            self.is_lost, self._rest = True, []
        self.is_sent.set()

    def write_all(self) -> None:
        """Write all; waits."""
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        while not self.is_sent.is_set():
            poll.poll()
            self.write()


class _Writer:
    """Writes messages: what fits at once, the rest in a thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._last: dict[socket.socket, _Outgoing] = {}  # by connection, the last message
        self._thread: threading.Thread | None = None

    def write(self, connection: socket.socket, slice_: Tensor, tag: int) -> _Outgoing:
        """Begin to write a message, after those before it."""
        message, before = _Outgoing(connection, slice_, tag), self._last.get(connection)
        self._last[connection] = message
        if before is None or before.is_sent.is_set():
            message.write()
        if not message.is_sent.is_set():
            if self._thread is None:
                self._thread = threading.Thread(target=_write_all, args=(self._queue,), name="dlrm_fused messages", daemon=True)
                self._thread.start()
            self._queue.put(message)
        return message

    def close(self) -> None:
        """End the thread, and whatever is still to be written."""
        self._queue.put(None)
        for connection in self._last:
            with suppress(OSError):  # it broke before
                connection.shutdown(socket.SHUT_RDWR)


def _write_all(messages: queue.SimpleQueue[_Outgoing | None]) -> None:
    while (message := messages.get()) is not None:
        message.write_all()
        del message


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(cast(Any, tensor.detach().view(-1).view(torch.uint8).numpy()))
