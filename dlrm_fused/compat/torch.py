"""Private names of PyTorch, 2.11, 2.13 and 2.14."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives, _symmetric_memory

_CU_STREAM_CAPTURE_MODE_RELAXED = 2
_CYCLES_PER_SECOND = 2e9  # of a GPU's clock, about

# Attention's operations by their names on CPUs: those that torch.utils.flop_counter knows. They have no public name.
ATTENTION_OF_GPUS = {
    "_scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": torch.ops.aten._scaled_dot_product_flash_attention_backward,
}


def is_rocm() -> bool:
    """Return whether this torch is built for AMD's GPUs, which it calls ``cuda`` too."""
    return torch.version.hip is not None


def one_graph_in_ddp() -> AbstractContextManager[None]:
    """Calls of compiled functions inside compile one graph; otherwise torch cuts what runs in DistributedDataParallel at the
    borders of its buckets, and nothing is fused across."""
    import torch._dynamo.config  # takes long to import

    return cast(AbstractContextManager[None], torch._dynamo.config.patch(optimize_ddp=False))


def wait_for_collective(result: Tensor) -> Tensor:
    """Return the result of a functional collective when it is there; a view of it does not wait by itself."""
    with torch.no_grad():
        _functional_collectives.wait_tensor(result.detach())
    return result


