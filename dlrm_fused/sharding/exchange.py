"""The exchange of some sharding types of a module: its layout and memory, and the state of one call.

The output [local batch, columns] is in TorchRec's order of keys, or in that of the module before it was sharded: nothing is
permuted or concatenated afterwards.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, LazyAwaitable, NoWait, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout
from dlrm_fused.sharding.options import FusedOptions, wire_for
from dlrm_fused.symmetric import SymmetricGroup

# Names of workspaces must be unique within a group and equal on its ranks, which make the same modules in the same order.
_workspace_numbers: weakref.WeakKeyDictionary[SymmetricGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


@dataclass
class BatchContext(EmbeddingBagCollectionContext):
    """TorchRec's context of a batch, which its pipelines pass from the input dist to the lookup.

    Attributes:
        own_keys: of the bags of this rank's batch, by :class:`~dlrm_fused.sharding.distinct_bags.BatchKeys`; None if there are
            none.
    """

    own_keys: Tensor | None = None


@dataclass(frozen=True)
class Call:
    """The state of one forward pass.

    Attributes:
        features: by sharding type, the bags of all ranks for this rank's tables.
        batch_sizes: bags of each rank.
        gradient_scale: factor of the gradients that the tables get.
        own_keys: those of :class:`BatchContext`; all ranks have them, or none.
    """

    features: list[KeyedJaggedTensor]
    batch_sizes: list[int]
    gradient_scale: float
    own_keys: Tensor | None


class Exchange:
    """Layout and memory of the sharding types of a module that a fused path serves. Construction is collective.

    Args:
        shardings: numbers of the sharding types in the module, ascending.
        output_dtype: of the pooled embeddings. If it has 16 bits, so have they on the wire.

    Attributes:
        order: of the output's features, with ``in_feature_order`` that before the module was sharded, if these are all sharding
            types. Empty for TorchRec's order, that of the sharding types.
    """

    def __init__(
        self,
        module: ShardedEmbeddingBagCollection,
        options: FusedOptions,
        group: SymmetricGroup,
        shardings: Sequence[int],
        output_dtype: torch.dtype,
    ) -> None:
        self.shardings = tuple(shardings)
        self._widths = [sum(compat.shardings(module)[i].embedding_dims()) for i in shardings]
        self.order = _order(module, shardings) if options.in_feature_order else []
        self.workspace = EmbeddingWorkspace(
            group,
            _layout(module, shardings, group.world_size, self.order),
            name=f"{compat.path(module)} ({next_number(group)})",
            output_dtype=output_dtype,
            forward_wire=wire_for(options.forward_wire, output_dtype, group.world_size),
            backward_wire=wire_for(options.backward_wire, output_dtype, group.world_size),
            timeout_seconds=options.timeout_seconds,
            check_indices=options.check_indices,
        )

    def begin_others(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> dict[int, Awaitable[Tensor]]:
        """Begin TorchRec's lookups and collectives of the other sharding types; return their results by number. Collective."""
        others = [i for i in range(len(compat.lookups(module))) if i not in self.shardings]
        return {i: compat.look_up_and_deliver(module, i, ctx, input) for i in others}

    def call(self, ctx: EmbeddingBagCollectionContext, input: KJTList) -> Call:
        """Return the state of the forward pass of a batch whose features have been distributed.

        Raises:
            UsageError: if TorchRec has lost the batch sizes of the ranks, and they cannot be equal.
        """
        features = [input[i] for i in self.shardings]
        return Call(
            features=features,
            batch_sizes=self._batch_sizes(ctx, features[0].stride()),
            # TorchRec divides by what is set when the collective runs.
            gradient_scale=1 / self.workspace.world_size if get_gradient_division() else 1.0,
            own_keys=ctx.own_keys if isinstance(ctx, BatchContext) else None,
        )

    def output(
        self,
        module: ShardedEmbeddingBagCollection,
        ctx: EmbeddingBagCollectionContext,
        pooled: Tensor,
        others: Mapping[int, Awaitable[Tensor]],
    ) -> LazyAwaitable[KeyedTensor]:
        """Return the module's output.

        Args:
            pooled: [local batch, columns], of the exchange.
            others: from :meth:`begin_others`.
        """
        parts = {**others, **{i: NoWait(part) for i, part in self._split(pooled).items()}}
        return compat.output_of(module, parts, ctx, self.order)

    def _batch_sizes(self, ctx: EmbeddingBagCollectionContext, global_batch: int) -> list[int]:
        sizes = list(cast(Any, ctx.sharding_contexts[self.shardings[0]]).batch_size_per_rank)
        if not sizes:
            # After TrainPipelineSparseDist.attach they are missing; TorchRec then takes them for equal, too.
            world_size = self.workspace.world_size
            if global_batch % world_size:
                raise UsageError(
                    f"a batch of {global_batch} samples from {world_size} ranks without their sizes, which "
                    "TrainPipelineSparseDist.attach loses; give all ranks batches of one size, or do not attach in between"
                )
            sizes = [global_batch // world_size] * world_size
        return sizes

    def _split(self, output: Tensor) -> dict[int, Tensor]:
        """Return the columns of neighbouring sharding types together, by the number of the first."""
        runs: dict[int, int] = {}
        begin = previous = -2
        for sharding, width in zip(self.shardings, self._widths, strict=True):
            if sharding != previous + 1:
                begin = sharding
            runs[begin] = runs.get(begin, 0) + width
            previous = sharding
        return {begin: output} if len(runs) == 1 else dict(zip(runs, output.split(list(runs.values()), dim=1), strict=True))


def next_number(group: SymmetricGroup) -> int:
    """For the name of a workspace."""
    return next(_workspace_numbers.setdefault(group, itertools.count()))


def _order(module: ShardedEmbeddingBagCollection, shardings: Sequence[int]) -> list[str]:
    order, names = (
        compat.feature_order(module),
        [name for i in shardings for name in compat.shardings(module)[i].embedding_names()],
    )
    is_whole = len(shardings) == len(compat.sharding_types(module)) and sorted(order) == sorted(names)
    return order if is_whole and not compat.divides_after_output(module) else []


def _layout(
    module: ShardedEmbeddingBagCollection, shardings: Sequence[int], world_size: int, order: Sequence[str]
) -> ExchangeLayout:
    """Return where the lookups of all ranks put their features: in this order, or else that of the sharding types. Shards of
    columns lie side by side."""
    by_rank: list[list[LookupLayout]] = [[] for _ in range(world_size)]
    dims = {
        name: dim
        for i in shardings
        for name, dim in zip(
            compat.shardings(module)[i].embedding_names(), compat.shardings(module)[i].embedding_dims(), strict=True
        )
    }
    columns, begin = {}, 0
    for name in order or dims:
        columns[name] = begin
        begin += dims[name]
    for i in shardings:
        sharding = compat.shardings(module)[i]
        for rank, groups in enumerate(compat.grouped_configs_per_rank(sharding)):
            for group in groups:
                features = [
                    (columns[name] + table.local_metadata.shard_offsets[1], table.local_cols)
                    for table in group.embedding_tables
                    for name in table.embedding_names
                ]
                by_rank[rank].append(
                    LookupLayout(
                        columns=tuple(column for column, _ in features),
                        dims=tuple(dim for _, dim in features),
                        row_wise=compat.sharding_types(module)[i] == ShardingType.ROW_WISE.value,
                    )
                )
    return ExchangeLayout(tuple(tuple(lookups) for lookups in by_rank), begin)
