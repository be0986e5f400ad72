"""Programmatic dependent launch: a kernel is brought onto the GPU while the one before it in its stream still runs.

A kernel that takes part begins with :func:`wait_for_earlier_kernels`, before it reads or writes anything, and is launched with
:func:`launch_options`. What is saved is the time from the end of one kernel to the first instruction of the next, about a
microsecond of each of the kernels in a CUDA graph. See "Programmatic Dependent Launch and Synchronization" in NVIDIA's *CUDA
C++ Programming Guide*.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dlrm_fused.ops.common.devices import has_dependent_launches, multiprocessors


@triton.jit
def wait_for_earlier_kernels():
    """Wait until the kernels before this one are complete and what they wrote is there; the next one may be brought in now."""
    gdc_wait()
    gdc_launch_dependents()


def starts_early(device: torch.device, programs: int) -> bool:
    """Whether a launch of so many programs gains: GPUs from Hopper on, if every multiprocessor has one program at most.

    With more programs than that, those of the next kernel take the places of this one's last, and some multiprocessors get
    more work than others.
    """
    return device.type == "cuda" and programs <= multiprocessors(device) and has_dependent_launches(device)


def launch_options(early: bool) -> dict[str, Any]:
    """Return the options of a launch of a Triton kernel."""
    return {"launch_pdl": True} if early else {}
