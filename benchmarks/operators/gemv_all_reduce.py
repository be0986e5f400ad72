"""GEMV + AllReduce: [m, K] x [N, K]^T with K split over the ranks, against cuBLAS with NCCL or torch's symmetric memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from benchmarks.common.harness import Work, World, relative_error
from benchmarks.operators import stress
from benchmarks.operators.case import DTYPE, Operator, Pass
from benchmarks.operators.products import (
    MatrixProduct,
    Multiply,
    ProductCase,
    draw_operands,
    largest_error,
    operands_in_turn,
    workspace_for,
)
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.gemv_all_reduce.schedule import CHUNKS, COPIES, KERNEL, PRODUCT, SCATTER

# N and K: of attention outputs and second feed-forward matrices of common Transformers.
SHAPES = ((1024, 4096), (2048, 8192), (4096, 16384), (5120, 13824), (8192, 8192), (8192, 28672))
ROWS, LARGE_ROWS = (1, 2, 4, 8, 16, 32, 64), (2048, 4096, 8192, 16384)
# The all-reduces over torch's symmetric memory.
SYMMETRIC = ("one_shot", "two_shot")
_NORM_EPS = 1e-6
# A kernel may start before the one before it ends: what goes wrong then is not seen in calls that come one by one.
_CALLS_IN_A_ROW = 4
# A pass of few rows makes at least so many calls, so that the launch of a graph does not count.
_CALLS_OF_A_PASS = 48


@dataclass(frozen=True)
class Cell(MatrixProduct):
    """A product whose depth is split over the ranks; k is that of all ranks together, m are candidates or tokens."""

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k} m{self.m}"

    @property
    def is_large(self) -> bool:
        """Whether it is a GEMM, as in training and prefill; else the weights are all that takes time to read."""
        return self.m > ROWS[-1]

    def depth(self, ranks: int) -> int:
        """Return the depth of a rank's operands."""
        return self.k // ranks

    def work(self, ranks: int) -> Work:
        """Weight and x read once, the result written once; a reduce-scatter and an all-gather. Flops take no time here."""
        depth = self.depth(ranks)
        sent = 2 * DTYPE.itemsize * self.m * self.n * (ranks - 1) / ranks
        return Work(0, DTYPE.itemsize * (self.n * depth + self.m * depth + self.m * self.n), sent)

    def operands_of_rank(self, ranks: int) -> int:
        """Return how many operands take turns."""
        return 1 if self.is_large else operands_in_turn(DTYPE.itemsize * self.n * self.depth(ranks), least=2, most=1000)


def tolerance_of(cell: Cell, world: World) -> float:
    """As with cuBLAS and NCCL, partial sums of large products, and those of hosts, are rounded too."""
    return largest_error(terms_are_rounded=cell.is_large or world.symmetric.hosts.are_many)


