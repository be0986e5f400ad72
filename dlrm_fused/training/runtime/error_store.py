"""Where the first failure of a run is written, for all ranks to see."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from dlrm_fused.training.runtime.rank import Rank
from dlrm_fused.training.runtime.rendezvous import is_agents_store, rendezvous_store

_FAILURE_KEY = "failure"
STORE_TIMEOUT = timedelta(seconds=10)


class ErrorStore:
    """Where the first failure of a run is written, for all ranks to see."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._store: dist.Store | None = None

    def store(self) -> dist.Store | None:
        """The store of the rendezvous, through a connection of its own.

        None for a process without torchrun, and as long as there is no store: one that is not torchrun's own begins with the
        process group.
        """
        if self._store is None and (is_agents_store() or (self._rank.world_size > 1 and dist.is_initialized())):
            self._store = dist.PrefixStore("dlrm_fused", rendezvous_store(STORE_TIMEOUT))
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
        """The posted failure, unless it is this rank's own."""
        store = self.store()
        if store is None or not store.check([_FAILURE_KEY]):
            return None
        index, message = store.get(_FAILURE_KEY).decode().split(" ", 1)
        return None if int(index) == self._rank.index else message
