"""The model of a config, ready to train or to evaluate."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from dlrm_fused.config import Comm, Config
from dlrm_fused.datasets.schema import DatasetSchema
from dlrm_fused.errors import UsageError
from dlrm_fused.models import build_model
from dlrm_fused.sharding.groups import model_parallel_groups
from dlrm_fused.sharding.parallel import ShardedModel, shard
from dlrm_fused.symmetric.factory import reason_against

logger = logging.getLogger("dlrm_fused")


def build(config: Config, schema: DatasetSchema, device: torch.device) -> ShardedModel:
    """Build the model on all ranks, and spread it over them. Collective.

    Raises:
        ConfigError: if the model does not go with the data set or the ranks, or no plan satisfies the config.
        UsageError: with ``comm_strict``, if ``comm=fused`` does not cover all of the model.
    """
    config = _with_possible_comm(config, device)
    groups = model_parallel_groups(config.model)
    task = build_model(config, schema, dist.get_world_size(), device, groups.model_parallel if groups else None)
    return shard(task, config, schema, device, groups)


def _with_possible_comm(config: Config, device: torch.device) -> Config:
    """Return the config; where the device has no fused communication, one with ``comm=baseline``, and warn, or with
    ``comm_strict`` raise UsageError."""
    reason = reason_against(device)
    if config.comm is Comm.baseline or reason is None:
        return config
    if config.comm_strict:
        raise UsageError(f"comm={config.comm.name}, comm_strict=true: {reason}")
    if dist.get_rank() == 0:
        logger.warning("comm=%s runs as comm=baseline: %s", config.comm.name, reason)
    return replace(config, comm=Comm.baseline)
