"""HSTU's attention against attention with a softmax, and against Meta's kernel of the same; on each rank alone.

The contestants of a cell read the same queries, keys and values, jagged and causal:

* baseline: FlashAttention of jagged samples (torch's ``varlen_attn``); without GPUs, torch's attention of padded samples;
* cudnn: cuDNN's attention, where all samples are of one length;
* generative_recommenders: the Triton kernel of https://github.com/meta-recsys/generative-recommenders, in cells without
  biases, if its package can be imported (it is not on PyPI);
* fused: ``hstu_attention``, with the cell's biases, which the others have not. Its bits are the same in each run; theirs, of
  gradients, are not.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from benchmarks.common.harness import HALF, Work, World, relative_error
from benchmarks.operators import stress
from benchmarks.operators.case import Case, Operator, Pass
from benchmarks.operators.products import largest_error
from dlrm_fused.models.jagged import JaggedBatch
from dlrm_fused.ops.hstu_attention import BUCKETS, JaggedQueries, RelativeBias, hstu_attention
from dlrm_fused.ops.hstu_attention.reference import reference

# Tokens of a batch, by the longest sample.
TOKENS = {512: 64 * 512, 2048: 32 * 2048, 4096: 16 * 4096}
HEADS = ((8, 64), (4, 128))
_RIVAL = "generative_recommenders"
_SEED = 5
# Seconds between two tokens: between one and 2^21, evenly by their logarithm.
_LONGEST_STEP = 21.0

Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Cell:
    """One batch of a rank.

    Attributes:
        samples, longest: how many, and tokens of the longest.
        lengths: ``full``: all have so many; ``jagged``: 1 to so many, evenly.
        biases: ``none``, or ``both``: by distance and by time.
    """

    samples: int
    longest: int
    heads: int
    d: int
    lengths: str
    biases: str

    @property
    def name(self) -> str:
        return f"{self.samples}x{self.longest} {self.lengths} {self.heads}x{self.d} biases {self.biases}"

    def draw_lengths(self, generator: torch.Generator) -> Tensor:
        if self.lengths == "full":
            return torch.full((self.samples,), self.longest)
        return torch.randint(1, self.longest + 1, (self.samples,), generator=generator)


class Batch:
    """A cell's tensors on a rank.

    Attributes:
        lengths: tokens of each sample.
        rows: queries, keys and values, each [n, heads, d].
        tables: biases by distance and by time, or none.
        gradient: of the result.
    """

    def __init__(self, cell: Cell, device: torch.device, seed: int) -> None:
        self.cell, generator = cell, torch.Generator().manual_seed(seed)
        self.lengths: list[int] = cell.draw_lengths(generator).tolist()
        total = sum(self.lengths)
        on_device = torch.Generator(device).manual_seed(seed)

        def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
            return torch.randn(shape, generator=on_device, device=device).to(dtype)

        self.rows = [random(total, cell.heads, cell.d).requires_grad_() for _ in range(3)]
        self.gradient = random(total, cell.heads, cell.d)
        widths = {"none": (), "both": (cell.longest, BUCKETS)}[cell.biases]
        self.tables = [random(cell.heads, width, dtype=torch.float32).requires_grad_() for width in widths]
        steps = 2 ** (_LONGEST_STEP * torch.rand(total, generator=generator, dtype=torch.float64))
        self.times = steps.long().cumsum(0).to(device)
        self.bounds = F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0)).to(device, torch.int32)

    @property
    def inputs(self) -> list[Tensor]:
        """All that gradients flow into, by the operator."""
        return [*self.rows, *self.tables]

    @property
    def scale(self) -> float:
        """The scale of scores."""
        return float(self.cell.d**-0.5)

    def attend(
        self, by: Callable[..., Tensor], inputs: Sequence[Tensor], bounds: Tensor, longest: int, times: Tensor
    ) -> Tensor:
        """Return HSTU's attention of samples by the operator or its reference."""
        queries, keys, values, *tables = inputs
        bias = RelativeBias(tables[0], tables[1], times) if tables else None
        batch = JaggedQueries.among_all(bounds, longest)
        return by(queries, keys, values, batch, scale=self.scale, divisor=float(self.cell.longest), bias=bias)

    def fused(self) -> Tensor:
        return self.attend(hstu_attention, self.inputs, self.bounds, self.cell.longest, self.times)

    def expected(self) -> list[Tensor]:
        """The result and all gradients in float32, computed sample by sample."""
        exact = [one.detach().float().requires_grad_() for one in self.inputs]
        gradients, results, begin = [torch.zeros_like(one) for one in exact], [], 0
        for length in self.lengths:
            end = begin + length
            bounds = torch.tensor([0, length], device=self.gradient.device)
            own = [*(one[begin:end] for one in exact[:3]), *exact[3:]]
            result = self.attend(reference, own, bounds, length, self.times[begin:end])
            for total, part in zip(
                gradients, torch.autograd.grad(result, exact, self.gradient[begin:end].float()), strict=True
            ):
                total += part
            results.append(result.detach())
            begin = end
        return [torch.cat(results), *gradients]


