"""AllGather + GEMM and GEMM + ReduceScatter by every schedule, against NCCL and cuBLAS."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.harness import Work, World
from benchmarks.operators import stress
from benchmarks.operators.case import DTYPE, Operator, Pass
from benchmarks.operators.products import MatrixProduct, Multiply, ProductCase, draw_operands, largest_error, workspace_for
from dlrm_fused.ops.all_gather_gemm import (
    ShardWorkspace,
    all_gather_gemm,
    gemm_reduce_scatter,
    reference,
    scatter_reference,
)
from dlrm_fused.ops.all_gather_gemm.op import NAMES
from dlrm_fused.ops.schedules import Pair

PAIRS = (Pair.all_gather_gemm, Pair.gemm_reduce_scatter)
# N and K of one rank. Llama 3 of 8 and 70 billion parameters over 8 ranks: query, key and value, then gate and up; this
# project's transformer_large over 4 ranks: query, key and value, then feed-forward; first matrices of experts.
GATHERED = (*((768, 4096), (3584, 4096), (1280, 8192), (7168, 8192), (3072, 4096), (4096, 4096), (1024, 2048), (2048, 1024)),)
# N and K of their second products: attention's output, then down; feed-forward's second matrix; experts' second matrices.
SCATTERED = (*((4096, 512), (4096, 1792), (8192, 1024), (8192, 3584), (4096, 1024), (4096, 4096), (2048, 1024), (1024, 2048)),)
# M, of all ranks together.
ROWS = (1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Layer(MatrixProduct):
    """A product whose rows are gathered before, or scattered after; m are the rows of all ranks, n and k those of one.

    Attributes:
        pair: which of the two.
    """

    pair: Pair

    def rows(self, ranks: int) -> tuple[int, int]:
        """Return the rows of x and of the result on one rank."""
        shard = self.m // ranks
        return (shard, self.m) if self.pair.moves_first else (self.m, shard)

    @property
    def travelling(self) -> int:
        """Columns of the matrix whose shards travel."""
        return self.k if self.pair.moves_first else self.n

    def work(self, ranks: int) -> Work:
        """Operands are read once, the result is written once; what travels is written and read besides."""
        sent = self.m // ranks * self.travelling * (ranks - 1)
        elements = sum(self.rows(ranks)[i] * width for i, width in enumerate((self.k, self.n))) + self.n * self.k + 2 * sent
        return Work(2 * self.m * self.n * self.k, DTYPE.itemsize * elements, DTYPE.itemsize * sent)


def call(workspace: ShardWorkspace, pair: Pair, x: Tensor, weight: Tensor, schedule: str) -> Tensor:
    operator = all_gather_gemm if pair.moves_first else gemm_reduce_scatter
    return operator(workspace, x, weight, schedule=schedule)


def in_fp64(pair: Pair, x: Tensor, weight: Tensor) -> Tensor:
    """The result. Collective."""
    right = reference if pair.moves_first else scatter_reference
    return right(dist.group.WORLD, x.double(), weight.double())


def products_of_shards(x: Tensor, weight: Tensor) -> Tensor:
    """Return the result of the gathering operator, each rank's rows multiplied by themselves. Collective."""
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x)
    return torch.cat([torch.mm(shard, weight.T) for shard in shards])


def tolerance_of(pair: Pair) -> float:
    return largest_error(terms_are_rounded=not pair.moves_first)


