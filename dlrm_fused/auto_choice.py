"""The measurements behind ``comm=auto``, and behind operators that choose how they run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from dlrm_fused.compat.torch import sleep_on_device

logger = logging.getLogger("dlrm_fused")

_WARMUP_RUNS, _MEASURED_RUNS = 3, 10
_LONGEST_SLEEP_SECONDS = 0.05


@dataclass(frozen=True)
class BothWays:
    """Seconds of the same work in two ways, each on its slowest rank."""

    fused: float
    unfused: float

    @property
    def fused_is_faster(self) -> bool:
        return self.fused < self.unfused


def measure_both(
    fused: Callable[[], object],
    unfused: Callable[[], object],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    work: str,
    unfused_name: str,
) -> BothWays:
    """Measure the same work in two ways; all ranks get the same times. The first rank logs them. Collective over the group.

    Args:
        fused, unfused: the same work in two ways; collective.
        work, unfused_name: for the log.
    """
    both = BothWays(*on_slowest_rank([_mean_seconds(run, device) for run in (fused, unfused)], group, device))
    log_choice(both, group, work=work, unfused_name=unfused_name)
    return both


def on_slowest_rank(seconds: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the largest of all ranks' times, one by one. Collective over the group."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.tolist()


def log_choice(both: BothWays, group: dist.ProcessGroup, *, work: str, unfused_name: str) -> None:
    """Log which of two ways is taken, on the group's first rank."""
    if group.rank() == 0:
        times, chosen = (both.fused * 1e3, unfused_name, both.unfused * 1e3), "fused" if both.fused_is_faster else unfused_name
        logger.info("comm=auto, %s: fused %.3f ms, %s %.3f ms: %s", work, *times, chosen)


class CallSeconds(NamedTuple):
    """The seconds of a call: what the device needs, whatever the host needs to launch it, and the host's."""

    device: float
    host: float


def call_seconds(run: Callable[[], object], device: torch.device) -> CallSeconds:
    """Measure one run, which may be collective."""
    if device.type != "cuda":
        return CallSeconds(_mean_seconds(run, device), 0.0)
    host_seconds = math.inf
    for _ in range(_WARMUP_RUNS):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run()
        host_seconds = min(host_seconds, time.perf_counter() - begin)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sleep_on_device(min(2 * _MEASURED_RUNS * host_seconds, _LONGEST_SLEEP_SECONDS))  # meanwhile the host gets ahead
    run()  # ranks sleep for different times, and a collective run ends on all of them together
    start.record()
    for _ in range(_MEASURED_RUNS):
        run()
    end.record()
    end.synchronize()
    return CallSeconds(start.elapsed_time(end) / 1e3 / _MEASURED_RUNS, host_seconds)


def _mean_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that one run takes on the device, after some that warm up. Collective if the run is."""
    for _ in range(_WARMUP_RUNS):
        run()
    torch.get_device_module(device).synchronize(device)
    begin = time.perf_counter()
    for _ in range(_MEASURED_RUNS):
        run()
    torch.get_device_module(device).synchronize(device)
    return (time.perf_counter() - begin) / _MEASURED_RUNS
