"""Symmetric memory of GPUs on one host with peer access: torch's symmetric memory, CUDA backend.

A rank's kernels store straight into the memory of another rank's GPU, over NVLink where there is one. Only mapping is torch's:
flags are ours (torch's signal pads must return to zero and collide between groups), and there is no NVLink multicast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dlrm_fused.compat.torch import empty_symmetric, rendezvous, symmetric_memory_backend
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric.memory import SymmetricGroup, SymmetricMemory, readable


class CudaGroup(SymmetricGroup):
    """Ranks on one host, each with a GPU of its own."""

    _other_host = (
        "symmetric memory of GPUs needs all ranks on one host; a transport between hosts (NVSHMEM) is not supported yet"
    )

    def _check_peers(self) -> None:
        gpus = self.gather(lambda: str(torch.cuda.get_device_properties(self.device).uuid))
        self.gather(lambda: self._check_gpus(gpus))

    def _check_gpus(self, gpus: list[str]) -> None:
        for rank, gpu in enumerate(gpus):
            if gpus.index(gpu) < rank:
                raise UsageError(
                    f"ranks {gpus.index(gpu)} and {rank} use the same GPU ({gpu}); give each rank one of its own: "
                    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
                )
        backend = symmetric_memory_backend(self.device)
        if backend not in (None, "CUDA"):
            raise UsageError(
                f"torch's symmetric memory is set to the backend {backend}; set TORCH_SYMMMEM=CUDA, or leave it unset"
            )
        # A GPU that CUDA_VISIBLE_DEVICES hides from this process cannot be asked about; it may be reachable all the same.
        visible = {
            str(torch.cuda.get_device_properties(index).uuid): torch.device("cuda", index)
            for index in range(torch.cuda.device_count())
        }
        unreachable = [
            f"rank {rank} ({visible[gpu]})"
            for rank, gpu in enumerate(gpus)
            if rank != self.rank and gpu in visible and not torch.cuda.can_device_access_peer(self.device, visible[gpu])
        ]
        if unreachable:
            raise CommunicationError(
                f"the GPU of rank {self.rank} ({self.device}) has no peer access to that of {', '.join(unreachable)}; "
                "`nvidia-smi topo -p2p r` shows why; use comm=baseline"
            )

    def _allocate(self, name: str, size: int) -> SymmetricMemory:
        self.gather(lambda: self._check_available(name, size))
        with torch.cuda.device(self.device):
            if self.world_size == 1:
                return SymmetricMemory(name, [torch.zeros(size, dtype=torch.uint8, device=self.device)], 0)
            allocated: list[Tensor] = []
            self.gather(lambda: allocated.append(self._zeros(size)))
            (local,) = allocated
            group = self.process_group
            assert group is not None
            handles: list[Any] = []
            # Ends when all ranks have mapped all, and all memory is zero.
            self.gather(lambda: handles.append(rendezvous(local, group)))
            (handle,) = handles
            blocks = [
                local if rank == self.rank else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self.world_size)
            ]
        addresses = [block.data_ptr() for block in blocks]
        assert addresses == list(handle.buffer_ptrs), "a block does not begin where its allocation does"
        # Views of peers' memory do not own it; the handle does.
        return SymmetricMemory(name, blocks, self.rank, resources=handle)

    def _zeros(self, size: int) -> Tensor:
        block = empty_symmetric(size, self.device)
        block.zero_()
        torch.cuda.synchronize(self.device)
        return block

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
