"""Each pooled embedding goes to another host once, however many bags have it: slices of distinct rows.

Bags of one feature that hold one and the same id have the same pooled embedding, and those that hold none have zeros. Sender
and receiver both know the ids of a slice's bags, so they agree without a word on which rows are sent, and in which order.
Backward, the receiver adds up the gradients of the bags that share a row, and sends the sum; at the table's rank it counts as
the gradient of one of them, of the others it is zero, so the update adds up the same gradients in another order.

A slice [bags, features * dim] has a place for each bag and feature, ``bag * features + feature``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

# Ids are smaller; bags with several ids are told apart by numbers from here on.
_SEVERAL_IDS = 1 << 40


class BagKeys(NamedTuple):
    """What two bags of a feature have in common if their pooled embeddings are equal.

    Attributes:
        keys: int64 [features, bags]: the id of a bag with one, a number of its own for a bag with several.
        exists: bool [features, bags]: whether a bag has any.
    """

    keys: Tensor
    exists: Tensor

    @classmethod
    def of(cls, lengths: Tensor, offsets: Tensor, values: Tensor, numbers: Tensor) -> Self:
        """Args:
        lengths: [features, bags].
        offsets: [features * bags + 1], where bags begin in ``values``.
        values: ids, without weights.
        numbers: int64 [bags]: of the bag in its rank's batch.
        """
        if values.numel():
            first = values[offsets[:-1].clamp(max=values.numel() - 1)].view_as(lengths).long()
        else:
            first = torch.zeros_like(lengths, dtype=torch.int64)
        return cls(torch.where(lengths > 1, _SEVERAL_IDS + numbers, first), lengths > 0)

    def select(self, features: Tensor | slice, bags: slice) -> BagKeys:
        """Those of some features and bags."""
        return BagKeys(self.keys[features, bags], self.exists[features, bags])

    def distinct(self) -> tuple[Tensor, Tensor, int]:
        """int64 places of the bags that exist, for each of them the number of its row, and how many rows there are."""
        features = len(self.keys)
        of_feature = self.keys.T * features + torch.arange(features)
        places = torch.nonzero(self.exists.T.flatten()).flatten()
        rows, numbers = torch.unique(of_feature.flatten()[places], return_inverse=True)
        return places, numbers, rows.numel()


class DistinctRows(NamedTuple):
    """Which rows go between this rank and those of other hosts, in the order of ``Hosts.remote``; tensors of int64.

    Attributes:
        sent: for each row that this rank sends, one of the places that have it.
        places: those places of a slice that this rank receives which are not zeros.
        numbers: the row that belongs to each of them.
        received: how many rows come.
    """

    sent: list[Tensor]
    places: list[Tensor]
    numbers: list[Tensor]
    received: list[int]

    @classmethod
    def of(cls, looked_up: Sequence[BagKeys], own: Sequence[BagKeys]) -> Self:
        """Args:
        looked_up: the bags of each rank for whose features this one has the tables.
        own: this rank's bags, of the features for which each rank has the tables.
        """
        sent = []
        for keys in looked_up:
            places, numbers, count = keys.distinct()
            sent.append(places.new_empty(count).scatter_(0, numbers, places))
        received = [keys.distinct() for keys in own]
        return cls(sent, *(list(values) for values in zip(*received, strict=True)))  # type: ignore[arg-type]

    def rows_of_slice(self, number: int, slice_: Tensor, dim: int) -> Tensor:
        """[rows, dim]: what this rank sends of the slice [bags, features * dim] for the ``number``-th rank."""
        return slice_.reshape(-1, dim)[self.sent[number]]

    def slice_of_rows(self, number: int, rows: Tensor, bags: int, width: int) -> Tensor:
        """The slice [bags, width] of the ``number``-th rank from the rows that it sent."""
        slice_ = rows.new_zeros(bags * width // rows.shape[1], rows.shape[1])
        slice_[self.places[number]] = rows[self.numbers[number]]
        return slice_.view(bags, width)

    def gradient_of_rows(self, number: int, gradient: Tensor, dim: int) -> Tensor:
        """[rows, dim], fp32: the gradients of the rows that the ``number``-th rank sent, from that of its slice."""
        of_places = gradient.reshape(-1, dim)[self.places[number]].float()
        return of_places.new_zeros(self.received[number], dim).index_add_(0, self.numbers[number], of_places)

    def gradient_of_slice(self, number: int, rows: Tensor, bags: int, width: int) -> Tensor:
        """[bags, width]: the gradient of the slice for the ``number``-th rank from those of its rows."""
        gradient = rows.new_zeros(bags * width // rows.shape[1], rows.shape[1])
        gradient[self.sent[number]] = rows
        return gradient.view(bags, width)
