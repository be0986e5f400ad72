"""Calls of AllGather + GEMM and GEMM + ReduceScatter with what must come out of them, for tests of both paths."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.gemm_all_to_all import tuning
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import on_hosts, run_ranks
from tests.ops.gemm_all_to_all.cases import SMALL_TILES, difference

MAX_ROWS, MAX_COLUMNS = 120, 80


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        rows: of a shard.
        columns, depth: N and K.
    """

    pair: Pair
    rows: int
    columns: int
    depth: int
    schedule: str = "auto"


@dataclass(frozen=True)
class Inputs:
    """Those of one rank."""

    x: Tensor
    weight: Tensor


def draw(case: Case, ranks: int, seed: int, dtype: torch.dtype) -> list[Inputs]:
    """Inputs of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = case.rows if case.pair.moves_first else case.rows * ranks
    return [
        Inputs(
            torch.randn(rows, case.depth, generator=generator).to(dtype),
            torch.randn(case.columns, case.depth, generator=generator).to(dtype),
        )
        for _ in range(ranks)
    ]


def expected(case: Case, inputs: list[Inputs], rank: int) -> Tensor:
    """In fp64."""
    if case.pair.moves_first:
        return torch.cat([own.x.double() for own in inputs]) @ inputs[rank].weight.double().T
    total = sum((own.x.double() @ own.weight.double().T for own in inputs), torch.zeros((), dtype=torch.float64))
    return total.chunk(len(inputs))[rank]


def expected_gradients(case: Case, inputs: list[Inputs], rank: int, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Those of x and weight of a rank, in fp64, from the gradients of all ranks' results."""
    own, of_results = inputs[rank], [gradient.double() for gradient in gradients]
    if case.pair.moves_first:
        total = sum((g @ i.weight.double() for g, i in zip(of_results, inputs, strict=True)), torch.zeros(()).double())
        return total.chunk(len(inputs))[rank], of_results[rank].T @ torch.cat([other.x.double() for other in inputs])
    of_product = torch.cat(of_results)
    return of_product @ own.weight.double(), of_product.T @ own.x.double()


def call(workspace: ShardWorkspace, case: Case, x: Tensor, weight: Tensor) -> Tensor:
    operator = all_gather_gemm if case.pair.moves_first else gemm_reduce_scatter
    return operator(workspace, x, weight, schedule=case.schedule)


def new_workspace(group: Any, dtype: torch.dtype = torch.float32, timeout_seconds: float = 100.0) -> ShardWorkspace:
    return ShardWorkspace(
        group, name="layers", max_rows=MAX_ROWS, max_columns=MAX_COLUMNS, dtype=dtype, timeout_seconds=timeout_seconds
    )


def run_calls(
    cases: list[Case],
    calls: int,
    dtype: torch.dtype,
    with_gradients: bool,
    straggler: int,
    delay_seconds: float,
    mutate: Callable[[], None] | None,
) -> list[str]:
    """Calls of all cases in turn through one workspace; the last three results are held, and looked at later. Returns what was
    wrong."""
    if mutate is not None:
        mutate()
    tuning.override(SMALL_TILES)
    rank = Rank.from_environment()
    delays, wrong = random.Random(rank.index), []
    held: list[tuple[int, Tensor, Tensor]] = []
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        workspace = new_workspace(group, dtype)
        for number in range(calls):
            case = cases[number % len(cases)]
            inputs = draw(case, rank.world_size, number, dtype)
            if delays.random() < 0.2 or rank.index == straggler:
                time.sleep(delays.uniform(0, delay_seconds))
            own = inputs[rank.index]
            x, weight = (tensor.clone().requires_grad_(with_gradients) for tensor in (own.x, own.weight))
            result = call(workspace, case, x, weight)
            held = [*held[-2:], (number, result.detach(), expected(case, inputs, rank.index))]
            for earlier, given, right in held:
                if found := difference(given, right, dtype):
                    wrong.append(f"call {earlier}, {cases[earlier % len(cases)]}: {found}")
            if with_gradients:
                wrong += _wrong_gradients(case, inputs, rank.index, (x, weight), result, number, dtype)
        workspace.raise_fault()
        group.close()
    return wrong


def _wrong_gradients(
    case: Case,
    inputs: list[Inputs],
    rank: int,
    leaves: tuple[Tensor, Tensor],
    result: Tensor,
    number: int,
    dtype: torch.dtype,
) -> list[str]:
    gradients = [
        torch.randn(result.shape, generator=torch.Generator().manual_seed(100 * number + other)).to(dtype)
        for other in range(len(inputs))
    ]
    result.backward(gradients[rank])
    right = expected_gradients(case, inputs, rank, gradients)
    return [
        f"call {number}, {case}, gradient of {name}: {found}"
        for name, leaf, gradient in zip(("x", "weight"), leaves, right, strict=True)
        if leaf.grad is None or (found := difference(leaf.grad, gradient, dtype))
    ]


def check(
    cases: list[Case],
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
    found: list[Any] = run_ranks(
        ranks, on_hosts, hosts or (0,) * ranks, run_calls, cases, calls, dtype, with_gradients, straggler, delay_seconds, mutate
    )
    assert found == [[]] * ranks, found
