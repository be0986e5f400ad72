"""Works of the stress test of GEMM + All-to-All: products of equal blocks by every schedule, which share one workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.harness import World, relative_error
from benchmarks.operators.case import TOLERANCE, draw_operands
from benchmarks.operators.gemm_all_to_all import SCHEDULES, Product, new_workspace
from benchmarks.operators.stress import Work
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all.schedule import KERNEL, LIBRARY
from dlrm_fused.symmetric.device import uses_kernels

# M for each rank.
FULL = (Product(33, 1024, 1024), Product(256, 4096, 1024), Product(512, 1024, 4096), Product(1024, 7168, 512))
TINY = (Product(3, 16, 8), Product(7, 8, 16))
_OPERANDS = 3


def works(world: World, *, tiny: bool) -> Sequence[Work]:
    """Return several works of each shape, whose operands differ, so that a result of another call is seen. Collective."""
    cells = [replace(cell, m=cell.m * world.size) for cell in (TINY if tiny else FULL)]
    workspace = new_workspace(world, cells, "stress")
    return [product(world, workspace, cell, i * _OPERANDS + j) for i, cell in enumerate(cells) for j in range(_OPERANDS)]


def product(world: World, workspace: GemmWorkspace, cell: Product, number: int) -> Work:
    """One product; its number says which operands it has, and its schedule."""
    schedule = SCHEDULES[number % len(SCHEDULES)]
    ((x, weight),) = draw_operands(world, cell.m, cell.n, cell.k, seed=number)

    @torch.no_grad()
    def multiply(by: str) -> list[Tensor]:
        return [gemm_all_to_all(workspace, x, weight, schedule=by)]

    def check(first: Sequence[Tensor]) -> tuple[float, bool]:
        product = x.double() @ weight.double().t()
        expected = torch.empty_like(product)
        dist.all_to_all_single(expected, product)
        error = relative_error(first[0], expected)
        return error, error <= TOLERANCE

    # Without kernels torch multiplies: between hosts the rows of each rank by themselves, which may change bits.
    is_of_torch = schedule != LIBRARY and not uses_kernels(world.device)
    return Work(
        f"{cell.name} {schedule}",
        workspace,
        lambda delay: multiply(schedule),
        check,
        {"product": asdict(cell), "schedule": schedule},
        tolerance_to_one_host=TOLERANCE if is_of_torch else None,
        # Between hosts all schedules but the library's are one, which has the bits of the kernel.
        as_between_hosts=lambda: multiply(LIBRARY if schedule == LIBRARY else KERNEL),
    )
