"""The input dist of a module: its sparse features go to the ranks of their tables without the host.

TorchRec's pipeline is given awaitables as from its own input dist, which it waits for a step later.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import EmbeddingShardingContext, KJTListSplitsAwaitable
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, NoWait, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.lasting import lasting
from dlrm_fused.ops.feature_all_to_all import FeatureExchange, SentFeatures
from dlrm_fused.sharding.exchange import next_number
from dlrm_fused.sharding.support import OF_WHOLE_FEATURES
from dlrm_fused.symmetric import SymmetricGroup

_WHOLE_FEATURES = {kind.value for kind in OF_WHOLE_FEATURES}


def covers(module: ShardedEmbeddingBagCollection) -> bool:
    """Whether all features of the module go to ranks as a whole, or by blocks of rows."""
    return not compat.divides_after_output(module) and rows_of_blocks(module) is not None


def rows_of_blocks(module: ShardedEmbeddingBagCollection) -> dict[str, int] | None:
    """By feature of a row-wise table, the rows that each rank has of it.

    None if a table is sharded otherwise than row-wise or as a whole, or two tables need a feature in different ways.
    """
    ranks, rows, whole = compat.environment(module).world_size, dict[str, int](), set[str]()
    for kind, sharding in zip(compat.sharding_types(module), compat.shardings(module), strict=True):
        if kind in _WHOLE_FEATURES or ranks == 1:
            whole.update(name for names in compat.feature_names_per_rank(sharding) for name in names)
        elif kind != ShardingType.ROW_WISE.value:
            return None
        else:
            for name, own_rows in compat.rows_of_features(sharding):
                block = -(-own_rows // ranks)
                if rows.setdefault(name, block) != block:
                    return None
    return None if whole & rows.keys() else rows


class FusedInputDist:
    """The input dist of one module, for batches like the first. Making one is collective.

    Args:
        features: a batch.
    """

    @lasting
    def __init__(
        self, module: ShardedEmbeddingBagCollection, group: SymmetricGroup, features: KeyedJaggedTensor, timeout_seconds: float
    ) -> None:
        self._module = module
        self._keys = list(features.keys())
        self._dtypes = features.lengths().dtype, features.values().dtype
        self._names = [compat.feature_names_per_rank(sharding) for sharding in compat.shardings(module)]
        rows = rows_of_blocks(module)
        assert rows is not None, "the module is not covered"
        self._blocks = _RowBlocks(self._keys, rows, group.world_size, features.values().dtype, group.device) if rows else None
        # The features as they are given are sent if some go as a whole; after them, for each rank, its blocks.
        has_whole = any(name not in rows for names in self._names for own in names for name in own)
        self._given = self._keys if has_whole else []

        def place(name: str, rank: int) -> int:
            if self._blocks is None or name not in rows:
                return self._given.index(name)
            return len(self._given) + rank * len(rows) + self._blocks.names.index(name)

        features_of_ranks = [
            [place(name, rank) for names in self._names for name in names[rank]] for rank in range(group.world_size)
        ]
        name = f"{compat.path(module)}: features ({next_number(group)})"
        self._exchange = FeatureExchange(
            group, features_of_ranks, name=name, dtypes=self._dtypes, timeout_seconds=timeout_seconds
        )

    def release(self) -> None:
        """Let go of the memory. Collective; as :meth:`~dlrm_fused.ops.common.workspace.Workspace.release`."""
        self._exchange.release()

    def takes(self, features: KeyedJaggedTensor) -> bool:
        """Whether a batch is like the first; ranks are taken to have batches of one kind, as TorchRec takes them."""
        return (
            not features.variable_stride_per_key()
            and features.weights_or_none() is None
            and features.inverse_indices_or_none() is None
            and list(features.keys()) == self._keys
            and (features.lengths().dtype, features.values().dtype) == self._dtypes
        )

    def __call__(self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor) -> KJTListSplitsAwaitable[object]:
        """Collective."""
        ctx.variable_batch_per_feature, ctx.inverse_indices = False, None
        stride = features.stride()
        sent = self._exchange.send(*self._as_sent(features))
        awaitables, first = [], 0
        for names in self._names:
            context = EmbeddingShardingContext(batch_size_per_feature_pre_a2a=[stride] * sum(map(len, names)))
            ctx.sharding_contexts.append(context)
            awaitables.append(compat.Later(partial(_receive, sent, names[self._exchange.rank], first, context)))
            first += len(names[self._exchange.rank])
        return KJTListSplitsAwaitable(
            awaitables,
            ctx,
            compat.path(self._module),
            compat.sharding_types(self._module),  # type: ignore[arg-type]
        )

    def _as_sent(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths [features as given + ranks * row-wise features, bags], offsets and values."""
        lengths = features.lengths().contiguous().view(len(self._keys), features.stride())
        values, offsets = features.values().contiguous(), features.offsets_or_none()
        if self._blocks is not None:
            block_lengths, block_values = self._blocks.of(features)
            lengths = torch.cat([lengths, block_lengths]) if self._given else block_lengths
            values = torch.cat([values, block_values]) if self._given else block_values
            offsets = None
        offsets = offsets_of(lengths.flatten()) if offsets is None else offsets.to(lengths.dtype).contiguous()
        return lengths, offsets, values


