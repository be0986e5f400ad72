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
_REMEDY = "start with torchrun, which sets what it needs, or unset all of these for one process"


@dataclass(frozen=True)
class Rank:
    """The place of this process among all of the run, as torchrun states it; a process without torchrun is alone."""

    index: int
    world_size: int
    local_index: int
    host: str

    @staticmethod
    def from_environment() -> Rank:
        """Return which rank the environment says this process is; alone where it says nothing.

        Raises:
            ConfigError: if the environment does not say which rank this is, or contradicts itself.
        """
        world_size = _variable("WORLD_SIZE", "1", range(1, 2**31))
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 and name not in os.environ]
        if missing:
            raise ConfigError(f"WORLD_SIZE={world_size} in the environment, without {', '.join(missing)}; {_REMEDY}")
        if "MASTER_ADDR" in os.environ:
            _variable("MASTER_PORT", "", range(2**16))
        _variable("LOCAL_WORLD_SIZE", "1", range(1, 2**31))
        return Rank(
            index=_variable("RANK", "0", range(world_size), f", with WORLD_SIZE={world_size}"),
            world_size=world_size,
            local_index=_variable("LOCAL_RANK", "0", range(2**31)),
            host=socket.gethostname(),
        )

    def __str__(self) -> str:
        return f"rank {self.index} on {self.host}"


def _variable(name: str, default: str, allowed: range, reason: str = "") -> int:
    value = os.environ.get(name, default)
    if not value.isdecimal() or int(value) not in allowed:
        raise ConfigError(f"{name}={value} in the environment: allowed: {allowed[0]} to {allowed[-1]}{reason}; {_REMEDY}")
    return int(value)


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
