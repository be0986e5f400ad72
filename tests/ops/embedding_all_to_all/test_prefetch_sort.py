"""A sort that the forward pass prepares is that of its own lookup and its own indices. One rank, Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, ExchangeLayout, LookupLayout, Sgd, embedding_all_to_all
from dlrm_fused.symmetric import symmetric_group
from tests.ops.embedding_all_to_all.lookups import make_tables

pytestmark = pytest.mark.interpreted

INDICES, OFFSETS, BATCH_SIZES = torch.tensor([3, 0, 3, 5]), torch.tensor([0, 1, 4]), [2]
DIM, RATE = 8, 0.1


@pytest.fixture
def workspace() -> Iterator[EmbeddingWorkspace]:
    """Of two lookups: one of a table of 8 rows, and one of two tables, whose only feature reads the second, of 24 rows."""
    group = symmetric_group(device="cpu")
    layout = ExchangeLayout(((LookupLayout((0,), (DIM,)), LookupLayout((DIM,), (DIM,))),), 2 * DIM)
    workspace = EmbeddingWorkspace(group, layout, name="two lookups", timeout_seconds=60.0)
    first = make_tables([8], [DIM], [0], optimizer="sgd", learning_rate=RATE)
    second = make_tables([8, 24], [DIM, DIM], [1], optimizer="sgd", learning_rate=RATE)
    workspace.attach_tables([first, second])
    yield workspace
    group.close()


def pooled_sum(workspace: EmbeddingWorkspace, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
    return embedding_all_to_all(workspace, indices, offsets, [], BATCH_SIZES).sum()


def updates(workspace: EmbeddingWorkspace, step: Callable[[], object]) -> list[Tensor]:
    """How often a step has subtracted the learning rate from each row, by lookup: the gradient of a sum is 1."""
    before = [tables.weights.clone() for tables in workspace.tables]
    step()
    changes = [old - tables.weights for old, tables in zip(before, workspace.tables, strict=True)]
    return [(change.view(-1, DIM).mean(1) / RATE).round(decimals=3) for change in changes]


def expected_updates(indices: Tensor) -> list[Tensor]:
    return [indices.bincount(minlength=8).float(), (8 + indices).bincount(minlength=32).float()]


def test_lookups_that_are_given_the_same_tensors_update_their_own_tables(workspace: EmbeddingWorkspace) -> None:
    found = updates(workspace, lambda: pooled_sum(workspace, [INDICES, INDICES], [OFFSETS, OFFSETS]).backward())
    torch.testing.assert_close(found, expected_updates(INDICES))


def test_a_sort_whose_backward_pass_never_came_is_not_used_for_later_indices(workspace: EmbeddingWorkspace) -> None:
    indices = [INDICES.clone(), INDICES.clone()]
    offsets = [OFFSETS.clone(), OFFSETS.clone()]
    pooled_sum(workspace, indices, offsets)
    for tensor in indices:
        tensor.copy_(INDICES + 2)  # the next batch, at the same address
    # A compiled forward pass prepares no sort of its own.
    step = torch.compile(pooled_sum, backend="aot_eager", fullgraph=True)
    found = updates(workspace, lambda: step(workspace, indices, offsets).backward())
    torch.testing.assert_close(found, expected_updates(INDICES + 2))


def test_a_graph_that_is_kept_updates_the_tables_in_each_backward_pass(workspace: EmbeddingWorkspace) -> None:
    loss = pooled_sum(workspace, [INDICES, INDICES], [OFFSETS, OFFSETS])

    def step() -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    torch.testing.assert_close(updates(workspace, step), [2 * times for times in expected_updates(INDICES)])


def test_a_backward_pass_updates_the_tables_of_its_forward_pass(workspace: EmbeddingWorkspace) -> None:
    before = workspace.tables
    loss = pooled_sum(workspace, [INDICES, INDICES], [OFFSETS, OFFSETS])
    workspace.attach_tables([replace(tables, optimizer=Sgd(torch.tensor(5.0))) for tables in before])

    def step() -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    found = updates(workspace, step)  # of the same weights
    torch.testing.assert_close(found, [2 * times for times in expected_updates(INDICES)])
    after = updates(workspace, lambda: pooled_sum(workspace, [INDICES, INDICES], [OFFSETS, OFFSETS]).backward())
    torch.testing.assert_close(after, [5.0 / RATE * times for times in expected_updates(INDICES)])
