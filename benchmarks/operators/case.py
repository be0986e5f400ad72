"""The declaration of an operator's benchmark: cells, and for each cell its contestants, the check, and the least work."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from benchmarks.common.harness import HALF, Work, World
from benchmarks.operators import stress

# One or several calls of a contestant.
Pass = Callable[[], object]

DTYPE = HALF
TIMEOUT_SECONDS = 60.0


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
