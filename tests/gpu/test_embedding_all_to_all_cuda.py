"""The fused lookup and its backward pass on several GPUs: results, CUDA graphs, torch.compile, opcheck, faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.ops.embedding_all_to_all import (
    Adam,
    EmbeddingWorkspace,
    LocalTables,
    RowwiseAdagrad,
    embedding_all_to_all,
)
from dlrm_fused.sharding.replay import ReplayedEmbeddingAllToAll
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import MARKS, ON_GPU, captured, checked_on_all_ranks, delay
from tests.ops.embedding_all_to_all import test_op
from tests.ops.embedding_all_to_all.lookups import states_of
from tests.ops.embedding_all_to_all.world import Features, Result, Traffic, World, _Batch, _difference, run_epochs

pytestmark = MARKS
TIMEOUT_SECONDS = 20.0
# The interpreter is slow.
WIDE, MIDDLE, ODD = (128, 64, 12) if ON_GPU else (8, 4, 12)
EPOCHS, BATCH, BAG = (15, 12, 9) if ON_GPU else (6, 2, 2)
REPLAYS = 100 if ON_GPU else 5
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def world_of(
    ranks: int, traffic: Traffic, dtype: torch.dtype = FP32, index_dtype: torch.dtype = torch.int64, seed: int = 1
) -> World:
    """Sum and mean, weighted and not, odd and even dims, row-wise tables; of three ranks or more the last has only these."""
    lookups: list[list[Features]] = []
    for rank in range(ranks):
        own = [Features((6,), (MIDDLE,), (0,), row_wise=True, dtype=dtype, index_dtype=index_dtype)]
        if ranks < 3 or rank < ranks - 1:
            sums = Features((11, 70), (WIDE, ODD), (0, 1, 0), dtype=dtype, index_dtype=index_dtype)
            means = replace(own[0], rows=(5 + rank, 9), dims=(MIDDLE, ODD), feature_tables=(0, 1), mean=True, row_wise=False)
            own = [sums, replace(means, weighted=rank == 0, index_dtype=torch.int32), *own]
        lookups.append(own)
    return World(lookups, traffic, seed)


def delays(rank: int) -> Callable[[int], None]:
    """Up to a millisecond, on the device, at random."""
    generator = random.Random(rank)
    return lambda _: delay(generator)


def expect(result: Result, output: float, tables: float) -> None:
    assert max(result.output, result.held, result.weight_gradients) < output, result
    assert max(result.tables, result.momentum) < tables, result
    assert result.largest() < float("inf"), result


def epochs_in_fp32(group: SymmetricGroup, index_dtype: torch.dtype, optimizer: str) -> None:
    traffic = Traffic(optimizer=optimizer, longest_bag=BAG, largest_batch=BATCH)
    world = world_of(group.world_size, traffic, index_dtype=index_dtype)
    workspace = world.workspace(group, f"{index_dtype} {optimizer}", timeout_seconds=TIMEOUT_SECONDS)
    # More outputs are held than symmetric memory has room for.
    expect(run_epochs(world, workspace, EPOCHS, delays(group.rank), hold=5), output=1e-4, tables=1e-4)


def one_epoch(
    group: SymmetricGroup,
    dtype: torch.dtype,
    forward_wire: torch.dtype,
    backward_wire: torch.dtype,
    output_dtype: torch.dtype = FP32,
) -> None:
    traffic = Traffic(output_dtype, forward_wire, backward_wire, largest_batch=BATCH)
    world = world_of(group.world_size, traffic, dtype)
    workspace = world.workspace(
        group, f"{dtype} {forward_wire} {backward_wire} {output_dtype}", timeout_seconds=TIMEOUT_SECONDS
    )
    # Values and gradients of some units, rounded once on the wire; partial sums of every rank. Updated tables once more.
    wires = [output_dtype if wire == FP32 else wire for wire in (forward_wire, backward_wire)]
    output, gradient, rounding = (0 if kind == FP32 else torch.finfo(kind).eps for kind in (*wires, dtype))
    result = run_epochs(world, workspace, 1)
    of_ranks = [0.0] * group.world_size
    dist.all_gather_object(of_ranks, result.output)
    expect(result, output=1e-4 + 8 * max(output, gradient), tables=1e-4 + 8 * gradient + rounding)
    assert (max(of_ranks) > 1e-5) == (wires[0] != FP32)


def many_batch_sizes(group: SymmetricGroup) -> None:
    """The memory grows, and some ranks have no samples."""
    world = world_of(group.world_size, Traffic(longest_bag=2))
    workspace = world.workspace(group, "growing", timeout_seconds=TIMEOUT_SECONDS)
    for largest in (1, 2, 40 if ON_GPU else 4, 3):
        world._traffic = replace(world._traffic, largest_batch=largest)
        expect(run_epochs(world, workspace, 2), output=1e-4, tables=1e-4)


def redraw(world: World, batches: list[list[_Batch]], batch: int) -> None:
    """Other rows for all bags of all ranks, which keep their lengths."""
    for lookups, own in zip(world.ranks, batches, strict=True):
        for features, drawn in zip(lookups, own, strict=True):
            rows = np.repeat([features.rows[table] for table in features.feature_tables], batch)
            lengths = np.diff(drawn.offsets.numpy())
            indices = (world._random.random(int(lengths.sum())) * np.repeat(rows, lengths)).astype(np.int64)
            drawn.indices = torch.from_numpy(indices).to(features.index_dtype)


def replays_of_a_graph(group: SymmetricGroup, training: bool) -> None:
    """Inputs and gradients are changed in place; every replay is an epoch with the values of its time."""
    world = world_of(group.world_size, Traffic(optimizer="sgd"))
    workspace = world.workspace(group, f"graph, training: {training}", timeout_seconds=TIMEOUT_SECONDS)
    sizes = [3 + rank for rank in range(group.world_size)]
    batches, device = world.draw_batches(sizes), group.device
    own = batches[group.rank]
    indices, offsets = [batch.indices.to(device) for batch in own], [batch.offsets.to(device) for batch in own]
    weights = [batch.weights.to(device) for batch in own]
    gradient = torch.zeros(sizes[group.rank], workspace.layout.columns, device=device)

    def step() -> Tensor:
        with torch.set_grad_enabled(training):
            output = embedding_all_to_all(workspace, indices, offsets, weights, sizes)
        if training:
            output.backward(gradient)
        return output.detach()

    replay = captured(step)
    wait = delays(group.rank)
    for number in range(REPLAYS):
        redraw(world, batches, sum(sizes))
        for static, batch in zip(indices, own, strict=True):
            static.copy_(batch.indices)
        expected = world.output(batches, sizes, group.rank)
        gradients = world.draw_gradients(sizes)
        gradient.copy_(0.01 * gradients[group.rank])
        wait(number)
        output = replay()
        if training:
            world.update(batches, [0.01 * own_gradient for own_gradient in gradients], group.rank)
        assert _difference(output, expected) < 1e-3, f"replay {number}"
    workspace.raise_fault()
    assert max(world.table_errors(workspace)) < 1e-3
    # Replays and other calls may follow each other.
    eager = embedding_all_to_all(workspace, indices, offsets, weights, sizes)
    assert _difference(eager, world.output(batches, sizes, group.rank)) < 1e-3


def with_eps(tables: LocalTables, eps: float) -> LocalTables:
    assert isinstance(tables.optimizer, RowwiseAdagrad | Adam)
    return replace(tables, optimizer=replace(tables.optimizer, eps=eps))


def replayed_operator(group: SymmetricGroup, optimizer: str) -> None:
    """The same bits as the operator, whatever happens between two steps of the same shapes."""
    world = world_of(group.world_size, Traffic(optimizer=optimizer, largest_batch=BATCH))
    world = World([[replace(features, weighted=False) for features in own] for own in world.ranks], world._traffic, seed=2)
    plain, workspace = (
        world.workspace(group, f"replayed {optimizer}: {name}", timeout_seconds=TIMEOUT_SECONDS) for name in ("no", "yes")
    )

    def prepare(indices: Sequence[Tensor], offsets: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return [tensor - 1 for tensor in indices], list(offsets)

    plain_operator, replays = partial(embedding_all_to_all, plain), ReplayedEmbeddingAllToAll(workspace, prepare)
    wait, held = delays(group.rank), []

    def replayed(indices: Sequence[Tensor], offsets: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        if replays.covers(indices, sizes):
            return replays(indices, offsets, sizes)
        return embedding_all_to_all(workspace, *prepare(indices, offsets), (), sizes)

    def outputs(number: int, sizes: list[int], batches: list[list[_Batch]]) -> list[Tensor]:
        redraw(world, batches, sum(sizes))
        own = batches[group.rank]
        indices, offsets = ([getattr(batch, key).to(group.device) for batch in own] for key in ("indices", "offsets"))
        wait(number)
        found = [plain_operator(indices, offsets, (), sizes), replayed([tensor + 1 for tensor in indices], offsets, sizes)]
        assert torch.equal(*found), f"step {number}"
        held.append((found[1], found[1].detach().clone()))
        return found

    def go_back(number: int, found: list[Tensor], **settings: bool) -> None:
        generator = torch.Generator().manual_seed(100 * number + group.rank)
        gradient = torch.randn(found[0].shape, generator=generator).to(group.device)
        for output, tables in zip(found, (plain.tables, workspace.tables), strict=True):
            for own in tables:
                assert own.optimizer is not None
                own.optimizer.learning_rate.fill_(0.1 / (1 + number))
            output.backward(gradient, **settings)

    usual = [3 + rank for rank in range(group.world_size)]
    batches = world.draw_batches(usual)

    def set_eps(eps: float) -> None:
        for of_both in (plain, workspace):
            of_both.attach_tables([with_eps(tables, eps) for tables in of_both.tables])

    for number in range(22):
        if number == 15:  # steps are replayed until then, and the last ones captured anew
            set_eps(0.25)
        sizes = [2 * BATCH] * group.world_size if number == 9 else usual
        own = world.draw_batches(sizes) if number == 9 else batches
        found = outputs(number, sizes, own)
        if number == 6:  # an output that waits while another is made
            later = outputs(number, sizes, own)
            go_back(number, later)
        if number == 7:  # an output that nobody differentiates
            outputs(number, sizes, own)
        go_back(number, found, retain_graph=number == 8)
        if number == 8:
            set_eps(0.5)  # the step is made with the numbers of its forward pass
            go_back(number, found)
        with torch.no_grad():
            outputs(number, sizes, own)
    for own, expected in zip(workspace.tables, plain.tables, strict=True):
        assert torch.equal(own.weights, expected.weights)
        assert all(map(torch.equal, states_of(own), states_of(expected)))
    assert all(torch.equal(output, copy) for output, copy in held)
    assert len(replays._captures) == ON_GPU  # what was captured before there was more memory is gone
    workspace.raise_fault()


def as_operator(group: SymmetricGroup, work: Callable[..., Any], *arguments: Any) -> Any:
    """Checks of test_op.py, on this device."""
    world = World([[Features((7, 5), (8, 4), (0, 1), weighted=True)]] * group.world_size, Traffic(held_outputs=8), seed=1)
    name = getattr(work, "__name__", "operator")
    workspace = world.workspace(group, name, timeout_seconds=TIMEOUT_SECONDS)
    sizes = [3 - rank % 2 for rank in range(group.world_size)]
    (batch,) = world.draw_batches(sizes)[group.rank]
    tensors = (batch.indices.to(group.device), batch.offsets.to(group.device), batch.weights.to(group.device))
    return work(workspace, *tensors, sizes, *arguments)


def opcheck(group: SymmetricGroup) -> None:
    as_operator(group, test_op.opcheck_lookup)
    as_operator(group, test_op.opcheck_pooled)


def compiled_steps(group: SymmetricGroup) -> None:
    eager, compiled = as_operator(group, test_op.compiled_and_eager, "inductor" if ON_GPU else "aot_eager")
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    assert len(set(eager)) == 4, "the tables are trained"


def reference_in_plain_torch(group: SymmetricGroup) -> None:
    assert as_operator(group, test_op.differences_to_the_reference) < 1e-5


def pooled_gradients(group: SymmetricGroup) -> None:
    assert as_operator(group, test_op.gradient_of_pooled)


def refused(group: SymmetricGroup, in_backward: bool) -> None:
    """Rank 1 makes a mistake: all ranks raise, and no table changes."""

    def attempt(workspace: EmbeddingWorkspace, indices: Tensor, offsets: Tensor, weights: Tensor, sizes: list[int]) -> None:
        output = embedding_all_to_all(workspace, [indices], [offsets], [weights], sizes)
        held, tables = output.detach().clone(), workspace.tables[0]
        before = tables.weights.clone(), tables.optimizer.momentum.clone()  # type: ignore[union-attr]
        wrong = group.rank == 1
        with pytest.raises(UsageError if wrong else CommunicationError) as raised:
            if in_backward:
                gradient = torch.ones_like(held)
                arguments = ([indices], [offsets], [weights], sizes, workspace.handle)
                operator = torch.ops.dlrm_fused.embedding_all_to_all_backward
                operator(gradient.double() if wrong else gradient, *arguments)
            else:
                embedding_all_to_all(workspace, [indices.float() if wrong else indices], [offsets], [weights], sizes)
            if ON_GPU:
                torch.cuda.synchronize()
            workspace.raise_fault()
        assert ("torch.float" if wrong else "rank 1 on") in str(raised.value)
        assert torch.equal(output.detach(), held)
        assert torch.equal(tables.weights, before[0])
        assert torch.equal(tables.optimizer.momentum, before[1])  # type: ignore[union-attr]

    as_operator(group, attempt)


def wrong_indices_are_found(group: SymmetricGroup) -> None:
    world = world_of(group.world_size, Traffic())
    workspace = world.workspace(group, "checked", timeout_seconds=TIMEOUT_SECONDS, check_indices=True)
    sizes = [2] * group.world_size
    own = world.draw_batches(sizes)[group.rank]
    indices = [batch.indices.to(group.device) for batch in own]
    offsets, weights = ([getattr(batch, key).to(group.device) for batch in own] for key in ("offsets", "weights"))
    if group.rank == 1:
        indices[0][-1] = 1_000
    with pytest.raises(UsageError, match=r"rank 1: checked: indices\[0\] holds 1000"):
        embedding_all_to_all(workspace, indices, offsets, weights, sizes)


CHECKS: dict[str, Callable[[SymmetricGroup], Any]] = {
    "epochs with delays, int64": partial(epochs_in_fp32, index_dtype=torch.int64, optimizer="rowwise_adagrad"),
    "epochs with delays, int32, SGD": partial(epochs_in_fp32, index_dtype=torch.int32, optimizer="sgd"),
    "fp16 tables": partial(one_epoch, dtype=FP16, forward_wire=FP32, backward_wire=FP32),
    "bf16 tables, fp16 on the wire": partial(one_epoch, dtype=BF16, forward_wire=FP16, backward_wire=FP16),
    "bf16 outputs": partial(one_epoch, dtype=FP32, forward_wire=BF16, backward_wire=BF16, output_dtype=BF16),
    "bf16 outputs, fp32 on the wire": partial(one_epoch, dtype=FP32, forward_wire=FP32, backward_wire=FP32, output_dtype=BF16),
    "fp32 tables, bf16 on the wire": partial(one_epoch, dtype=FP32, forward_wire=BF16, backward_wire=BF16),
    "batches that grow": many_batch_sizes,
    "equals plain torch": reference_in_plain_torch,
    "gradients of pooled_all_to_all": pooled_gradients,
    "graph of lookups": partial(replays_of_a_graph, training=False),
    "graph of training steps": partial(replays_of_a_graph, training=True),
    "replayed": partial(replayed_operator, optimizer="rowwise_adagrad"),
    "replayed, Adam": partial(replayed_operator, optimizer="adam"),
    "opcheck": opcheck,
    "torch.compile": compiled_steps,
    "refused in forward": partial(refused, in_backward=False),
    "refused in backward": partial(refused, in_backward=True),
    "wrong indices": wrong_indices_are_found,
}


failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)
