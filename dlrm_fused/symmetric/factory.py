"""Chooses the transport of a process group, shared memory or CUDA; the only module that knows both."""

from __future__ import annotations

import atexit
from contextlib import suppress

import torch
import torch.distributed as dist

from dlrm_fused.compat.torch import is_alive, is_rocm
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric.cuda import CudaGroup
from dlrm_fused.symmetric.gloo_threads import wait_for_gloo_threads
from dlrm_fused.symmetric.memory import SymmetricGroup
from dlrm_fused.symmetric.shared import SharedGroup

# Groups by type of device.
_TRANSPORTS: dict[str, type[SymmetricGroup]] = {"cpu": SharedGroup, "cuda": CudaGroup}

_groups: dict[tuple[dist.ProcessGroup | None, torch.device], SymmetricGroup] = {}


@atexit.register
def _close_all() -> None:
    for group in _groups.values():
        with suppress(RuntimeError):  # of a GPU; said where it happened
            group.close()
    # The threads of process groups that torch has let go of end here.
    _groups.clear()
    wait_for_gloo_threads()


def symmetric_group(process_group: dist.ProcessGroup | None = None, device: torch.device | str | None = None) -> SymmetricGroup:
    """Return the symmetric group of a process group on a device; made at the first call, which is collective, and kept.

    Args:
        process_group: default: all ranks; without torch.distributed, this process alone.
        device: of this rank's memory: ``cpu`` or a CUDA device. Default: the current CUDA device if the process group has
            NCCL, else ``cpu``.

    Raises:
        UsageError: this rank is not in the process group, or there is no transport for the device; or, on all ranks, their
            types of device differ.
        CommunicationError: on all ranks, if some of them cannot connect to each other, or torch is built for AMD's GPUs.
    """
    if process_group is None and dist.is_initialized():
        process_group = dist.group.WORLD
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise UsageError(f"process_group={process_group}: this process is not a member of it")
    device = _device(process_group, device)
    key = (process_group, device)
    _forget_closed_groups()
    if key not in _groups:
        _groups[key] = _transport(device)(process_group, device)
    return _groups[key]


def _forget_closed_groups() -> None:
    """Let go of groups that are closed, and close those whose process group has been destroyed."""
    for key, group in list(_groups.items()):
        if group.process_group is not None and not is_alive(group.process_group):
            group.close()
        if group.is_closed:
            del _groups[key]


def _device(process_group: dist.ProcessGroup | None, device: torch.device | str | None) -> torch.device:
    if device is None:
        with_cuda = torch.cuda.is_available() if process_group is None else "nccl" in dist.get_backend_config(process_group)
        device = "cuda" if with_cuda else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def reason_against(device: torch.device) -> str | None:
    """Why there is no fused communication on devices of this kind; None if there is."""
    if device.type == "cuda" and is_rocm():
        return (
            f"fused communication is not known to work on AMD's GPUs (torch {torch.__version__} for ROCm {torch.version.hip}), "
            "where it has never run; comm=baseline is TorchRec's own path"
        )
    return None


def _transport(device: torch.device) -> type[SymmetricGroup]:
    if reason := reason_against(device):
        raise CommunicationError(f"device={device}: {reason}")  # on all ranks, which have one build of torch
    if device.type not in _TRANSPORTS:
        raise UsageError(f"device={device}: symmetric memory exists for cpu and cuda")
    return _TRANSPORTS[device.type]
