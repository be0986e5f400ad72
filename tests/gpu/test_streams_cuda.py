"""Calls of one workspace on several streams: on every rank they run in the order of their launch, and give what they must.

One rank is late with every other call, on one of the streams, so that the calls of the other stream could overtake there. With
``TRITON_INTERPRET=1`` it runs on the CPU too, without streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_fused.errors import CommunicationError, UsageError
from dlrm_fused.models.captured import CapturedFunction
from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.common.workspace import Workspace
from dlrm_fused.ops.embedding_all_to_all import (
    EmbeddingWorkspace,
    embedding_all_to_all,
    pooled_all_to_all,
)
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.moe import ExpertWorkspace, expert_layer
from dlrm_fused.sharding.replay import ReplayedEmbeddingAllToAll
from dlrm_fused.symmetric import SymmetricGroup
from tests.gpu.all_ranks import HALF, MARKS, ON_GPU, checked_on_all_ranks, synchronize
from tests.ops.embedding_all_to_all.world import Features, Traffic, World

pytestmark = MARKS
TIMEOUT_SECONDS = 20.0
CALLS = 4
LATE_RANK, LATE_CYCLES = 1, 200_000_000  # a tenth of a second: longer than the host takes to launch all calls
ROWS, COLUMNS, DEPTH = (256, 512, 768) if ON_GPU else (8, 48, 32)
REPLAYED_FROM = 4  # steps after which the lookup is replayed

Streams = Sequence["torch.cuda.Stream | None"]


@dataclass
class Calls:
    """Some calls of a workspace, by their number; each has inputs of its own.

    Attributes:
        backward: from the number and the output to gradients.
        state: what calls change, all together.
    """

    workspace: Workspace
    forward: Callable[[int], Tensor]
    backward: Callable[[int, Tensor], Sequence[Tensor]]
    state: Sequence[Tensor] = ()


Make = Callable[[SymmetricGroup, str], Calls]


def drawn(group: SymmetricGroup, number: int, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Random values of this rank and a call."""
    generator = torch.Generator().manual_seed(100 * number + group.rank + sum(shape))
    return torch.randn(shape, generator=generator).to(group.device, dtype)


def products(
    group: SymmetricGroup,
    workspace: Workspace,
    multiply: Callable[[Tensor, Tensor], Tensor],
    rows: int,
    *,
    equal_gradients: bool = False,
) -> Calls:
    """Calls of an operator that multiplies x [rows, DEPTH] by a weight [COLUMNS, DEPTH]."""
    weight = (drawn(group, 0, COLUMNS, DEPTH) * DEPTH**-0.5).requires_grad_()
    inputs = [drawn(group, number, rows, DEPTH).requires_grad_() for number in range(CALLS)]

    def backward(number: int, output: Tensor) -> Sequence[Tensor]:
        gradient = torch.ones_like(output) * (number + 1)
        if not equal_gradients:
            gradient *= group.rank + 1
        return torch.autograd.grad(output, [inputs[number], weight], gradient)

    return Calls(workspace, lambda number: multiply(inputs[number], weight), backward)


def gemms(group: SymmetricGroup, name: str, schedule: str) -> Calls:
    rows = ROWS * group.world_size
    workspace = GemmWorkspace(group, name=name, max_rows=rows, max_columns=COLUMNS, dtype=HALF, timeout_seconds=TIMEOUT_SECONDS)
    return products(group, workspace, partial(gemm_all_to_all, workspace, schedule=schedule), rows)