class GemvCase(ProductCase):
    """A cell on this rank."""

    cell: Cell
    rivals = ("nccl", *SYMMETRIC, "gemm")

    def __init__(self, world: World, cell: Cell) -> None:
        count = cell.operands_of_rank(world.size)
        depth = cell.depth(world.size)
        super().__init__(world, cell, draw_operands(world, cell.m, cell.n, depth, count=count, whole_depth=cell.k))
        self.workspace, self.buffer = workspace_for(GemvWorkspace, world, [cell], "benchmark"), self.symmetric_buffer()
        self.tolerance = tolerance_of(cell, world)
        self.turns = 1 if cell.is_large or world.device.type != "cuda" else max(1, _CALLS_OF_A_PASS // count)

    def symmetric_buffer(self) -> Tensor | None:
        """In torch's symmetric memory, for the partial results of the all-reduces that need it; None leaves them out."""
        if self.cell.is_large or self.world.device.type != "cuda" or self.world.symmetric.hosts.are_many:
            return None
        buffer = symm_mem.empty(self.cell.m, self.cell.n, dtype=DTYPE, device=self.world.device)
        symm_mem.rendezvous(buffer, self.world.group)
        dist.barrier()  # torch clears the signal pads, and does not wait for the peers to have done so
        return buffer

    def multiply(self, number: int, schedule: str = "auto") -> Tensor:
        return gemv_all_reduce(self.workspace, *self.operands[number], schedule=schedule)[0]

    def schedules(self) -> Sequence[str]:
        """Return the schedules among which auto chooses."""
        if not self.workspace.sums_by_kernel:
            return ()
        return (CHUNKS, SCATTER, COPIES) if self.cell.is_large else (KERNEL, PRODUCT)

    def contestants(self, stage: str) -> dict[str, Multiply]:
        def nccl(number: int) -> Tensor:
            out = linear(*self.operands[number])
            dist.all_reduce(out)
            return out

        others = {schedule: partial(self.multiply, schedule=schedule) for schedule in self.schedules()}
        return {"fused": self.multiply, **others, "nccl": nccl, **self.symmetric(), "gemm": lambda i: linear(*self.operands[i])}

    def symmetric(self) -> dict[str, Multiply]:
        """All-reduces over torch's symmetric memory, into which cuBLAS stores."""
        if self.buffer is None:
            return {}
        out, group = self.buffer, self.world.group.group_name

        def one_shot(number: int) -> Tensor:
            x, weight = self.operands[number]
            torch.mm(x, weight.t(), out=out)
            return torch.ops.symm_mem.one_shot_all_reduce_out(out, "sum", group, torch.empty_like(out))

        def two_shot(number: int) -> Tensor:
            x, weight = self.operands[number]
            torch.mm(x, weight.t(), out=out)
            return torch.ops.symm_mem.two_shot_all_reduce_(out, "sum", group)

        return {"one_shot": one_shot, "two_shot": two_shot}

    def expected(self, stage: str) -> Tensor:
        x, weight = self.operands[-1]
        product = x.double() @ weight.double().t()
        dist.all_reduce(product)
        return product

    @torch.no_grad()
    def check(self, stage: str) -> dict[str, Any]:
        """Errors, and whether all ranks have the same bits."""
        self.workspace.raise_fault()
        if "two_shot" in self.last:  # its result is the symmetric buffer, which others have used since
            self.last["two_shot"] = self.symmetric()["two_shot"](len(self.operands) - 1)
        same: dict[str, bool] = {}
        for name, result in self.last.items():
            if name != self.alone:
                of_first_rank = result.clone()
                dist.broadcast(of_first_rank, src=0)
                same[name] = torch.equal(result.view(torch.int16), of_first_rank.view(torch.int16))
        every_rank = self.world.gather(same)
        everywhere = {name: all(own[name] for own in every_rank) for name in same}
        checked = super().check(stage)
        passed = checked["passed"] and everywhere[self.fused]
        return {**checked, "passed": passed, "same_bits_on_all_ranks": everywhere}

    def phases(self, stage: str) -> Sequence[Work]:
        return [self.cell.work(self.world.size)]

    def remarks(self, us: Mapping[str, float]) -> dict[str, Any]:
        symmetric = {name: us[name] for name in SYMMETRIC if name in us}
        best = min(symmetric, key=symmetric.__getitem__, default=None)
        return {"best_symmetric": best, "ratio_to_symmetric": us["fused"] / us[best] if best else None}


def to_compile(world: World, cells: Sequence[Cell]) -> Sequence[Pass]:
    """Collective."""
    workspace = workspace_for(GemvWorkspace, world, cells, "compilation")

    @torch.no_grad()
    def call(cell: Cell) -> None:
        depth = cell.depth(world.size)
        x, weight = (torch.empty(rows, depth, dtype=DTYPE, device=world.device) for rows in (cell.m, cell.n))
        gemv_all_reduce(workspace, x, weight)

    return [partial(call, cell) for cell in cells]


def cells_of(*rows: int) -> list[Cell]:
    return [Cell(m, n, k) for (n, k), m in itertools.product(SHAPES, rows)]


# Shapes of the stress test: (m, N, K); K of all ranks together is K times their number.
STRESSED = (
    *((1, 1024, 1024), (2, 8192, 2048), (5, 2048, 2048), (16, 4096, 4096), (33, 5120, 3456), (64, 8192, 2048)),
    (312, 1024, 512),
)
STRESSED_TINY = ((1, 16, 16), (3, 32, 24), (72, 16, 16))


def works(world: World, *, tiny: bool) -> Sequence[stress.Work]:
    """Several works of each shape with other operands, so that a result of another call is seen. Collective.

    Each has a schedule of its own, with and without a graph: what auto takes in a graph may be rounded elsewhere than what it
    takes without.
    """
    cells = [Cell(m, n, k * world.size) for m, n, k in (STRESSED_TINY if tiny else STRESSED)]
    workspace = workspace_for(GemvWorkspace, world, cells, "stress")
    ways = itertools.chain.from_iterable(
        itertools.product([cell], (CHUNKS, SCATTER, COPIES) if cell.is_large else (KERNEL, PRODUCT), (True, False))
        for cell in cells
    )
    return [stressed(world, workspace, *way, number) for number, way in enumerate(ways)]


def stressed(world: World, workspace: GemvWorkspace, cell: Cell, schedule: str, in_graph: bool, number: int) -> stress.Work:
    """One product with what follows it, by its number: nothing; bias and residual; these and a norm."""
    depth, followed = cell.depth(world.size), number % 3
    ((x, weight),) = draw_operands(world, cell.m, cell.n, depth, seed=number, whole_depth=cell.k)
    generator = torch.Generator().manual_seed(number)
    shapes = ((cell.n,), (cell.m, cell.n), (cell.n,))
    drawn = [torch.randn(shape, generator=generator).to(world.device, DTYPE) for shape in shapes]
    bias, residual = (drawn[0], drawn[1]) if followed else (None, None)
    # Programs of a norm wait for each other; Triton's interpreter runs one after the other.
    gain = drawn[2] if followed == 2 and not triton.knobs.runtime.interpret else None
    # The norm is rounded once more than the sum.
    tolerance = (1 if gain is None else 2) * tolerance_of(cell, world)

    @torch.no_grad()
    def compute(_: Callable[[], None]) -> list[Tensor]:
        options: dict[str, Any] = {"norm_eps": _NORM_EPS, "schedule": schedule}
        calls = [gemv_all_reduce(workspace, x, weight, bias, residual, gain, **options) for _ in range(_CALLS_IN_A_ROW)]
        return [result for results in calls for result in results if result is not None]

    def expected() -> list[Tensor]:
        out = x.double() @ weight.double().t()
        dist.all_reduce(out)
        if bias is not None and residual is not None:
            out = out + bias.double() + residual.double()
        return _CALLS_IN_A_ROW * ([out] if gain is None else [out, rms_norm(out, (cell.n,), gain.double(), _NORM_EPS)])

    def check(first: Sequence[Tensor]) -> tuple[float, bool]:
        """Against fp64, and against rank 0."""
        error = max(relative_error(*pair) for pair in zip(first, expected(), strict=True))
        of_first_rank = [result.clone() for result in first]
        for result in of_first_rank:
            dist.broadcast(result, src=0)
        same = not any(int(stress.count_differing(*pair)) for pair in zip(first, of_first_rank, strict=True))
        return error, error <= tolerance and same

    description = {
        **asdict(cell),
        "with_bias_and_residual": bias is not None,
        "with_norm": gain is not None,
        "schedule": schedule,
    }
    return stress.Work(cell.name, workspace, compute, check, description, in_graph, tolerance_to_one_host=tolerance)


OPERATOR = Operator(
    open=GemvCase,
    sets={
        # Two GEMVs and a GEMM, for a test on the CPU.
        "tiny": lambda: [Cell(m, 32, 64) for m in (1, 3, 70)],
        # Online scoring of 1 to 64 candidates.
        "small": lambda: cells_of(*ROWS),
        # Training and prefill.
        "large": lambda: cells_of(*LARGE_ROWS),
        "all": lambda: cells_of(*ROWS, *LARGE_ROWS),
    },
    stages=lambda cell: ["large" if cell.is_large else "small"],
    key="size",
    to_compile=to_compile,
    works=works,
)