class _RowBlocks:
    """Divides the ids of row-wise features by the ranks that have their rows.

    Source: RwSparseFeaturesDist of TorchRec's distributed/sharding/rw_sharding.py.

    ``rows`` are those of each rank, by row-wise feature; ``dtype`` is that of ids; ``names`` are the row-wise ones of ``keys``.
    """

    def __init__(
        self, keys: Sequence[str], rows: Mapping[str, int], ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.names = [name for name in keys if name in rows]
        self._ranks = ranks
        self._places = [place for place, name in enumerate(keys) if name in rows]
        self._places_on_device = torch.tensor(self._places, dtype=torch.int32, device=device)
        self._are_all = len(self.names) == len(keys)
        self._sizes = torch.tensor([rows[name] for name in self.names], dtype=dtype, device=device)

    def of(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Lengths [ranks * row-wise features, bags] and values, of rank 0's rows first; ids count from a rank's first row."""
        count, bags = self._ranks * len(self.names), features.stride()
        if not bags:
            return features.lengths().new_zeros(count, 0), features.values()[:0]
        own = features if self._are_all else features.permute(self._places, self._places_on_device)
        lengths, values, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            own.lengths(), own.values(), bucketize_pos=False, sequence=False, block_sizes=self._sizes, my_size=self._ranks
        )
        return lengths.view(count, bags), values


def _receive(
    sent: SentFeatures, names: Sequence[str], first: int, context: EmbeddingShardingContext
) -> Awaitable[KeyedJaggedTensor]:
    """Return this rank's features of one sharding type, before which come ``first`` ones of others."""
    received, end = sent.receive(), first + len(names)
    context.batch_size_per_rank = received.bags
    counts = received.counts[first:end]
    begin = sum(received.counts[:first])
    lengths = received.lengths[first:end].flatten()
    return NoWait(
        KeyedJaggedTensor(
            keys=list(names),
            values=received.values[begin : begin + sum(counts)],
            lengths=lengths,
            offsets=offsets_of(lengths),
            stride=sum(received.bags),
            length_per_key=counts,
            offset_per_key=[0, *itertools.accumulate(counts)],
        )
    )


def offsets_of(lengths: Tensor) -> Tensor:
    """[n] to where each bag begins and the last ends, [n + 1], of the same dtype; in less time than FBGEMM's operator."""
    offsets = lengths.new_zeros(len(lengths) + 1)
    torch.cumsum(lengths, 0, dtype=lengths.dtype, out=offsets[1:])
    return offsets
