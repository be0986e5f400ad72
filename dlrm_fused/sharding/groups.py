"""Groups of ranks that share the weights of a layer, and data parallelism across those groups.

A parameter whose attribute ``shard_dim`` is set is sharded along that dimension: rank r of a group of n holds the r-th of n
equal shards. Other groups hold the same shards. A group is consecutive ranks:

* tensor-parallel (TP) ones share the weights of the Transformer's blocks, and lie on one host unless the config asks for more;
* expert-parallel (EP) ones share the experts of a Mixture of Experts: shards are whole experts.

A model has groups of one kind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from dlrm_fused.config import ExpertsConfig, ModelConfig
from dlrm_fused.errors import ConfigError


@dataclass(frozen=True)
class ModelParallelGroups:
    """The groups of this rank.

    Attributes:
        model_parallel: the ranks that share the weights of layers, this one included.
        data_parallel: the ranks that hold the same shards as this one, one of each group.
    """

    model_parallel: dist.ProcessGroup
    data_parallel: dist.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Whether this rank belongs to the first of the groups."""
        return self.data_parallel.rank() == 0


def model_parallel_groups(model: ModelConfig) -> ModelParallelGroups | None:
    """The groups of the model; None if no weights of its layers are shared. Collective.

    Raises:
        ConfigError: on all ranks, if ranks or weights cannot be divided as the settings say.
    """
    if model.experts.count:
        return _groups_of(expert_parallel_size(model.experts, dist.get_world_size()))
    size = tensor_parallel_size(model, ranks_of_hosts()) if model.kind.reads_histories else 1
    return _groups_of(size) if size > 1 else None


def tensor_parallel_groups(model: ModelConfig) -> ModelParallelGroups:
    """The groups that ``model.tensor_parallel`` asks for. Collective.

    Raises:
        ConfigError: on all ranks, if the ranks of a host, or ``model.heads``, cannot be divided so.
    """
    return _groups_of(tensor_parallel_size(model, ranks_of_hosts()))


def ranks_of_hosts() -> list[int]:
    """Return, by rank, the number of ranks on its host. Collective."""
    world_size = dist.get_world_size()
    hosts: list[int] = [0] * world_size
    dist.all_gather_object(hosts, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    return hosts


def tensor_parallel_size(model: ModelConfig, hosts: Sequence[int]) -> int:
    """Ranks of a TP group.

    Args:
        hosts: by rank, the number of ranks on its host.

    Raises:
        ConfigError: if the ranks, by default those of each host, or ``model.heads`` cannot be divided so.
    """
    size = model.tensor_parallel or max(hosts)
    shared, what = ([len(hosts)], "all ranks") if model.tensor_parallel else (hosts, "the ranks of each host")
    allowed = [n for n in range(1, len(hosts) + 1) if all(ranks % n == 0 for ranks in (*shared, model.heads))]
    if size not in allowed:
        given = f"{model.tensor_parallel}" if model.tensor_parallel else f"0, all {size} ranks of a host"
        ranks = " and ".join(map(str, sorted(set(shared))))
        raise ConfigError(
            f"model.tensor_parallel={given}: allowed: {', '.join(map(str, allowed))}; it must divide {what}, "
            f"{ranks}, and model.heads={model.heads}"
        )
    return size


def expert_parallel_size(experts: ExpertsConfig, world_size: int) -> int:
    """Ranks of an EP group.

    Raises:
        ConfigError: if the ranks, or ``model.experts.count``, cannot be divided so.
    """
    size = experts.parallel or world_size
    allowed = [n for n in range(1, world_size + 1) if world_size % n == 0 and experts.count % n == 0]
    if size not in allowed:
        given = f"{experts.parallel}" if experts.parallel else f"0, all {size} ranks"
        raise ConfigError(
            f"model.experts.parallel={given}: allowed: {', '.join(map(str, allowed))}; it must divide the number of ranks, "
            f"{world_size}, and model.experts.count={experts.count}"
        )
    return size


def _groups_of(size: int) -> ModelParallelGroups:
    """Collective."""
    world_size = dist.get_world_size()
    return ModelParallelGroups(
        model_parallel=_group_of_this_rank([range(first, first + size) for first in range(0, world_size, size)]),
        data_parallel=_group_of_this_rank([range(shard, world_size, size) for shard in range(size)]),
    )


def _group_of_this_rank(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Collective: every rank takes part in making every group."""
    if len(groups) == 1:
        return cast(dist.ProcessGroup, dist.GroupMember.WORLD)
    made = [dist.new_group(list(ranks)) for ranks in groups]
    return cast(dist.ProcessGroup, next(m for m, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks))


def sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are sharded over model-parallel groups, by their names."""
    return {name: p for name, p in model.named_parameters() if getattr(p, "shard_dim", None) is not None}


def data_parallel_wrapper(model: nn.Module) -> DefaultDataParallelWrapper:
    """For DistributedModelParallel: averages over all ranks the gradients of what is not sharded."""
    return DefaultDataParallelWrapper(params_to_ignore=list(sharded_parameters(model)))


def average_gradients(parameters: Sequence[Tensor], data_parallel: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over the ranks that hold the same shard. Collective."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for gradient in gradients:
        gradient.div_(data_parallel.size())
    for work in [dist.all_reduce(gradient, group=data_parallel, async_op=True) for gradient in gradients]:
        cast(Any, work).wait()  # of which releases of torch have different types
