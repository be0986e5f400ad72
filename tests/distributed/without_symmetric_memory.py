"""A rank that cannot reach the memory of others: what a layer then computes with, and what comm_strict=true says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from dlrm_fused.config import Config
from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.models import fused_communication
from dlrm_fused.training.runtime import Rank, process_group


def refuse_memory(*_: object) -> NoReturn:
    raise CommunicationError("no peer access")


def choose_without_symmetric_memory(
    choose: Callable[[Config, dist.ProcessGroup, torch.device], Any], config: Config
) -> tuple[bool, str]:
    """Whether the computations are those of comm=baseline, and what is said with comm_strict=true."""
    fused_communication.symmetric_group = refuse_memory
    device = torch.device("cpu")
    with process_group(Rank.from_environment(), device):
        group = dist.group.WORLD
        chosen = choose(config, group, device)
        with pytest.raises(UsageError) as refused:
            choose(replace(config, comm_strict=True), group, device)
    chosen = chosen if isinstance(chosen, list) else [chosen]
    return all(each.group is group and each.workspace is None for each in chosen), str(refused.value)
