"""Works of the stress test of GEMV + AllReduce: products of few and of many rows, with and without what may follow them.

All share one workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.nn.functional import rms_norm

from benchmarks.common.harness import World, relative_error
from benchmarks.operators.case import DTYPE, draw_operands
from benchmarks.operators.gemv_all_reduce import Cell, new_workspace, tolerance_of
from benchmarks.operators.stress import Work, count_differing
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce

NORM_EPS = 1e-6
# (m, N, K); K of all ranks together is K times their number.
FULL = (
    *((1, 1024, 1024), (2, 8192, 2048), (5, 2048, 2048), (16, 4096, 4096), (33, 5120, 3456), (64, 8192, 2048)),
    (300, 1024, 512),
)
TINY = ((1, 16, 16), (3, 32, 24), (70, 16, 16))


def works(world: World, *, tiny: bool) -> Sequence[Work]:
    """Return several works of each shape, whose operands differ, so that a result of another call is seen. Collective."""
    cells = [Cell(m, n, k * world.size) for m, n, k in (TINY if tiny else FULL)]
    workspace = new_workspace(world, cells, "stress")
    return [product(world, workspace, cell, i + j) for i, cell in enumerate(cells) for j in range(2 if tiny else 3)]


def product(world: World, workspace: GemvWorkspace, cell: Cell, number: int) -> Work:
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
        results = gemv_all_reduce(workspace, x, weight, bias, residual, gain, norm_eps=NORM_EPS)
        return [result for result in results if result is not None]

    def expected() -> list[Tensor]:
        out = x.double() @ weight.double().t()
        dist.all_reduce(out)
        if bias is not None and residual is not None:
            out = out + bias.double() + residual.double()
        return [out] if gain is None else [out, rms_norm(out, (cell.n,), gain.double(), NORM_EPS)]

    def check(first: Sequence[Tensor]) -> tuple[float, bool]:
        """Against fp64, and against rank 0."""
        error = max(relative_error(*pair) for pair in zip(first, expected(), strict=True))
        of_first_rank = [result.clone() for result in first]
        for result in of_first_rank:
            dist.broadcast(result, src=0)
        same = not any(int(count_differing(*pair)) for pair in zip(first, of_first_rank, strict=True))
        return error, error <= tolerance and same

    description = {**asdict(cell), "with_bias_and_residual": bias is not None, "with_norm": gain is not None}
    return Work(cell.name, workspace, compute, check, description, tolerance_to_one_host=tolerance)
