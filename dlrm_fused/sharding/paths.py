"""The ways in which a sharded module looks up and delivers a batch: one interface, one object for each way.

* :class:`TorchRecPath`: TorchRec's own, for all sharding types;
* :class:`GpuPath` and :class:`CpuPath`: fused communication;
* :class:`MeasuringPath`: TorchRec's, until a training batch has shown which of the others is the fastest.

A batch comes in as TorchRec's input dist has left it: for each sharding type, the ids of all ranks' bags for the tables of this
rank. The pooled embeddings of this rank's own bags come out. The backward pass brings their gradients to the tables' ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_fused.auto_choice import BothWays, measure_both
from dlrm_fused.compat import torchrec as compat
from dlrm_fused.compat.fbgemm import uncounted
from dlrm_fused.ops.embedding_all_to_all import embedding_all_to_all, pooled_all_to_all
from dlrm_fused.sharding.distinct_bags import DistinctBags
from dlrm_fused.sharding.exchange import Call, Exchange
from dlrm_fused.sharding.fbgemm_tables import FbgemmTables
from dlrm_fused.sharding.options import FusedOptions
from dlrm_fused.sharding.replay import ReplayedEmbeddingAllToAll
from dlrm_fused.symmetric import SymmetricGroup, abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels


class Path:
    """A way of a module's batches. It is given the module in each call, and keeps no reference to it.

    Attributes:
        shardings: numbers of the sharding types with fused communication, ascending; TorchRec serves the others.
        reads_keys: whether it needs the keys of the bags of a batch.
    """

    shardings: tuple[int, ...] = ()
    reads_keys = False

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver a batch whose features have been distributed. Collective."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go of the memory. Collective."""


class TorchRecPath(Path):
    """TorchRec's own lookups and collectives, without memory of ours."""

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        return ShardedEmbeddingBagCollection.compute_and_output_dist(module, ctx, input)


class FusedPath(Path):
    """A path with an :class:`~dlrm_fused.sharding.exchange.Exchange`; TorchRec's lookups and collectives of sharding types that
    are not fused begin before it, and run beside it."""

    def __init__(self, module: ShardedEmbeddingBagCollection, exchange: Exchange) -> None:
        self.exchange, self.shardings = exchange, exchange.shardings
        self._lookups = [compat.lookups(module)[i] for i in self.shardings]

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        others = self.exchange.begin_others(module, ctx, input)
        pooled = self.look_up(self.exchange.call(ctx, input))
        return self.exchange.output(module, ctx, pooled, others)

    def look_up(self, call: Call) -> Tensor:
        """Return the pooled embeddings of this rank's bags, [local batch, columns]. Collective."""
        raise NotImplementedError

    def release(self) -> None:
        """As :meth:`~dlrm_fused.ops.common.workspace.Workspace.release`."""
        self.exchange.workspace.release()


class GpuPath(FusedPath):
    """Lookup and delivery by kernels: one operator looks up the bags of all ranks and stores them at their ranks.

    Launched are, in this order, FBGEMM's check of the ids; the lookup kernels, which store each pooled bag at its rank, and
    what adds up row-wise partial sums there; for the backward pass the sort of the ids, beside these if there are many. Batches
    of few ids replay all of this as one CUDA graph. In the backward pass kernels update FBGEMM's tables in place.

    Args:
        check_indices: wrong ids are kept for the workspace's own check, where FBGEMM would replace them by 0.
    """

    def __init__(self, module: ShardedEmbeddingBagCollection, exchange: Exchange, *, check_indices: bool) -> None:
        super().__init__(module, exchange)
        self._modules = [own for lookup in self._lookups for own in compat.embedding_modules(lookup)]
        self._tables = FbgemmTables([own.emb_module for own in self._modules], checks_bounds=not check_indices)
        self._tables.attach_to(exchange.workspace)
        self._replayed = ReplayedEmbeddingAllToAll(exchange.workspace, self._tables.inputs_without_weights)

    def look_up(self, call: Call) -> Tensor:
        workspace = self.exchange.workspace
        with abort_peers_on_error(workspace.forward_channel):
            self._tables.attach_to(workspace)
        by_module = [
            (lookup, features)
            for lookup, of_sharding in zip(self._lookups, call.features, strict=True)
            if compat.embedding_modules(lookup)
            for features in compat.split_features(lookup, of_sharding)
        ]
        indices, offsets = [own.values() for _, own in by_module], [own.offsets() for _, own in by_module]
        weights = [
            _weights(lookup, module, features) for (lookup, features), module in zip(by_module, self._modules, strict=True)
        ]
        if all(own is None for own in weights) and self._replayed.covers(indices, call.batch_sizes):
            return self._replayed(indices, offsets, call.batch_sizes, call.gradient_scale)
        inputs = self._tables.inputs(indices, offsets, weights)
        return embedding_all_to_all(workspace, *inputs, call.batch_sizes, call.gradient_scale)


def _weights(lookup: Any, module: Any, features: KeyedJaggedTensor) -> Tensor | None:
    """The weights of samples that the lookup reads."""
    weights = features.weights_or_none()
    if weights is None or not weights.is_floating_point():
        return None  # TorchRec's lookups ignore whole numbers as well
    # Their gradients are averaged over ranks by whoever owns them: they must not be divided here.
    return compat.undivided_gradient(lookup, weights) if module.config.is_weighted else weights


class CpuPath(FusedPath):
    """Lookup by FBGEMM, and delivery by copies to the ranks, where row-wise partial sums are added up.

    Between hosts, bags with equal ids are found, whose results are sent once. In the backward pass FBGEMM's fused optimizer
    updates the tables.

    Args:
        keyed: the features that keys of batches are for, see :class:`~dlrm_fused.sharding.distinct_bags.BatchKeys`; None if
            none are made.
    """

    def __init__(
        self, module: ShardedEmbeddingBagCollection, exchange: Exchange, keyed: Sequence[tuple[str, int]] | None
    ) -> None:
        super().__init__(module, exchange)
        self._distinct: DistinctBags | None = None
        if keyed is not None and exchange.workspace.layout.row_dim is not None:
            self._distinct = DistinctBags(module, exchange.workspace.group, self.shardings, keyed)
        self.reads_keys = self._distinct is not None

    def look_up(self, call: Call) -> Tensor:
        pooled = [
            result
            for lookup, features in zip(self._lookups, call.features, strict=True)
            for result in compat.pooled_by_module(lookup, features)
        ]
        distinct = None
        if self._distinct is not None and call.own_keys is not None:
            distinct = self._distinct.rows(call.own_keys, call.features, call.batch_sizes)
        return pooled_all_to_all(self.exchange.workspace, pooled, call.batch_sizes, distinct, call.gradient_scale)


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


def fused_path(module: ShardedEmbeddingBagCollection, settings: FusedSettings, shardings: Sequence[int]) -> FusedPath:
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
        chosen: list[FusedPath] = []
        measured, kinds, group = dict[str, BothWays](), compat.sharding_types(module), self._settings.group
        for shardings in [self._covered] if group.hosts.are_many else [[i] for i in self._covered]:
            candidate = fused_path(module, self._settings, shardings)
            with torch.no_grad(), uncounted(compat.fbgemm_lookups(module)):
                both = measure_both(
                    partial(candidate.look_up, candidate.exchange.call(ctx, input)),
                    partial(_look_up_by_torchrec, module, shardings, ctx, input),
                    cast(dist.ProcessGroup, compat.process_group(module)),
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