class LayerCase(ProductCase):
    """A cell on this rank."""

    cell: Layer

    def __init__(self, world: World, cell: Layer) -> None:
        rows = cell.rows(world.size)[0]
        super().__init__(world, cell, draw_operands(world, rows, cell.n, cell.k, count=cell.operands))
        self.workspace, self.tolerance = workspace_for(ShardWorkspace, world, [cell], "benchmark"), tolerance_of(cell.pair)

        def empty(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, dtype=DTYPE, device=world.device)

        self.buffer = empty(cell.m, cell.n)
        self.travelling = empty(cell.m, cell.travelling)
        self.shard = empty(cell.m // world.size, cell.n)

    def nccl(self, number: int) -> Tensor:
        x, weight = self.operands[number]
        if self.cell.pair.moves_first:
            dist.all_gather_into_tensor(self.travelling, x)
            return torch.mm(self.travelling, weight.t(), out=self.buffer)
        torch.mm(x, weight.t(), out=self.travelling)
        dist.reduce_scatter_tensor(self.shard, self.travelling)
        return self.shard

    def library(self, number: int) -> Tensor:
        """cuBLAS alone, for all rows."""
        x, weight = self.operands[number]
        return torch.mm(self.travelling if self.cell.pair.moves_first else x, weight.t(), out=self.buffer)

    def contestants(self, stage: str) -> dict[str, Multiply]:
        def by_schedule(schedule: str, number: int) -> Tensor:
            return call(self.workspace, self.cell.pair, *self.operands[number], schedule)

        names = ("auto",) if self.world.symmetric.hosts.are_many else NAMES[self.cell.pair]
        own = {name: partial(by_schedule, name) for name in names}
        return {"nccl": self.nccl, **own, "gemm": self.library}

    def expected(self, stage: str) -> Tensor:
        self.workspace.raise_fault()
        return in_fp64(self.cell.pair, *self.operands[-1])

    def phases(self, stage: str) -> Sequence[Work]:
        return [self.cell.work(self.world.size)]

    def remarks(self, us: Mapping[str, float]) -> dict[str, Any]:
        return {"best": self.fastest(us)}


def to_compile(world: World, cells: Sequence[Layer]) -> Sequence[Pass]:
    """Collective. Between hosts the operators have no kernels of their own."""
    if world.symmetric.hosts.are_many:
        return []
    workspace = workspace_for(ShardWorkspace, world, cells, "compilation")

    @torch.no_grad()
    def compiled(cell: Layer, schedule: str) -> None:
        sizes = (cell.rows(world.size)[0], cell.n)
        x, weight = (torch.empty(rows, cell.k, dtype=DTYPE, device=world.device) for rows in sizes)
        call(workspace, cell.pair, x, weight, schedule)

    return [partial(compiled, cell, name) for cell in cells for name in NAMES[cell.pair]]


@cache
def all_cells() -> list[Layer]:
    of_pairs = dict(zip(PAIRS, (GATHERED, SCATTERED), strict=True))
    return [Layer(m, n, k, pair) for pair, shapes in of_pairs.items() for (n, k), m in itertools.product(shapes, ROWS)]


# Shapes of the stress test: M for each rank, N, K.
STRESSED = ((33, 1024, 1024), (256, 1536, 1024), (768, 512, 2048))
STRESSED_TINY = ((3, 16, 16), (7, 8, 32))


def works(world: World, *, tiny: bool) -> Sequence[stress.Work]:
    """Products by every schedule, which share one workspace. Collective."""
    shapes = STRESSED_TINY if tiny else STRESSED
    cells = [Layer(rows * world.size, columns, depth, pair) for pair in PAIRS for rows, columns, depth in shapes]
    workspace = workspace_for(ShardWorkspace, world, cells, "stress")
    return [
        stressed(world, workspace, cell, schedule, number) for number, cell in enumerate(cells) for schedule in NAMES[cell.pair]
    ]


def stressed(world: World, workspace: ShardWorkspace, cell: Layer, schedule: str, number: int) -> stress.Work:
    """One product; its number says which operands it has."""
    ((x, weight),) = draw_operands(world, cell.rows(world.size)[0], cell.n, cell.k, seed=number)
    tolerance = tolerance_of(cell.pair)

    @torch.no_grad()
    def multiply(by: str) -> list[Tensor]:
        return [call(workspace, cell.pair, x, weight, by)]

    return stress.Work(
        f"{cell.pair} {cell.name} {schedule}",
        workspace,
        lambda delay: multiply(schedule),
        stress.equal_within(tolerance, partial(in_fp64, cell.pair, x, weight)),
        {"layer": asdict(cell), "schedule": schedule},
        tolerance_to_one_host=None if cell.pair.moves_first else tolerance,
        # Between hosts torch multiplies the gathered rows of each rank by themselves.
        as_between_hosts=lambda: [products_of_shards(x, weight)] if cell.pair.moves_first else multiply(schedule),
    )


OPERATOR = Operator(
    open=LayerCase,
    sets={
        # For a test on the CPU.
        "tiny": lambda: [Layer(24, 16, 16, Pair.all_gather_gemm), Layer(48, 8, 16, Pair.gemm_reduce_scatter)],
        "all": all_cells,
    },
    stages=lambda cell: [str(cell.pair)],
    key="pair",
    to_compile=to_compile,
    works=works,
)
