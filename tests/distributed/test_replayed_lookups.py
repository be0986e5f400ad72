"""Between hosts lookups are replayed on all ranks or on none, whatever the shapes of one rank's batches are."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout
from dlrm_fused.sharding.replay import ReplayedEmbeddingAllToAll, _key
from dlrm_fused.symmetric import SymmetricGroup
from tests.distributed.launch import cpu_group, on_hosts, run_ranks

SIZES, WIDTH, STEPS = [3, 2], 4, 8


def calls_that_are_taken(shapes: str) -> list[bool]:
    """On a rank: which calls of a training loop are for replays; rank 1 has no table."""
    with cpu_group() as group, mock.patch.object(SymmetricGroup, "calls_can_be_captured", True):
        layout = ExchangeLayout(((LookupLayout((0,), (WIDTH,)),), ()), WIDTH)
        replayed = ReplayedEmbeddingAllToAll(EmbeddingWorkspace(group, layout, name="replayed"))
        taken = []
        for step in range(STEPS):
            ids = 5 + step * (shapes == "change")
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
