"""The number of this process among all processes of a run."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Rank:
    """The place of this process among all of the run, as torchrun states it; a process without torchrun is alone."""

    index: int
    world_size: int
    local_index: int
    host: str

    @staticmethod
    def from_environment() -> Rank:
        return Rank(
            index=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_index=int(os.environ.get("LOCAL_RANK", "0")),
            host=socket.gethostname(),
        )

    def __str__(self) -> str:
        return f"rank {self.index} on {self.host}"
