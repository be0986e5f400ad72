"""Samples, which readers return, and batches, which a rank trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Samples:
    """Samples as a data set holds them, in the order they were asked for.

    With token features, a sample has T = ``history_length + 1`` tokens: its history of n interactions, oldest first, at
    positions 0 to n - 1, the candidate at position n, and padding, whose bags are empty.

    Attributes:
        dense: [b, D] float32.
        sparse: ids of all sparse features, feature after feature; lengths int32 [F * b].
        labels: [b] float32, each 0 or 1; [b, L] of L > 1 labels, in the order of the schema.
        tokens: ids of all token features, keys in the order of the schema, of stride b * T: bag i * T + t is token t of
            sample i; None without token features.
        history_lengths: [b] int32, n of each sample; None without token features.
        weights: [b] float32, what each sample counts, 0 or more; None where all count the same.
        token_count: the sum of ``history_lengths``, plus b, where these lie on a device and the host knows it all the same.
        token_times: [b, T] int64, seconds since 1970 of each token; the candidate's again for padding. Times of a history do
            not decrease, and are before the candidate's. None where these are not known.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    tokens: KeyedJaggedTensor | None = None
    history_lengths: Tensor | None = None
    weights: Tensor | None = None
    token_count: int | None = None
    token_times: Tensor | None = None


@dataclass
class Batch(Pipelineable):
    """One rank's share of a global batch.

    Attributes:
        dense: [b, D] float32.
        sparse: ids of all sparse features, keys in the order of the schema; values int32 or int64, lengths int32 [F * b].
        labels: as in :class:`Samples`.
        weights: [b] float32, 1 for a sample and 0 for padding: b is the same on all ranks, however uneven their shares.
        global_size: samples of this batch over all ranks, padding not counted.
        tokens, history_lengths: as in :class:`Samples`; padding has a history of length 0, and no ids for its candidate.
        sample_weights: [b] float32, what each sample counts in the loss and the metrics, 0 for padding; None where that is
            ``weights``.
        token_count: the sum of ``history_lengths``, plus b: tokens without padding, known here without asking the device
            for it later; None where nobody has counted.
        token_times: as in :class:`Samples`; zeros for padding.
    """

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor
    weights: Tensor
    global_size: int
    tokens: KeyedJaggedTensor | None = None
    history_lengths: Tensor | None = None
    sample_weights: Tensor | None = None
    token_count: int | None = None
    token_times: Tensor | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return replace(self, **{name: part.to(device, non_blocking=non_blocking) for name, part in self._tensors()})

    def record_stream(self, stream: torch.Stream) -> None:
        for _, part in self._tensors():
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        return replace(self, **{name: part.pin_memory() for name, part in self._tensors()})

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        """Names and values of the fields that are tensors, which a batch need not have all of."""
        for field in fields(self):
            if isinstance(part := getattr(self, field.name), Tensor | KeyedJaggedTensor):
                yield field.name, part


def sparse_from_features(
    names: Sequence[str], ids: Sequence[NDArray[np.int32]], lengths: Sequence[NDArray[np.int64] | int], batch_size: int
) -> KeyedJaggedTensor:
    """Join the ids of every feature into one KeyedJaggedTensor.

    Args:
        ids: for each feature, its ids, sample after sample; all of its elements in C order count.
        lengths: for each feature, the number of ids of each sample [b], or one number that holds for all samples.
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


def select_bags(bags: KeyedJaggedTensor, chosen: Tensor) -> KeyedJaggedTensor:
    """Return these bags, [n] int64, of each key, in their order; on the CPU."""
    keys = bags.keys()
    lengths = bags.lengths().view(len(keys), -1)[:, chosen].flatten().long()
    starts = bags.offsets()[:-1].view(len(keys), -1)[:, chosen].flatten().long()
    # Places count from each bag's start.
    shifts = starts - pad(lengths.cumsum(0), (1, 0))[:-1]
    places = torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)
    return KeyedJaggedTensor(keys=keys, values=bags.values()[places], lengths=lengths.int(), stride=len(chosen))
