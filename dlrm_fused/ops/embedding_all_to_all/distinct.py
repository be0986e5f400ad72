"""Each pooled embedding goes to another host once, however many bags have it: slices of distinct rows.

Bags of one feature that hold one and the same id have the same pooled embedding, and those that hold none have zeros. Sender
and receiver both know the ids of a slice's bags, so they agree without a word on which rows are sent, and in which order.
Backward, the receiver adds up the gradients of the bags that share a row, and sends the sum; at the table's rank it counts as
the gradient of the first of them, of the others it is zero, so the update adds up the same gradients in another order.

A matrix [bags, rows * dim] has a place for each bag and row, ``bag * rows + row``. A feature is of one row, or of several where
features have different widths: they are sent together.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from dlrm_fused.lasting import lasting

# Ids are smaller; bags with several ids are told apart by numbers from here on.
_SEVERAL_IDS = 1 << 40
# Keys of bags are smaller, once 1 is added to them.
_KEYS = 1 << 41
_KEPT_BATCH_SIZES = 16


def keys_of_bags(lengths: Tensor, begins: Tensor, values: Tensor, numbers: Tensor, rows: Tensor) -> Tensor:
    """Return keys, int64 [features, bags]; two bags of a feature with equal keys have equal pooled embeddings.

    A wrong id has the key of id 0, by which FBGEMM replaces it, so keys are the same before and after that.

    Args:
        lengths: [features, bags].
        begins: the same shape: where bags begin in ``values``.
        values: ids, without weights.
        numbers: int64 [bags]: of the bag in its rank's batch.
        rows: int64 [features, 1]: of each feature's table; at most 2^40.
    """
    if not values.numel():
        return torch.full(lengths.shape, -1, device=lengths.device)
    first = values[begins.clamp(max=values.numel() - 1)].long()
    first.masked_fill_((first < 0) | (first >= rows), 0)
    return torch.where(lengths == 1, first, torch.where(lengths > 1, _SEVERAL_IDS + numbers, -1))


class DistinctRows(NamedTuple):
    """The rows that go between this rank and those of other hosts, in the order of ``Hosts.remote``.

    Attributes:
        sent: int64 [rows]: for each row that this rank sends, the first place that has it in its results for the global batch.
        received: int64 [rows, bags]: the row, among all that come, for each row of those ranks' features and bag of this one.
        sent_counts: how many rows go to each of those ranks.
        received_counts: how many rows come from each.
    """

    sent: Tensor
    received: Tensor
    sent_counts: list[int]
    received_counts: list[int]

    @classmethod
    def of(
        cls,
        looked_up: Tensor,
        own: Tensor,
        *,
        remote: tuple[int, ...],
        batch_sizes: tuple[int, ...],
        rows: tuple[int, ...],
        rows_of_remote: Sequence[tuple[int, ...]],
    ) -> Self:
        """Args:
        looked_up: keys [features, global batch], of the features for which this rank has the tables.
        own: keys [features, bags], of this rank's bags and the features of one remote rank after the other.
        remote: the ranks of other hosts.
        batch_sizes: of all ranks.
        rows: of how many rows each feature of this rank is; ``rows_of_remote``: those of each of them.
        """
        features = len(looked_up)
        bags, firsts, places = _sent_places(remote, batch_sizes, rows)
        sent_keys, numbers = torch.unique(looked_up.index_select(1, bags) + firsts, return_inverse=True)
        sent = places.new_full((sent_keys.numel(),), torch.iinfo(torch.int64).max)
        sent.scatter_reduce_(0, numbers.flatten(), places, "amin")
        received_keys, received = torch.unique(own + _first_keys(len(own)), return_inverse=True)
        sent_features, received_features = sent_keys // _KEYS, received_keys // _KEYS
        of_own, of_remote = (
            torch.tensor(numbers, device=own.device).long()
            for numbers in (rows, [row for of_rank in rows_of_remote for row in of_rank])
        )
        of_sent, of_received = of_own[sent_features % max(features, 1)], of_remote[received_features]
        begins = of_received.cumsum(0) - of_received
        return cls(
            _following(sent, of_sent),
            begins[received].repeat_interleave(of_remote, 0) + _following(torch.zeros_like(of_remote), of_remote)[:, None],
            _counts(sent_features, of_sent, [features] * len(remote)),
            _counts(received_features, of_received, list(map(len, rows_of_remote))),
        )

    def gradient_of_rows(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """[rows, dim], fp32, for each rank from which rows came: their gradients.

        Args:
            gradient: [rows * bags, dim], of what has each row: in the order of ``received``.
        """
        rows = gradient.new_zeros(sum(self.received_counts), gradient.shape[1], dtype=torch.float32)
        return rows.index_add_(0, self.received.flatten(), gradient.float()).split(self.received_counts)

    def gradient_of_slice(self, number: int, rows: Tensor, bags: slice, rows_of_bag: int) -> Tensor:
        """[bags, rows of a bag * dim]: the gradient of the results for the ``number``-th rank from those of its rows.

        Args:
            bags: of that rank.
        """
        gradient = rows.new_zeros((bags.stop - bags.start) * rows_of_bag, rows.shape[1])
        gradient.index_copy_(0, self.sent.split(self.sent_counts)[number] - bags.start * rows_of_bag, rows)
        return gradient.view(bags.stop - bags.start, -1)


@functools.lru_cache(maxsize=_KEPT_BATCH_SIZES)
@lasting
def _sent_places(remote: tuple[int, ...], batch_sizes: tuple[int, ...], rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The bags of remote ranks; [features, bags]: what to add to their keys, so that rows of one rank and feature follow each
    other; and, flat, the places of their features' first rows."""
    starts = [0, *itertools.accumulate(batch_sizes)]
    bags = torch.cat([torch.arange(starts[rank], starts[rank + 1]) for rank in remote])
    receivers = torch.repeat_interleave(torch.arange(len(remote)), torch.tensor([batch_sizes[rank] for rank in remote]))
    feature = torch.arange(len(rows))[:, None]
    first_rows = torch.tensor([*itertools.accumulate(rows, initial=0)])[:-1, None]
    return bags, (receivers * len(rows) + feature) * _KEYS + 1, (bags * sum(rows) + first_rows).flatten()


@functools.cache
@lasting
def _first_keys(features: int) -> Tensor:
    return (torch.arange(features) * _KEYS + 1)[:, None]


def _following(first: Tensor, counts: Tensor) -> Tensor:
    """Return, for each of ``first``, so many numbers from it on."""
    begins = counts.cumsum(0) - counts
    return (first - begins).repeat_interleave(counts) + torch.arange(int(counts.sum()), device=counts.device)


def _counts(features: Tensor, rows: Tensor, of_ranks: Sequence[int]) -> list[int]:
    """Return the number of rows that belong to each rank.

    Args:
        features: ascending, and of how many rows each is.
        of_ranks: how many features each rank has.
    """
    before = torch.cat([rows.new_zeros(1), rows.cumsum(0)])
    firsts = torch.tensor([*itertools.accumulate(of_ranks)], device=rows.device).long()
    ends = before[torch.searchsorted(features, firsts)].tolist()
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]
