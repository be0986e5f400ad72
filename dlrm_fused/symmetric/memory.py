"""The one interface to memory that the ranks of a process group have alike, and that those of one host can write.

:meth:`SymmetricGroup.allocate` gives a block of one size on every rank, through whose ``addresses`` kernels store at the ranks
of their host. Transports implement it: :mod:`~dlrm_fused.symmetric.shared` for processes on a CPU machine,
:mod:`~dlrm_fused.symmetric.cuda` for GPUs; :mod:`~dlrm_fused.symmetric.factory` chooses one. What goes to another host goes in
finished slices, through the group's :meth:`~SymmetricGroup.open_link`.
"""

from __future__ import annotations

import abc
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.lasting import lasting
from dlrm_fused.symmetric.collective_errors import gather_or_raise
from dlrm_fused.symmetric.connections import connect_ranks
from dlrm_fused.symmetric.hosts import Host, Hosts
from dlrm_fused.symmetric.messages import Link, NcclLink
from dlrm_fused.symmetric.peer_monitor import PeerMonitor
from dlrm_fused.symmetric.tcp import TcpLink

logger = logging.getLogger("dlrm_fused")

T = TypeVar("T")


class SymmetricMemory:
    """A block of one size on every rank. Made by :meth:`SymmetricGroup.allocate`.

    Attributes:
        size: bytes on each rank.
        local: uint8 [size], this rank's block, on the group's device.
        addresses: int64 [world_size] on the group's device: where each rank's block lies in the address space of this process
            (CPU) or of this rank's GPU; 0 for a rank on another host, which stores do not reach.
    """

    def __init__(self, name: str, blocks: Mapping[int, Tensor], rank: int, world_size: int, resources: object = None) -> None:
        """Args:
        blocks: uint8 [size] of each rank on this host: views of the ranks' blocks.
        resources: what must live as long as the memory does.
        """
        self.name = name
        self.local = blocks[rank]
        self.size = self.local.numel()
        addresses = [blocks[peer].data_ptr() if peer in blocks else 0 for peer in range(world_size)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=self.local.device)
        self._blocks = dict(blocks)
        self._resources = resources

    def peer(self, rank: int) -> Tensor:
        """uint8 [size], a direct view of the block of a rank on this host."""
        return self._blocks[rank]


