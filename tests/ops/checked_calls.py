"""Many calls of an operator that multiplies and exchanges, in real processes: each result and gradient is what it must be."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.gemm_all_to_all import FP8, tuning
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import cpu_group, on_hosts, run_ranks

SMALL_TILES = tuning.Tiles(rows=16, columns=32, depth=16, band=2, warps=4, stages=2, programs=1)


@dataclass(frozen=True)
class Operator:
    """An operator by what it is called with and what must come out.

    Attributes:
        make_workspace: ``(group, dtype)``.
        draw: ``(case, ranks, seed, dtype)`` gives inputs of all ranks, each with ``x`` and ``weight``.
        call: ``(workspace, case, inputs of the rank)``.
        expected: ``(case, inputs of all, rank)`` gives the result in fp64; NaN where it may be anything.
        expected_gradients: ``(case, inputs of all, rank, gradients of all results)`` gives those of x and weight in fp64.
    """

    make_workspace: Callable[[SymmetricGroup, torch.dtype], Any]
    draw: Callable[[Any, int, int, torch.dtype], Sequence[Any]]
    call: Callable[[Any, Any, Any], Tensor]
    expected: Callable[[Any, Any, int], Tensor]
    expected_gradients: Callable[[Any, Any, int, list[Tensor]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Calls:
    """Calls of all cases in turn through one workspace.

    Attributes:
        straggler: a rank that is late in every call, by up to ``delay_seconds``; the others are at times.
        mutate: called first, on every rank.
    """

    cases: Sequence[Any]
    count: int
    dtype: torch.dtype
    with_gradients: bool
    straggler: int
    delay_seconds: float
    mutate: Callable[[], None] | None


def check_calls(
    operator: Operator,
    cases: Sequence[Any],
    ranks: int,
    calls: int,
    dtype: torch.dtype = torch.float32,
    *,
    with_gradients: bool = False,
    straggler: int = 1,
    delay_seconds: float = 0.01,
    mutate: Callable[[], None] | None = None,
    hosts: Sequence[int] | None = None,
) -> None:
    """Every result and gradient of every rank is right to the rounding of the dtype, also while later calls are made.

    Args:
        hosts: number of each rank's host; None for one.
    """
    of_rank = Calls(cases, calls, dtype, with_gradients, straggler, delay_seconds, mutate)
    found: list[Any] = run_ranks(ranks, on_hosts, hosts or (0,) * ranks, _run_calls, operator, of_rank)
    assert found == [[]] * ranks, found


def _run_calls(operator: Operator, calls: Calls) -> list[str]:
    """On a rank: what was wrong. The last three results are held, and looked at later."""
    if calls.mutate is not None:
        calls.mutate()
    tuning.override(SMALL_TILES)
    wrong: list[str] = []
    held: list[tuple[int, Tensor, Tensor]] = []
    with cpu_group() as group:
        delays = random.Random(group.rank)
        workspace = operator.make_workspace(group, calls.dtype)
        for number in range(calls.count):
            case = calls.cases[number % len(calls.cases)]
            inputs = operator.draw(case, group.world_size, number, calls.dtype)
            if delays.random() < 0.2 or group.rank == calls.straggler:
                time.sleep(delays.uniform(0, calls.delay_seconds))
            own = inputs[group.rank]
            leaves = {"x": own.x, "weight": own.weight} if calls.with_gradients else {}
            for leaf in leaves.values():
                leaf.requires_grad_(leaf.dtype != FP8)
            result = operator.call(workspace, case, own)
            with torch.no_grad():
                held = [*held[-2:], (number, result.detach(), operator.expected(case, inputs, group.rank))]
            for earlier, given, right in held:
                if found := difference(given, right, calls.dtype):
                    wrong.append(f"call {earlier}, {calls.cases[earlier % len(calls.cases)]}: {found}")
            if leaves:
                gradients = _gradients(result, group.world_size, number)
                result.backward(gradients[group.rank])
                with torch.no_grad():
                    of_leaves = operator.expected_gradients(case, inputs, group.rank, gradients)
                for (name, leaf), right in zip(leaves.items(), of_leaves, strict=True):
                    if leaf.requires_grad and (leaf.grad is None or (found := difference(leaf.grad, right, calls.dtype))):
                        wrong.append(f"call {number}, {case}, gradient of {name}: {found}")
        workspace.raise_fault()
    return wrong


def _gradients(result: Tensor, ranks: int, seed: int) -> list[Tensor]:
    """Those of all ranks' results, which have one shape."""
    generators = [torch.Generator().manual_seed(100 * seed + rank) for rank in range(ranks)]
    return [torch.randn(result.shape, generator=generator).to(result.dtype) for generator in generators]


def difference(given: Tensor, right: Tensor, dtype: torch.dtype) -> str:
    """Say what differs by more than the rounding of the dtype; empty if nothing does. NaN in ``right`` is not looked at."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    there = ~right.isnan()
    scale = right[there].abs().max().item() if there.any() else 0.0
    if given.shape != right.shape:
        return f"shape {list(given.shape)} instead of {list(right.shape)}"
    worst = (given.double() - right)[there].abs().max().item() if there.any() else 0.0
    return "" if worst <= tolerance * max(1.0, scale) else f"differs by {worst:.3g}"


def check_reference(operator: Operator, reference: Callable[[Any, Any], Tensor], case: Any, ranks: int) -> None:
    """The operator gives the result and the gradients of ``reference(case, inputs of the rank)``."""
    fused, unfused = (run_ranks(ranks, _result_and_gradients, operator, unfused, case) for unfused in (None, reference))
    torch.testing.assert_close(fused, unfused, rtol=1e-5, atol=1e-5)


def _result_and_gradients(operator: Operator, reference: Callable[[Any, Any], Tensor] | None, case: Any) -> list[Tensor | None]:
    rank = Rank.from_environment()
    with process_group(rank, torch.device("cpu")):
        inputs = operator.draw(case, rank.world_size, 1, torch.float32)
        own = inputs[rank.index]
        leaves = own.x.requires_grad_(), own.weight.requires_grad_()
        if reference is None:
            group = symmetric_group()
            workspace = operator.make_workspace(group, torch.float32)
            result = operator.call(workspace, case, own)
        else:
            result = reference(case, own)
        # A part that may be anything is zeros in the reference, and not initialized otherwise.
        result = result.masked_fill(operator.expected(case, inputs, rank.index).isnan(), 0)
        result.sin().sum().backward()
        if reference is None:
            workspace.raise_fault()
            group.close()
        assert all(leaf.grad is not None for leaf in leaves)
        return [result.detach(), *(leaf.grad for leaf in leaves)]
