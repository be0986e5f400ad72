"""The cells of the GEMV + AllReduce benchmark: shapes of row-parallel products, and random operands for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.harness import HALF
from dlrm_fused.symmetric.hosts import Hosts

DTYPE = HALF
# N and K: of attention outputs and second feed-forward matrices of common Transformers.
SHAPES = ((1024, 4096), (2048, 8192), (4096, 16384), (5120, 13824), (8192, 8192), (8192, 28672))
ROWS = (1, 2, 4, 8, 16, 32, 64)
LARGE_ROWS = (2048, 4096, 8192, 16384)
# Largest relative errors of the fused operator against fp64. Sums in fp32 are rounded to bf16 once; in large products, so are
# the partial results of the ranks, as with cuBLAS and NCCL, whose errors were up to 2.3e-2; between hosts, those of the hosts.
TOLERANCE = {"small": 1.02 * 2**-8, "large": 8 * 2**-8}
# Three times the L2 cache of an H200: what is read again has been evicted meanwhile.
_ROTATED_BYTES = 180e6


@dataclass(frozen=True)
class Cell:
    """[m, K] x [N, K]^T with K split over the ranks.

    Attributes:
        m: rows of x: candidates or tokens.
        n: columns of the result.
        k: the depth, of all ranks together.
    """

    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.n}x{self.k} m{self.m}"

    @property
    def is_large(self) -> bool:
        """Whether it is a GEMM, as in training and prefill; else the weights are all that takes time to read."""
        return self.m > ROWS[-1]

    @property
    def size(self) -> str:
        return "large" if self.is_large else "small"

    def tolerance(self, hosts: Hosts) -> float:
        """Largest relative error of the result on these hosts."""
        return TOLERANCE["large" if hosts.are_many else self.size]

    def depth(self, ranks: int) -> int:
        """Of a rank's operands."""
        return self.k // ranks

    def memory_bytes(self, ranks: int) -> int:
        """Bytes that a rank's memory must at least carry: weight and x read once, the result written once."""
        depth = self.depth(ranks)
        return DTYPE.itemsize * (self.n * depth + self.m * depth + self.m * self.n)

    def link_bytes(self, ranks: int) -> float:
        """Bytes that a rank must at least send to its peers: a reduce-scatter and an all-gather."""
        return 2 * DTYPE.itemsize * self.m * self.n * (ranks - 1) / ranks


def small_cells() -> list[Cell]:
    """GEMVs: online scoring of 1 to 64 candidates."""
    return [Cell(m, n, k) for (n, k), m in itertools.product(SHAPES, ROWS)]


def large_cells() -> list[Cell]:
    """GEMMs: training and prefill."""
    return [Cell(m, n, k) for (n, k), m in itertools.product(SHAPES, LARGE_ROWS)]


def tiny_cells() -> list[Cell]:
    """For a test on the CPU: two GEMVs and a GEMM."""
    return [Cell(1, 32, 64), Cell(3, 32, 64), Cell(70, 32, 64)]


CELLS = {
    "tiny": tiny_cells,
    "small": small_cells,
    "large": large_cells,
    "all": lambda: small_cells() + large_cells(),
}


def by_shape(cells: list[Cell]) -> Iterator[tuple[tuple[int, int], list[Cell]]]:
    """(N, K) and the cells of that shape, which can share weights; in the order of the cells."""
    for shape, own in itertools.groupby(cells, key=lambda cell: (cell.n, cell.k)):
        yield shape, list(own)


def weight_copies(n: int, depth: int) -> int:
    """How many different weights take turns, so that the L2 cache does not hold the next one; two at least."""
    return max(2, math.ceil(_ROTATED_BYTES / (n * depth * DTYPE.itemsize)))


def draw_weights(copies: int, n: int, k: int, rank: int, ranks: int, device: torch.device, seed: int = 0) -> Tensor:
    """DTYPE [copies, N, K / ranks] of this rank, with results of about 1 in mind."""
    generator = torch.Generator(device).manual_seed(seed * ranks + rank)
    return torch.empty(copies, n, k // ranks, dtype=DTYPE, device=device).normal_(0, k**-0.5, generator=generator)


def draw_inputs(copies: int, cell: Cell, rank: int, ranks: int, device: torch.device, seed: int = 0) -> Tensor:
    """DTYPE [copies, m, K / ranks] of this rank."""
    generator = torch.Generator(device).manual_seed(-1 - seed * ranks - rank)
    return torch.empty(copies, cell.m, cell.depth(ranks), dtype=DTYPE, device=device).normal_(generator=generator)
