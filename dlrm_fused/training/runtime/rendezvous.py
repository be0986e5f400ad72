"""The means by which ranks find each other: the store of the rendezvous, and the default process group."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from dlrm_fused.training.runtime.environment import Rank

# A collective that outlasts this was caused by something the watchdog did not see.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)


# Stores that rank 0 serves where torchrun's agent does not, by port. Held as long as the process lives: another rank may read
# from it, or begin its next process group, when rank 0 has left this one.
_servers: dict[int, dist.TCPStore] = {}
_groups_before = itertools.count()


def rendezvous_store(timeout: timedelta) -> dist.Store:
    """Return a connection of its own to the store of the rendezvous, where nothing is left of an attempt before this one."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    if not is_agents_store():
        return store  # that of this attempt's rank 0
    # The agent's outlives attempts. Their count is that of one agent: on many nodes it differs, hence
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there.
    return dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def is_agents_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_store(rank: Rank, timeout: timedelta) -> dist.Store:
    """Return :func:`rendezvous_store`; rank 0 serves it first, where torchrun's agent does not. A process may be alone."""
    if "MASTER_ADDR" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_WORLD_SIZE="1")
    if rank.index == 0 and not is_agents_store():
        _serve()
    return rendezvous_store(timeout)


@contextmanager
def process_group(rank: Rank, device: torch.device, timeout: timedelta = _COLLECTIVE_TIMEOUT) -> Iterator[None]:
    """The default process group: gloo for CPU tensors, NCCL for those on GPUs.

    A program may have one after the other, as one that trains and then evaluates: as many on each rank.
    """
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        # Keys of its own: of an earlier group, it would meet the addresses, and wait for them.
        store=dist.PrefixStore(f"group_{next(_groups_before)}", meeting_store(rank, timeout)),
        rank=rank.index,
        world_size=rank.world_size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    # A rank may be done at once while others are still connecting to it.
    dist.all_reduce(torch.zeros(1, device="cpu"))
    yield
    # A finally would not do: after a failure other ranks may never join, and the process is about to end anyway.
    dist.destroy_process_group()


def _serve() -> None:
    """Serve the store at MASTER_PORT, unless this process does so already; port 0 becomes one that is free."""
    port = int(os.environ["MASTER_PORT"])
    if port not in _servers:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, is_master=True, wait_for_workers=False, multi_tenant=True)
        os.environ["MASTER_PORT"] = str(store.port)
        _servers[store.port] = store
