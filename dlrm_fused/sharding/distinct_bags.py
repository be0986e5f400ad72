"""Which bags of a batch need not go between hosts one by one, from the features before and after the input dist."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.compat.torchrec import feature_names_per_rank
from dlrm_fused.ops.embedding_all_to_all import BagKeys, DistinctRows
from dlrm_fused.symmetric import Channel

logger = logging.getLogger("dlrm_fused")

_MEASURED_BYTES, _MEASURED_TIMES = 1 << 18, 3


class DistinctBags:
    """Finds the distinct rows of batches, where sending them takes less time than sending all.

    Args:
        channel: of the forward passes; the network is measured with it.
        shardings: TorchRec's, by sharding type, of the features whose pooled embeddings are exchanged.
        types: their sharding types.
        row_bytes: of a row, forward and backward together.
    """

    def __init__(self, channel: Channel, shardings: Sequence[object], types: Sequence[str], row_bytes: int) -> None:
        self._channel, self._group, self._row_bytes = channel, channel.group, row_bytes
        self._is_row_wise = [kind == ShardingType.ROW_WISE.value for kind in types]
        whole = [
            feature_names_per_rank(sharding)
            for sharding, is_row_wise in zip(shardings, self._is_row_wise, strict=True)
            if not is_row_wise
        ]
        # Of each rank, in the order of its lookups.
        self._names = [[name for names in whole for name in names[rank]] for rank in range(self._group.world_size)]
        self._is_faster: bool | None = None

    def rows(
        self, own: KeyedJaggedTensor, looked_up: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]
    ) -> DistinctRows | None:
        """The rows of a batch; None if all are to be sent. Collective at the first call, which measures.

        Args:
            own: this rank's batch.
            looked_up: what the input dist has brought to this rank's tables, by sharding type.
            batch_sizes: of all ranks.
        """
        if own.weights_or_none() is not None or self._is_faster is False:
            return None
        begin = time.perf_counter()
        rows = self._find(own, looked_up, batch_sizes)
        if self._is_faster is None:
            self._choose(rows, batch_sizes, time.perf_counter() - begin)
        return rows if self._is_faster else None

    def _find(self, own: KeyedJaggedTensor, looked_up: Sequence[KeyedJaggedTensor], batch_sizes: Sequence[int]) -> DistinctRows:
        remote, rank = self._group.hosts.remote, self._group.rank
        starts = [0, *itertools.accumulate(batch_sizes)]
        numbers = torch.cat([torch.arange(size) for size in batch_sizes])
        of_lookups = [
            _keys(features, numbers)
            for features, is_row_wise in zip(looked_up, self._is_row_wise, strict=True)
            if not is_row_wise and features.keys()
        ]
        keys, exists = _empty(len(numbers)) if not of_lookups else (torch.cat(part) for part in zip(*of_lookups, strict=True))
        of_features, place = BagKeys(keys, exists), {name: i for i, name in enumerate(own.keys())}
        of_batch = _keys(own, numbers[starts[rank] : starts[rank + 1]])
        everything = slice(None)
        return DistinctRows.of(
            [of_features.select(everything, slice(starts[peer], starts[peer + 1])) for peer in remote],
            [of_batch.select(torch.tensor([place[name] for name in self._names[peer]]).long(), everything) for peer in remote],
        )

    def _choose(self, rows: DistinctRows, batch_sizes: Sequence[int], seconds: float) -> None:
        """Collective."""
        remote, features = self._group.hosts.remote, len(self._names[self._group.rank])
        all_rows = sum(batch_sizes[peer] * features for peer in remote)
        saved_bytes = (all_rows - sum(map(len, rows.sent))) * self._row_bytes
        # Rows are gathered and added up besides, which takes about as long again.
        times = torch.tensor([2 * seconds, saved_bytes * self._seconds_per_byte()], dtype=torch.float64)
        dist.all_reduce(times, group=self._group.process_group)
        spent, saved = (times / self._group.world_size * 1e3).tolist()
        self._is_faster = bool(spent < saved)
        if self._group.rank == 0:
            chosen = "distinct rows" if self._is_faster else "all rows"
            logger.info(
                "between hosts: to send distinct rows only takes %.2f ms and saves %.2f ms a step: %s", spent, saved, chosen
            )

    def _seconds_per_byte(self) -> float:
        """Of what a rank sends to other hosts while all ranks send. Collective."""
        hosts, channel = self._channel.group.hosts, self._channel
        block = torch.zeros(_MEASURED_BYTES, dtype=torch.uint8)

        def exchange() -> None:
            received = {peer: torch.empty_like(block) for peer in hosts.served}
            started = channel.exchange(dict.fromkeys(hosts.counterparts(), block), received, fingerprint=0)
            for _ in started.arrivals():
                pass
            started.finish()

        exchange()  # connects
        begin = time.perf_counter()
        for _ in range(_MEASURED_TIMES):
            exchange()
        return (time.perf_counter() - begin) / (_MEASURED_TIMES * _MEASURED_BYTES * len(hosts.counterparts()))


def _keys(features: KeyedJaggedTensor, numbers: Tensor) -> BagKeys:
    lengths = features.lengths().view(len(features.keys()), -1)
    return BagKeys.of(lengths, features.offsets(), features.values(), numbers)


def _empty(bags: int) -> tuple[Tensor, Tensor]:
    return torch.empty(0, bags, dtype=torch.int64), torch.empty(0, bags, dtype=torch.bool)
