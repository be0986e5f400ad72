"""Does GEMV + AllReduce give the same bits on all ranks whatever their delays, and an error when a rank is killed?

    torchrun --standalone --nproc-per-node=4 -m benchmarks.gemv_all_reduce.stress --replays 100000 --output stress.json
        [--tiny] [--slices-by messages --ranks-per-host 2]
    python -m benchmarks.gemv_all_reduce.stress --ranks 4 --kill-rank 2 --kill-after 3 --output killed.json

Products of several shapes, of few and of many rows, with and without bias, residual and norm, share one workspace. The first
result of each is compared with a product in fp64, and between the ranks; what replays.py does with them follows.

With ``--kill-rank`` that rank kills itself meanwhile; see killed_rank.py. Exit status 1 says that something was not as it must
be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.nn.functional import rms_norm

from benchmarks.common import replays
from benchmarks.common.harness import World, relative_error
from benchmarks.common.replays import Work, count_differing
from benchmarks.gemv_all_reduce.cells import DTYPE, Cell, draw_inputs, draw_weights
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce

NORM_EPS = 1e-6


@dataclass(frozen=True)
class Size:
    """Of the products.

    Attributes:
        shapes: (m, N, K); K of all ranks together is K times their number.
        operands: different ones of each shape, so that a result that is left from another call differs.
    """

    shapes: tuple[tuple[int, int, int], ...]
    operands: int


FULL = Size(
    shapes=(
        (1, 1024, 1024),
        (2, 8192, 2048),
        (5, 2048, 2048),
        (16, 4096, 4096),
        (33, 5120, 3456),
        (64, 8192, 2048),
        (300, 1024, 512),
    ),
    operands=3,
)
TINY = Size(shapes=((1, 16, 16), (3, 32, 24), (70, 16, 16)), operands=2)


class Product(Work):
    """One product with what follows it. Collective."""

    def __init__(self, world: World, workspace: GemvWorkspace, cell: Cell, number: int) -> None:
        """Args:
        number: of the product; says which operands it has, and what follows it.
        """
        super().__init__(world, workspace, cell.name)
        self.gemv_exchange, self.cell = workspace, cell
        place = (world.rank, world.size, world.device)
        self.x = draw_inputs(1, cell, *place, seed=number)[0]
        self.weight = draw_weights(1, cell.n, cell.k, *place, seed=number)[0]
        generator = torch.Generator().manual_seed(number)
        followed, (m, n) = number % 3, (cell.m, cell.n)
        bias, residual, gain = (
            torch.randn(shape, generator=generator).to(world.device, DTYPE) for shape in ((n,), (m, n), (n,))
        )
        self.bias = bias if followed >= 1 else None
        self.residual = residual if followed >= 1 else None
        # Programs of a norm wait for each other; Triton's interpreter runs one after the other.
        self.norm_weight = gain if followed == 2 and not triton.knobs.runtime.interpret else None
        # The norm is rounded once more than the sum.
        self.tolerance = (1 if self.norm_weight is None else 2) * cell.tolerance(world.symmetric.hosts)
        self.tolerance_to_one_host = self.tolerance

    @torch.no_grad()
    def compute(self) -> list[Tensor]:
        results = gemv_all_reduce(
            self.gemv_exchange, self.x, self.weight, self.bias, self.residual, self.norm_weight, norm_eps=NORM_EPS
        )
        return [result for result in results if result is not None]

    def check(self) -> float:
        errors = [relative_error(*pair) for pair in zip(self.first, self.expected(), strict=True)]
        of_first_rank = [result.clone() for result in self.first]
        for result in of_first_rank:
            dist.broadcast(result, src=0)
        same = not any(int(count_differing(*pair)) for pair in zip(self.first, of_first_rank, strict=True))
        every_rank = self.world.gather((max(errors), same))
        error = max(own for own, _ in every_rank)
        if error > self.tolerance or not all(same for _, same in every_rank):
            raise SystemExit(f"{self.cell.name}: (relative error, same bits as rank 0) by rank: {every_rank}")
        return error

    def expected(self) -> list[Tensor]:
        """In fp64."""
        out = self.x.double() @ self.weight.double().t()
        dist.all_reduce(out)
        if self.bias is not None and self.residual is not None:
            out = out + self.bias.double() + self.residual.double()
        if self.norm_weight is None:
            return [out]
        return [out, rms_norm(out, (self.cell.n,), self.norm_weight.double(), NORM_EPS)]

    def describe(self) -> Mapping[str, Any]:
        return {
            **asdict(self.cell),
            "with_bias_and_residual": self.bias is not None,
            "with_norm": self.norm_weight is not None,
        }


def make_works(world: World, options: argparse.Namespace) -> Sequence[Work]:
    """Collective."""
    size = TINY if options.tiny else FULL
    cells = [Cell(m, n, k * world.size) for m, n, k in size.shapes]
    workspace = GemvWorkspace(
        world.symmetric,
        name="stress",
        max_columns=max(cell.n for cell in cells),
        max_rows=max(cell.m for cell in cells),
        dtype=DTYPE,
        timeout_seconds=60.0,
    )
    return [Product(world, workspace, cell, i + j) for i, cell in enumerate(cells) for j in range(size.operands)]


def main(arguments: Sequence[str] | None = None) -> int:
    return replays.main(__doc__, make_works, replays=100_000, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
