"""The store of a run's first failure, which all ranks can read."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from dlrm_fused.training.runtime.environment import Rank
from dlrm_fused.training.runtime.rendezvous import is_agents_store, meeting_store

_FAILURE_KEY = "failure"
_READERS_KEY = "readers"
STORE_TIMEOUT = timedelta(seconds=10)
# Seconds between the starts of a run's first and last rank, at most.
_SECONDS_TO_START = 30.0


class ErrorStore:
    """The store of a run's first failure, which all ranks can read."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._store: dist.Store | None = None
        self._has_read = False
        if rank.index == 0:
            self.store()  # serves it, where torchrun's agent does not

    def store(self) -> dist.Store | None:
        """Return the store of the rendezvous, through a connection of its own.

        None for a process without torchrun, and as long as there is no store: one that is not torchrun's own begins with rank
        0, which is waited for a while.
        """
        if self._store is None and (is_agents_store() or self._rank.world_size > 1):
            with suppress(RuntimeError, OSError):
                self._store = dist.PrefixStore("dlrm_fused", meeting_store(self._rank, STORE_TIMEOUT))
        return self._store

    def announce(self, message: str) -> bool:
        """Post a failure; True if it is the first, so that this rank is the one to tell the user."""
        try:
            store = self.store()
            if store is None:
                return True
            posted = f"{self._rank.index} {message}".encode()
            return bool(store.compare_set(_FAILURE_KEY, "", posted.decode()) == posted)
        except (RuntimeError, OSError):
            return True  # nobody else can be asked

    def failure_of_another(self) -> str | None:
        """Return the posted failure, unless it is this rank's own."""
        store = self.store()
        if store is None or not store.check([_FAILURE_KEY]):
            return None
        index, message = store.get(_FAILURE_KEY).decode().split(" ", 1)
        if int(index) == self._rank.index:
            return None
        if not self._has_read:
            store.add(_READERS_KEY, 1)
            self._has_read = True
        return message

    def wait_for_readers(self) -> None:
        """Before this process ends because of a failure: where it serves the store, wait until the others have read of that.

        Once there is a process group, they hear by its connections.
        """
        if self._rank.index or is_agents_store() or self._store is None or dist.is_initialized():
            return
        # torchrun's agent ends the ranks of a host when one of them has ended; those of other hosts may have read nothing yet.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        until = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < until and self._store.add(_READERS_KEY, 0) < self._rank.world_size - 1:
            time.sleep(0.1)
