"""Between hosts lookups are replayed on all ranks or on none, whatever the shapes of one rank's batches are."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from dlrm_fused.errors import UsageError
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
        replayed._tables = workspace.tables  # as the first call does
        taken = []
        for step in range(STEPS):
            ids = 5 + step * (shapes == "change") + (shapes == "change late" and step == STEPS - 1)
            if shapes == "of other tables late" and step == STEPS - 1 and group.rank == 0:
                replayed._tables = None
            of_tables = [torch.zeros(ids)] if group.rank == 0 else []
            batch = of_tables, of_tables, SIZES, None
            is_covered = not (shapes == "are not covered" or (shapes == "have weights late" and step == STEPS - 1))
            taken.append(replayed.takes(is_covered or group.rank == 1, *batch))
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


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ("change late", r"a batch of \[3, 2\] samples .* other ids than those before"),
        ("have weights late", r"a batch of \[3, 2\] samples for the ranks has weights"),
        ("of other tables late", "tables, or numbers of their optimizer, have changed"),
    ],
)
def test_what_a_rank_could_not_replay_with_the_others_is_told(shapes: str, message: str) -> None:
    with pytest.raises(
        RankFailed, match=rf"replayed: fixed_shapes=True, but {message}.*; shard the model without fixed_shapes"
    ):
        run_ranks(2, on_hosts, (0, 1), calls_that_are_taken, shapes)


def fixed_shapes_of_rank_0_alone() -> str:
    with cpu_group() as group:
        layout = ExchangeLayout(((LookupLayout((0,), (WIDTH,)),), ()), WIDTH)
        with pytest.raises(UsageError) as raised:
            ReplayedEmbeddingAllToAll(EmbeddingWorkspace(group, layout, name="replayed"), fixed_shapes=group.rank == 0)
        return str(raised.value)


def test_ranks_that_do_not_promise_the_same_are_told() -> None:
    first, second = run_ranks(2, fixed_shapes_of_rank_0_alone)
    assert first == "replayed: fixed_shapes=True, other ranks have another; give all the same"
    assert second == "replayed: fixed_shapes=False, other ranks have another; give all the same"
