"""Limits connections of clients: their number, the time until a request has come, and the bytes of its headers.

uvicorn limits none of these: it keeps headers of any length, waits for the rest of them for ever, and accepts clients until the
process has no more files.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import sys
from collections import Counter
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dlrm_fused.errors import ConfigError

# Most bytes of a request line with its headers, of trailers, and of anything else without a byte of a body. A request sent
# ahead is read together with the one before it, so its headers may have up to twice as many bytes.
HEADER_BYTES = 2**15
HEADER_SECONDS = 10.0  # from the first byte of a request, or from the connection, to the end of its headers
MOST_CONNECTIONS = 4096
_FORGOTTEN_BYTES = 2**20  # read after headers were refused: a client that is still sending sees no answer
_MOST_AHEAD = 16  # requests of a client that are read before the one before them is answered
_LAST_PORT = 65_535
_LOOK_SECONDS, _LOG_SECONDS = 1.0, 10.0

_LATE, _BEYOND, _LONG = "late", "beyond", "long"

logger = logging.getLogger("uvicorn.error")


def most_connections() -> int:
    """Return the most connections that leave files for everything else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else min(MOST_CONNECTIONS, 3 * files // 4)


def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets at all addresses of a host, to listen at.

    Raises:
        ConfigError: the host is unknown or not this machine, or the port is taken or not allowed.
    """
    if not 0 <= port <= _LAST_PORT:  # a larger one would be taken for another port
        raise ConfigError(f"--port {port}: allowed: 0 to {_LAST_PORT}")
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((info[0], info[4]) for info in found):
            sockets.append(own := socket.socket(family, socket.SOCK_STREAM))
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                own.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            own.bind(address)
    except (OSError, UnicodeError) as error:
        for own in sockets:
            own.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--host {host} --port {port}: {reason}; give an address of this machine and a free port") from None
    return sockets


class Door:
    """Keeps the connections that owe a whole request; closes them if it does not come, and those beyond the limit.

    Attributes:
        most: connections at a time. Of more, the one that has owed a request for the longest time is closed.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._loop: asyncio.AbstractEventLoop | None = None
        # By connection that owes a request or the rest of one, oldest debt first, the time by which its headers must come.
        self._owing: dict[LimitedProtocol, float] = {}
        self._closed: Counter[str] = Counter()  # since the last line in the log, by reason
        self._logged_at = -math.inf

    def enter(self, client: LimitedProtocol) -> None:
        """Note that a client has connected, and owes a request."""
        if self._loop is None:
            self._loop = client.loop
            self._look()
        self.expect(client)
        if len(client.connections) > self.most:
            self._close(next(iter(self._owing)), _BEYOND)

    def expect(self, client: LimitedProtocol) -> None:
        """Note that a client owes a request from now on."""
        assert self._loop is not None, "it has entered"
        self._owing.pop(client, None)
        self._owing[client] = self._loop.time() + HEADER_SECONDS

    def expect_body(self, client: LimitedProtocol) -> None:
        """Note that the headers of a request have come. The application limits the time of its body."""
        self._owing[client] = math.inf

    def release(self, client: LimitedProtocol) -> None:
        """Note that a client owes nothing: its request has come, or it has gone."""
        self._owing.pop(client, None)

    def refused(self) -> None:
        """Count a client whose headers are too long."""
        self._closed[_LONG] += 1

    def _look(self) -> None:
        """Close connections that are late, and say so in the log; then do it again in a second."""
        assert self._loop is not None, "somebody has entered"
        now = self._loop.time()
        late = [client for client, until in self._owing.items() if until < now]
        for client in late:
            self._close(client, _LATE)
        if self._closed and now - self._logged_at >= _LOG_SECONDS:
            self._log()
            self._logged_at = now
        self._loop.call_later(_LOOK_SECONDS, self._look)

    def _close(self, client: LimitedProtocol, reason: str) -> None:
        self.release(client)
        if not client.is_refused:
            self._closed[reason] += 1
        client.transport.abort()

    def _log(self) -> None:
        closed, self._closed = self._closed, Counter()
        logger.warning(
            "closed %d connections: %d whose request did not come within %g s, %d beyond the limit of %d, %d with headers of "
            "more than %d bytes",
            closed.total(), closed[_LATE], HEADER_SECONDS, closed[_BEYOND], self.most, closed[_LONG], HEADER_BYTES,
        )  # fmt: skip


class LimitedProtocol(HttpToolsProtocol):
    """Limits a client's connection.

    Attributes:
        is_refused: whether its headers were too long. Bytes that it still sends are forgotten.
    """

    def __init__(self, door: Door, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._door = door
        self._head_bytes = self._forgotten_bytes = 0
        self._part = b""
        self.is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._door.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.release(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            self._forgotten_bytes += len(data)
            if self._forgotten_bytes > _FORGOTTEN_BYTES:
                self.transport.pause_reading()
        while data and not (self.is_refused or self.transport.is_closing()):
            if self._head_bytes == HEADER_BYTES:
                self._refuse()
                return
            part = data[: HEADER_BYTES - self._head_bytes]
            self._head_bytes += len(part)  # the callbacks below begin anew
            self._parse(part)
            data = data[len(part) :]

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer the requests that have come of a client that says that it sends no more, and close the connection then."""
        is_owed = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if is_owed:
            (self.pipeline[0][0] if self.pipeline else self.cycle).keep_alive = False
        return is_owed

    def _parse(self, part: bytes) -> None:
        self._part = part
        super().data_received(part)

    def _offers_another_protocol(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Read a request that offers another protocol as one that does not.

        Clients of HTTP/2 begin so, such as Java's. The parser takes such a request for ended behind its headers; a new one
        reads them without the offer, and the body.
        """
        reason = sys.exception()
        if not (isinstance(reason, httptools.HttpParserUpgrade) and self._offers_another_protocol()):
            return
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        rest = self._part[reason.args[0] :]
        self.parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join([*lines, b"", rest]))

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # an answer to a request before this one would find the connection closed
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        if len(self.pipeline) == _MOST_AHEAD:
            raise ValueError("too many requests ahead of their answers")  # answered as bytes that are no HTTP
        self._door.expect(self)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        if self._offers_another_protocol():
            return
        self._door.expect_body(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if self._offers_another_protocol():
            return
        if not self.cycle.response_complete:  # otherwise it owes the next one since the answer
            self._door.release(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no other request has come meanwhile
            self._door.expect(self)

    def _refuse(self) -> None:
        """Answer; the connection ends when the client closes it, or as one whose request does not come."""
        self.is_refused = True
        self._door.refused()
        if self.cycle is not None and not self.cycle.response_complete:  # an answer to an earlier request is on its way
            self.transport.abort()
            return
        body = b'{"detail": "the headers have more than %d bytes"}' % HEADER_BYTES
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.write_eof()
