"""What kernels' launches ask of a GPU."""

from __future__ import annotations

import functools

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
