"""Clocks of the host and of a GPU: both take marks between what is launched, and tell the time from one to another."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """Marks are moments of the host's clock."""

    def mark(self) -> Any:
        return time.perf_counter()

    def passed(self, mark: Any) -> bool:
        return True

    def milliseconds(self, begin: Any, end: Any) -> float:
        return (end - begin) * 1e3

    def reuse(self, mark: Any) -> None:
        """Take back a mark that is no longer needed."""


class CudaClock(HostClock):
    """Marks are events on the current stream; they are read once the device has passed them, and used again."""

    def __init__(self) -> None:
        self._pool: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def milliseconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)

    def reuse(self, mark: torch.cuda.Event) -> None:
        self._pool.append(mark)
