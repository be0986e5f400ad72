"""Calls of GEMM + All-to-All with what must come out of them, for tests of its kernels and of its path on the CPU."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dlrm_fused.ops.gemm_all_to_all import FP8, GemmWorkspace, Routes, gemm_all_to_all, routed_gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups
from dlrm_fused.symmetric import SymmetricGroup
from tests.ops.checked_calls import Operator, check_calls

MAX_ROWS, MAX_COLUMNS = 128, 80
TILE_ROWS, GROUPS, SLOTS = 16, 3, 70


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        rows: of x, for equal blocks; routed rows are drawn.
        columns, depth: N and K.
    """

    columns: int
    depth: int
    rows: int = 0
    schedule: str = "auto"
    fp8: bool = False

    @property
    def is_routed(self) -> bool:
        return self.rows == 0


@dataclass(frozen=True)
class Inputs:
    """Those of one rank; ``destinations`` holds rank * SLOTS + slot, or -1."""

    x: Tensor
    weight: Tensor
    scale: Tensor | None
    bounds: list[int]
    local_from: list[int]
    destinations: Tensor

    def product(self) -> Tensor:
        """In fp64."""
        weight = self.weight.double() if self.scale is None else self.weight.double() * self.scale.double()[..., None]
        if weight.dim() == 2:
            return self.x.double() @ weight.T
        product = torch.zeros(len(self.x), weight.shape[1], dtype=torch.float64)
        for group, (first, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            rows = slice(first * TILE_ROWS, end * TILE_ROWS)
            product[rows] = self.x[rows].double() @ weight[group].T
        return product


def draw(case: Case, ranks: int, seed: int, dtype: torch.dtype) -> list[Inputs]:
    """Inputs of all ranks."""
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    slots = list(range(ranks * SLOTS))
    chance.shuffle(slots)
    inputs = []
    for rank in range(ranks):
        bounds, local_from, destinations = [0], [], []
        for _ in range(GROUPS if case.is_routed else 0):
            remote, local = chance.choice([0, 3, 20]), chance.choice([0, 5])
            own = [destination for destination in slots if destination // SLOTS == rank][:local]
            others = [destination for destination in slots if destination // SLOTS != rank][:remote]
            slots = [destination for destination in slots if destination not in own and destination not in others]
            pads = -(len(own) + len(others)) % TILE_ROWS
            destinations += others + own + [-1] * pads
            local_from.append(bounds[-1] + -(-len(others) // TILE_ROWS))
            bounds.append(len(destinations) // TILE_ROWS)
        destinations += [-1] * TILE_ROWS  # rows of no group
        rows = case.rows or len(destinations)
        shape = (GROUPS, case.columns, case.depth) if case.is_routed else (case.columns, case.depth)
        x = torch.randn(rows, case.depth, generator=generator).to(dtype)
        weight = torch.randn(shape, generator=generator).to(FP8 if case.fp8 else dtype)
        scale = torch.rand(shape[:-1], generator=generator) if case.fp8 else None
        inputs.append(Inputs(x, weight, scale, bounds, local_from, torch.tensor(destinations, dtype=torch.int32)))
    return inputs


def expected(case: Case, inputs: list[Inputs], rank: int) -> Tensor:
    """[rows or SLOTS, N] in fp64; NaN in slots where nothing belongs."""
    products = [own.product() for own in inputs]
    if not case.is_routed:
        return torch.cat([product.chunk(len(inputs))[rank] for product in products])
    result = torch.full((SLOTS, case.columns), torch.nan, dtype=torch.float64)
    for own, product in zip(inputs, products, strict=True):
        here = torch.div(own.destinations, SLOTS, rounding_mode="floor") == rank
        result[own.destinations[here].long() % SLOTS] = product[: len(own.destinations)][here]
    return result


def expected_gradients(case: Case, inputs: list[Inputs], rank: int, gradients: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Those of x and weight of a rank, in fp64, from the gradients of all ranks' results."""
    own = inputs[rank]
    weight = own.weight.double()
    if own.scale is not None:
        weight *= own.scale.double()[..., None]
    if case.is_routed:
        flat = torch.cat([gradient.double() for gradient in gradients])
        of_product = torch.where((own.destinations >= 0)[:, None], flat[own.destinations.clamp(min=0).long()], 0.0)
        x_gradient, weight_gradient = torch.zeros_like(own.x.double()), torch.zeros_like(weight)
        for group, (first, end) in enumerate(zip(own.bounds, own.bounds[1:], strict=False)):
            rows = slice(first * TILE_ROWS, end * TILE_ROWS)
            x_gradient[rows] = of_product[rows] @ weight[group]
            weight_gradient[group] = of_product[rows].T @ own.x[rows].double()
        return x_gradient, weight_gradient
    of_product = torch.cat([gradient.double().chunk(len(inputs))[rank] for gradient in gradients])
    return of_product @ weight, of_product.T @ own.x.double()


def routes_of(own: Inputs) -> Routes:
    groups = Groups(TILE_ROWS, torch.tensor(own.bounds, dtype=torch.int32), torch.tensor(own.local_from, dtype=torch.int32))
    return Routes(groups, own.destinations, SLOTS)


def call(workspace: GemmWorkspace, case: Case, own: Inputs) -> Tensor:
    if not case.is_routed:
        return gemm_all_to_all(workspace, own.x, own.weight, own.scale, schedule=case.schedule)
    return routed_gemm_all_to_all(workspace, own.x, own.weight, routes_of(own), own.scale)


def new_workspace(group: SymmetricGroup, dtype: torch.dtype = torch.float32) -> GemmWorkspace:
    return GemmWorkspace(group, name="products", max_rows=MAX_ROWS, max_columns=MAX_COLUMNS, dtype=dtype, timeout_seconds=100.0)


OPERATOR = Operator(new_workspace, draw, call, expected, expected_gradients)
check = partial(check_calls, OPERATOR)
