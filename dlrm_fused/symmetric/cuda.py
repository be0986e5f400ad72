"""Symmetric memory of GPUs, those of one host with peer access: torch's symmetric memory, CUDA backend.

A rank's kernels store straight into the memory of another rank's GPU, over NVLink where there is one. Only mapping is torch's:
flags are ours (torch's signal pads must return to zero and collide between groups), and there is no NVLink multicast.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Mapping
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.compat.torch import MappingRanks, symmetric_memory_backend, zeros_symmetric
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric.memory import SymmetricGroup, SymmetricMemory, readable

logger = logging.getLogger("dlrm_fused")

# With it users say that peer access does not work, whatever the driver says, or try out a machine without: NCCL does without it
# too. Source: NCCL's user guide, environment variables.
P2P_VARIABLE = "NCCL_P2P_DISABLE"


def is_p2p_off() -> bool:
    """Return whether ``NCCL_P2P_DISABLE=1`` is set: then no GPU of this rank is taken to reach another's memory."""
    return os.environ.get(P2P_VARIABLE) == "1"


# Memory that other ranks map, as long as there is any use of it.
_mapped: WeakSet[SymmetricMemory] = WeakSet()


def mapped_bytes(device: torch.device) -> int:
    """Return the bytes of this rank's symmetric memory that other ranks map: torch's allocator does not count them."""
    return sum(memory.size for memory in _mapped if memory.local.device == device)


class CudaGroup(SymmetricGroup):
    """Ranks with a GPU of their own each."""

    def _check_peers(self) -> None:
        uuids = self.gather(lambda: str(torch.cuda.get_device_properties(self.device).uuid))
        gpus = {rank: uuids[rank] for rank in self.hosts.local}
        self.gather(lambda: self._check_gpus(gpus))
        unreachable = self.gather(lambda: self._unreachable(gpus))
        self.hosts = self.hosts.divided(unreachable)
        if any(unreachable) and dist.get_rank() == 0:
            _say_what_no_peer_access_means()
        local = self.hosts.local
        name = self.gather(lambda: f"dlrm_fused memory {secrets.token_hex(8)}")[local[0]]
        self._mapping = MappingRanks(name, local.index(self.rank), len(local)) if len(local) > 1 else None

    def close(self) -> None:
        super().close()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def _check_gpus(self, gpus: Mapping[int, str]) -> None:
        first_users: dict[str, int] = {}
        for rank, gpu in gpus.items():
            if (first := first_users.setdefault(gpu, rank)) != rank:
                raise UsageError(
                    f"ranks {first} and {rank} use the same GPU ({gpu}); give each rank one of its own: "
                    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
                )
        backend = symmetric_memory_backend(self.device)
        if backend not in (None, "CUDA"):
            raise UsageError(
                f"torch's symmetric memory is set to the backend {backend}; set TORCH_SYMMMEM=CUDA, or leave it unset"
            )

    def _unreachable(self, gpus: Mapping[int, str]) -> list[int]:
        """Return the ranks of this host to whose GPU this rank's has no peer access."""
        # A GPU that CUDA_VISIBLE_DEVICES hides from this process cannot be asked about; it may be reachable all the same.
        visible = {
            str(torch.cuda.get_device_properties(index).uuid): torch.device("cuda", index)
            for index in range(torch.cuda.device_count())
        }
        return [
            rank
            for rank, gpu in gpus.items()
            if rank != self.rank
            and (is_p2p_off() or (gpu in visible and not torch.cuda.can_device_access_peer(self.device, visible[gpu])))
        ]

    def _zeros(self, size: int) -> Tensor:
        zeros = torch.zeros(size, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        return zeros

    def _allocate(self, name: str, size: int) -> SymmetricMemory:
        self.gather(lambda: self._check_available(name, size))
        calls = self.gather(lambda: MappingRanks.calls)
        are_in_step = len({calls[rank] for rank in self.hosts.local}) == 1
        mapping = self._mapping  # None where this rank is alone on its host
        with torch.cuda.device(self.device):
            # Ranks alone on their host make the collective calls of the others.
            local = self.on_all(lambda: zeros_symmetric(size, self.device) if mapping else self._zeros(size))
            # This call ends when all ranks have mapped all, and all memory is zero.
            handle = self.on_all(lambda: mapping.rendezvous(local, are_in_step=are_in_step) if mapping else None)
            if handle is None:
                return SymmetricMemory(name, {self.rank: local}, self.rank, self.world_size)
            blocks = {
                rank: local if rank == self.rank else handle.get_buffer(place, (size,), torch.uint8)
                for place, rank in enumerate(self.hosts.local)
            }
        addresses = [block.data_ptr() for block in blocks.values()]
        assert addresses == list(handle.buffer_ptrs), "a block does not begin where its allocation does"
        # Views of peers' memory do not own it; the handle does.
        memory = SymmetricMemory(name, blocks, self.rank, self.world_size, resources=handle)
        _mapped.add(memory)
        return memory

    def _check_available(self, name: str, size: int) -> None:
        free, total = torch.cuda.mem_get_info(self.device)
        if size > free:
            torch.cuda.empty_cache()  # memory that torch keeps for later tensors
            free, total = torch.cuda.mem_get_info(self.device)
        if size > free:
            raise CommunicationError(
                f"symmetric memory {name}: {readable(size)} needed, but {self.device} of rank {self.rank} has {readable(free)} "
                f"of {readable(total)} free; use a smaller batch, or more ranks"
            )


@functools.cache  # for all groups of this process
def _say_what_no_peer_access_means() -> None:
    logger.warning(
        "GPUs of one host have no peer access (%s), so each counts as a host of its own: NCCL carries finished slices between "
        "them; comm=fused may be slower than comm=baseline there, comm=auto measures both and takes the faster",
        f"{P2P_VARIABLE}=1" if is_p2p_off() else "`nvidia-smi topo -p2p r` shows why",
    )
