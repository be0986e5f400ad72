"""Clients that send requests one after the other, and check every answer."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_fused.inference.export.loader import load


@dataclass(frozen=True)
class Question:
    """The body of a request, and the probabilities that it is to be answered with."""

    body: bytes
    probabilities: list[float]


def questions_of(model: Path, rows: Sequence[dict[str, Any]], count: int) -> list[Question]:
    """Requests of ``count`` rows each, with what the loader predicts for them."""
    probabilities = load(model).predict(rows).tolist()
    starts = range(0, len(rows) - count + 1, count)
    return [
        Question(json.dumps({"rows": rows[first : first + count]}).encode(), probabilities[first : first + count])
        for first in starts
    ]


@dataclass
class Load:
    """The outcome of all clients' requests.

    Attributes:
        seconds: of each request that was answered as it should be.
        lost: what happened to each other one.
        wall: seconds that the clients ran.
    """

    seconds: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wall: float = 0.0


def send(port: int, questions: Sequence[Question], clients: int, seconds: float) -> Load:
    """Let so many clients ask for so long, each with a connection that it keeps."""
    load, began = Load(), time.perf_counter()
    end = began + seconds
    threads = [threading.Thread(target=_ask, args=(port, questions, client, end, load)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    load.wall = time.perf_counter() - began
    return load


def _ask(port: int, questions: Sequence[Question], client: int, end: float, load: Load) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    asked = client
    while time.perf_counter() < end:
        question = questions[asked % len(questions)]
        asked += 1
        began = time.perf_counter()
        try:
            connection.request("POST", "/predict", question.body)
            answer = connection.getresponse()
            wrong = _what_is_wrong(answer.status, answer.read(), question)
        except (OSError, http.client.HTTPException) as error:
            wrong = f"{type(error).__name__}: {error}"
            connection.close()
        if wrong:
            load.lost.append(wrong)
        else:
            load.seconds.append(time.perf_counter() - began)
    connection.close()


def _what_is_wrong(status: int, body: bytes, question: Question) -> str:
    if status != 200:
        return f"status {status}: {body[:200]!r}"
    difference = np.abs(np.subtract(json.loads(body)["probabilities"], question.probabilities)).max()
    return "" if difference < 1e-6 else f"a probability differs by {difference}"
