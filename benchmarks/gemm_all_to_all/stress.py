"""Do GEMM + All-to-All and the expert layer give the same bits whatever the ranks' delays, and an error when one is killed?

    torchrun --standalone --nproc-per-node=4 -m benchmarks.gemm_all_to_all.stress --replays 10000 --output stress.json
        [--tiny] [--slices-by messages --ranks-per-host 2]
    python -m benchmarks.gemm_all_to_all.stress --ranks 4 --kill-rank 2 --kill-after 3 --output killed.json

Products of several shapes share one workspace, expert layers have one each: some balanced, some skewed, and one with a rank
that has no tokens. Layers run forward and backward. First results are compared with fp64, of layers with the reference in fp32;
what replays.py does with them follows. Between hosts all schedules but the library's are one, which has the bits of ``kernel``.

With ``--kill-rank`` that rank kills itself meanwhile; see killed_rank.py. Exit status 1 says that something was not as it must
be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import replays
from benchmarks.common.harness import World, relative_error
from benchmarks.common.replays import Work
from benchmarks.gemm_all_to_all.cells import TOLERANCE, Layer, Product
from benchmarks.gemm_all_to_all.products import SCHEDULES, new_workspace
from benchmarks.moe.layers import LayerData, compared_with_baseline
from benchmarks.moe.layers import new_workspace as new_expert_workspace
from dlrm_fused.models.expert_parallel import ExpertComputation
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemm_all_to_all.schedule import KERNEL, LIBRARY
from dlrm_fused.ops.moe import ExpertWorkspace
from dlrm_fused.symmetric.device import uses_kernels


@dataclass(frozen=True)
class Size:
    """Of the work.

    Attributes:
        products: M, N, K; M for each rank of the world.
        layers: experts are those of a rank; the last has a rank without tokens.
        operands: different ones of each, so that a result that is left from another call differs.
    """

    products: tuple[Product, ...]
    layers: tuple[Layer, ...]
    operands: int


FULL = Size(
    products=(Product(33, 1024, 1024), Product(256, 4096, 1024), Product(512, 1024, 4096), Product(1024, 7168, 512)),
    layers=(
        Layer(2, 2, 1024, 2048, 1000, "balanced"),
        Layer(8, 8, 512, 256, 700, "zipf"),
        Layer(2, 1, 256, 512, 64, "zipf"),
    ),
    operands=3,
)
TINY = Size(
    products=(Product(3, 16, 8), Product(7, 8, 16)),
    layers=(Layer(2, 2, 8, 16, 10, "zipf"), Layer(1, 1, 16, 8, 5, "balanced")),
    operands=3,  # as many products as schedules
)


class ProductWork(Work):
    """GEMM + All-to-All of equal blocks."""

    def __init__(self, world: World, workspace: GemmWorkspace, cell: Product, number: int) -> None:
        """Args:
        number: of the work; says which operands it has, and its schedule.
        """
        super().__init__(world, workspace, cell.name)
        self.gemm_exchange, self.cell = workspace, cell
        self.schedule = SCHEDULES[number % len(SCHEDULES)]
        ((self.x, self.weight),) = cell.draw(world.rank, world.size, world.device, seed=number)
        # Without kernels torch multiplies: between hosts the rows of each rank by themselves, which may change bits.
        if self.schedule != LIBRARY and not uses_kernels(world.device):
            self.tolerance_to_one_host = TOLERANCE

    @torch.no_grad()
    def compute(self) -> list[Tensor]:
        return self.multiply(self.schedule)

    @torch.no_grad()
    def compute_as_between_hosts(self) -> list[Tensor]:
        return self.multiply(LIBRARY if self.schedule == LIBRARY else KERNEL)

    def multiply(self, schedule: str) -> list[Tensor]:
        return [gemm_all_to_all(self.gemm_exchange, self.x, self.weight, schedule=schedule)]

    def check(self) -> float:
        product = self.x.double() @ self.weight.double().t()
        expected = torch.empty_like(product)
        dist.all_to_all_single(expected, product)
        error = max(self.world.gather(relative_error(self.first[0], expected)))
        if error > TOLERANCE:
            raise SystemExit(f"{self.name}, {self.schedule}: relative error {error}")
        return error

    def describe(self) -> Mapping[str, Any]:
        return {"product": asdict(self.cell), "schedule": self.schedule}


class LayerWork(Work):
    """An expert layer with its router, forward and backward."""

    in_graph = False  # a graph would keep what the layer holds for its backward pass

    def __init__(self, world: World, workspace: ExpertWorkspace, cell: Layer, number: int, tokens: int) -> None:
        """Args:
        tokens: of this rank.
        """
        super().__init__(world, workspace, cell.name)
        self.cell = cell
        self.tokens = world.gather(tokens)
        self.computation = ExpertComputation(world.group, workspace)
        self.names: list[str] = []  # of the results
        self.data = LayerData(world, replace(cell, tokens=tokens), seed=number)

    def compute(self) -> list[Tensor]:
        results = self.data.compute(self.computation, training=True)
        self.names = list(results)
        return list(results.values())

    def check(self) -> float:
        compared = compared_with_baseline(self.world, self.data, dict(zip(self.names, self.first, strict=True)))
        if not compared["passed"]:
            raise SystemExit(f"{self.name}: relative errors {compared['errors']}")
        return max(compared["errors"].values())

    def describe(self) -> Mapping[str, Any]:
        return {"layer": asdict(self.cell), "tokens": self.tokens}


def make_works(world: World, options: argparse.Namespace) -> Sequence[Work]:
    """Collective."""
    size = TINY if options.tiny else FULL
    products = [replace(cell, m=cell.m * world.size) for cell in size.products]
    layers = [replace(cell, experts=cell.experts * world.size) for cell in size.layers]
    workspace = new_workspace(world, "stress", max(cell.m for cell in products), max(cell.n for cell in products))
    works: list[Work] = [
        ProductWork(world, workspace, cell, i * size.operands + j)
        for i, cell in enumerate(products)
        for j in range(size.operands)
    ]
    for cell in layers:
        expert_exchange = new_expert_workspace(world, cell, f"stress {cell.name}")
        is_idle = cell is layers[-1] and world.rank == 1
        works += [LayerWork(world, expert_exchange, cell, j, 0 if is_idle else cell.tokens) for j in range(size.operands)]
    return works


def main(arguments: Sequence[str] | None = None) -> int:
    return replays.main(__doc__, make_works, replays=10_000, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
