"""Calls run in the order of their launch, whatever streams they are on: a model of CUDA's streams, run at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from dlrm_fused.compat import torch as compat
from dlrm_fused.symmetric import call_order
from dlrm_fused.symmetric.call_order import CallOrder

GPU = torch.device("cuda", 0)


@dataclass
class Stream:
    """Work in its order: a call by its number, or another stream and how much of its work must be done before.

    Attributes:
        capture: number of the capture that the stream is part of; 0: none.
    """

    cuda_stream: int
    capture: int = 0
    work: list[int | tuple[Stream, int]] = field(default_factory=list)
    done: int = 0

    def wait_stream(self, other: Stream) -> None:
        assert self.capture == other.capture, "CUDA refuses waits that leave a capture or enter one"
        self.work.append((other, len(other.work)))

    @property
    def is_ready(self) -> bool:
        if self.done == len(self.work):
            return False
        head = self.work[self.done]
        return isinstance(head, int) or head[0].done >= head[1]


class Device:
    """Some streams, one of which is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
        self.streams = [Stream(100 + number) for number in range(streams)]
        self.current = self.streams[0]
        monkeypatch.setattr(call_order, "current_stream_handle", lambda device: self.current.cuda_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(self.current.capture))
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def launch(self, order: CallOrder, call: int, stream: int) -> None:
        with self.stream(self.streams[stream]):
            order.follow()
            self.current.work.append(call)

    def run(self, generator: random.Random) -> list[int]:
        """All that was launched: the calls, in the order in which they ran."""
        ran: list[int] = []
        while ready := [stream for stream in self.streams if stream.is_ready]:
            stream = generator.choice(ready)
            head = stream.work[stream.done]
            stream.done += 1
            if isinstance(head, int):
                ran.append(head)
        assert all(stream.done == len(stream.work) for stream in self.streams), "streams wait for each other in a circle"
        return ran


@pytest.mark.parametrize("seed", range(20))
def test_calls_on_any_streams_run_in_the_order_of_their_launch(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    device, order, generator = Device(monkeypatch, streams=3), CallOrder(GPU), random.Random(seed)
    for call in range(30):
        device.launch(order, call, generator.randrange(3))
    assert device.run(generator) == list(range(30))


def test_calls_on_one_stream_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    device, order = Device(monkeypatch, streams=1), CallOrder(GPU)
    for call in range(3):
        device.launch(order, call, 0)
    assert device.streams[0].work == [0, 1, 2]


def test_calls_of_one_capture_follow_each_other_and_none_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device, order = Device(monkeypatch, streams=4), CallOrder(GPU)
    device.launch(order, 0, stream=0)
    for captured in device.streams[1:3]:
        captured.capture = 1
    device.launch(order, 1, stream=1)
    device.launch(order, 2, stream=2)
    assert device.streams[2].work == [(device.streams[1], 1), 2]
    for captured in device.streams[1:3]:
        captured.capture = 0  # the capture ends
    device.launch(order, 3, stream=3)
    assert device.streams[3].work[-1] == 3


def test_calls_on_the_cpu_ask_for_no_stream() -> None:
    CallOrder(torch.device("cpu")).follow()


def test_a_current_stream_is_one_object_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    handles = {"current": 7}
    monkeypatch.setattr(compat, "current_stream_handle", lambda device: handles["current"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: (index, handles["current"], object()))
    compat._current_stream.cache_clear()
    first = compat.current_stream(torch.device("cuda", 0))
    handles["current"] = 8
    second = compat.current_stream(torch.device("cuda", 0))
    other_device = compat.current_stream(torch.device("cuda", 1))
    handles["current"] = 7
    assert compat.current_stream(torch.device("cuda", 0)) is first
    assert [stream[:2] for stream in (first, second, other_device)] == [(0, 7), (0, 8), (1, 8)]  # type: ignore[index]
    compat._current_stream.cache_clear()
