"""Requests that clients send in bad faith or by mistake, with the status that each is to get."""

from __future__ import annotations

import json
import random
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.inference.service_process import Service

_LARGE_BODY = 100 * 10**6
_MALFORMED = 50


@dataclass(frozen=True)
class Incident:
    """
    Attributes:
        status: what it got, and how often.
        is_right: whether it always got what it is to get.
    """

    status: dict[int, int]
    is_right: bool


def cause(service: Service, row: Mapping[str, Any], repeats: int) -> dict[str, Incident]:
    """Do all of it, so many times each; ``row`` is one that the model takes."""
    name = next(iter(row))
    unknown = _body({**row, "no_such_feature": 1})
    missing = _body({key: value for key, value in row.items() if key != name})
    wrong = _body({**row, name: {"not": "a value"}})
    valid = _body(row)
    rng = random.Random(1)
    return {
        "killed while sending": _killed(service, valid, repeats, is_sent=False),
        "killed while waiting": _killed(service, valid, repeats, is_sent=True),
        "a body of 100 MB": _posted(service, [b" " * _LARGE_BODY] * min(repeats, 3), {413}),
        "broken JSON": _posted(service, [valid[:-3], b"", b"\xff\xfe", b"[" * 100_000, b'{"rows": [NaN]}'] * repeats, {400}),
        "no rows": _posted(service, [b"[]", b"{}", b"7", b'{"rows": 7}', b'{"rows": [], "more": 1}'] * repeats, {422}),
        "an unknown feature": _posted(service, [unknown] * repeats, {422}),
        "a missing feature": _posted(service, [missing] * repeats, {422}),
        "a value of another type": _posted(service, [wrong] * repeats, {422}),
        "malformed at random": _posted(service, list(_malformed(valid, rng)), {400, 422}),
        "no HTTP": _not_http(service, rng, repeats),
    }


def _body(row: Mapping[str, Any]) -> bytes:
    return json.dumps({"rows": [row]}).encode()


def _posted(service: Service, bodies: list[bytes], allowed: set[int]) -> Incident:
    counts = Counter(service.request("POST", "/predict", body)[0] for body in bodies)
    return Incident(dict(counts), counts.keys() <= allowed)


def _malformed(valid: bytes, rng: random.Random) -> Iterator[bytes]:
    """Cut off, or with a byte of its structure replaced by one that JSON has nowhere outside of texts."""
    for _ in range(_MALFORMED):
        at = rng.randrange(1, len(valid) - 1)
        yield valid[:at] if rng.random() < 0.5 else valid[:at] + b"\x00" + valid[at + 1 :]


def _head(length: int) -> bytes:
    return f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def _killed(service: Service, body: bytes, repeats: int, is_sent: bool) -> Incident:
    """Connections that are cut: nobody reads a status."""
    for _ in range(repeats):
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(_head(len(body)) + (body if is_sent else body[: len(body) // 2]))
            # An end without farewell, as of a process that is killed.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    return Incident({}, service.process.poll() is None)


def _not_http(service: Service, rng: random.Random, repeats: int) -> Incident:
    counts: Counter[int] = Counter()
    for _ in range(repeats):
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
            connection.sendall(b"\x16\x03" + rng.randbytes(200) + b"\r\n\r\n")
            answer = connection.recv(1000)
        counts[int(answer.split()[1])] += 1
    return Incident(dict(counts), counts.keys() == {400})
