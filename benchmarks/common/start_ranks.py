"""Starts the ranks of a run as processes of the caller's: torchrun would end all of them when one is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def start_ranks(command: Sequence[str], ranks: int, store: dist.TCPStore, **options: Any) -> list[subprocess.Popen[str]]:
    """Start the command once for each rank, with what torchrun would put into its environment.

    Args:
        store: through which the ranks find each other; a master of the caller's, so that it outlives any rank.
        options: of :class:`subprocess.Popen`; ``env`` replaces the environment of the caller.
    """
    environment = options.pop("env", os.environ)
    return [
        subprocess.Popen(
            command,
            env={
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the ranks are clients of the store
            },
            text=True,
            **options,
        )
        for rank in range(ranks)
    ]