def copy_all(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its destination, in one kernel where all have one dtype and device."""
    if destinations:
        torch._foreach_copy_(list(destinations), list(sources))


def scaled_product(left: Tensor, right: Tensor, factors: tuple[Tensor, Tensor], has_short_sums: bool) -> Tensor:
    """Multiply two matrices of 8-bit floating point on a GPU; the public name of it came after 2.11.

    Args:
        left: [M, K], contiguous.
        right: [K, N], the transpose of a contiguous matrix.
        factors: [] float32, by which both are multiplied.
        has_short_sums: Hopper may add with fewer bits.

    Returns:
        [M, N] in bf16.
    """
    return torch._scaled_mm(left, right, *factors, out_dtype=torch.bfloat16, use_fast_accum=has_short_sums)


def modules_of(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers and all modules in them, faster than ``modules()``: this is asked at every call."""
    found = list(layers)
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found


def tensors_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters and buffers of these modules alone."""
    named = [tensors for module in modules for tensors in (module._parameters, module._buffers) if tensors]
    return [tensor for tensors in named for tensor in tensors.values() if tensor is not None]


def sleep_on_device(seconds: float) -> None:
    """Keep the current CUDA stream idle for about so long; no public function does."""
    torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))


def current_stream_handle(device: torch.device) -> int:
    """Return the handle of a device's current CUDA stream. The public way makes an object, which takes as long as a launch.

    Args:
        device: with an index.
    """
    return torch._C._cuda_getCurrentRawStream(device.index)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a device's current CUDA stream, the same object each time that it is current.

    Args:
        device: with an index.
    """
    return _current_stream(device.index, current_stream_handle(device))


@functools.cache
def _current_stream(index: int, handle: int) -> torch.cuda.Stream:
    return torch.cuda.current_stream(index)


def has_dispatch_mode() -> bool:
    """Return whether a ``TorchDispatchMode``, such as a tracer, or a transform of ``torch.func`` sees calls of operators."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._are_functorch_transforms_active()


def is_in_forward_mode() -> bool:
    """Return whether a level of forward-mode differentiation has been entered, in which tensors may have tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def is_profiled() -> bool:
    """Return whether torch's profiler records the calls of operators."""
    return torch._C._autograd._profiler_enabled()


def is_alive(process_group: dist.ProcessGroup) -> bool:
    """Return whether a process group has not been destroyed; there is no public way to ask."""
    return process_group in dist.distributed_c10d._world.pg_map


def default_store() -> dist.Store:
    """Return the store through which the ranks of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def nccl_backend(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    """Return a communicator of NCCL that belongs to no process group. Collective. After an error nothing is torn down.

    Args:
        timeout: of NCCL's watchdog, which says in the log what takes longer.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # Else its watchdog, when NCCL has noticed a loss, sleeps for a minute with the lock that every call needs, and then ends
    # the process (ProcessGroupNCCL.cpp, Watchdog::runLoop).
    with _environment(TORCH_NCCL_ASYNC_ERROR_HANDLING="0", TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="0"):
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Within it, environment variables of this process have these values."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def let_captures_be() -> None:
    """Let this thread ask for events while another one captures a CUDA graph, which would otherwise be spoilt.

    A capture in the mode "global", torch's default, forbids it; torch's own threads do the same. Source: CUDA's driver API,
    ``cuThreadExchangeStreamCaptureMode``.
    """
    mode = ctypes.c_int(_CU_STREAM_CAPTURE_MODE_RELAXED)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def symmetric_memory_backend(device: torch.device) -> str | None:
    """Return the backend of torch's symmetric memory on a device; None if it has none, as on CPUs.

    The module has an underscore; what it offers is documented and has no other name.
    """
    return _symmetric_memory.get_backend(device)


def zeros_symmetric(size: int, device: torch.device) -> Tensor:
    """Zeros, uint8 [size], that :func:`rendezvous` can map, an allocation of its own.

    The public ``empty`` may return a part of a larger allocation, from a pool; a handle's addresses are then those of that.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    block = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device).zero_()
    torch.cuda.synchronize(device)
    return block


class RenumberingStore(dist.Store):
    """A store in which torch's symmetric memory counts the exchanges of one rendezvous from zero.

    Torch numbers them by all that the process has made, for whatever ranks (``StoreExchange`` in CUDASymmetricMemoryUtils.hpp;
    pytorch/pytorch issue 196082): ranks that have made unequal numbers wait for each other's keys.
    """

    _NUMBERED = re.compile(r"(\D*/)(\d+)(.*)", re.DOTALL)

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self._rendezvous, self._first = store, 0, -1

    def begin(self) -> None:
        """Begin a rendezvous."""
        self._rendezvous, self._first = self._rendezvous + 1, -1

    def renumbered(self, key: str) -> str:
        """Return a key that all ranks have of the same exchange; one without a number as it is."""
        numbered = self._NUMBERED.fullmatch(key)
        if numbered is None:
            return key
        before, number, after = numbered[1], int(numbered[2]), numbered[3]
        if self._first < 0:
            self._first = number
        return f"{before}{self._rendezvous}.{number - self._first}{after}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self.renumbered(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self.renumbered(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get([self.renumbered(key) for key in keys])

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self.renumbered(key), amount)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        renumbered = [self.renumbered(key) for key in keys]
        if timeout is None:
            self._store.wait(renumbered)
        else:
            self._store.wait(renumbered, timeout)

    def has_extended_api(self) -> bool:
        return True


class MappingRanks:
    """Ranks that map each other's blocks. Torch's symmetric memory knows them by the name of a process group; these have no
    collectives, so that making them takes no other rank, as ``new_group`` on GPUs does, and no counting of groups.

    Args:
        name: equal on these ranks, and of no other process group.
        rank: among them.
    """

    # By this process, of any ranks.
    calls = 0

    def __init__(self, name: str, rank: int, world_size: int) -> None:
        self._name, self._rank, self._world_size = name, rank, world_size
        self._store = dist.PrefixStore(name, default_store())
        self._renumbering = RenumberingStore(self._store)
        self._groups: dict[str, dist.ProcessGroup] = {}  # by name; torch's registry keeps no reference

    def rendezvous(self, block: Tensor, *, are_in_step: bool) -> Any:
        """Map the blocks of all ranks; the handle gives their addresses. Collective.

        Args:
            block: of :func:`zeros_symmetric`, of the same size on all of them.
            are_in_step: whether all of them have made as many calls before, of any ranks.
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        MappingRanks.calls += 1
        self._renumbering.begin()
        name = self._name if are_in_step else f"{self._name}, out of step"
        self._register(name, self._store if are_in_step else self._renumbering)
        return _SymmetricMemory.rendezvous(block, cast(Any, name))  # torch's own type since 2.13

    def close(self) -> None:
        """Let go of the names."""
        from torch._C._distributed_c10d import _unregister_process_group

        while self._groups:
            _unregister_process_group(cast(Any, self._groups.popitem()[0]))

    def _register(self, name: str, store: dist.Store) -> None:
        from torch._C._distributed_c10d import _register_process_group

        if name not in self._groups:
            self._groups[name] = dist.ProcessGroup(store, self._rank, self._world_size)
            _register_process_group(cast(Any, name), self._groups[name])


def tensors_without_memory() -> AbstractContextManager[object]:
    """Within it, new tensors have shapes and dtypes only; operations may mix them with tensors from outside."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def ranks_without_peers(world_size: int) -> Iterator[None]:
    """Within it, this process is rank 0 of so many, and collectives return at once: for tracing a model of many ranks.

    The backend has no public module.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def traced_group(group: torch.ScriptObject) -> dist.ProcessGroup:
    """Return the process group of a collective in a graph that make_fx has traced."""
    return dist.ProcessGroup.unbox(group)
