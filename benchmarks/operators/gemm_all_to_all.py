"""GEMM + All-to-All against cuBLAS and NCCL, and the operator's kernel without communication against cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.harness import Work, World
from benchmarks.operators import stress
from benchmarks.operators.case import DTYPE, Operator, Pass
from benchmarks.operators.products import MatrixProduct, Multiply, ProductCase, draw_operands, largest_error, workspace_for
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all, reference, schedule_of
from dlrm_fused.ops.gemm_all_to_all.kernel import gemm
from dlrm_fused.ops.gemm_all_to_all.schedule import KERNEL
from dlrm_fused.ops.gemm_all_to_all.split import Arrivals
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.rule import SPACE
from dlrm_fused.symmetric.device import uses_kernels

SCHEDULES = SPACE[Pair.gemm_all_to_all]
# (M, N, K): rows of x on each rank, columns of the result, depth; of first and second matrices of experts.
PRODUCTS = (
    *((1024, 1024, 4096), (1024, 4096, 1024), (1024, 7168, 2048), (1024, 14336, 4096), (2048, 2048, 2048)),
    *((2048, 4096, 1024), (2048, 4096, 14336), (4096, 1024, 1024), (4096, 4096, 4096), (4096, 14336, 4096)),
    *((8192, 1024, 2048), (8192, 2048, 7168), (8192, 4096, 4096), (8192, 4096, 14336), (16384, 1024, 4096)),
    *((16384, 4096, 1024), (16384, 7168, 2048), (32768, 1024, 1024), (32768, 4096, 4096), (32768, 7168, 2048)),
)
# Products of fewer tiles than a GPU has multiprocessors.
FEW_TILES = (*((128, 2048, 8192), (256, 256, 8192), (256, 1024, 4096), (512, 512, 4096), (512, 1024, 8192), (1024, 512, 2048)),)
# Results of a workspace that may be held. Those of a graph are held for ever.
_HELD_RESULTS = 2


@dataclass(frozen=True)
class Product(MatrixProduct):
    """A product on every rank, with m rows of x; of the rows of the result each rank gets an equal part."""

    def work(self, ranks: int) -> Work:
        """Operands are read once, the result is written once."""
        elements = self.m * self.k + self.n * self.k + self.m * self.n
        sent = self.m * self.n * (ranks - 1) / ranks
        return Work(2 * self.m * self.n * self.k, DTYPE.itemsize * elements, DTYPE.itemsize * sent)


def in_fp64(x: Tensor, weight: Tensor) -> Tensor:
    """The result. Collective."""
    product = x.double() @ weight.double().t()
    received = torch.empty_like(product)
    dist.all_to_all_single(received, product)
    return received


class GemmCase(ProductCase):
    """A cell on this rank: in stage ``op`` the operator, in ``gemm`` its kernel alone, each rank for itself."""

    cell: Product

    def __init__(self, world: World, cell: Product) -> None:
        super().__init__(world, cell, draw_operands(world, cell.m, cell.n, cell.k, count=cell.operands))
        self.buffer, self.received = (torch.empty(cell.m, cell.n, dtype=DTYPE, device=world.device) for _ in range(2))
        count = -(-len(self.operands) // _HELD_RESULTS)
        self.workspaces = [workspace_for(GemmWorkspace, world, [cell], f"benchmark {number}") for number in range(count)]
        self.arrivals = Arrivals(world.device)
        self.schedule = self.choose_schedule()

    @torch.no_grad()
    def choose_schedule(self) -> str:
        """Return the schedule that ``auto`` takes in all workspaces; it measures a shape without a table in the first one."""
        first, *others = self.workspaces
        gemm_all_to_all(first, *self.operands[0])
        for workspace in others:
            workspace.schedules.measured_here.update(first.schedules.measured_here)
        return schedule_of(first, self.cell.m, self.cell.n, self.cell.k)

    def multiply(self, number: int, schedule: str = "auto") -> Tensor:
        return gemm_all_to_all(self.workspaces[number // _HELD_RESULTS], *self.operands[number], schedule=schedule)

    def library(self, number: int) -> Tensor:
        """cuBLAS alone."""
        x, weight = self.operands[number]
        return torch.mm(x, weight.t(), out=self.buffer)

    def kernel_alone(self, number: int) -> Tensor:
        gemm(*self.operands[number], out=self.received, arrivals=self.arrivals)
        return self.received

    def contestants(self, stage: str) -> dict[str, Multiply]:
        self.baseline = "nccl" if stage == "op" else "gemm"
        if stage == "gemm":
            return {"kernel": self.kernel_alone, "gemm": self.library}

        def nccl(number: int) -> Tensor:
            dist.all_to_all_single(self.received, self.library(number))
            return self.received

        names = () if self.world.symmetric.hosts.are_many else SCHEDULES
        by_schedule = {name: partial(self.multiply, schedule=name) for name in names}
        return {"fused": self.multiply, **by_schedule, "nccl": nccl, "gemm": self.library}

    def expected(self, stage: str) -> Tensor:
        for workspace in self.workspaces:
            workspace.raise_fault()
        x, weight = self.operands[-1]
        return x.double() @ weight.double().t() if stage == "gemm" else in_fp64(x, weight)

    def phases(self, stage: str) -> Sequence[Work]:
        return [self.cell.work(self.world.size if stage == "op" else 1)]

    def remarks(self, us: Mapping[str, float]) -> dict[str, Any]:
        return {"schedule": self.schedule} if "fused" in us else {}

    def own_pass(self, *, training: bool) -> Pass:
        self.received.normal_()  # the gradient of a result
        leaves = [tuple(operand.detach().requires_grad_(training) for operand in pair) for pair in self.operands]

        def run() -> None:
            for number, (x, weight) in enumerate(leaves):
                y = gemm_all_to_all(self.workspaces[number // _HELD_RESULTS], x, weight)
                if training:
                    torch.autograd.grad(y, (x, weight), self.received)

        return run


def to_compile(world: World, cells: Sequence[Product]) -> Sequence[Pass]:
    """Collective. Between hosts the operator has no kernels of its own."""
    if world.symmetric.hosts.are_many:
        return []
    workspace = workspace_for(GemmWorkspace, world, cells, "compilation")

    @torch.no_grad()
    def call(cell: Product, schedule: str) -> None:
        x, weight, out = (
            torch.empty(shape, dtype=DTYPE, device=world.device)
            for shape in ((cell.m, cell.k), (cell.n, cell.k), (cell.m, cell.n))
        )
        gemm_all_to_all(workspace, x, weight, schedule=schedule)
        gemm(x, weight, out)

    return [partial(call, cell, schedule) for cell in cells for schedule in ("kernel", "chunks")]


# Products of the stress test, with M for each rank.
STRESSED = (Product(33, 1024, 1024), Product(256, 4096, 1024), Product(512, 1024, 4096), Product(1024, 7168, 512))
STRESSED_TINY = (Product(3, 16, 8), Product(7, 8, 16))
_REPEATS = 3


def works(world: World, *, tiny: bool) -> Sequence[stress.Work]:
    """Several works of each shape with other operands, so that a result of another call is seen. Collective."""
    cells = [replace(cell, m=cell.m * world.size) for cell in (STRESSED_TINY if tiny else STRESSED)]
    workspace = workspace_for(GemmWorkspace, world, cells, "stress")
    return [stressed(world, workspace, cell, i * _REPEATS + j) for i, cell in enumerate(cells) for j in range(_REPEATS)]


def stressed(world: World, workspace: GemmWorkspace, cell: Product, number: int) -> stress.Work:
    """One product; its number says which operands it has, and its schedule."""
    schedule = SCHEDULES[number % len(SCHEDULES)]
    ((x, weight),) = draw_operands(world, cell.m, cell.n, cell.k, seed=number)

    @torch.no_grad()
    def multiply(by: str) -> list[Tensor]:
        return [gemm_all_to_all(workspace, x, weight, schedule=by)]

    # Without kernels torch multiplies: between hosts the rows of each rank by themselves, which may change bits.
    is_of_torch = not uses_kernels(world.device)
    return stress.Work(
        f"{cell.name} {schedule}",
        workspace,
        lambda delay: multiply(schedule),
        stress.equal_within(largest_error(), partial(in_fp64, x, weight)),
        {"product": asdict(cell), "schedule": schedule},
        tolerance_to_one_host=largest_error() if is_of_torch else None,
        # Between hosts the library multiplies all rows of a small product at once.
        as_between_hosts=lambda: multiply(schedule) if schedule == KERNEL else [reference(dist.group.WORLD, x, weight)],
    )


OPERATOR = Operator(
    open=GemmCase,
    sets={
        # For a test on the CPU.
        "tiny": lambda: [Product(8, 16, 8), Product(24, 8, 16)],
        "small": lambda: [Product(*shape) for shape in PRODUCTS[::4]],
        "few": lambda: [Product(*shape) for shape in FEW_TILES],
        "all": lambda: [Product(*shape) for shape in PRODUCTS],
    },
    stages=lambda cell: ["gemm", "op"] if torch.cuda.is_available() else ["op"],
    to_compile=to_compile,
    works=works,
)
