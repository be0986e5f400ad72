"""The common parts of benchmarks of matrix products: shapes, operands that take turns, and the check against fp64."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.common.harness import World, relative_error
from benchmarks.operators.case import DTYPE, TIMEOUT_SECONDS, Case, Pass
from dlrm_fused.ops.common.matrix_workspace import MatrixWorkspace

W = TypeVar("W", bound=MatrixWorkspace)
# The product of the operands of a number.
Multiply = Callable[[int], Tensor]

# Three times the L2 cache of an H200: what is read again has been evicted meanwhile.
ROTATED_BYTES = 180e6


def largest_error(*, terms_are_rounded: bool = False) -> float:
    """Return the largest relative error against fp64: of a result rounded once to bf16, or of a sum of terms that are rounded
    before and may be larger than it."""
    return 8 * 2**-8 if terms_are_rounded else 1.02 * 2**-8


def operands_in_turn(bytes_: float, least: int = 1, most: int = 8) -> int:
    """Return how many operands of so many bytes take turns, so that the L2 cache does not hold the next ones."""
    return max(least, min(most, math.ceil(ROTATED_BYTES / bytes_)))


@dataclass(frozen=True)
class MatrixProduct:
    """[M, K] x [N, K]^T, by operands that take turns.

    Attributes:
        m, n, k: rows of x, columns of the result, and depth.
    """

    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def travelling(self) -> int:
        """Columns of the matrix that travels: the result."""
        return self.n

    @property
    def operands(self) -> int:
        """Return how many operands take turns."""
        return operands_in_turn(DTYPE.itemsize * self.k * (self.m + self.n))


def draw_operands(
    world: World, rows: int, columns: int, depth: int, *, count: int = 1, seed: int = 0, whole_depth: int | None = None
) -> list[tuple[Tensor, Tensor]]:
    """So many pairs of x DTYPE [rows, depth] and weight DTYPE [columns, depth] of this rank, with results of about 1 in mind.

    Args:
        count: two at most without a GPU, where times mean nothing.
        whole_depth: of the product that ranks add up, if depth is a part of it.
    """
    generator = torch.Generator(world.device).manual_seed(seed * world.size + world.rank)

    def normal(rows: int, deviation: float) -> Tensor:
        return torch.empty(rows, depth, dtype=DTYPE, device=world.device).normal_(0, deviation, generator=generator)

    drawn = count if world.device.type == "cuda" else min(2, count)
    return [(normal(rows, 1.0), normal(columns, (whole_depth or depth) ** -0.5)) for _ in range(drawn)]


def workspace_for(kind: type[W], world: World, cells: Sequence[MatrixProduct], name: str) -> W:
    """Return a workspace that has room for what travels of all cells. Collective."""
    rows, columns = max(cell.m for cell in cells), max(cell.travelling for cell in cells)
    return kind(world.symmetric, name=name, max_rows=rows, max_columns=columns, dtype=DTYPE, timeout_seconds=TIMEOUT_SECONDS)


class ProductCase(Case):
    """A cell of products of two matrices, by operands that take turns.

    Attributes:
        turns: how often a pass goes through all operands.
        tolerance: largest relative error of the operator's results against fp64.
        last: the last result of each contestant.
    """

    turns = 1
    tolerance = largest_error()

    def __init__(self, world: World, cell: Any, operands: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(world, cell)
        self.operands = operands
        self.last: dict[str, Tensor] = {}

    @property
    def calls(self) -> int:  # type: ignore[override]
        return self.turns * len(self.operands)

    @abc.abstractmethod
    def contestants(self, stage: str) -> dict[str, Multiply]:
        """By name; the first one's time decides about CUDA graphs."""

    @abc.abstractmethod
    def expected(self, stage: str) -> Tensor:
        """The result of the last operands, in fp64."""

    def passes(self, stage: str) -> dict[str, Pass]:
        def pass_of(name: str, multiply: Multiply) -> Pass:
            @torch.no_grad()
            def run() -> None:
                for _, number in itertools.product(range(self.turns), range(len(self.operands))):
                    self.last[name] = multiply(number)

            return run

        return {name: pass_of(name, multiply) for name, multiply in self.contestants(stage).items()}

    @torch.no_grad()
    def check(self, stage: str) -> dict[str, Any]:
        expected = self.expected(stage)
        own = {name: relative_error(result, expected) for name, result in self.last.items() if name != self.alone}
        every_rank = self.world.gather(own)
        errors = {name: max(errors[name] for errors in every_rank) for name in own}
        passed = all(error <= self.tolerance for name, error in errors.items() if name not in self.rivals)
        self.last.clear()
        return {"passed": passed, "errors": errors}
