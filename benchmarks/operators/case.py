"""The declaration of an operator's benchmark: cells, and for each cell its contestants, the check, and the least work."""

from __future__ import annotations

import abc
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from benchmarks.common.harness import HALF, Work, World, relative_error
from benchmarks.operators import stress
from dlrm_fused.ops.common.matrix_workspace import MatrixWorkspace

# One or several calls of a contestant.
Pass = Callable[[], object]
# The product of the operands of a number.
Multiply = Callable[[int], Tensor]

DTYPE = HALF
# Three times the L2 cache of an H200: what is read again has been evicted meanwhile.
ROTATED_BYTES = 180e6
TIMEOUT_SECONDS = 60.0
# Largest relative errors against fp64: of a product, rounded once to bf16; of a sum whose terms are rounded, too, and which may
# be larger than the sum.
TOLERANCE, SUM_TOLERANCE = 1.02 * 2**-8, 8 * 2**-8


class Case(abc.ABC):
    """A cell on this rank: its inputs, and who computes with them in turns. Everything is collective.

    Attributes:
        fused, baseline: the contestants whose times make the ratio. If none has the name of ``fused``, the fastest of those
            that are no rivals stands for it.
        rivals: contestants beside the operator, the baseline among them.
        alone: the contestant that computes without communication.
        calls: of the operator, in a pass of a contestant.
        can_be_captured: whether passes may become CUDA graphs.
    """

    fused, baseline, alone = "fused", "nccl", "gemm"
    rivals: Sequence[str] = ("nccl", "gemm")
    calls = 1
    can_be_captured = True

    def __init__(self, world: World, cell: Any) -> None:
        self.world, self.cell = world, cell

    @abc.abstractmethod
    def passes(self, stage: str) -> dict[str, Pass]:
        """By contestant. The first one's time decides about CUDA graphs."""

    @abc.abstractmethod
    def check(self, stage: str) -> dict[str, Any]:
        """Whether the results that were timed are right: ``passed``, ``errors``, and what the report says besides."""

    @abc.abstractmethod
    def phases(self, stage: str) -> Sequence[Work]:
        """The least work of this rank in a call, one phase after the other."""

    def remarks(self, us: Mapping[str, float]) -> dict[str, Any]:
        """Return further entries of the report, made of the contestants' times in microseconds of a call."""
        return {}

    def fastest(self, us: Mapping[str, float]) -> str:
        """The contestant that stands for the operator."""
        own = [name for name in us if name not in self.rivals]
        return self.fused if self.fused in us else min(own, key=us.__getitem__)

    def own_pass(self, *, training: bool) -> Pass:
        """One pass of the operator, forward or with backward, for the comparison of checkouts."""
        raise NotImplementedError(f"{type(self).__name__} has no comparison of checkouts")


class Works(Protocol):
    def __call__(self, world: World, *, tiny: bool) -> Sequence[stress.Work]: ...


@dataclass(frozen=True)
class Operator:
    """An operator's benchmark.

    Attributes:
        open: draws a cell's inputs. Collective.
        sets: of cells, by name; each cell is a dataclass with a ``name``. ``all`` is measured unless another is asked for.
        stages: of a cell, each measured for a record of its own; report.py has their titles.
        key: of a record, for the stage.
        works: returns the pieces of the stress test. Collective.
        to_compile: returns calls with the kernels of all cells, which are compiled before the first is timed. Collective.
    """

    open: Callable[[World, Any], Case]
    sets: Mapping[str, Callable[[], Sequence[Any]]]
    stages: Callable[[Any], Sequence[str]]
    works: Works
    key: str = "stage"
    to_compile: Callable[[World, Sequence[Any]], Sequence[Pass]] = lambda world, cells: []

    def cells(self, name: str, match: str) -> list[Any]:
        """Return the cells of a set in whose name the regular expression is found."""
        return [cell for cell in self.sets[name]() if re.search(match, cell.name)]

    def entry(self, cell: Any, stage: str) -> dict[str, Any]:
        """Return the first entries of a cell's record."""
        return {"name": cell.name, **asdict(cell), self.key: stage}


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


W = TypeVar("W", bound=MatrixWorkspace)


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
    tolerance = TOLERANCE

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
