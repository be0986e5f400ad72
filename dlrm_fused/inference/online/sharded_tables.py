"""Shards embedding tables by rows for online scoring, where all ranks have the few ids of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_fused.errors import UsageError
from dlrm_fused.lasting import lasting
from dlrm_fused.models.tensor_parallel import group_size


class ShardedTables:
    """Holds this rank's shard of all embedding tables, one below the other, sharded by rows over the ranks of a group.

    Args:
        features: rows of each feature's table, by the feature's name.
        dims: columns of each table, by the feature's name.
        group: the ranks; None for this rank alone.

    Attributes:
        rows: [local rows + 1, D], this rank's rows; the last is zero, for ids whose rows others hold. D is the widest table's
            columns; what is right of a narrower one is zero.
    """

    @lasting
    def __init__(
        self,
        features: Mapping[str, int],
        dims: Mapping[str, int],
        group: ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        ranks, rank = group_size(group), 0 if group is None else group.rank()
        total = sum(features.values())
        self._first, end = total * rank // ranks, total * (rank + 1) // ranks
        self.features, self.dims = dict(features), dict(dims)
        self.rows = torch.zeros(end - self._first + 1, max(self.dims.values()), dtype=dtype, device=device)
        starts = np.cumsum([0, *features.values()])[:-1]
        self._starts = dict(zip(features, starts.tolist(), strict=True))
        self._layouts: dict[tuple[tuple[str, ...], tuple[str, ...]], _Layout] = {}

    def local_shards(self) -> dict[str, tuple[int, Tensor]]:
        """Return for each feature the first row of its table that this rank holds, and a view of the rows, [n, its columns], to
        fill."""
        shards = {}
        last = self._first + len(self.rows) - 1
        for feature, rows in self.features.items():
            start = self._starts[feature]
            begin, end = max(self._first, start), min(last, start + rows)
            if begin < end:
                shards[feature] = (begin - start, self.rows[begin - self._first : end - self._first, : self.dims[feature]])
        return shards

    def columns_of(self, features: Sequence[str]) -> Tensor:
        """Return the columns of these features' rows, [features * D] side by side, that are theirs: int64, on the device."""
        width = self.rows.shape[1]
        own = [range(place * width, place * width + self.dims[feature]) for place, feature in enumerate(features)]
        return torch.tensor([column for columns in own for column in columns], device=self.rows.device)

    def local_rows(self, ids: KeyedJaggedTensor, features: Sequence[str], width: int) -> NDArray[np.int64]:
        """Return the places of the ids' rows in :attr:`rows`.

        Args:
            ids: on the CPU.
            features: its keys, in the order of the result.
            width: the most ids of a bag.

        Returns:
            [bags of a key, features, width]; unused places point to the zero row.

        Raises:
            UsageError: for other features, ids outside their tables, bags too long, or if they are not on the CPU.
        """
        if ids.values().device.type != "cpu":
            raise UsageError(
                f"the request's ids are on {ids.values().device}; needed: on the CPU, from where they are looked up"
            )
        layout = self._layout(tuple(ids.keys()), tuple(features))
        lengths = ids.lengths().numpy().reshape(len(layout.sizes), -1)
        values, zero_row = ids.values().numpy().astype(np.int64), len(self.rows) - 1
        # All keys are one array, so that a request takes microseconds.
        if len(values) == lengths.size and lengths.min(initial=1) == 1:
            values = values.reshape(lengths.shape)
            starts, sizes = layout.starts[:, None], layout.sizes[:, None]
        else:
            if lengths.max(initial=0) > width:
                raise UsageError(f"a bag of {lengths.max()} ids; the scorer was made for ids_per_bag={width} at most")
            ids_of_key = lengths.sum(axis=1)
            starts, sizes = np.repeat(layout.starts, ids_of_key), np.repeat(layout.sizes, ids_of_key)
        outside = values.view(np.uint64) >= sizes  # as negative ones are
        if outside.any():
            raise UsageError(self._outside(ids))
        local = values + starts
        local[local.view(np.uint64) > zero_row] = zero_row  # another rank's
        if local.ndim == 2 and width == 1:
            return local[layout.order].T[:, :, None]
        result = np.full((*lengths.shape, width), zero_row, dtype=np.int64)
        result[np.arange(width) < lengths[:, :, None]] = local.reshape(-1)
        return result[layout.order].swapaxes(0, 1)

    def _layout(self, keys: tuple[str, ...], features: tuple[str, ...]) -> _Layout:
        """Return the layout that requests with such keys share."""
        if (keys, features) not in self._layouts:
            if sorted(keys) != sorted(features):
                raise UsageError(f"the request has features {', '.join(keys) or 'none'}; the model takes {', '.join(features)}")
            starts = [self._starts[key] - self._first for key in keys]
            sizes = [self.features[key] for key in keys]
            order = [keys.index(feature) for feature in features]
            self._layouts[keys, features] = _Layout(
                np.array(starts, np.int64), np.array(sizes, np.uint64), np.array(order, np.int64)
            )
        return self._layouts[keys, features]

    def _outside(self, ids: KeyedJaggedTensor) -> str:
        """Return the message for ids of which one is outside its table."""
        for feature in ids.keys():  # noqa: SIM118 - no dictionary
            of_feature = ids[feature].values()
            if len(of_feature):
                low, high = int(of_feature.min()), int(of_feature.max())
                if low < 0 or high >= self.features[feature]:
                    return f"feature {feature}: ids from {low} to {high}; its table has rows 0 to {self.features[feature] - 1}"
        raise AssertionError("no id is outside its table")


class _Layout(NamedTuple):
    """Holds places of the keys of a request."""

    starts: NDArray[np.int64]  # by key, the place at which its table begins, counted from the first row of this rank
    sizes: NDArray[np.uint64]  # by key, rows of its table
    order: NDArray[np.int64]  # by feature, its key
