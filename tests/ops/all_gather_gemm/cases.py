"""Calls of AllGather + GEMM and GEMM + ReduceScatter with what must come out of them, for tests of both paths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.symmetric import SymmetricGroup
from tests.ops.checked_calls import Operator, check_calls

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


def call(workspace: ShardWorkspace, case: Case, own: Inputs) -> Tensor:
    operator = all_gather_gemm if case.pair.moves_first else gemm_reduce_scatter
    return operator(workspace, own.x, own.weight, schedule=case.schedule)


def new_workspace(group: SymmetricGroup, dtype: torch.dtype = torch.float32) -> ShardWorkspace:
    return ShardWorkspace(group, name="layers", max_rows=MAX_ROWS, max_columns=MAX_COLUMNS, dtype=dtype, timeout_seconds=100.0)


OPERATOR = Operator(new_workspace, draw, call, expected, expected_gradients)
check = partial(check_calls, OPERATOR)
