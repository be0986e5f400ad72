"""Checks of ranks and config that layers with a fused operator make before they use it."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from dlrm_fused.config import Config
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group

logger = logging.getLogger("dlrm_fused")


def reachable_memory(config: Config, group: dist.ProcessGroup, device: torch.device, layers: str) -> SymmetricGroup | None:
    """Return the memory of the ranks; None, with a warning, if they cannot reach each other's. Collective over the group.

    Args:
        layers: what they are to share, for messages.

    Raises:
        UsageError: instead of the warning, with ``comm_strict``.
    """
    try:
        return symmetric_group(group, device)
    except CommunicationError as error:  # raised by all ranks
        decline(config, layers, str(error))
        return None


def decline(config: Config, layers: str, reason: str) -> None:
    """Warn that layers run without fused communication, and why.

    Raises:
        UsageError: instead of the warning, with ``comm_strict``.
    """
    if config.comm_strict:
        raise UsageError(f"comm_strict=true: {layers} without fused communication: {reason}") from None
    logger.warning("%s run without fused communication: %s", layers, reason)


def compute_dtype(config: Config) -> torch.dtype:
    """Return the dtype of matrix products, by ``training.precision``."""
    return torch.bfloat16 if config.training.precision.is_bf16 else torch.float32
