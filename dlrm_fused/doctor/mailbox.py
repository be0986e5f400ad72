"""Ranks talk through the store of the rendezvous: it needs no process group, so it works where those fail."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import dlrm_fused
from dlrm_fused.training.runtime import Rank, meeting_store

_POLL_SECONDS = 0.02


class OtherReleaseError(Exception):
    """A rank has another release of dlrm_fused, so its messages may not be readable."""


class Mailbox:
    """The ranks of a run, by what they post; a topic is posted once by a rank.

    Raises:
        RuntimeError, OSError: the store cannot be reached in time.
    """

    def __init__(self, rank: Rank, seconds: float) -> None:
        self._rank = rank
        self._store = dist.PrefixStore("doctor", meeting_store(rank, timedelta(seconds=seconds)))

    def post(self, topic: str, value: Any) -> None:
        """Post for all to see."""
        message = f"{dlrm_fused.__version__}\n".encode() + pickle.dumps(value)
        self._store.set(f"{topic}/{self._rank.index}", message)  # type: ignore[arg-type]  # takes bytes too

    def read(self, topic: str, rank: int, seconds: float) -> Any:
        """Return the message that a rank posts within so many seconds.

        Raises:
            TimeoutError: it posts nothing.
            OtherReleaseError: names the release that it has.
        """
        key, deadline = f"{topic}/{rank}", time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {rank} posted no {topic} within {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)  # a wait of the store would warn of each time-out
        release, message = self._store.get(key).split(b"\n", 1)
        if release.decode() != dlrm_fused.__version__:
            raise OtherReleaseError(release.decode())
        return pickle.loads(message)

    def read_all(self, topic: str, seconds: float) -> dict[int, Any]:
        """Return each rank's message, by rank, or the exception of :meth:`read`; all ranks together have so many seconds."""
        deadline = time.monotonic() + seconds
        found: dict[int, Any] = {}
        for rank in range(self._rank.world_size):
            try:
                found[rank] = self.read(topic, rank, max(0.0, deadline - time.monotonic()))
            except (TimeoutError, OtherReleaseError) as error:
                found[rank] = error
        return found
