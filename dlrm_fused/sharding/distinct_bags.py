"""Find the bags of a batch that need not go between hosts one by one, from the features before and after the input dist."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat import torchrec as compat
from dlrm_fused.ops.embedding_all_to_all import DistinctRows, ExchangeLayout, keys_of_bags
from dlrm_fused.sharding.support import OF_WHOLE_FEATURES
from dlrm_fused.symmetric import SymmetricGroup
from dlrm_fused.symmetric.device import uses_kernels


def finds_distinct_rows(group: SymmetricGroup) -> bool:
    """Whether batches are searched for them: only where they save messages between hosts, and not by kernels."""
    return group.hosts.are_many and not uses_kernels(group.device)


class BatchKeys:
    """Keys the bags of this rank's batches before the input dist: FBGEMM repairs wrong ids in place, later and elsewhere.

    Attributes:
        features: (name, rows of a table) of what is looked up as a whole, each once; all that the module can exchange, in the
            order of its tables.
    """

    def __init__(self, module: ShardedEmbeddingBagCollection) -> None:
        numbers, names = range(len(compat.sharding_types(module))), compat.feature_names(module)
        looked_up = set(itertools.chain(*_whole_features(module, numbers)))
        self.features = sorted(looked_up, key=lambda feature: (names.index(feature[0]), feature))
        self._rows = _column(self.features)
        self._places: list[int] | None = None  # in a batch

    def of(self, batch: KeyedJaggedTensor) -> Tensor | None:
        """Keys [features, bags]; None if all bags are to be sent, as with weights of samples."""
        if batch.weights_or_none() is not None or batch.variable_stride_per_key():
            return None
        if self._places is None:
            self._places = [batch.keys().index(name) for name, _ in self.features]
        shape = len(batch.keys()), batch.stride()
        lengths, begins = batch.lengths().view(shape), batch.offsets()[:-1].view(shape)
        if self._places != [*range(len(lengths))]:
            lengths, begins = lengths[self._places], begins[self._places]
        return keys_of_bags(lengths, begins, batch.values(), torch.arange(batch.stride(), device="cpu"), self._rows)


class DistinctBags:
    """Finds the distinct rows of batches.

    Args:
        shardings: numbers of the sharding types whose pooled embeddings are exchanged.
        keyed: the attribute of :class:`BatchKeys`.
        layout: of the exchange; it divides into rows.
    """

    def __init__(
        self,
        module: ShardedEmbeddingBagCollection,
        group: SymmetricGroup,
        shardings: Sequence[int],
        keyed: Sequence[tuple[str, int]],
        layout: ExchangeLayout,
    ) -> None:
        self._group = group
        self._has_whole = [_has_whole_features(module, number) for number in shardings]
        by_rank = _whole_features(module, shardings)
        self._rows = _column(by_rank[group.rank])
        # In the order of the lookups, as all here.
        self._rows_of_own = tuple(layout.rows_of_features(group.rank))
        self._rows_of_remote = [tuple(layout.rows_of_features(rank)) for rank in group.hosts.remote]
        places = [keyed.index(own) for rank in group.hosts.remote for own in by_rank[rank]]
        self._places = torch.tensor(places, device="cpu").long()

    def rows(self, own: Tensor, looked_up: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]) -> DistinctRows:
        """The rows of a batch.

        Args:
            own: keys of this rank's batch, by :class:`BatchKeys`.
            looked_up: what the input dist has brought to this rank's tables, by sharding type.
            batch_sizes: of all ranks.
        """
        numbers = torch.cat([torch.arange(size, device="cpu") for size in batch_sizes])
        whole = [
            features for features, has_whole in zip(looked_up, self._has_whole, strict=True) if has_whole and features.keys()
        ]
        rows = self._rows.split([len(features.keys()) for features in whole])
        of_lookups = [_keys(*of_lookup, numbers) for of_lookup in zip(whole, rows, strict=True)]
        return DistinctRows.of(
            torch.cat(of_lookups) if of_lookups else numbers.new_empty(0, len(numbers)),
            own.index_select(0, self._places),
            remote=self._group.hosts.remote,
            batch_sizes=tuple(batch_sizes),
            rows=self._rows_of_own,
            rows_of_remote=self._rows_of_remote,
        )


def _keys(features: KeyedJaggedTensor, rows: Tensor, numbers: Tensor) -> Tensor:
    lengths = features.lengths().view(len(rows), -1)
    return keys_of_bags(lengths, features.offsets()[:-1].view_as(lengths), features.values(), numbers, rows)


def _whole_features(module: ShardedEmbeddingBagCollection, shardings: Sequence[int]) -> list[list[tuple[str, int]]]:
    """For each rank, the features that its lookups of these sharding types read as a whole, with their tables' rows."""
    whole = [compat.features_per_rank(compat.shardings(module)[i]) for i in shardings if _has_whole_features(module, i)]
    return [[own for by_rank in whole for own in by_rank[rank]] for rank in range(compat.environment(module).world_size)]


def _has_whole_features(module: ShardedEmbeddingBagCollection, number: int) -> bool:
    return compat.sharding_types(module)[number] in {kind.value for kind in OF_WHOLE_FEATURES}


def _column(features: Sequence[tuple[str, int]]) -> Tensor:
    """Rows of their tables, int64 [features, 1]."""
    return torch.tensor([rows for _, rows in features], device="cpu").long().view(-1, 1)
