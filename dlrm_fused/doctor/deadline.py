"""A time limit for work that may hang where no limit can be given to it: drivers, process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The value that work returned, or the reason why it did not return: ``error`` is empty if it did."""

    value: T | None
    error: str = ""


def attempt(work: Callable[[], T], seconds: float) -> Outcome[T]:
    """Run ``work`` in a thread for at most so long; never raises. A thread that hangs is left behind."""
    outcomes: list[Outcome[T]] = []

    def run() -> None:
        try:
            outcomes.append(Outcome(work()))
        except BaseException as error:
            outcomes.append(Outcome(None, f"{type(error).__name__}: {' '.join(str(error).split())}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcomes[0] if outcomes else Outcome(None, f"did not end within {seconds:.0f} s")
