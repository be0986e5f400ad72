"""Abilities of a GPU, which launches ask for: for every kernel it is decided here what a GPU has and what it lacks."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dlrm_fused.compat.torch import is_rocm
from dlrm_fused.ops.common.gpus import gpu_of

# Bytes of shared memory that CUDA keeps for itself, of each program. Source: NVIDIA's *CUDA C++ Programming Guide*, "Compute
# Capabilities": 163 KB of a program on a multiprocessor with 164, 99 of 100, 227 of 228.
_RESERVED = 1024


def is_nvidia(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU; torch for AMD's GPUs calls those ``cuda`` too."""
    return device.type == "cuda" and not is_rocm()


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU; (0, 0) of the CPU, and of AMD's GPUs, which count otherwise."""
    return torch.cuda.get_device_capability(device) if is_nvidia(device) else (0, 0)


def has_dependent_launches(device: torch.device) -> bool:
    """Whether kernels can wait for the one before them in their stream (``griddepcontrol``): from Hopper on."""
    return capability(device) >= (9, 0)


def has_async_proxy(device: torch.device) -> bool:
    """Whether loads by descriptors go another way than plain ones, by the tensor memory accelerator: from Hopper on."""
    return capability(device) >= (9, 0)


def has_tensor_memory(device: torch.device) -> bool:
    """Whether tensor cores leave sums of 16-bit products in a memory of their own, and read all operands from shared memory:
    Blackwell's of data centers."""
    return capability(device)[0] == 10


def has_float8(device: torch.device) -> bool:
    """Whether kernels can read float8_e4m3fn: from Ada on, and under the interpreter."""
    return device.type == "cpu" or capability(device) >= (8, 9)


def register_limit(device: torch.device, registers: int | None) -> dict[str, Any]:
    """An option of a launch: registers of a thread at most. Triton has it for NVIDIA's GPUs alone."""
    return {"maxnreg": registers} if is_nvidia(device) else {}


def room_of_program(memory: int, programs: int = 1) -> int:
    """Bytes that each of so many programs may have of a multiprocessor's shared memory."""
    return memory // programs - _RESERVED


@triton.jit
def wait_for_earlier_kernels():
    """Wait until the kernels before this one are complete and what they wrote is there; the next one may be brought in now.

    A kernel that takes part in programmatic dependent launch begins with it, before it reads or writes anything, and is
    launched with :func:`launch_options`. That saves the time from the end of one kernel to the first instruction of the next,
    about a microsecond of each of the kernels in a CUDA graph. See "Programmatic Dependent Launch and Synchronization" in
    NVIDIA's *CUDA C++ Programming Guide*.
    """
    gdc_wait()
    gdc_launch_dependents()


def starts_early(device: torch.device, programs: int) -> bool:
    """Whether a launch of so many programs gains: GPUs from Hopper on, if every multiprocessor has one program at most.

    With more programs than that, those of the next kernel take the places of this one's last, and some multiprocessors get
    more work than others.
    """
    return device.type == "cuda" and programs <= gpu_of(device).multiprocessors and has_dependent_launches(device)


def launch_options(early: bool) -> dict[str, Any]:
    """Return the options of a launch of a Triton kernel."""
    return {"launch_pdl": True} if early else {}