class SymmetricGroup(abc.ABC):
    """The ranks of a process group and the memory that they share. Made by
    :func:`~dlrm_fused.symmetric.factory.symmetric_group`.

    Attributes:
        process_group: None in a single process without torch.distributed, and after ``close``.
        rank: within the process group, as all ranks here.
        device: of this rank's memory; a CUDA device has an index.
        hosts: which ranks lie on one host, and so reach each other's memory by stores.
        peer_monitor: notices when the process of another rank is gone.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.process_group = process_group
        self.rank = 0 if process_group is None else process_group.rank()
        self.world_size = 1 if process_group is None else process_group.size()
        self.device = device
        self.is_closed = False
        self._memories: list[SymmetricMemory] = []
        self._channels = itertools.count()
        self.hosts = self._find_hosts()
        self._check_peers()
        self.peer_monitor = PeerMonitor(self.rank, self.world_size, self.gather)
        self._nccl: NcclLink | None = None
        self._links: list[Link] = []
        if self.hosts.are_many:
            self._nccl = self._connect_by_nccl()
            if self.rank == 0:
                logger.info(
                    "%d ranks on %d hosts: stores inside a host, messages (%s) between hosts",
                    self.world_size,
                    len(self.hosts.ranks),
                    "nccl" if self._nccl else "tcp",
                )

    def _connect_by_nccl(self) -> NcclLink | None:
        """Return the link between GPUs; None where messages go by TCP."""
        process_group = self.process_group
        if self.device.type == "cpu" or process_group is None or "nccl" not in dist.get_backend_config(process_group):
            return None
        # Not torch's name for a group, after the number of those that a process has: that may differ between the ranks.
        name = self.gather(lambda: secrets.token_hex(8))[0]
        try:
            return self.on_all(lambda: NcclLink(process_group, self.device, self.peer_monitor, name))
        except BaseException:
            self.peer_monitor.close()
            raise

    @property
    def calls_can_be_captured(self) -> bool:
        """Whether a CUDA graph can have calls of channels: stores, and messages of NCCL, but none by TCP."""
        return self.device.type == "cuda" and (not self.hosts.are_many or self._nccl is not None)

    def open_link(self, channel: int) -> Link:
        """Return the link by which slices of the channel of that number go to other hosts as messages. Collective.

        Raises:
            CommunicationError: on all ranks, if two of them cannot connect.
        """
        if self._nccl is not None:
            return self._nccl
        _, connections = connect_ranks(self.rank, self.hosts.remote, self.gather)
        self._links.append(TcpLink(connections, self.peer_monitor, channel))
        return self._links[-1]

    def close_link(self, link: Link) -> None:
        """Let go of what only that link has; none of its exchanges is running on any rank."""
        if link in self._links:
            self._links.remove(link)
            link.close()

    def _find_hosts(self) -> Hosts:
        ranks = self.gather(lambda: (self.device.type, Host.here()))
        if len({kind for kind, _ in ranks}) > 1:
            listed = ", ".join(f"rank {rank}: {kind}" for rank, (kind, _) in enumerate(ranks))
            raise UsageError(f"symmetric memory must be on the same type of device on all ranks; got {listed}")
        return Hosts.of([host for _, host in ranks], self.rank)

    def next_channel(self) -> int:
        """Return a number for a channel of the group, equal on all ranks that make their channels in the same order."""
        return next(self._channels)

    @abc.abstractmethod
    def _check_peers(self) -> None:
        """Collective. Divides hosts whose ranks do not reach each other's memory; raises what is wrong with their devices."""

    @abc.abstractmethod
    def _allocate(self, name: str, size: int) -> SymmetricMemory:
        """Collective; names and sizes have been compared. An error on one rank is raised by all."""

    @lasting
    def allocate(self, name: str, size: int) -> SymmetricMemory:
        """Memory of ``size`` bytes on every rank, zero-filled. Collective, and logged once.

        All ranks must allocate the same in the same order. The memory lives until :meth:`release` or :meth:`close`. It cannot
        be allocated while a CUDA graph is captured.

        Args:
            name: says what the memory is for, in messages and the log; the same on all ranks.

        Raises:
            UsageError: on all ranks, if names or sizes differ between ranks, or the size is not positive.
            CommunicationError: on all ranks, if one of them has not so much memory.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(f"symmetric memory {name}: cannot be allocated while a CUDA graph is captured; run once before")
        requests = self.gather(lambda: (name, size))
        if len(set(requests)) > 1:
            listed = ", ".join(f"rank {rank}: {name} with {size} bytes" for rank, (name, size) in enumerate(requests))
            raise UsageError(
                f"symmetric memory must be allocated with the same name and size on all ranks, in the same order; got {listed}"
            )
        if size <= 0:
            raise UsageError(f"symmetric memory {name}: size={size}: must be positive")
        memory = self._allocate(name, size)
        self._memories.append(memory)
        if self.rank == 0:
            logger.info(
                "symmetric memory %s: %s on each of %d ranks (%s)", name, readable(size), self.world_size, self.device.type
            )
        return memory

    def release(self, memory: SymmetricMemory) -> None:
        """Let go of memory before the group is closed; it is freed when no
        :class:`~dlrm_fused.symmetric.block_pool.BlockPool` and no tensor of one refers to it any more.

        Every rank may do so on its own, once no epoch that stores there can still be running on any rank, that is, after this
        rank has completed the last one; and not while a captured CUDA graph uses it.
        """
        self._memories.remove(memory)

    def gather(self, work: Callable[[], T]) -> list[T]:
        """Return ``work()``'s results on all ranks; see :func:`~dlrm_fused.symmetric.collective_errors.gather_or_raise`."""
        return gather_or_raise(work, self.process_group, self.device)

    def on_all(self, work: Callable[[], T]) -> T:
        """Return ``work()``'s result on this rank, once all ranks have theirs; raises as :meth:`gather`. Collective."""
        results: list[T] = []
        self.gather(lambda: results.append(work()))
        return results[0]

    def close(self) -> None:
        """Leave the group: tell the peers, so that they take it for no loss, and let go of the memory.

        To be called by all ranks when none of them needs the memory any more; waits for none of them. A process that ends
        without having called it says goodbye all the same, unless it was killed or ended by ``os._exit``.
        """
        self.is_closed = True
        try:
            torch.get_device_module(self.device).synchronize(self.device)
        finally:
            self.peer_monitor.close()
            for link in self._links:
                link.close()
            if self._nccl is not None:
                self._nccl.close()
            self._nccl = None
            self._memories.clear()
            self.process_group = None  # for its destruction, when torch's own reference goes


def readable(size: float) -> str:
    """Return a number of bytes for people: ``1.5 MB``."""
    units = ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
