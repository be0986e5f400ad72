"""What ``comm`` means for layers that have a fused operator: whether it can run, and whether it is the faster one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dlrm_fused.config import Config, Precision
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group

logger = logging.getLogger("dlrm_fused")

_WARMUP_RUNS, _MEASURED_RUNS = 3, 10


def reachable_memory(config: Config, group: dist.ProcessGroup, device: torch.device, layers: str) -> SymmetricGroup | None:
    """The memory of the ranks; None, with a warning, if they cannot reach each other's. Collective over the group.

    Args:
        layers: what they are to share, for messages.

    Raises:
        UsageError: instead of the warning, with ``comm_strict``.
    """
    try:
        return symmetric_group(group, device)
    except CommunicationError as error:  # raised by all ranks
        if config.comm_strict:
            raise UsageError(f"comm_strict=true: {layers} without fused communication: {error}") from None
        logger.warning("%s run without fused communication: %s", layers, error)
        return None


def compute_dtype(config: Config) -> torch.dtype:
    """Of products, by ``training.precision``."""
    return torch.bfloat16 if config.training.precision is Precision.bf16 else torch.float32


def is_faster(
    fused: Callable[[], object],
    unfused: Callable[[], object],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    layers: str,
    unfused_name: str,
) -> bool:
    """Whether the fused way takes less time on its slowest rank than the other; the log says so. Collective over the group.

    Args:
        fused, unfused: the same work; collective.
        layers, unfused_name: for the log.
    """
    own, other = _slowest_rank([_seconds(work, device) for work in (fused, unfused)], group, device)
    logger.info(
        "comm=auto, %s: fused %.3f ms, %s %.3f ms: %s",
        layers,
        own * 1e3,
        unfused_name,
        other * 1e3,
        "fused" if own < other else unfused_name,
    )
    return own < other


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Mean time. Collective."""
    for run in range(_WARMUP_RUNS + _MEASURED_RUNS):
        if run == _WARMUP_RUNS:
            _synchronize(device)
            begin = time.perf_counter()
        work()
    _synchronize(device)
    return (time.perf_counter() - begin) / _MEASURED_RUNS


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest_rank(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return [float(time) for time in times]
