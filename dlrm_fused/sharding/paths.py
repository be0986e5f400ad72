"""The ways in which a sharded module looks up and delivers a batch: one interface, one object for each way.

* :class:`TorchRecPath`: TorchRec's own, for all sharding types;
* :class:`~dlrm_fused.sharding.gpu_path.GpuPath` and :class:`~dlrm_fused.sharding.cpu_path.CpuPath`: fused communication;
* :class:`MeasuringPath`: TorchRec's, until a training batch has shown which of the others is the fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_fused.auto_choice import BothWays, measure_both
from dlrm_fused.compat import torchrec as compat
from dlrm_fused.compat.fbgemm import uncounted
from dlrm_fused.sharding.cpu_path import CpuPath
from dlrm_fused.sharding.exchange import Exchange
from dlrm_fused.sharding.gpu_path import GpuPath
from dlrm_fused.sharding.options import FusedOptions
from dlrm_fused.symmetric import SymmetricGroup
from dlrm_fused.symmetric.device import uses_kernels


class Path(Protocol):
    """A way of a module's batches. It is given the module in each call, and keeps no reference to it."""

    @property
    def shardings(self) -> tuple[int, ...]:
        """Numbers of the sharding types with fused communication, ascending; TorchRec serves the others."""

    @property
    def reads_keys(self) -> bool:
        """Whether it needs the keys of the bags of a batch."""

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver a batch whose features have been distributed. Collective."""

    def release(self) -> None:
        """Let go of the memory. Collective."""


class TorchRecPath:
    """TorchRec's own lookups and collectives."""

    shardings: tuple[int, ...] = ()
    reads_keys = False

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver a batch. Collective."""
        return ShardedEmbeddingBagCollection.compute_and_output_dist(module, ctx, input)

    def release(self) -> None:
        """Do nothing: there is no memory of ours."""


@dataclass(frozen=True)
class FusedSettings:
    """The settings of a module's fused paths.

    Attributes:
        group: the ranks, and their memory.
        output_dtype: of the pooled embeddings.
        keyed: the features that keys of batches are for; None if none are made.
    """

    options: FusedOptions
    group: SymmetricGroup
    output_dtype: torch.dtype
    keyed: Sequence[tuple[str, int]] | None


def fused_path(module: ShardedEmbeddingBagCollection, settings: FusedSettings, shardings: Sequence[int]) -> GpuPath | CpuPath:
    """Make the fused path of some sharding types for the device of the ranks. Collective."""
    exchange = Exchange(module, settings.options, settings.group, shardings, settings.output_dtype)
    if uses_kernels(settings.group.device):
        return GpuPath(module, exchange, check_indices=settings.options.check_indices)
    return CpuPath(module, exchange, settings.keyed)


class MeasuringPath(TorchRecPath):
    """TorchRec's path, until the faster one of each sharding type has been measured.

    Args:
        covered: numbers of the sharding types that may be fused, ascending.
    """

    reads_keys = True

    def __init__(self, settings: FusedSettings, covered: Sequence[int]) -> None:
        self._settings, self._covered = settings, covered

    def measure(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> tuple[Path, dict[str, BothWays]]:
        """Measure both paths of every covered sharding type on a batch. Collective.

        Between hosts all types are measured together: messages of both paths in one step wait for each other (see
        docs/symmetric.md, "GPUs without peer access").

        Returns:
            The path of the types whose fused path is faster, and the times by sharding type.
        """
        chosen: list[GpuPath | CpuPath] = []
        measured, kinds, group = dict[str, BothWays](), compat.sharding_types(module), self._settings.group
        for shardings in [self._covered] if group.hosts.are_many else [[i] for i in self._covered]:
            candidate = fused_path(module, self._settings, shardings)
            with torch.no_grad(), uncounted(compat.fbgemm_lookups(module)):
                both = measure_both(
                    partial(candidate.look_up, candidate.exchange.call(ctx, input)),
                    partial(_look_up_by_torchrec, module, shardings, ctx, input),
                    cast(dist.ProcessGroup, compat.environment(module).process_group),
                    group.device,
                    work=f"{compat.path(module)}: {', '.join(kinds[i] for i in shardings)} tables",
                    unfused_name="TorchRec",
                )
            measured.update(dict.fromkeys((kinds[i] for i in shardings), both))
            if both.fused_is_faster:
                chosen.append(candidate)
            else:
                candidate.release()
        if len(chosen) > 1:
            for candidate in chosen:
                candidate.release()
            chosen = [fused_path(module, self._settings, [i for candidate in chosen for i in candidate.shardings])]
        return chosen[0] if chosen else TorchRecPath(), measured


def _look_up_by_torchrec(
    module: ShardedEmbeddingBagCollection, shardings: Sequence[int], ctx: EmbeddingBagCollectionContext, input: KJTList
) -> list[Tensor]:
    """Return the results of TorchRec's own path for some sharding types. Collective."""
    return [part.wait() for part in [compat.look_up_and_deliver(module, i, ctx, input) for i in shardings]]
