"""Jagged batches for tests of HSTU's attention, and its formula, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.ops.hstu_attention import BUCKETS, JaggedQueries, RelativeBias

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """Shapes and dtypes of a batch.

    Attributes:
        lengths: keys of each sample.
        queries: how many of the last places have queries; None: all.
        targets: how many of the last places are candidates; None: there are none.
        biases: ``distance`` and ``time``, or one of them.
        device: of all tensors.
    """

    lengths: Sequence[int]
    heads: int = 2
    d: int = 16
    d_v: int | None = None
    dtype: torch.dtype = torch.float32
    queries: Sequence[int] | None = None
    targets: Sequence[int] | None = None
    biases: tuple[str, ...] = ("distance", "time")
    seed: int = 0
    device: str = "cpu"

    def batch(self, **changes: Any) -> JaggedQueries:
        counts = self.queries or self.lengths

        def places_before(last: Sequence[int]) -> Tensor:
            places = [all_ - few for all_, few in zip(self.lengths, last, strict=True)]
            return torch.tensor(places, dtype=torch.int64, device=self.device)

        return JaggedQueries(
            key_bounds=bounds_of(self.lengths).to(self.device),
            query_bounds=bounds_of(counts).int().to(self.device),
            first_places=places_before(counts),
            longest=max(self.lengths, default=0),
            targets_from=self.targets and places_before(self.targets),
            most_queries=self.queries and max(self.queries),
        )._replace(**changes)

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Queries, keys, values, the tables that there are, and the gradient of the result: the same numbers in ``dtype``."""
        generator = torch.Generator().manual_seed(self.seed)
        rows, of_queries, d_v = sum(self.lengths), sum(self.queries or self.lengths), self.d_v or self.d

        def random(*shape: int, as_dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator).to(as_dtype).to(self.device, dtype or as_dtype)

        inputs = [random(of_queries, self.heads, self.d), random(rows, self.heads, self.d), random(rows, self.heads, d_v)]
        widths = {"distance": max(self.lengths, default=0) + 5, "time": BUCKETS}
        tables = [random(self.heads, widths[name], as_dtype=torch.float32) for name in self.biases]
        return [*inputs, *tables, random(of_queries, self.heads, d_v)]

    def times(self) -> Tensor:
        """Seconds, in order within a sample, of steps between a second and a month."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows = sum(self.lengths)
        times = 1_700_000_000 + (2 ** (21.3 * torch.rand(rows, generator=generator))).long().cumsum(0) % 900_000_000
        return times.to(self.device)

    def run(self, function: Function, dtype: torch.dtype | None = None, batch: JaggedQueries | None = None) -> list[Tensor]:
        """The function's result and all gradients, of tensors in ``dtype``."""
        *inputs, gradient = self.tensors(dtype)
        inputs = [one.requires_grad_() for one in inputs]
        result = function(*inputs[:3], batch or self.batch(), **self.numbers(), bias=self.bias(inputs[3:]))
        return [result, *torch.autograd.grad(result, inputs, gradient)]

    def numbers(self) -> dict[str, float]:
        return {"scale": self.d**-0.5, "divisor": 50.0}

    def bias(self, tables: Sequence[Tensor]) -> RelativeBias | None:
        found = dict(zip(self.biases, tables, strict=True))
        times = self.times() if "time" in found else None
        return RelativeBias(found.get("distance"), found.get("time"), times) if found else None


def bounds_of(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def bucket(seconds: int) -> int:
    """Two an octave: the first half of [2^e, 2^(e + 1)), and the second."""
    exponent = max(seconds, 1).bit_length() - 1
    return 2 * exponent + (2 * max(seconds, 1) >= 3 * 2**exponent)


def pair_by_pair(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: JaggedQueries,
    *,
    scale: float,
    divisor: float,
    bias: RelativeBias | None,
) -> Tensor:
    """The formula, one pair of places at a time."""
    result = torch.zeros(*queries.shape[:2], values.shape[2], dtype=values.dtype)
    for sample in range(batch.samples):
        first_key, end_key = batch.key_bounds[sample : sample + 2].tolist()
        first_query, end_query = batch.query_bounds[sample : sample + 2].tolist()
        targets = end_key if batch.targets_from is None else int(batch.targets_from[sample])
        for row in range(first_query, end_query):
            i = int(batch.first_places[sample]) + row - first_query
            for j in range(end_key - first_key):
                if j > i or (j >= targets and j != i):
                    continue
                for head in range(queries.shape[1]):
                    score = scale * float(queries[row, head] @ keys[first_key + j, head])
                    if bias is not None and bias.by_distance is not None:
                        score += float(bias.by_distance[head, min(i, targets) - min(j, targets)])
                    if bias is not None and bias.by_time is not None and bias.times is not None:
                        seconds = int(bias.times[first_key + i] - bias.times[first_key + j])
                        score += float(bias.by_time[head, bucket(seconds)])
                    result[row, head] += score / (1 + math.exp(-score)) * values[first_key + j, head] / divisor
    return result
