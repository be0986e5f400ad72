"""The gradients of the biases of HSTU's attention, for GPUs: sums of the scores' gradients over all pairs of places with a
distance, or a bucket of times, of all samples.

The kernel that walks the keys of a tile of queries has the scores' gradients of a tile of pairs at a time. Pairs of a distance
lie on a diagonal there; they come through shared memory into a column, which is added up. Pairs of a bucket are added up one
bucket after the other, for the buckets that occur. A program of that kernel works for one head, on several tiles of queries.
It has a row of its own for its sums, and torch adds the rows: without atomics, in one order.

All candidates of a sample have the distances of the first one. So their pairs of a distance with the history lie in a column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from dlrm_fused.ops.hstu_attention.kernel import Call, bucket_of
from dlrm_fused.ops.hstu_attention.reference import BUCKETS
from dlrm_fused.symmetric.launches import next_power_of_2

_BUCKETS = tl.constexpr(BUCKETS)
_ROWS_OF_WARP = tl.constexpr(16)  # of a product


class Sums(NamedTuple):
    """The sums of all programs, for kernels; a tensor without elements stands for what is not wanted.

    Attributes:
        distances: fp32 [1, programs, P], zeros at first; with candidates [2, programs, P], the second of pairs of a candidate
            and a key of the history.
        of_targets: the last of ``distances``, [programs, P].
        times: fp32 [programs, BUCKETS]; every program stores its row.
        columns: P, at least the longest sample; a power of two, since kernels are compiled by its divisors.
    """

    distances: Any
    of_targets: Any
    times: Any
    columns: int

    @staticmethod
    def new(call: Call, programs: int, of_distances: bool, of_times: bool) -> Sums:
        """Return memory for the sums that are wanted."""
        kinds, longest = 1 + (call.batch.targets_from is not None), next_power_of_2(max(1, call.batch.longest))
        device, dtype = call.queries.device, torch.float32
        distances = torch.zeros((kinds, programs, longest) if of_distances else (1, 0), dtype=dtype, device=device)
        times = torch.empty((programs, BUCKETS) if of_times else 0, dtype=dtype, device=device)
        return Sums(distances, distances[-1], times, longest)

    def gradients(self, call: Call) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the biases by distance [heads, P] and by time [heads, BUCKETS], in their dtypes; None for
        those that are not wanted. Program p is of head p % heads."""
        of_distances = _sum_of_programs(call, call.bias.by_distance, self.distances)
        return of_distances, _sum_of_programs(call, call.bias.by_time, self.times)


def _sum_of_programs(call: Call, bias: Tensor | None, sums: Tensor) -> Tensor | None:
    """Return the gradient of a bias [heads, C], the sum of those of all programs [..., programs, P]; zeros beyond P."""
    if bias is None or sums.shape[-1] == 0:
        return None
    columns, of_programs = bias.shape[1], sums.flatten(0, -2)
    found = of_programs.unflatten(0, (len(of_programs) // call.heads, call.heads))[..., :columns].sum(0) / call.divisor
    if found.shape[1] < columns:
        found = F.pad(found, (0, columns - found.shape[1]))
    return found.to(bias.dtype)


@triton.jit
def turned(tile):
    """Return a tile [A, B], A <= B, so that column c of the result has what lies on two of its diagonals: row a has the element
    of row a and column (a - c) % B."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    row, column = tl.arange(0, rows)[:, None], tl.arange(0, columns)[None, :]
    index = row * columns + ((row - column) & (columns - 1))
    flat = tl.gather(tl.reshape(tile, (rows * columns,)), tl.reshape(index, (rows * columns,)), 0)
    return tl.reshape(flat, (rows, columns))


@triton.jit
def part_of_row(sums, first, count, COLUMNS: tl.constexpr):
    """Return the addresses of a row's columns from ``first`` on, which may be negative, and which of them are in [0, count)."""
    column = first + tl.arange(0, COLUMNS)
    return sums + column, (column >= 0) & (column < count)


@triton.jit
def along_diagonals(of_scores):
    """Return the sums of a tile [ROWS, KEYS] along its diagonals: [KEYS], of pairs 0 to KEYS - 1 further apart than its first
    query and key are, and [KEYS], of pairs nearer by KEYS to 1."""
    rows: tl.constexpr = of_scores.shape[0]
    keys: tl.constexpr = of_scores.shape[1]
    columns = turned(of_scores)
    is_further = tl.arange(0, rows)[:, None] >= tl.arange(0, keys)[None, :]
    return tl.sum(tl.where(is_further, columns, 0.0), 0), tl.sum(tl.where(is_further, 0.0, columns), 0)


@triton.jit
def add_candidates(row_of_targets, of_scores, place, begin, count, targets):
    """Add the pairs of a candidate and a key of the history to the sums of their distances, and return the others.

    Args:
        place: [ROWS], of queries; ``begin``: of the first key.
        count: of the sample's keys; no candidate has ``targets`` if that is as many.
    """
    key_place = begin + tl.arange(0, of_scores.shape[1])
    of_history = (place >= targets)[:, None] & (key_place < targets)[None, :]
    of_keys = tl.sum(tl.where(of_history, of_scores, 0.0), 0)
    sums, inside = row_of_targets + (targets - key_place), (key_place < targets) & (targets < count)
    tl.store(sums, tl.load(sums, mask=inside, other=0.0) + of_keys, mask=inside)
    return tl.where(of_history, 0.0, of_scores)


@triton.jit
def no_times(ROWS: tl.constexpr):
    """Return the sums by bucket before the first tile of ROWS queries, see :func:`add_times`."""
    return tl.zeros((ROWS // _ROWS_OF_WARP, _BUCKETS), tl.float32)


@triton.jit
def add_times(sums, of_scores, times_of_queries, times_of_keys):
    """Return the sums [ROWS / 16, BUCKETS] with those of a tile of scores' gradients [ROWS, KEYS] added, by their buckets."""
    buckets = bucket_of(times_of_queries[:, None] - times_of_keys[None, :])
    # Pairs that do not see each other have zeros, in whatever bucket.
    first = bucket_of(tl.min(times_of_queries) - tl.max(times_of_keys))
    last = bucket_of(tl.max(times_of_queries) - tl.min(times_of_keys))
    rows: tl.constexpr = of_scores.shape[0]
    bucket = tl.arange(0, _BUCKETS)[None, :]
    for number in range(first, last + 1):
        of_rows = tl.sum(tl.where(buckets == number, of_scores, 0.0), 1)
        of_warps = tl.sum(tl.reshape(of_rows, (rows // _ROWS_OF_WARP, _ROWS_OF_WARP)), 1)
        sums = tl.where(bucket == number, sums + of_warps[:, None], sums)
    return sums