def shards(group: SymmetricGroup, name: str, schedule: str, gathers: bool) -> Calls:
    workspace = ShardWorkspace(
        group,
        name=name,
        max_rows=ROWS * group.world_size,
        max_columns=max(COLUMNS, DEPTH),
        dtype=HALF,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    operator, rows = (all_gather_gemm, ROWS) if gathers else (gemm_reduce_scatter, ROWS * group.world_size)
    return products(group, workspace, partial(operator, workspace, schedule=schedule), rows)


def sums(group: SymmetricGroup, name: str, schedule: str, rows: int) -> Calls:
    workspace = GemvWorkspace(group, name=name, max_columns=COLUMNS, max_rows=rows, dtype=HALF, timeout_seconds=TIMEOUT_SECONDS)

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return gemv_all_reduce(workspace, x, weight, schedule=schedule)[0]

    return products(group, workspace, multiply, rows, equal_gradients=True)


def experts(group: SymmetricGroup, name: str) -> Calls:
    count, hidden = 2 * group.world_size, 2 * COLUMNS
    workspace = ExpertWorkspace(
        group, name=name, experts=count, top_k=2, max_tokens=ROWS, width=COLUMNS, dtype=HALF, timeout_seconds=TIMEOUT_SECONDS
    )
    w_in = (drawn(group, 0, 2, hidden, COLUMNS) * COLUMNS**-0.5).requires_grad_()
    w_out = (drawn(group, 1, 2, COLUMNS, hidden) * hidden**-0.5).requires_grad_()
    inputs = [drawn(group, number, ROWS, COLUMNS).requires_grad_() for number in range(CALLS)]
    gates = drawn(group, 2, ROWS, 2, dtype=torch.float32)
    chosen = [drawn(group, number, ROWS, count).argsort(1)[:, :2].contiguous() for number in range(CALLS)]

    def forward(number: int) -> Tensor:
        return expert_layer(workspace, inputs[number], chosen[number], gates, w_in, w_out)

    def backward(number: int, output: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(output, [inputs[number], w_in, w_out], torch.ones_like(output))

    return Calls(workspace, forward, backward)


def small_world(group: SymmetricGroup, *, weighted: bool) -> World:
    """Tables of their own, and row-wise ones, whose partial sums are added up after they have come."""
    row_wise = Features((6,), (8,), (0,), row_wise=True)
    own = [[Features((11, 7), (8, 4), (0, 1), weighted=weighted), row_wise] for _ in range(group.world_size)]
    return World(own, Traffic(), seed=3)


def lookups(group: SymmetricGroup, name: str, *, replayed: bool) -> Calls:
    world, sizes = small_world(group, weighted=not replayed), [5 + rank for rank in range(group.world_size)]
    workspace = world.workspace(group, name, timeout_seconds=TIMEOUT_SECONDS)
    workspace.reserve(sizes)
    batches = [world.draw_batches(sizes)[group.rank] for _ in range(CALLS)]
    if replayed:  # of equal shapes
        batches = [batches[0]] * CALLS
    on_device = [
        [[getattr(batch, key).to(group.device) for batch in own] for key in ("indices", "offsets", "weights")]
        for own in batches
    ]
    gradients = [drawn(group, number, sizes[group.rank], world.layout.columns, dtype=torch.float32) for number in range(CALLS)]
    replay = ReplayedEmbeddingAllToAll(workspace)

    def forward(number: int) -> Tensor:
        indices, offsets, weights = on_device[number]
        if replayed and replay.covers(indices, sizes):
            return replay(indices, offsets, sizes)
        return embedding_all_to_all(workspace, indices, offsets, weights, sizes)

    def backward(number: int, output: Tensor) -> Sequence[Tensor]:
        output.backward(gradients[number])
        return ()

    if replayed:
        for number in range(REPLAYED_FROM):
            backward(number, forward(number))
    return Calls(workspace, forward, backward, [tables.weights for tables in workspace.tables])


def pooled(group: SymmetricGroup, name: str) -> Calls:
    world, sizes = small_world(group, weighted=False), [5 + rank for rank in range(group.world_size)]
    workspace = EmbeddingWorkspace(group, world.layout, name=name, timeout_seconds=TIMEOUT_SECONDS)
    workspace.reserve(sizes)
    inputs = [
        [drawn(group, number, sum(sizes), width, dtype=torch.float32).requires_grad_() for width in (12, 8)]
        for number in range(CALLS)
    ]
    gradients = [drawn(group, number, sizes[group.rank], world.layout.columns, dtype=torch.float32) for number in range(CALLS)]

    def backward(number: int, output: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad(output, inputs[number], gradients[number])

    return Calls(workspace, lambda number: pooled_all_to_all(workspace, inputs[number], sizes), backward)


def results_of(calls: Calls, streams: Streams, group: SymmetricGroup) -> list[Tensor]:
    """All outputs, gradients and the state after calls that take the streams in turn, forward and then backward."""
    synchronize()
    outputs, gradients = [], []
    for number in range(CALLS):
        with on_stream(streams, number, group):
            outputs.append(calls.forward(number))
    for number, output in enumerate(outputs):
        with on_stream(streams, number, group):
            gradients += calls.backward(number, output)
    synchronize()
    calls.workspace.raise_fault()
    return [tensor.detach() for tensor in (*outputs, *gradients, *calls.state)]


def on_stream(streams: Streams, number: int, group: SymmetricGroup) -> Any:
    """The stream of a call, on which one rank is late if it is the first of several."""
    context = torch.cuda.stream(streams[number % len(streams)])
    if number % len(streams) == 0 and len(streams) > 1 and group.rank == LATE_RANK:
        sleep(streams[0])
    return context


def sleep(stream: torch.cuda.Stream | None) -> None:
    if ON_GPU:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LATE_CYCLES)


def new_streams(count: int) -> Streams:
    return [torch.cuda.Stream() if ON_GPU else None for _ in range(count)]


def on_two_streams(group: SymmetricGroup, make: Make) -> None:
    in_turn, at_once = make(group, "in turn"), make(group, "on two streams")
    for calls in (in_turn, at_once):  # compiles kernels, and copies to the device what else would hold up the host
        results_of(calls, [None], group)
    expected, found = results_of(in_turn, [None], group), results_of(at_once, new_streams(2), group)
    differing = [number for number, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]
    assert not differing


def a_graph_among_calls(group: SymmetricGroup) -> None:
    """A graph with calls on two streams, replayed on another stream than that of the call before."""
    calls = sums(group, "graph", "kernel", rows=4)
    with torch.no_grad():
        expected = [calls.forward(number).clone() for number in range(3)]
        synchronize()
        if not ON_GPU:
            return
        first, second, beside = (torch.cuda.Stream() for _ in range(3))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            captured = torch.cuda.current_stream()
            beside.wait_stream(captured)
            if group.rank == LATE_RANK:
                torch.cuda._sleep(LATE_CYCLES)
            found = [calls.forward(0)]
            with torch.cuda.stream(beside):
                found.append(calls.forward(1))
            captured.wait_stream(beside)
        if group.rank == LATE_RANK:
            sleep(first)
        with torch.cuda.stream(first):
            found.append(calls.forward(2))
        with torch.cuda.stream(second):
            calls.workspace.begin_call()
            graph.replay()
        synchronize()
    calls.workspace.raise_fault()
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * 3


def captured_function(group: SymmetricGroup) -> None:
    """A captured function's memory holds what the backward pass needs, and the next call may be on another stream."""
    layer, streams = torch.nn.Linear(DEPTH, COLUMNS).to(group.device), new_streams(2)
    function = CapturedFunction(lambda x: layer(x).square().sum(), lambda: [layer])
    inputs = [drawn(group, number, ROWS, DEPTH, dtype=torch.float32).requires_grad_() for number in range(CALLS)]
    expected = [torch.autograd.grad(layer(x).square().sum(), x)[0] for x in inputs]
    torch.autograd.grad(function(inputs[0]), inputs[0])  # captures
    synchronize()
    found = []
    for number, x in enumerate(inputs):
        stream = streams[number % 2]
        with torch.cuda.stream(stream):
            loss = function(x)
            sleep(stream)  # the next call's forward pass comes before this one's backward pass, if it does not wait
            found.append(torch.autograd.grad(loss, x)[0].clone())
    synchronize()
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right)


def refused_behind_a_late_call(group: SymmetricGroup) -> None:
    """A rank refuses the call that is wrong, not the one before, which is still to run on another stream."""
    calls, streams = gemms(group, "refused", "kernel"), new_streams(2)
    rows = ROWS * group.world_size
    x, weight = drawn(group, 0, rows, DEPTH), drawn(group, 0, COLUMNS, DEPTH)
    assert isinstance(calls.workspace, GemmWorkspace)
    multiply = partial(gemm_all_to_all, calls.workspace, schedule="kernel")
    expected = multiply(x, weight).clone()
    synchronize()
    with on_stream(streams, 0, group):
        found = multiply(x, weight)
    is_wrong = group.rank == LATE_RANK
    with pytest.raises(UsageError if is_wrong else CommunicationError) as raised, on_stream(streams, 1, group):
        multiply(x.double() if is_wrong else x, weight)
        synchronize()
        calls.workspace.raise_fault()
    assert ("float64" if is_wrong else f"rank {LATE_RANK} on") in str(raised.value)
    synchronize()
    assert torch.equal(found, expected)


MAKERS: dict[str, Make] = {
    "embedding_all_to_all": partial(lookups, replayed=False),
    "replayed embedding_all_to_all": partial(lookups, replayed=True),
    "pooled_all_to_all": pooled,
    "gemm_all_to_all, kernel": partial(gemms, schedule="kernel"),
    "gemm_all_to_all, chunks": partial(gemms, schedule="chunks"),
    "gemv_all_reduce, few rows": partial(sums, schedule="kernel", rows=4),
    "gemv_all_reduce, chunks": partial(sums, schedule="chunks", rows=128 if ON_GPU else 66),
    "gemv_all_reduce, scatter": partial(sums, schedule="scatter", rows=128 if ON_GPU else 72),
    "all_gather_gemm, kernel": partial(shards, schedule="kernel", gathers=True),
    "all_gather_gemm, chunks": partial(shards, schedule="chunks", gathers=True),
    "gemm_reduce_scatter, kernel": partial(shards, schedule="kernel", gathers=False),
    "gemm_reduce_scatter, chunks": partial(shards, schedule="chunks", gathers=False),
    "expert_layer": experts,
}
CHECKS: dict[str, Callable[[SymmetricGroup], None]] = {
    **{name: partial(on_two_streams, make=make) for name, make in MAKERS.items()},
    "a graph among calls": a_graph_among_calls,
    "captured function": captured_function,
    "refused behind a late call": refused_behind_a_late_call,
}
failures, test_on_all_ranks = checked_on_all_ranks(__name__, CHECKS)
