"""What readers return and what a rank trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Samples:
    """Samples as a data set holds them, in the order they were asked for.

    Attributes:
        dense: [b, D] float32.
        sparse: ids of all sparse features, feature after feature; lengths int32 [F * b].
        labels: [b] float32, each 0 or 1.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor


@dataclass
class Batch(Pipelineable):
    """One rank's share of a global batch.

    Attributes:
        dense: [b, D] float32.
        sparse: ids of all sparse features, keys in the order of the schema; values int32 or int64, lengths int32 [F * b].
        labels: [b] float32, each 0 or 1.
        weights: [b] float32, 1 for a sample and 0 for padding: b is the same on all ranks, however uneven their shares.
        global_size: samples of this batch over all ranks, padding not counted.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor
    global_size: int

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
            global_size=self.global_size,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
        self.weights.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(
            dense=self.dense.pin_memory(),
            sparse=self.sparse.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=self.weights.pin_memory(),
            global_size=self.global_size,
        )


def sparse_from_features(
    names: Sequence[str], ids: Sequence[NDArray[np.int32]], lengths: Sequence[NDArray[np.int64] | int], batch_size: int
) -> KeyedJaggedTensor:
    """Join the ids of every feature into one KeyedJaggedTensor.

    Args:
        names: F feature names.
        ids: for each feature, its ids, sample after sample; all of its elements in C order count.
        lengths: for each feature, the number of ids of each sample [b], or one number that holds for all samples.
        batch_size: b.
    """
    all_lengths = np.empty((len(names), batch_size), dtype=np.int32)
    for row, length in zip(all_lengths, lengths, strict=True):
        row[:] = length
    return KeyedJaggedTensor(
        keys=list(names),
        values=torch.from_numpy(np.concatenate([column.reshape(-1) for column in ids])),
        lengths=torch.from_numpy(all_lengths.reshape(-1)),
        stride=batch_size,
        # Known here without asking the device for it later.
        length_per_key=[column.size for column in ids],
    )
