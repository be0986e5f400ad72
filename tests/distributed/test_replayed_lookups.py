"""Between hosts lookups are replayed on all ranks or on none, whatever the shapes of one rank's batches are."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout
from dlrm_fused.sharding.replay import ReplayedEmbeddingAllToAll, _key
from dlrm_fused.symmetric import SymmetricGroup
from tests.distributed.launch import RankFailed, cpu_group, on_hosts, run_ranks

SIZES, WIDTH, STEPS = [3, 2], 4, 8


def calls_that_are_taken(shapes: str, fixed_shapes: bool = True, row_wise: bool = False) -> list[bool]:
    """On a rank: which calls of a training loop are for replays; rank 1 has no rows of a table."""
    not_captured = mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False)
    with cpu_group() as group, mock.patch.object(SymmetricGroup, "calls_can_be_captured", True), not_captured:
        lookups = (LookupLayout((0,), (WIDTH,), row_wise),)
        layout = ExchangeLayout((lookups, lookups if row_wise else ()), WIDTH)
        workspace = EmbeddingWorkspace(group, layout, name="replayed")
        replayed = ReplayedEmbeddingAllToAll(workspace, fixed_shapes=fixed_shapes)
        taken = []
        for step in range(STEPS):
            ids = 5 + step * (shapes == "change") + (shapes == "change late" and step == STEPS - 1)
            of_tables = [torch.zeros(ids)] if group.rank == 0 else []
            batch = of_tables, of_tables, SIZES, None
            taken.append(replayed.takes(shapes != "are not covered" or group.rank == 1, *batch))
            key = _key(*batch)
            replayed._steps[key] = replayed._steps.get(key, 0) + 1  # as the backward pass does
        return taken


@pytest.mark.parametrize(
    ("hosts", "shapes", "taken"),
    [
        ((0, 1), "come again", ([True] * STEPS, [True] * STEPS)),
        ((0, 1), "change", ([True] * 5 + [False] * 3, [True] * 5 + [False] * 3)),
        ((0, 1), "are not covered", ([False] * STEPS, [True] * 5 + [False] * 3)),
        ((0, 0), "are not covered", ([False] * STEPS, [True] * STEPS)),
    ],
)
def test_hosts_agree_once_for_the_batch_sizes(hosts: tuple[int, ...], shapes: str, taken: Sequence[list[bool]]) -> None:
    assert run_ranks(2, on_hosts, hosts, calls_that_are_taken, shapes) == list(taken)


@pytest.mark.parametrize(("fixed_shapes", "row_wise"), [(False, False), (True, True)])
def test_shapes_that_may_change_are_not_replayed_between_hosts(fixed_shapes: bool, row_wise: bool) -> None:
    """A rank whose shapes are others could not replay with those whose are not. Ids decide how many a row-wise table gets."""
    taken = run_ranks(2, on_hosts, (0, 1), calls_that_are_taken, "come again", fixed_shapes, row_wise)
    assert taken == [[False] * STEPS] * 2


def test_a_batch_of_another_shape_is_told_where_shapes_are_fixed() -> None:
    with pytest.raises(
        RankFailed, match=r"replayed: fixed_shapes=True, but a batch of \[3, 2\] samples .* without fixed_shapes"
    ):
        run_ranks(2, on_hosts, (0, 1), calls_that_are_taken, "change late")
