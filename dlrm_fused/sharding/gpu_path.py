"""The way of a batch through kernels: one operator looks up the bags of all ranks and stores them at their ranks.

A batch comes in as TorchRec's input dist has left it: for each sharding type, the ids of all ranks' bags for this rank's
tables. Launched are, in this order:

1. TorchRec's lookups and collectives of sharding types that are not fused, which run beside the rest;
2. FBGEMM's check of the ids;
3. the lookup kernels, which store each pooled bag at its rank, and what adds up row-wise partial sums there;
4. for the backward pass the sort of the ids, beside 3 if there are many.

Batches of few ids replay 2 to 4 as one CUDA graph. The pooled embeddings of this rank's own bags come out. The backward pass
brings their gradients to the tables' ranks, where kernels update FBGEMM's tables in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.ops.embedding_all_to_all import embedding_all_to_all
from dlrm_fused.sharding.exchange import Call, Exchange
from dlrm_fused.sharding.fbgemm_tables import FbgemmTables
from dlrm_fused.sharding.options import FusedOptions
from dlrm_fused.sharding.replay import ReplayedEmbeddingAllToAll
from dlrm_fused.symmetric import abort_peers_on_error


class GpuPath:
    """Lookup and delivery by kernels. Implements :class:`~dlrm_fused.sharding.paths.Path`."""

    reads_keys = False

    def __init__(self, module: ShardedEmbeddingBagCollection, exchange: Exchange, options: FusedOptions) -> None:
        self.exchange, self.shardings = exchange, exchange.shardings
        self._lookups = [compat.lookups(module)[i] for i in self.shardings]
        self._modules = [own for lookup in self._lookups for own in compat.embedding_modules(lookup)]
        # Wrong ids are kept for the workspace's own check, where FBGEMM would replace them by 0.
        checks_bounds = not options.check_indices
        self._tables = FbgemmTables([own.emb_module for own in self._modules], checks_bounds=checks_bounds)
        self._tables.attach_to(exchange.workspace)
        prepare, fixed = self._tables.inputs_without_weights, options.fixed_shapes
        self._replayed = ReplayedEmbeddingAllToAll(exchange.workspace, prepare, fixed_shapes=fixed)

    def deliver(
        self, module: ShardedEmbeddingBagCollection, ctx: EmbeddingBagCollectionContext, input: KJTList
    ) -> LazyAwaitable[KeyedTensor]:
        """Look up and deliver a batch. Collective."""
        others = self.exchange.begin_others(module, ctx, input)
        pooled = self.look_up(self.exchange.call(ctx, input))
        return self.exchange.output(module, ctx, pooled, others)

    def look_up(self, call: Call) -> Tensor:
        """Return the pooled embeddings of this rank's bags, [local batch, columns]. Collective."""
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
        is_covered = all(own is None for own in weights) and self._replayed.covers(indices, call.batch_sizes)
        if self._replayed.takes(is_covered, indices, offsets, call.batch_sizes, call.gradient_scale):
            return self._replayed(indices, offsets, call.batch_sizes, call.gradient_scale)
        inputs = self._tables.inputs(indices, offsets, weights)
        return embedding_all_to_all(workspace, *inputs, call.batch_sizes, call.gradient_scale)

    def release(self) -> None:
        """Let go of the memory. Collective; as :meth:`~dlrm_fused.ops.common.workspace.Workspace.release`."""
        self.exchange.workspace.release()


def _weights(lookup: Any, module: Any, features: KeyedJaggedTensor) -> Tensor | None:
    """The weights of samples that the lookup reads."""
    weights = features.weights_or_none()
    if weights is None or not weights.is_floating_point():
        return None  # TorchRec's lookups ignore whole numbers as well
    # Their gradients are averaged over ranks by whoever owns them: they must not be divided here.
    return compat.undivided_gradient(lookup, weights) if module.config.is_weighted else weights
