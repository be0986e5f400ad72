"""The cells of the benchmark of AllGather + GEMM and GEMM + ReduceScatter, and random operands for them."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.harness import Work
from benchmarks.gemm_all_to_all.cells import DTYPE
from dlrm_fused.ops.schedules import Pair

# N and K of one rank. Llama 3 of 8 and 70 billion parameters over 8 ranks: query, key and value, then gate and up; this
# project's transformer_large over 4 ranks: query, key and value, then feed-forward; first matrices of experts.
GATHERED = (
    (768, 4096),
    (3584, 4096),
    (1280, 8192),
    (7168, 8192),
    (3072, 4096),
    (4096, 4096),
    (1024, 2048),
    (2048, 1024),
)
# The same layers' second products: attention's output, then down; feed-forward's second matrix; experts' second matrices.
SCATTERED = (
    (4096, 512),
    (4096, 1792),
    (8192, 1024),
    (8192, 3584),
    (4096, 1024),
    (4096, 4096),
    (2048, 1024),
    (1024, 2048),
)
# M, of all ranks together.
ROWS = (1024, 4096, 16384, 65536)
# Three times the L2 cache of an H200: what is read again has been evicted meanwhile.
_ROTATED_BYTES = 180e6
_MAX_OPERANDS = 8


@dataclass(frozen=True)
class Layer:
    """A product whose rows are gathered before, or scattered after.

    Attributes:
        pair: which of the two.
        m: rows of all ranks together.
        n, k: columns of the result, and depth, on one rank.
    """

    pair: Pair
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def operands(self) -> int:
        """How many different operands take turns, so that the L2 cache does not hold the next ones."""
        return min(_MAX_OPERANDS, math.ceil(_ROTATED_BYTES / (DTYPE.itemsize * self.k * (self.m + self.n))))

    def rows(self, ranks: int) -> tuple[int, int]:
        """Of x, and of the result, on one rank."""
        shard = self.m // ranks
        return (shard, self.m) if self.pair.moves_first else (self.m, shard)

    def travelling(self) -> int:
        """Columns of the matrix whose shards travel."""
        return self.k if self.pair.moves_first else self.n

    def work(self, ranks: int) -> Work:
        """Operands are read once, the result is written once; what travels is written and read besides."""
        sent = self.m // ranks * self.travelling() * (ranks - 1)
        elements = sum(self.rows(ranks)[i] * width for i, width in enumerate((self.k, self.n))) + self.n * self.k + 2 * sent
        return Work(2 * self.m * self.n * self.k, DTYPE.itemsize * elements, DTYPE.itemsize * sent)

    def draw(self, rank: int, ranks: int, device: torch.device, seed: int = 0, count: int = 1) -> list[tuple[Tensor, Tensor]]:
        """So many pairs of x and weight of this rank, with results of about 1 in mind."""
        generator = torch.Generator(device).manual_seed(seed * ranks + rank)

        def normal(rows: int, deviation: float) -> Tensor:
            return torch.empty(rows, self.k, dtype=DTYPE, device=device).normal_(0, deviation, generator=generator)

        return [(normal(self.rows(ranks)[0], 1.0), normal(self.n, self.k**-0.5)) for _ in range(count)]


def full_cells() -> list[Layer]:
    of_pairs = {Pair.all_gather_gemm: GATHERED, Pair.gemm_reduce_scatter: SCATTERED}
    return [Layer(pair, m, n, k) for pair, shapes in of_pairs.items() for (n, k), m in itertools.product(shapes, ROWS)]


def tiny_cells() -> list[Layer]:
    """For a test on the CPU."""
    return [Layer(Pair.all_gather_gemm, 24, 16, 16), Layer(Pair.gemm_reduce_scatter, 48, 8, 16)]


CELLS = {"tiny": tiny_cells, "full": full_cells}
