"""Which ranks share the weights of tensor-parallel layers, and data parallelism across those groups.

A tensor-parallel (TP) group is consecutive ranks of one host. A parameter whose attribute ``tensor_parallel_dim`` is set is cut
along that dimension: rank r of a group of n holds the r-th of n equal pieces. Other groups hold the same pieces.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from dlrm_fused.config import ModelConfig
from dlrm_fused.errors import ConfigError


@dataclass(frozen=True)
class TensorParallelGroups:
    """The groups of this rank.

    Attributes:
        layers: the ranks that share the weights of layers, this one included.
        copies: the ranks that hold the same pieces as this one, one of each group.
    """

    layers: dist.ProcessGroup
    copies: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Whether this rank belongs to the first of the groups."""
        return self.copies.rank() == 0


def tensor_parallel_groups(model: ModelConfig) -> TensorParallelGroups:
    """The groups that ``model.tensor_parallel`` asks for. Collective.

    Raises:
        ConfigError: on all ranks, if the ranks of a host, or ``model.heads``, cannot be divided so.
    """
    world_size = dist.get_world_size()
    hosts: list[int] = [0] * world_size
    dist.all_gather_object(hosts, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    size = tensor_parallel_size(model, hosts)
    firsts = range(0, world_size, size)
    return TensorParallelGroups(
        layers=_group_of_this_rank([range(first, first + size) for first in firsts]),
        copies=_group_of_this_rank([range(piece, world_size, size) for piece in range(size)]),
    )


def tensor_parallel_size(model: ModelConfig, hosts: Sequence[int]) -> int:
    """Ranks of a TP group.

    Args:
        hosts: by rank, the number of ranks on its host.

    Raises:
        ConfigError: if the ranks of a host, or ``model.heads``, cannot be divided so.
    """
    size = model.tensor_parallel or max(hosts)
    allowed = [n for n in range(1, min(hosts) + 1) if all(ranks % n == 0 for ranks in (*hosts, model.heads))]
    if size not in allowed:
        given = f"{model.tensor_parallel}" if model.tensor_parallel else f"0, all {size} ranks of a host"
        ranks = " and ".join(map(str, sorted(set(hosts))))
        raise ConfigError(
            f"model.tensor_parallel={given}: allowed: {', '.join(map(str, allowed))}; it must divide the ranks of each host, "
            f"{ranks}, and model.heads={model.heads}"
        )
    return size


def _group_of_this_rank(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Collective: every rank takes part in making every group."""
    if len(groups) == 1:
        return cast(dist.ProcessGroup, dist.GroupMember.WORLD)
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return cast(dist.ProcessGroup, next(m for m, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks))


def tensor_parallel_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are cut, by their names."""
    return {name: p for name, p in model.named_parameters() if getattr(p, "tensor_parallel_dim", None) is not None}


def data_parallel_wrapper(model: nn.Module) -> DefaultDataParallelWrapper:
    """For DistributedModelParallel: averages over all ranks the gradients of what is neither sharded nor cut."""
    return DefaultDataParallelWrapper(params_to_ignore=list(tensor_parallel_parameters(model)))


def average_gradients(parameters: Sequence[Tensor], copies: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks that hold the same piece. Collective."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for gradient in gradients:
        gradient.div_(copies.size())
    for work in [dist.all_reduce(gradient, group=copies, async_op=True) for gradient in gradients]:
        cast(dist.Work, work).wait()
