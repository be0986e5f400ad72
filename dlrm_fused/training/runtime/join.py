"""A rank joins its run: device and numbers set up, all ranks in a process group, each watching another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dlrm_fused.config import Config
from dlrm_fused.training.runtime.environment import apply_numerics, choose_device
from dlrm_fused.training.runtime.error_store import ErrorStore
from dlrm_fused.training.runtime.rank import Rank
from dlrm_fused.training.runtime.rendezvous import process_group
from dlrm_fused.training.runtime.watchdog import Watchdog


@contextmanager
def join_run(config: Config, rank: Rank, error_store: ErrorStore) -> Iterator[torch.device]:
    """Join the default process group, for the time of the context; gives this rank's device. Collective.

    Raises:
        ConfigError: if the host has fewer GPUs than ranks.
    """
    device = choose_device(config.runtime.device, rank)
    apply_numerics(config)
    with Watchdog(rank, error_store, config.runtime.peer_timeout_seconds) as watchdog, process_group(rank, device):
        watchdog.peers_have_joined()
        yield device
