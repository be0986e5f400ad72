"""The way of a batch on the CPU: FBGEMM looks up, and the results are copied into the memory of their ranks.

A batch comes in as TorchRec's input dist has left it: for each sharding type, the ids of all ranks' bags for this rank's
tables. In this order

1. TorchRec looks up, and begins the collectives of, sharding types that are not fused;
2. FBGEMM looks up the bags of all ranks for the others;
3. between hosts, bags with equal ids are found, whose results are sent once;
4. the results are copied to their ranks, where row-wise partial sums are added up.

The pooled embeddings of this rank's own bags come out. The backward pass brings their gradients to the tables' ranks, where
FBGEMM's fused optimizer updates the tables.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.ops.embedding_all_to_all import pooled_all_to_all
from dlrm_fused.sharding.distinct_bags import DistinctBags
from dlrm_fused.sharding.exchange import Call, Exchange


class CpuPath:
    """Lookup by FBGEMM, and delivery by copies. Implements :class:`~dlrm_fused.sharding.paths.Path`.

    Args:
        keyed: the features that keys of batches are for, see :class:`~dlrm_fused.sharding.distinct_bags.BatchKeys`; None if
            none are made.
    """

    def __init__(
        self, module: ShardedEmbeddingBagCollection, exchange: Exchange, keyed: Sequence[tuple[str, int]] | None
    ) -> None:
        self.exchange, self.shardings = exchange, exchange.shardings
        self._lookups = [compat.lookups(module)[i] for i in self.shardings]
        self._distinct: DistinctBags | None = None
        workspace = exchange.workspace
        if keyed is not None and workspace.layout.row_dim is not None:
            self._distinct = DistinctBags(module, workspace.group, self.shardings, keyed, workspace.layout)

    @property
    def reads_keys(self) -> bool:
        """Whether it needs the keys of the bags of a batch."""
        return self._distinct is not None

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver a batch. Collective."""
        others = self.exchange.begin_others(module, ctx, input)
        pooled = self.look_up(self.exchange.call(ctx, input))
        return self.exchange.output(module, ctx, pooled, others)

    def look_up(self, call: Call) -> Tensor:
        """Return the pooled embeddings of this rank's bags, [local batch, columns]. Collective."""
        pooled = [
            result
            for lookup, features in zip(self._lookups, call.features, strict=True)
            for result in compat.pooled_by_module(lookup, features)
        ]
        distinct = None
        if self._distinct is not None and call.own_keys is not None:
            distinct = self._distinct.rows(call.own_keys, call.features, call.batch_sizes)
        return pooled_all_to_all(self.exchange.workspace, pooled, call.batch_sizes, distinct, call.gradient_scale)

    def release(self) -> None:
        """Let go of the memory. Collective; as :meth:`~dlrm_fused.ops.common.workspace.Workspace.release`."""
        self.exchange.workspace.release()
