"""Which bags of a batch need not go between hosts one by one, from the features before and after the input dist."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat.torchrec import feature_names_per_rank
from dlrm_fused.ops.embedding_all_to_all import DistinctRows, keys_of_bags
from dlrm_fused.symmetric import SymmetricGroup
from dlrm_fused.symmetric.device import uses_kernels


def finds_distinct_rows(group: SymmetricGroup) -> bool:
    """Whether batches are searched for them: only where they save messages between hosts, and not by kernels."""
    return group.hosts.are_many and not uses_kernels(group.device)


class DistinctBags:
    """Finds the distinct rows of batches.

    Args:
        shardings: TorchRec's, by sharding type, of the features whose pooled embeddings are exchanged.
        types: their sharding types.
    """

    def __init__(self, group: SymmetricGroup, shardings: Sequence[object], types: Sequence[str]) -> None:
        self._group = group
        self._is_row_wise = [kind == ShardingType.ROW_WISE.value for kind in types]
        whole = [
            feature_names_per_rank(sharding)
            for sharding, is_row_wise in zip(shardings, self._is_row_wise, strict=True)
            if not is_row_wise
        ]
        # Of each rank of another host, in the order of its lookups; and where they are in a batch.
        self._names = [[name for names in whole for name in names[rank]] for rank in group.hosts.remote]
        self._places: Tensor | None = None

    def rows(
        self, own: KeyedJaggedTensor, looked_up: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]
    ) -> DistinctRows | None:
        """The rows of a batch; None if all are to be sent, as with weights of samples.

        Args:
            own: this rank's batch.
            looked_up: what the input dist has brought to this rank's tables, by sharding type.
            batch_sizes: of all ranks.
        """
        if own.weights_or_none() is not None:
            return None
        numbers = torch.cat([torch.arange(size) for size in batch_sizes])
        of_lookups = [
            _keys(features, numbers)
            for features, is_row_wise in zip(looked_up, self._is_row_wise, strict=True)
            if not is_row_wise and features.keys()
        ]
        if self._places is None:
            place = {name: i for i, name in enumerate(own.keys())}
            self._places = torch.tensor([place[name] for names in self._names for name in names]).long()
        return DistinctRows.of(
            torch.cat(of_lookups) if of_lookups else numbers.new_empty(0, len(numbers)),
            _keys(own, torch.arange(own.stride())).index_select(0, self._places),
            remote=self._group.hosts.remote,
            batch_sizes=tuple(batch_sizes),
            features_of_remote=[len(names) for names in self._names],
        )


def _keys(features: KeyedJaggedTensor, numbers: Tensor) -> Tensor:
    lengths = features.lengths().view(len(features.keys()), -1)
    return keys_of_bags(lengths, features.offsets(), features.values(), numbers)
