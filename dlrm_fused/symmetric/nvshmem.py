"""Symmetric memory of GPUs on several hosts: torch's, NVSHMEM backend.

Inside a host, kernels store through peers' addresses, as with :mod:`~dlrm_fused.symmetric.cuda`; to ranks of other hosts they
put finished slices, :mod:`~dlrm_fused.symmetric.puts`. Of torch only the allocation and the bindings are used: the barrier and
the signals of its handles do nothing with this backend (pytorch/pytorch#191858).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.compat.torch import (
    is_nvshmem_available,
    nvshmem_bindings,
    rendezvous,
    use_symmetric_memory_backend,
    zeros_symmetric,
)
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric.device_puts import bind_nvshmem
from dlrm_fused.symmetric.memory import SymmetricGroup, SymmetricMemory

# Memory is kept until the process ends: freeing is collective (pytorch/pytorch#195500), and a late credit may still arrive.
_kept: list[SymmetricMemory] = []


class NvshmemGroup(SymmetricGroup):
    """Ranks with a GPU of their own each, on one or several hosts. The process group has all ranks."""

    puts_between_hosts = True

    def _check_peers(self) -> None:
        self._kernels: dict[Any, Any] = {}
        self._bindings: Any = None
        self.gather(self._use_nvshmem)

    def _use_nvshmem(self) -> None:
        # Its first allocation is a collective of all ranks; one of some ranks can hang a later one (pytorch/pytorch#196082).
        if self.process_group is not None and self.world_size != dist.get_world_size():
            raise UsageError(
                f"DLRM_FUSED_TRANSPORT=nvshmem: a group of {self.world_size} of {dist.get_world_size()} ranks; it takes all"
            )
        if not is_nvshmem_available():
            raise UsageError(
                "DLRM_FUSED_TRANSPORT=nvshmem: torch finds no NVSHMEM (`python -m dlrm_fused.doctor` says more); "
                "install the nvidia-nvshmem package that torch's CUDA build names, or use DLRM_FUSED_TRANSPORT=messages"
            )
        try:
            use_symmetric_memory_backend("NVSHMEM", self.device)
        except RuntimeError as error:
            raise UsageError(f"torch's symmetric memory has another backend; set TORCH_SYMMMEM=NVSHMEM: {error}") from error
        self._bindings = nvshmem_bindings()
        bind_nvshmem(self._bindings)

    def put_numbers(self) -> list[int]:
        """torch numbers NVSHMEM's processing elements as the ranks of the default process group."""
        if self.process_group is None:
            return [0]
        return dist.get_process_group_ranks(self.process_group)

    def with_puts(self, kernel: Any) -> Any:
        """Return the kernel linked with NVSHMEM's device library, whose state is set up when it is loaded."""
        if kernel not in self._kernels:
            self._kernels[kernel] = self._bindings.requires_nvshmem(kernel)
        return self._kernels[kernel]

    def _allocate(self, name: str, size: int) -> SymmetricMemory:
        with torch.cuda.device(self.device):
            if self.process_group is None:
                return SymmetricMemory(name, {0: torch.zeros(size, dtype=torch.uint8, device=self.device)}, 0, 1)
            local = self.on_all(lambda: zeros_symmetric(size, self.device))
            # This call ends when all memory is zero and mapped.
            handle, blocks = self.on_all(lambda: self._map(name, local))
        memory = SymmetricMemory(name, blocks, self.rank, self.world_size, resources=handle)
        _kept.append(memory)
        return memory

    def _map(self, name: str, local: Tensor) -> tuple[Any, dict[int, Tensor]]:
        """torch's handle, which owns the views of other blocks, and the blocks of this host."""
        assert self.process_group is not None
        handle = rendezvous(local, self.process_group)
        unreachable = [rank for rank in self.hosts.local if not handle.buffer_ptrs[rank]]
        if unreachable:
            raise CommunicationError(
                f"symmetric memory {name}: rank {self.rank} cannot map the memory of ranks {unreachable} of its own host; "
                "`nvidia-smi topo -p2p r` shows why"
            )
        assert local.data_ptr() == handle.buffer_ptrs[self.rank], "a block does not begin where its allocation does"
        return handle, {
            rank: local if rank == self.rank else handle.get_buffer(rank, tuple(local.shape), torch.uint8)
            for rank in self.hosts.local
        }
