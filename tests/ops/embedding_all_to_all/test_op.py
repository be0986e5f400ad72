"""How the fused operators behave as operators of PyTorch: opcheck, torch.compile, gradients. Under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.ops.embedding_all_to_all import EmbeddingWorkspace, Sgd, embedding_all_to_all, pooled_all_to_all, reference
from tests.distributed.launch import cpu_group, run_ranks
from tests.ops.embedding_all_to_all.world import Features, Traffic, World

pytestmark = pytest.mark.interpreted

BATCHES = {1: [3], 2: [3, 2]}


def in_world(work: Any) -> Any:
    with cpu_group() as group:
        ranks = [[Features((7, 5), (8, 4), (0, 1), weighted=True)] for _ in range(group.world_size)]
        world = World(ranks, Traffic(held_outputs=8), seed=1)
        workspace = world.workspace(group, "world", timeout_seconds=60.0)
        batches = BATCHES[group.world_size]
        batch = world.draw_batches(batches)[group.rank][0]
        result = work(workspace, batch.indices, batch.offsets, batch.weights, batches)
        return result


def without_optimizer(workspace: EmbeddingWorkspace) -> None:
    """The checks run an operator several times, and expect the same each time."""
    workspace.attach_tables([replace(tables, optimizer=None) for tables in workspace.tables])


def opcheck_lookup(
    workspace: EmbeddingWorkspace, indices: Tensor, offsets: Tensor, weights: Tensor, batches: list[int]
) -> None:
    without_optimizer(workspace)
    tables = [workspace.tables[0].weights]
    arguments = (workspace.anchor, tables, [indices], [offsets], [weights.requires_grad_()], batches, workspace.handle)
    torch.library.opcheck(torch.ops.dlrm_fused.embedding_all_to_all.default, arguments)


def opcheck_pooled(
    workspace: EmbeddingWorkspace, indices: Tensor, offsets: Tensor, weights: Tensor, batches: list[int]
) -> None:
    pooled = torch.randn(sum(batches), 12, device=workspace.device, requires_grad=True)
    arguments = (workspace.anchor, [pooled], batches, workspace.handle)
    torch.library.opcheck(torch.ops.dlrm_fused.pooled_all_to_all.default, arguments)


def test_opcheck_of_the_fused_lookup() -> None:
    for ranks in (1, 2):
        run_ranks(ranks, in_world, opcheck_lookup)


def test_opcheck_of_the_exchange() -> None:
    for ranks in (1, 2):
        run_ranks(ranks, in_world, opcheck_pooled)


def step(workspace: EmbeddingWorkspace, indices: Tensor, offsets: Tensor, weights: Tensor, batches: list[int]) -> Tensor:
    pooled = embedding_all_to_all(workspace, [indices], [offsets], [weights], batches)
    return torch.sin(pooled).sum()


def compiled_and_eager(
    workspace: EmbeddingWorkspace,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor,
    batches: list[int],
    backend: str = "aot_eager",
) -> list[list[float]]:
    losses = []
    start = workspace.tables[0].weights.clone()
    for run in (step, torch.compile(step, backend=backend, fullgraph=True)):
        workspace.tables[0].weights.copy_(start)
        workspace.tables[0].optimizer.momentum.zero_()  # type: ignore[union-attr]
        losses.append([])
        for _ in range(4):
            loss = run(workspace, indices, offsets, weights, batches)
            loss.backward()
            losses[-1].append(float(loss.detach()))
    return losses


def test_compiled_training_steps_equal_eager_ones() -> None:
    for eager, compiled in run_ranks(2, in_world, compiled_and_eager):
        assert eager == compiled
        assert len(set(eager)) == 4, "the tables are trained"


def differences_to_the_reference(
    workspace: EmbeddingWorkspace, indices: Tensor, offsets: Tensor, weights: Tensor, batches: list[int]
) -> float:
    """Of outputs, of gradients of per-sample weights, and of what SGD subtracts from the tables at a learning rate of 1."""
    tables, start = workspace.tables[0], workspace.tables[0].weights.clone()
    workspace.attach_tables([replace(tables, optimizer=Sgd(torch.tensor(1.0)))])
    leaves = replace(tables, weights=start.clone().requires_grad_(), optimizer=None)
    factors, expected_factors = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    group, layout = workspace.group.process_group, workspace.layout
    expected = reference(group, layout, [leaves], [indices], [offsets], [expected_factors], batches)
    fused = embedding_all_to_all(workspace, [indices], [offsets], [factors], batches)
    gradient = torch.randn_like(expected)
    for output in (expected, fused):
        output.backward(gradient)
    pairs = [
        (fused, expected),
        (factors.grad, workspace.gradient_scale * expected_factors.grad),  # type: ignore[operator]
        (start - tables.weights, workspace.gradient_scale * leaves.weights.grad),  # type: ignore[operator]
    ]
    return max(float((found - right).detach().abs().max()) for found, right in pairs)  # type: ignore[operator]


def test_the_reference_is_the_same_computation() -> None:
    assert max(run_ranks(2, in_world, differences_to_the_reference)) < 1e-6


def gradient_of_pooled(
    workspace: EmbeddingWorkspace, indices: Tensor, offsets: Tensor, weights: Tensor, batches: list[int]
) -> bool:
    pooled = torch.randn(sum(batches), 12, device=workspace.device, requires_grad=True)
    columns = workspace.layout.columns
    pooled_all_to_all(workspace, [pooled], batches).backward(
        torch.ones(batches[workspace.rank], columns, device=workspace.device)
    )
    return torch.equal(pooled.grad, torch.full_like(pooled, 1 / workspace.world_size))  # type: ignore[arg-type]


def test_gradients_are_divided_by_the_number_of_ranks() -> None:
    assert run_ranks(2, in_world, gradient_of_pooled) == [True, True]
