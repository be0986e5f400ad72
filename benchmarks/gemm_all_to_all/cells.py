"""The cells of the GEMM + All-to-All benchmark: products, expert layers, and random operands for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.common.harness import HALF, Work

DTYPE = HALF
# Largest relative errors: of products against fp64, rounded once to bf16; of layers, which round several times, and whose
# gradients are sums of rounded rows, against fp32.
TOLERANCE = 1.02 * 2**-8
LAYER_TOLERANCE = 16 * 2**-8
# (M, N, K): rows of x on each rank, columns of the result, depth; of first and second matrices of experts.
PRODUCTS = (
    (1024, 1024, 4096),
    (1024, 4096, 1024),
    (1024, 7168, 2048),
    (1024, 14336, 4096),
    (2048, 2048, 2048),
    (2048, 4096, 1024),
    (2048, 4096, 14336),
    (4096, 1024, 1024),
    (4096, 4096, 4096),
    (4096, 14336, 4096),
    (8192, 1024, 2048),
    (8192, 2048, 7168),
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (16384, 1024, 4096),
    (16384, 4096, 1024),
    (16384, 7168, 2048),
    (32768, 1024, 1024),
    (32768, 4096, 4096),
    (32768, 7168, 2048),
)
# Of fewer tiles than a GPU has multiprocessors.
FEW_TILES = (
    (128, 2048, 8192),
    (256, 256, 8192),
    (256, 1024, 4096),
    (512, 512, 4096),
    (512, 1024, 8192),
    (1024, 512, 2048),
)
# (experts, top_k, width, hidden, tokens of a rank).
LAYERS = (
    (8, 2, 1024, 4096, 4096),
    (8, 2, 4096, 4096, 8192),
    (8, 2, 2048, 4096, 16384),
    (8, 8, 1024, 2048, 4096),
    (32, 2, 2048, 2048, 2048),
    (32, 2, 4096, 2048, 16384),
    (32, 8, 1024, 1024, 8192),
    (32, 8, 2048, 2048, 4096),
    (128, 2, 2048, 1024, 8192),
    (128, 8, 1024, 1024, 2048),
    (128, 8, 2048, 1024, 16384),
    (128, 8, 4096, 2048, 4096),
)
# Of Zipf's law: the popularity of experts.
_ZIPF_EXPONENT = 1.0
# Three times the L2 cache of an H200: what is read again has been evicted meanwhile.
_ROTATED_BYTES = 180e6
_MAX_OPERANDS = 8


@dataclass(frozen=True)
class Product:
    """[M, K] x [N, K]^T on every rank; of the rows of the result each rank gets an equal part.

    Attributes:
        m: rows of x on each rank.
        n: columns of the result.
        k: depth.
    """

    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def operands(self) -> int:
        """How many different operands take turns, so that the L2 cache does not hold the next ones."""
        bytes_ = DTYPE.itemsize * self.k * (self.m + self.n)
        return min(_MAX_OPERANDS, math.ceil(_ROTATED_BYTES / bytes_))

    def work(self, ranks: int) -> Work:
        """Operands are read once, the result is written once."""
        elements = self.m * self.k + self.n * self.k + self.m * self.n
        sent = self.m * self.n * (ranks - 1) / ranks
        return Work(2 * self.m * self.n * self.k, DTYPE.itemsize * elements, DTYPE.itemsize * sent)

    def draw(self, rank: int, ranks: int, device: torch.device, seed: int = 0, count: int = 1) -> list[tuple[Tensor, Tensor]]:
        """So many pairs of x [M, K] and weight [N, K] of this rank, with results of about 1 in mind."""
        generator = torch.Generator(device).manual_seed(seed * ranks + rank)

        def normal(rows: int, deviation: float) -> Tensor:
            return torch.empty(rows, self.k, dtype=DTYPE, device=device).normal_(0, deviation, generator=generator)

        return [(normal(self.m, 1.0), normal(self.n, self.k**-0.5)) for _ in range(count)]


@dataclass(frozen=True)
class Layer:
    """An expert layer on all ranks, each of which has an equal part of the experts.

    Attributes:
        experts: of all ranks together.
        top_k: experts of a token.
        width: elements of a token.
        hidden: of an expert, between its two matrices.
        tokens: of each rank.
        routing: ``balanced``, or ``zipf``: logits have the logarithms of Zipf's law added, by the popularity of experts.
    """

    experts: int
    top_k: int
    width: int
    hidden: int
    tokens: int
    routing: str

    @property
    def name(self) -> str:
        return f"{self.experts}e top{self.top_k} {self.width}x{self.hidden} t{self.tokens} {self.routing}"

    def forward_work(self, received: int, sent: int, away: int, ranks: int) -> Work:
        """What a rank has to do in the forward pass.

        Args:
            received: rows that its experts compute.
            sent: rows of its own tokens that go to experts of other ranks, and whose results come back.
            away: rows of other ranks' tokens that its experts compute, and whose results it sends back.
        """
        weights = 2 * self.experts // ranks * self.width * self.hidden
        memory = weights + 2 * self.tokens * self.width
        return Work(
            4 * received * self.width * self.hidden, DTYPE.itemsize * memory, DTYPE.itemsize * (sent + away) * self.width
        )

    def backward_work(self, received: int, sent: int, away: int, ranks: int) -> Work:
        """The same in the backward pass: every product has two of its size, and gradients of the weights are written."""
        forward = self.forward_work(received, sent, away, ranks)
        weights = 2 * self.experts // ranks * self.width * self.hidden
        return Work(2 * forward.flops, forward.memory_bytes + DTYPE.itemsize * weights, forward.link_bytes)

    def draw_router(self, device: torch.device, seed: int = 0) -> Tensor:
        """DTYPE [experts, width]: the router's weight, equal on all ranks, for logits of the experts' popularity and noise.

        The first column holds the logarithms of the popularity, and the first element of a token is 1.
        """
        generator = torch.Generator().manual_seed(seed)
        router = torch.empty(self.experts, self.width).normal_(0, self.width**-0.5, generator=generator)
        router[:, 0] = 0.0
        if self.routing == "zipf":
            # Popular experts lie anywhere.
            places = torch.randperm(self.experts, generator=generator)
            router[places, 0] = -_ZIPF_EXPONENT * torch.arange(1.0, self.experts + 1).log()
        return router.to(device, DTYPE)

    def draw_tokens(self, rank: int, ranks: int, device: torch.device, seed: int = 0) -> Tensor:
        """DTYPE [tokens, width] of this rank."""
        generator = torch.Generator(device).manual_seed(-1 - seed * ranks - rank)
        tokens = torch.empty(self.tokens, self.width, dtype=DTYPE, device=device).normal_(generator=generator)
        tokens[:, 0] = 1.0
        return tokens

    def draw_weights(self, rank: int, ranks: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """DTYPE [experts / ranks, hidden, width] and [experts / ranks, width, hidden] of this rank, for results of about 1."""
        generator = torch.Generator(device).manual_seed(seed * ranks + rank)
        own = self.experts // ranks
        w_in, w_out = (
            torch.empty(own, rows, depth, dtype=DTYPE, device=device).normal_(0, depth**-0.5, generator=generator)
            for rows, depth in ((self.hidden, self.width), (self.width, self.hidden))
        )
        return w_in, w_out


def tiny_products() -> list[Product]:
    """For a test on the CPU."""
    return [Product(8, 16, 8), Product(24, 8, 16)]


def tiny_layers() -> list[Layer]:
    """For a test on the CPU."""
    return [Layer(4, 2, 8, 16, 12, "balanced"), Layer(8, 3, 16, 8, 20, "zipf")]


def full_products() -> list[Product]:
    return [Product(*shape) for shape in PRODUCTS]


def few_tiles() -> list[Product]:
    return [Product(*shape) for shape in FEW_TILES]


def full_layers() -> list[Layer]:
    layers = [Layer(*shape, routing) for shape, routing in itertools.product(LAYERS, ("balanced", "zipf"))]
    return [layer for layer in layers if layer.routing == "balanced" or layer.top_k < layer.experts]  # all experts: no skew


PRODUCT_CELLS = {"tiny": tiny_products, "full": full_products, "few": few_tiles}
LAYER_CELLS: dict[str, Callable[[], list[Layer]]] = {"tiny": tiny_layers, "full": full_layers, "few": list}
