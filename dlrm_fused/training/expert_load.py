"""Measures of how evenly the experts of a model are used in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dlrm_fused.models.moe import MixtureOfExperts


def read_expert_loads(layers: Sequence[MixtureOfExperts]) -> list[list[float]]:
    """Return each layer's tokens by expert, as parts of them all, over all ranks since they were read before. Collective."""
    if not layers:
        return []
    loads = torch.stack([layer.load for layer in layers])
    for layer in layers:
        layer.load.zero_()
    dist.all_reduce(loads)
    return (loads.double() / loads.sum(dim=1, keepdim=True).clamp(min=1)).tolist()


def load_values(loads: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the loads of each layer's busiest and idlest expert, relative to the mean of all: 1 if all are even."""
    return {
        f"experts_{layer}_{name}": extreme(fractions) * len(fractions)
        for layer, fractions in enumerate(loads)
        for name, extreme in (("busiest", max), ("idlest", min))
    }
