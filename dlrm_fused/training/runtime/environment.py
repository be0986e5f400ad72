"""A rank, and its setup before its work: its log lines, its device, the arithmetic of its numbers."""

from __future__ import annotations

import logging
import os
import socket
import sys
import warnings
from dataclasses import dataclass

import torch

from dlrm_fused.config import Config, Precision
from dlrm_fused.errors import ConfigError

logger = logging.getLogger("dlrm_fused")


@dataclass(frozen=True)
class Rank:
    """The place of this process among all of the run, as torchrun states it; a process without torchrun is alone."""

    index: int
    world_size: int
    local_index: int
    host: str

    @staticmethod
    def from_environment() -> Rank:
        return Rank(
            index=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_index=int(os.environ.get("LOCAL_RANK", "0")),
            host=socket.gethostname(),
        )

    def __str__(self) -> str:
        return f"rank {self.index} on {self.host}"


def configure_logging(rank: Rank) -> None:
    """Log lines say when, which host and which rank; ranks above 0 only say what is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank.host} rank {rank.index} %(levelname)s %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.INFO if rank.index == 0 else logging.WARNING)
    # Deprecations inside torch and torchrec, repeated by every rank, are nothing a user can mend.
    warnings.simplefilter("ignore", FutureWarning)
    warnings.filterwarnings("ignore", module=r"(torch|torchrec|fbgemm_gpu|torchmetrics|tensordict)\b")
    for library in ("torch", "torchrec"):
        logging.getLogger(library).setLevel(logging.ERROR)


def choose_device(setting: str, rank: Rank) -> torch.device:
    """Return the device of this rank: ``cpu``, ``cuda``, or ``auto`` for cuda where there is one.

    Raises:
        ConfigError: if the host has fewer GPUs than ranks.
    """
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(f"runtime.device={setting}: PyTorch finds no GPU on this host; allowed here: cpu")
    if rank.local_index >= count:
        raise ConfigError(
            f"runtime.device={setting}: {rank} is local rank {rank.local_index}, but the host has {count} GPUs; "
            "start fewer processes with --nproc-per-node"
        )
    device = torch.device("cuda", rank.local_index)
    torch.cuda.set_device(device)
    return device


def apply_numerics(config: Config) -> None:
    """Set the random seed and the arithmetic of fp32 matrix products."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("highest" if config.training.precision is Precision.fp32 else "high")