class AttentionCase(Case):
    """A cell on this rank."""

    baseline, alone = "baseline", ""
    rivals = ("baseline", "cudnn", _RIVAL)

    def __init__(self, world: World, cell: Cell) -> None:
        super().__init__(world, cell)
        self.batch = Batch(cell, world.device, _SEED + world.rank)

    def passes(self, stage: str) -> dict[str, Pass]:
        attentions = self.softmax_attentions()
        if self.cell.biases == "none" and self.world.device.type == "cuda" and importlib.util.find_spec(_RIVAL):
            attentions[_RIVAL] = self.rival()
        forwards: dict[str, Callable[[], Tensor]] = {"fused": self.batch.fused}
        forwards |= {name: partial(attend, *self.batch.rows) for name, attend in attentions.items()}
        if stage == "attention_forward":
            return {name: partial(_without_gradients, forward) for name, forward in forwards.items()}
        return {name: partial(self.with_gradients, name, forward) for name, forward in forwards.items()}

    def with_gradients(self, name: str, forward: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        inputs = self.batch.inputs if name == "fused" else self.batch.rows
        return torch.autograd.grad(forward(), inputs, self.batch.gradient)

    def softmax_attentions(self) -> dict[str, Attend]:
        """Attention as a Transformer has it, of the same samples, by contestant."""
        cell, bounds = self.cell, self.batch.bounds
        if self.world.device.type != "cuda":
            batch = JaggedBatch.of(torch.tensor(self.batch.lengths) - 1, cell.longest, sum(self.batch.lengths))
            return {"baseline": lambda *rows: batch.attend(torch.stack(rows, dim=2))}

        def flash(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            longest = cell.longest
            attended = varlen_attn(queries, keys, values, bounds, bounds, longest, longest, window_size=(-1, 0))
            assert isinstance(attended, Tensor)
            return attended

        def cudnn(*rows: Tensor) -> Tensor:
            queries, keys, values = (one.unflatten(0, (cell.samples, cell.longest)).transpose(1, 2) for one in rows)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(queries, keys, values, is_causal=True).transpose(1, 2).flatten(0, 1)

        return {"baseline": flash, **({"cudnn": cudnn} if cell.lengths == "full" else {})}

    def rival(self) -> Attend:
        from generative_recommenders.ops.triton.triton_hstu_attention import triton_hstu_mha

        longest, scale, bounds = self.cell.longest, self.batch.scale, self.batch.bounds.long()
        return lambda queries, keys, values: triton_hstu_mha(longest, scale, queries, keys, values, bounds)

    @cached_property
    def expected(self) -> list[Tensor]:
        return self.batch.expected()

    def check(self, stage: str) -> dict[str, Any]:
        batch = self.batch
        found = [result := batch.fused()]
        if stage == "attention_training":
            found += torch.autograd.grad(result, batch.inputs, batch.gradient)
        names = ["fused", "queries", "keys", "values", "by_distance", "by_time"]
        own = {name: relative_error(*pair) for name, *pair in zip(names, found, self.expected, strict=False)}
        errors = {name: max(rank[name] for rank in self.world.gather(own)) for name in own}
        return {"passed": max(errors.values()) <= largest_error(terms_are_rounded=True), "errors": errors}

    def phases(self, stage: str) -> Sequence[Work]:
        row_bytes = 2.0 * self.cell.heads * self.cell.d * sum(self.batch.lengths)
        pairs = sum(length * (length + 1) / 2 for length in self.batch.lengths)
        product = 2.0 * self.cell.heads * self.cell.d * pairs
        phases = [Work(2 * product, 4 * row_bytes, 0)]
        if stage == "attention_training":
            phases.append(Work(5 * product, 7 * row_bytes, 0))
        return phases


@torch.no_grad()
def _without_gradients(forward: Callable[[], Tensor]) -> Tensor:
    return forward()


def all_cells() -> list[Cell]:
    """24 cells: the batches of training a long history, full and jagged, without and with biases."""
    drawn = itertools.product(TOKENS.items(), HEADS, ("full", "jagged"), ("none", "both"))
    return [Cell(tokens // longest, longest, *shape, lengths, biases) for (longest, tokens), shape, lengths, biases in drawn]


def tiny_cells() -> list[Cell]:
    return [Cell(3, 20, 4, 8, "full", "none"), Cell(3, 20, 4, 16, "jagged", "both")]


class _NoWorkspace:
    """The operator has none: it does not communicate."""

    def raise_fault(self) -> None:
        """There is nothing to raise."""


def works(world: World, *, tiny: bool) -> Sequence[stress.Work]:
    """Results and gradients of the cells of all kinds of lengths and biases."""
    cells = tiny_cells() if tiny else [cell for cell in all_cells() if (cell.longest, cell.d) == (2048, 64)]
    return [_stressed(world, cell) for cell in cells]


def _stressed(world: World, cell: Cell) -> stress.Work:
    batch = Batch(cell, world.device, _SEED + world.rank)

    def compute(delay: Callable[[], None]) -> list[Tensor]:
        result = batch.fused()
        delay()
        return [result.detach(), *torch.autograd.grad(result, batch.inputs, batch.gradient)]

    def check(found: Sequence[Tensor]) -> tuple[float, bool]:
        error = max(relative_error(*pair) for pair in zip(found, batch.expected(), strict=True))
        return error, error <= largest_error(terms_are_rounded=True)

    return stress.Work(cell.name, _NoWorkspace(), compute, check, {"cell": cell.name})


OPERATOR = Operator(
    open=AttentionCase,
    sets={"tiny": tiny_cells, "all": all_cells},
    stages=lambda cell: ["attention_forward", "attention_training"],
    works=works,
)
