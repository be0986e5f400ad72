"""SIGTERM and SIGINT: all ranks of a run stop after the same step, in time to write a checkpoint of it."""

from __future__ import annotations

import itertools
import logging
import os
import select
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from dlrm_fused.training.runtime.environment import Rank
from dlrm_fused.training.runtime.error_store import ErrorStore
from dlrm_fused.training.runtime.watchdog import flush

logger = logging.getLogger("dlrm_fused")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A rank may get a signal twice: Slurm sends it to all processes of a job, and the launcher passes it on.
_SECONDS_OF_ONE_REQUEST = 2.0
_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_TO_AGREE = 15.0
_NEVER = 1 << 62
_END_OF_THREAD = 0  # no signal has this number
# Runs before this one: a process may have several, one after the other, and each rank has the same number.
_requests_before = itertools.count()


class Stopped(Exception):  # noqa: N818 - reads as what happened
    """The run has stopped because of a signal, with a checkpoint from which it goes on.

    Attributes:
        status: of the process, 128 + the number of the signal, as shells have it.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"stopped by {signal.Signals(status - 128).name}")
        self.status = status


class StopRequest:
    """A wish to stop that reaches one rank or more, and where all ranks stop because of it.

    Use as a context around the work of a rank, whose main thread calls :meth:`is_due` after every step and before every batch
    of an evaluation: the same calls in the same order on all ranks. A call costs a lock and no communication.

    A thread of each rank looks for the wish once a second. It then promises, through the store of the rendezvous, that its main
    thread goes no further than the next call. When all ranks have promised, all go on to the furthest of these calls, and stop
    there. A rank whose main thread has made no call yet has nothing to save: then all ranks end at once. A second signal, too,
    ends its rank at once.
    """

    def __init__(self, rank: Rank, error_store: ErrorStore) -> None:
        self._rank = rank
        self._store = error_store.store() if rank.world_size > 1 else None
        self._key = f"stop_{next(_requests_before)}"
        self._lock = threading.Lock()
        self._calls = 0
        self._promised: int | None = None
        self._agreed_call = _NEVER
        self._has_agreed = threading.Event()
        self._signal = 0
        self._thread = threading.Thread(target=self._listen, name="stop-request", daemon=True)

    def __enter__(self) -> StopRequest:
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            # The interpreter writes the signal's number there at once, even if the main thread waits in a collective.
            self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            # Ignored signals stay ignored: a shell's background job has no Ctrl-C.
            taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._handlers = {number: signal.signal(number, _leave_to_the_thread) for number in taken}
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            return  # the process is about to end
        os.write(self._wakeup, bytes([_END_OF_THREAD]))
        self._thread.join()
        if self._store is not None:
            with suppress(RuntimeError, OSError):  # unless it has ended with a rank that is done
                self._store.set(f"{self._key}/{self._rank.index}", str(_NEVER))  # others need not wait for this rank
        if self._handlers:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._wakeup)
        os.close(self._signals)

    def is_due(self) -> bool:
        """Return whether all ranks stop here; wait for their agreement if there is a wish to. Once true, it stays so."""
        with self._lock:
            self._calls += 1
            promised = self._promised
        if promised is None or self._calls < promised:
            return False
        self._has_agreed.wait()
        return self._calls >= self._agreed_call

    def check(self) -> None:
        """Raises Stopped if :meth:`is_due`."""
        if self.is_due():
            raise self.stopped()

    def stopped(self) -> Stopped:
        """Return the exception for the signal that has come."""
        return Stopped(128 + self._signal)

    def _listen(self) -> None:
        number, is_ours = self._wait_for_wish()
        if number == _END_OF_THREAD:
            return
        self._signal, began = number, time.monotonic()
        try:
            if is_ours and self._store is not None:
                self._store.set(f"{self._key}/wish", str(number))
            self._agree()
        except (RuntimeError, OSError) as error:
            self._end_process(1, f"no agreement with the other ranks on where to stop: {error}")
        while (number := self._next_signal()) != _END_OF_THREAD:
            if not is_ours:
                is_ours, began = True, time.monotonic()
            elif time.monotonic() - began > _SECONDS_OF_ONE_REQUEST:
                self._end_process(128 + number, f"a second {signal.Signals(number).name}: ending without a checkpoint")

    def _wait_for_wish(self) -> tuple[int, bool]:
        """Return the number of a signal that any rank has had, and whether it is this one."""
        seconds = None if self._store is None else _SECONDS_BETWEEN_LOOKS
        while True:
            if select.select([self._signals], [], [], seconds)[0]:
                return self._next_signal(), True
            # The watchdog takes care of a store that is lost.
            with suppress(RuntimeError, OSError):
                if self._store is not None and self._store.check([f"{self._key}/wish"]):
                    return int(self._store.get(f"{self._key}/wish")), False

    def _next_signal(self) -> int:
        while (number := os.read(self._signals, 1)[0]) not in (_END_OF_THREAD, *SIGNALS):
            pass
        return number

    def _agree(self) -> None:
        with self._lock:
            self._promised = self._calls + 1 if self._calls else 0
        calls = self._exchange(self._promised)
        name = signal.Signals(self._signal).name
        if 0 in calls:
            self._end_process(128 + self._signal, f"{name}: ending before the first step, there is nothing to save")
        self._agreed_call = max(calls)
        if self._agreed_call != _NEVER:
            logger.info("%s: saving a checkpoint before this run ends", name)
        self._has_agreed.set()

    def _exchange(self, promised: int) -> list[int]:
        """Exchange promises: return those of all ranks."""
        if self._store is None:
            return [promised]
        keys = [f"{self._key}/{rank}" for rank in range(self._rank.world_size)]
        self._store.set(keys[self._rank.index], str(promised))
        until = time.monotonic() + _SECONDS_TO_AGREE
        while not self._store.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"one has not answered for {_SECONDS_TO_AGREE:.0f} s")
            time.sleep(0.05)
        return [int(self._store.get(key)) for key in keys]

    def _end_process(self, status: int, reason: str) -> None:
        logger.info(reason) if status > 128 else logger.error(reason)
        flush()
        os._exit(status)


def _leave_to_the_thread(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: the thread reads the signal's number."""
