"""Distinct rows: sender and receiver agree, each row goes once, and gradients of equal bags are added up."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all import DistinctRows, keys_of_bags

DIM = 3
# Rows of each feature of each rank's tables; ranks 0 and 1 are on one host.
ROWS = {"one width": ((1, 1), (), (1, 1, 1), (1,)), "several widths": ((2, 1), (), (1, 3, 2), (2,))}
FEATURES = tuple(map(len, ROWS["one width"]))
HOSTS = (0, 0, 1, 2)

with_widths = pytest.mark.parametrize("widths", ROWS)


def keys(batch_sizes: tuple[int, ...]) -> list[Tensor]:
    """Of each rank's features, [features, global batch]; few ids, so that many bags are equal."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(-1, 4, (features, sum(batch_sizes)), generator=generator) for features in FEATURES]


def numbers_of_rows(of_features: Tensor, rows: tuple[int, ...]) -> Tensor:
    """[rows, bags]: another number for each row of a feature, from one for each feature."""
    numbers = torch.tensor([number for count in rows for number in range(count)])
    return of_features.repeat_interleave(torch.tensor(rows).long(), 0) * 8 + numbers.long()[:, None]


def rows_of_ranks(batch_sizes: tuple[int, ...], rows: tuple[tuple[int, ...], ...]) -> list[DistinctRows]:
    looked_up, starts = keys(batch_sizes), [0, *itertools.accumulate(batch_sizes)]
    found = []
    for rank, host in enumerate(HOSTS):
        remote = tuple(other for other, its in enumerate(HOSTS) if its != host)
        own = torch.cat([looked_up[other][:, starts[rank] : starts[rank + 1]] for other in remote])
        of_remote = [rows[other] for other in remote]
        options = {"batch_sizes": batch_sizes, "rows": rows[rank], "rows_of_remote": of_remote}
        found.append(DistinctRows.of(looked_up[rank], own, remote=remote, **options))
    return found


def remote_of(rank: int) -> list[int]:
    return [other for other, host in enumerate(HOSTS) if host != HOSTS[rank]]


@with_widths
@pytest.mark.parametrize("batch_sizes", [(5, 7, 0, 6), (1, 1, 1, 1), (0, 0, 3, 0)])
def test_every_bag_gets_its_row_and_no_row_goes_twice(batch_sizes: tuple[int, ...], widths: str) -> None:
    rows, starts = rows_of_ranks(batch_sizes, ROWS[widths]), [0, *itertools.accumulate(batch_sizes)]
    looked_up = [numbers_of_rows(own, of_rank) for own, of_rank in zip(keys(batch_sizes), ROWS[widths], strict=True)]
    for rank in range(len(HOSTS)):
        arriving = []
        for other in remote_of(rank):
            number = remote_of(other).index(rank)
            sent = rows[other].sent.split(rows[other].sent_counts)[number]
            own = looked_up[other][:, starts[rank] : starts[rank + 1]]
            assert len(sent) == sum(len(of_feature.unique()) for of_feature in own)
            arriving.append(looked_up[other].T.flatten()[sent])
        assert rows[rank].received_counts == [len(of_rank) for of_rank in arriving]
        wanted = torch.cat([looked_up[other][:, starts[rank] : starts[rank + 1]] for other in remote_of(rank)])
        assert torch.equal(torch.cat(arriving)[rows[rank].received], wanted)


@with_widths
def test_gradients_of_equal_bags_are_added_up_at_the_first_of_them(widths: str) -> None:
    batch_sizes, of_ranks = (5, 7, 4, 6), list(map(sum, ROWS[widths]))
    rows, starts = rows_of_ranks(batch_sizes, ROWS[widths]), [0, *itertools.accumulate(batch_sizes)]
    looked_up = [numbers_of_rows(own, of_rank) for own, of_rank in zip(keys(batch_sizes), ROWS[widths], strict=True)]
    sender, receiver = 2, 1
    bags, features = slice(starts[receiver], starts[receiver + 1]), of_ranks[sender]
    gradient = torch.randn(sum(of_ranks[other] for other in remote_of(receiver)), batch_sizes[receiver], DIM)
    of_rows = rows[receiver].gradient_of_rows(gradient.flatten(0, 1))[remote_of(receiver).index(sender)]
    number = remote_of(sender).index(receiver)
    found = rows[sender].gradient_of_slice(number, of_rows, bags, features).view(-1, features, DIM)
    first_feature = sum(of_ranks[other] for other in remote_of(receiver) if other < sender)
    for feature in range(features):
        own, seen = looked_up[sender][feature, bags], set[int]()
        for bag, key in enumerate(own.tolist()):
            wanted = torch.zeros(DIM) if key in seen else gradient[first_feature + feature][own == key].sum(0)
            torch.testing.assert_close(found[bag, feature], wanted)
            seen.add(key)


def test_bags_are_equal_if_they_hold_one_and_the_same_id_or_none() -> None:
    lengths = torch.tensor([[1, 0, 2, 1, 2], [0, 1, 0, 1, 1]])
    values = torch.tensor([5, 6, 7, 5, 6, 7, 5, 9, 5])
    found = keys_of_bags(lengths, begins_of(lengths), values, torch.arange(5), torch.tensor([[8], [10]]))
    assert found[0, 0] == found[0, 3]
    assert found[0, 2] != found[0, 4]
    assert found[1, 0] == found[1, 2] == found[0, 1]
    assert found[1, 1] == found[1, 4] != found[1, 3]
    without_ids = keys_of_bags(*[torch.zeros(2, 3).long()] * 2, torch.zeros(0), torch.arange(3), torch.tensor([[8], [10]]))
    assert torch.equal(without_ids, found[:, 1:2].new_full((2, 3), -1))


@pytest.mark.parametrize("wrong", [8, -1, 1 << 40, (1 << 40) + 1, 3 << 40, -(1 << 40)])
def test_a_wrong_id_has_the_key_of_what_it_is_replaced_by(wrong: int) -> None:
    lengths = torch.ones(2, 3, dtype=torch.int64)
    values, rows = torch.tensor([7, wrong, 0, 0, wrong, 1]), torch.tensor([[8], [2]])
    repaired = torch.where(values == wrong, 0, values)
    keys = [keys_of_bags(lengths, begins_of(lengths), ids, torch.arange(3), rows) for ids in (values, repaired)]
    assert torch.equal(*keys)
    assert keys[0].tolist() == [[7, 0, 0], [0, 0, 1]]


def begins_of(lengths: Tensor) -> Tensor:
    """The first places of bags whose ids follow each other."""
    return (lengths.flatten().cumsum(0) - lengths.flatten()).view_as(lengths)
