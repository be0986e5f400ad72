"""Calls of GEMM + All-to-All with what must come out of them, for tests of its kernels and of its path on the CPU."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.gemm_all_to_all import FP8, GemmWorkspace, Routes, gemm_all_to_all, routed_gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all import tuning as gemm_tuning
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups
from dlrm_fused.symmetric import symmetric_group
from dlrm_fused.training.runtime import Rank, process_group
from tests.distributed.launch import on_hosts, run_ranks

MAX_ROWS, MAX_COLUMNS = 128, 80
TILE_ROWS, GROUPS, SLOTS = 16, 3, 70
SMALL_TILES = gemm_tuning.Tiles(rows=16, columns=32, depth=16, band=2, warps=4, stages=2, programs=1)


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
            return self.x.detach().double() @ weight.T
        product = torch.zeros(len(self.x), weight.shape[1], dtype=torch.float64)
        for group, (first, end) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            rows = slice(first * TILE_ROWS, end * TILE_ROWS)
            product[rows] = self.x.detach()[rows].double() @ weight[group].T
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
    weight = own.weight.detach().double()
    if own.scale is not None:
        weight *= own.scale.double()[..., None]
    if case.is_routed:
        flat = torch.cat([gradient.double() for gradient in gradients])
        of_product = torch.where((own.destinations >= 0)[:, None], flat[own.destinations.clamp(min=0).long()], 0.0)
        x_gradient, weight_gradient = torch.zeros_like(own.x.double()), torch.zeros_like(weight)
        for group, (first, end) in enumerate(zip(own.bounds, own.bounds[1:], strict=False)):
            rows = slice(first * TILE_ROWS, end * TILE_ROWS)
            x_gradient[rows] = of_product[rows] @ weight[group]
            weight_gradient[group] = of_product[rows].T @ own.x[rows].detach().double()
        return x_gradient, weight_gradient
    of_product = torch.cat([gradient.double().chunk(len(inputs))[rank] for gradient in gradients])
    return of_product @ weight, of_product.T @ own.x.detach().double()


def routes_of(own: Inputs) -> Routes:
    groups = Groups(TILE_ROWS, torch.tensor(own.bounds, dtype=torch.int32), torch.tensor(own.local_from, dtype=torch.int32))
    return Routes(groups, own.destinations, SLOTS)


def call(workspace: GemmWorkspace, case: Case, own: Inputs) -> Tensor:
    if not case.is_routed:
        return gemm_all_to_all(workspace, own.x, own.weight, own.scale, schedule=case.schedule)
    return routed_gemm_all_to_all(workspace, own.x, own.weight, routes_of(own), own.scale)


def run_calls(
    cases: list[Case],
    calls: int,
    dtype: torch.dtype,
    with_gradients: bool,
    straggler: int,
    delay_seconds: float,
    mutate: Callable[[], None] | None,
) -> list[str]:
    """Calls of all cases in turn through one workspace; the last three results are held, and looked at later. Returns what
    was wrong."""
    if mutate is not None:
        mutate()
    gemm_tuning.override(SMALL_TILES)
    rank = Rank.from_environment()
    delays, wrong = random.Random(rank.index), []
    held: list[tuple[int, Tensor, Tensor]] = []
    with process_group(rank, torch.device("cpu")):
        group = symmetric_group()
        workspace = GemmWorkspace(
            group, name="products", max_rows=MAX_ROWS, max_columns=MAX_COLUMNS, dtype=dtype, timeout_seconds=100.0
        )
        for number in range(calls):
            case = cases[number % len(cases)]
            inputs = draw(case, rank.world_size, number, dtype)
            own = inputs[rank.index]
            if delays.random() < 0.2 or rank.index == straggler:
                time.sleep(delays.uniform(0, delay_seconds))
            if with_gradients:
                own.x.requires_grad_()
                own.weight.requires_grad_(not case.fp8)
            result = call(workspace, case, own)
            held = [*held[-2:], (number, result.detach(), expected(case, inputs, rank.index))]
            for earlier, given, right in held:
                if found := difference(given, right, dtype):
                    wrong.append(f"call {earlier}: {found}")
            if with_gradients:
                wrong += _wrong_gradients(case, inputs, rank.index, result, number, dtype)
        workspace.raise_fault()
        group.close()
    return wrong


def _wrong_gradients(case: Case, inputs: list[Inputs], rank: int, result: Tensor, number: int, dtype: torch.dtype) -> list[str]:
    own = inputs[rank]
    shape = (SLOTS, case.columns) if case.is_routed else (case.rows, case.columns)
    gradients = [
        torch.randn(shape, generator=torch.Generator().manual_seed(100 * number + other)).to(dtype)
        for other in range(len(inputs))
    ]
    result.backward(gradients[rank])
    x_gradient, weight_gradient = expected_gradients(case, inputs, rank, gradients)
    pairs: list[tuple[str, Tensor | None, Tensor]] = [("x", own.x.grad, x_gradient)]
    if not case.fp8:
        pairs.append(("weight", own.weight.grad, weight_gradient))
    return [
        f"call {number}, gradient of {name}: {found}"
        for name, given, right in pairs
        if given is None or (found := difference(given, right, dtype))
    ]


def difference(given: Tensor, right: Tensor, dtype: torch.dtype) -> str:
    """What differs by more than the rounding of the dtype; empty if nothing does. NaN in ``right`` is not looked at."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    there = ~right.isnan()
    scale = right[there].abs().max().item() if there.any() else 0.0
    if given.shape != right.shape:
        return f"shape {list(given.shape)} instead of {list(right.shape)}"
    worst = (given.double() - right)[there].abs().max().item() if there.any() else 0.0
    return "" if worst <= tolerance * max(1.0, scale) else f"differs by {worst:.3g}"


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
    assert found == [[]] * ranks
