"""Clock and power of a GPU under a load without a break."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable

import torch

_QUERY = ["nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "-lms", "50"]
_SETTLING_SECONDS = 0.7


def sustained(step: Callable[[], object], device: torch.device, seconds: float = 1.0) -> dict[str, float]:
    """Repeat ``step`` until power and clock have settled, and then for so long.

    Returns:
        Means: ``ms`` of a step, ``watts``, and ``mhz`` of the multiprocessors.

    Raises:
        FileNotFoundError: if there is no nvidia-smi.
    """
    _repeat(step, device, _SETTLING_SECONDS)
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    with subprocess.Popen([*_QUERY, "-i", gpu], stdout=subprocess.PIPE, text=True) as reader:
        milliseconds = _repeat(step, device, seconds)
        reader.terminate()
        lines = reader.communicate()[0].splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]  # the last may be cut off
    samples = [[float(value) for value in line.split(", ")] for line in whole]
    watts, mhz = (statistics.mean(values) for values in zip(*samples, strict=True))
    return {"ms": milliseconds, "watts": watts, "mhz": mhz}


def _repeat(step: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Milliseconds of one."""
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            step()
        torch.cuda.synchronize(device)
        steps += 10
    return (time.perf_counter() - began) / steps * 1e3
