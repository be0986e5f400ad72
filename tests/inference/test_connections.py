"""Limits of the service's connections, before any application: a tiny one behind the door, in this process."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import uvicorn

from dlrm_fused.errors import ConfigError
from dlrm_fused.inference.http import connections
from dlrm_fused.inference.http.connections import HEADER_BYTES, Door, LimitedProtocol, bind, most_connections


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers with the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    body = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def refuse(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers without having read the body."""
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@contextmanager
def served(most: int = 100, app: Any = echo) -> Iterator[int]:
    """The port."""
    sockets = bind("127.0.0.1", 0)
    http_class = cast(Any, partial(LimitedProtocol, Door(most)))
    config = uvicorn.Config(app, http=http_class, ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    running = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    running.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        running.join()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short times."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "_LOOK_SECONDS", 0.1)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def answer_to(port: int, sent: bytes) -> bytes:
    """All that comes back, until the connection ends."""
    with connect(port) as client:
        client.sendall(sent)
        parts = []
        while part := client.recv(2**16):
            parts.append(part)
    return b"".join(parts)


def has_ended(client: socket.socket) -> bool:
    """Wait for the end of a connection; false if something comes instead."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def request(path: bytes = b"/", headers: bytes = b"", body: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n%s\r\n" % (path, len(body), headers)
    return head + body


def test_headers_up_to_the_limit_are_taken_and_longer_ones_refused() -> None:
    filler = b"x: " + b"a" * (HEADER_BYTES - 200) + b"\r\n"
    with served() as port:
        taken = answer_to(port, request(headers=filler + b"Connection: close\r\n", body=b"b" * 500_000))
        assert taken.startswith(b"HTTP/1.1 200 ")
        assert taken.endswith(b"500000")
        for sent in (
            request(headers=b"x: " + b"a" * 500_000 + b"\r\n"),  # one header
            request(headers=b"x: a\r\n" * 10_000),  # many
            request(path=b"/" + b"a" * 100_000),
            b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000,  # that do not end
        ):
            refused = answer_to(port, sent)
            assert refused.startswith(b"HTTP/1.1 431 ")
            assert refused.endswith(b'{"detail": "the headers have more than 32768 bytes"}')


def test_trailers_have_the_same_limit() -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: here\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
    with served() as port:
        assert answer_to(port, chunked + b"x: a\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        with pytest.raises(ConnectionError):
            answer_to(port, chunked + b"x: " + b"a" * 500_000)


def test_a_body_of_many_small_chunks_is_taken() -> None:
    head = b"POST / HTTP/1.1\r\nHost: here\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with served() as port:
        assert answer_to(port, head + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n").endswith(b"50000")


def test_requests_ahead_of_their_answers_are_answered_in_turn_but_not_any_number() -> None:
    with served() as port:
        few = answer_to(port, request() * 9 + request(headers=b"Connection: close\r\n"))
        assert few.count(b"HTTP/1.1 200 ") == 10
        assert b"HTTP/1.1 400 " in answer_to(port, request() * 1000)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: here\r\n", request() + b"GET / HTTP/1.1\r\n"])
def test_who_does_not_finish_a_request_is_disconnected(sent: bytes) -> None:
    with served() as port, connect(port) as client:
        client.sendall(sent)
        began = time.monotonic()
        while not has_ended(client):
            pass
        assert 0.2 < time.monotonic() - began < 5


@pytest.mark.usefixtures("quick")
def test_a_body_may_take_longer_than_headers() -> None:
    with served() as port, connect(port) as client:
        sent = request(headers=b"Connection: close\r\n", body=b"b" * 10)
        client.sendall(sent[:-5])
        time.sleep(1)
        client.sendall(sent[-5:])
        assert client.recv(2**16).endswith(b"10")


def test_beyond_the_limit_who_has_waited_longest_goes_and_requests_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "uvicorn.error"), served(most=10) as port:
        working = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        idle = []
        for _ in range(30):
            idle.append(connect(port))
            working.request("GET", "/")  # the connection is kept, and never the oldest
            assert working.getresponse().read() == b"0"
        assert all(has_ended(client) for client in idle[:21])
        idle[-1].sendall(request(headers=b"Connection: close\r\n"))
        assert idle[-1].recv(2**16).startswith(b"HTTP/1.1 200 ")
        time.sleep(1.5)  # a look
        lines = [record.getMessage() for record in caplog.records]
        for client in idle:
            client.close()
        working.close()
    assert len(lines) == 1, lines
    assert " beyond the limit of 10, " in lines[0]


def test_bodies_that_do_not_come_keep_nobody_out() -> None:
    with served(most=10) as port:
        working = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        slow = []
        for _ in range(30):
            slow.append(connect(port))
            slow[-1].sendall(request(body=b"b" * 10)[:-5])
            working.request("GET", "/")
            assert working.getresponse().read() == b"0"
        assert all(has_ended(client) for client in slow[:21])
        for client in slow:
            client.close()
        working.close()


@pytest.mark.usefixtures("quick")
def test_what_follows_an_early_answer_is_not_waited_for() -> None:
    """An application has answered before the body has come: the rest of it has as long as headers."""
    with served(app=refuse) as port, connect(port) as client:
        client.sendall(request(body=b"b" * 10)[:-5])
        assert client.recv(2**16).startswith(b"HTTP/1.1 404 ")
        client.sendall(b"b" * 5)
        assert has_ended(client)


def test_files_are_left_for_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((1024, 768), (-1, 4096), (10**6, 4096)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, files=files: (files, files))
        assert most_connections() == most


@pytest.mark.parametrize(
    ("host", "port", "reason"),
    [
        ("no.such.host.invalid", 8000, ""),
        ("192.0.2.1", 8000, "Cannot assign requested address"),
        ("127.0.0.1", 70_000, "allowed: 0 to 65535"),
        ("127.0.0.1", -1, "allowed: 0 to 65535"),
        ("a" * 300, 8000, ""),
    ],
)
def test_an_address_that_cannot_be_had_is_named(host: str, port: int, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        bind(host, port)
    message = str(raised.value)
    assert f"--port {port}: " in message
    assert reason in message
    assert "\n" not in message
