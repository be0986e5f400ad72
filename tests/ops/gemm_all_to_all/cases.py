"""Calls of GEMM + All-to-All with what must come out of them, for tests of its kernels and of its path on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dlrm_fused.ops.gemm_all_to_all import FP8, GemmWorkspace, gemm_all_to_all
from dlrm_fused.symmetric import SymmetricGroup
from tests.ops.checked_calls import Operator, check_calls

MAX_ROWS, MAX_COLUMNS = 128, 80


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        columns, depth: N and K.
        rows: of x.
    """

    columns: int
    depth: int
    rows: int
    schedule: str = "auto"
    fp8: bool = False


@dataclass(frozen=True)
class Inputs:
    """Those of one rank."""

    x: Tensor
    weight: Tensor
    scale: Tensor | None

    @property
    def factors(self) -> Tensor:
        """In fp64."""
        return self.weight.double() if self.scale is None else self.weight.double() * self.scale.double()[..., None]


def draw(case: Case, ranks: int, seed: int, dtype: torch.dtype) -> list[Inputs]:
    """Inputs of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(ranks):
        x = torch.randn(case.rows, case.depth, generator=generator).to(dtype)
        weight = torch.randn(case.columns, case.depth, generator=generator).to(FP8 if case.fp8 else dtype)
        inputs.append(Inputs(x, weight, torch.rand(case.columns, generator=generator) if case.fp8 else None))
    return inputs


def expected(case: Case, inputs: list[Inputs], rank: int) -> Tensor:
    """[rows, N] in fp64."""
    return torch.cat([(own.x.double() @ own.factors.T).chunk(len(inputs))[rank] for own in inputs])


def expected_gradients(case: Case, inputs: list[Inputs], rank: int, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Those of x and weight of a rank, in fp64, from the gradients of all ranks' results."""
    of_product = torch.cat([gradient.double().chunk(len(inputs))[rank] for gradient in gradients])
    return of_product @ inputs[rank].factors, of_product.T @ inputs[rank].x.double()


def call(workspace: GemmWorkspace, case: Case, own: Inputs) -> Tensor:
    return gemm_all_to_all(workspace, own.x, own.weight, own.scale, schedule=case.schedule)


def new_workspace(group: SymmetricGroup, dtype: torch.dtype = torch.float32) -> GemmWorkspace:
    return GemmWorkspace(group, name="products", max_rows=MAX_ROWS, max_columns=MAX_COLUMNS, dtype=dtype, timeout_seconds=100.0)


OPERATOR = Operator(new_workspace, draw, call, expected, expected_gradients)
check = partial(check_calls, OPERATOR)
