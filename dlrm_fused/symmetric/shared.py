"""Symmetric memory of processes on one CPU machine: laptops, CI, and kernels under Triton's interpreter.

Each rank's block is an anonymous file in memory (``memfd_create``) that its peers open through ``/proc`` and map. It has no
name anywhere, so nothing is left behind however a process ends, and the size of ``/dev/shm``, small in containers, does not
limit it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from dlrm_fused.errors import CommunicationError
from dlrm_fused.symmetric.memory import SymmetricGroup, SymmetricMemory, readable

_CGROUP = Path("/sys/fs/cgroup")


class SharedGroup(SymmetricGroup):
    """Ranks whose memory is on the CPU."""

    def _check_peers(self) -> None:
        pass  # whoever sees the process of a peer can open its files, or is told so at the first allocation

    def _allocate(self, name: str, size: int) -> SymmetricMemory:
        self.gather(lambda: _check_available(name, size, len(self.hosts.local)))
        descriptor = os.memfd_create(f"dlrm_fused {name}")
        try:
            files = self.gather(lambda: _File.reserve(name, descriptor, size))
            # The second gathering ends when all have mapped all: only then may a descriptor be closed.
            mapped = self.on_all(lambda: {rank: files[rank].map() for rank in self.hosts.local})
        finally:
            os.close(descriptor)
        return SymmetricMemory(name, mapped, self.rank, self.world_size)


@dataclass(frozen=True)
class _File:
    """The file and process by which peers find a rank's block."""

    name: str
    size: int
    process: int
    descriptor: int
    inode: int

    @staticmethod
    def reserve(name: str, descriptor: int, size: int) -> _File:
        try:
            # Takes the pages now: later there would be no error, but a SIGBUS at the first touch.
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise CommunicationError(
                f"symmetric memory {name}: no room for {readable(size)} on this host: {error.strerror}; "
                "use fewer ranks or a smaller batch"
            ) from error
        return _File(name, size, os.getpid(), descriptor, os.fstat(descriptor).st_ino)

    def map(self) -> Tensor:
        """Return the block as uint8 [size]; mapped as long as a tensor of its storage lives."""
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        try:
            inode = os.stat(path).st_ino
        except OSError as error:
            raise CommunicationError(
                f"symmetric memory {self.name}: process {os.getpid()} may not open the memory of process {self.process} "
                f"({path}: {error.strerror}); run all ranks as one user, in one container"
            ) from error
        assert inode == self.inode, f"{path} is not the memory of process {self.process}"
        # Unlike Python's mmap, keeps no descriptor open.
        return torch.from_file(path, shared=True, size=self.size, dtype=torch.uint8)


def _check_available(name: str, size: int, ranks: int) -> None:
    # Taking more than there is does not fail, it wakes the kernel's out-of-memory killer.
    available = _available_memory()
    if size * ranks > available:
        raise CommunicationError(
            f"symmetric memory {name}: {readable(size)} on each of {ranks} ranks are {readable(size * ranks)}, but this host "
            f"has {readable(available)} available; use fewer ranks or a smaller batch"
        )


def _available_memory() -> int:
    """Return bytes that processes can still take: of the host, and of the container if it has a limit."""
    available = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            # Cached files count as used, but give way.
            for line in (_CGROUP / "memory.stat").read_text().splitlines():
                if line.startswith("inactive_file "):
                    used -= int(line.split()[1])
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # no cgroups, or those of version 1
    return max(0, available)
