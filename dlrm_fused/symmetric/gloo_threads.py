"""Before Python ends, gloo's threads let go of the last collective.

A thread of gloo drops the tensors of a collective after its caller has been told that the collective is done. For tensors that
Python knows, it needs Python's lock. Python ends a thread that asks for the lock when Python itself is ending; in the middle
of C++ that aborts the process: "terminate called without an active exception". So a program could fail by chance after its
last collective, whether it had destroyed its process group or not.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_NAME = "pt_gloo_runloop"  # torch's, of each thread that runs collectives of gloo
_TASKS = Path("/proc/self/task")
_REST_SECONDS = 0.02
_LIMIT_SECONDS = 10.0
_SLEEPING = "S"


def wait_for_gloo_threads() -> None:
    """Wait until all threads of gloo rest: each has dropped what it had done. One that still waits for a peer rests, too.

    A thread rests if it has slept from one look to the next. Between them Python's lock is free: a thread that wants it is
    woken, and so does not sleep on.
    """
    switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(min(switch_seconds, _REST_SECONDS / 4))  # other threads of Python pass the lock on
    until = time.monotonic() + _LIMIT_SECONDS
    threads = _gloo_threads()
    while threads and time.monotonic() < until:
        before, threads = threads, _gloo_threads_after_rest()
        if threads == before and all(thread.sleeps for thread in threads):
            break
    sys.setswitchinterval(switch_seconds)


class _Thread(NamedTuple):
    """The state of a thread, as Linux tells it.

    Attributes:
        switches: how often it has left a processor; grows whenever it wakes up.
    """

    number: str
    sleeps: bool
    switches: tuple[str, ...]


def _gloo_threads_after_rest() -> list[_Thread]:
    time.sleep(_REST_SECONDS)
    return _gloo_threads()


def _gloo_threads() -> list[_Thread]:
    found = []
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has ended
            lines = (line.partition(":") for line in (task / "status").read_text().splitlines())
            status = {name: value.strip() for name, _, value in lines}
            if status["Name"] == _NAME:
                switches = tuple(value for name, value in status.items() if name.endswith("ctxt_switches"))
                found.append(_Thread(task.name, status["State"].startswith(_SLEEPING), switches))
    return found
