"""How ranks find each other: the store of the rendezvous, and the default process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dlrm_fused.training.runtime.rank import Rank

# A collective that outlasts this was caused by something the watchdog did not see.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


def rendezvous_store(timeout: timedelta) -> dist.Store:
    """A connection of its own to torchrun's store, where nothing is left of an attempt before this one."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    if not is_agents_store():
        return store  # that of this attempt's rank 0
    # The agent's outlives attempts. Their count is that of one agent: on many nodes it differs, hence
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def is_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@contextmanager
def process_group(rank: Rank, device: torch.device) -> Iterator[None]:
    """The default process group: gloo for CPU tensors, NCCL for those on GPUs."""
    if "MASTER_ADDR" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()), LOCAL_WORLD_SIZE="1")
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        # torch itself would meet the addresses of an earlier attempt in an agent's store, and wait for them.
        store=rendezvous_store(_COLLECTIVE_TIMEOUT) if is_agents_store() else None,
        rank=rank.index,
        world_size=rank.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
        device_id=None if device.type == "cpu" else device,
    )
    yield
    # Not in a finally: after a failure other ranks may never join, and the process is about to end anyway.
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
