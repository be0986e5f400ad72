"""The gradients of the biases of HSTU's attention, for GPUs: sums of the scores' gradients over all pairs of places with a
distance, or a bucket of times, of all samples.

Pairs of a distance i - j lie on a diagonal. A program walks the tiles that lie on one diagonal of tiles, of some samples and
one head. As each of them covers the same distances, the tiles are simply added up, and their sum is added along its diagonals
once, at the end. Buckets differ from tile to tile: the program adds up, one by one, those that occur in a tile. It stores its
sums in a place of its own, and torch adds them: without atomics, in one order.

All candidates of a sample have the distances of the first one. So their pairs of a distance lie in a column, and the program
walks the tiles of candidates and of the keys in its distances once more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.hstu_attention.backward import slope_of
from dlrm_fused.ops.hstu_attention.kernel import (
    Call,
    Rows,
    Tiles,
    at_head,
    biased,
    biases_by_time,
    bucket_of,
    fitted,
    load_tile,
    multiplied,
    sample_of,
    times_of,
    visible,
)
from dlrm_fused.ops.hstu_attention.reference import BUCKETS
from dlrm_fused.symmetric.launches import ceil_div

_BUCKETS = tl.constexpr(BUCKETS)
# At most so many, for each multiprocessor, and at least one for each diagonal of tiles and head.
_PROGRAMS = 8


class Sums(NamedTuple):
    """The sums of all programs, for kernels; a tensor without elements stands for what is not wanted.

    Attributes:
        distances: fp32 [groups, heads, diagonals, 2 * BLOCK]: number k of a diagonal is of distance
            (diagonal - 1) * BLOCK + k.
        of_targets: fp32 [groups, heads, diagonals, BLOCK], of pairs of a candidate and a key of the history: number k is of
            distance diagonal * BLOCK + k.
        times: fp32 [groups, heads, diagonals, BUCKETS].
    """

    distances: Any
    of_targets: Any
    times: Any


def biases_gradients(call: Call, gradient: Tensor, of_distances: bool, of_times: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the biases by distance [heads, P] and by time [heads, BUCKETS], in their dtypes.

    Args:
        gradient: of the result, [m, heads, d_v].
        of_distances, of_times: which of them are wanted, of biases that there are.
    """
    by_distance, by_time = call.bias.by_distance, call.bias.by_time
    if gradient.numel() == 0:
        return _zeros(by_distance, of_distances), _zeros(by_time, of_times)
    tiles = fitted(Tiles(64, 64, 4, 2), call, kept=lambda tiles: 0, stepped=lambda tiles: tiles.rows + tiles.keys)
    block = min(tiles.rows, tiles.keys)
    diagonals = ceil_div(call.batch.longest - 1, block) + 1
    groups = groups_of_samples(call, diagonals)
    shape = groups, call.heads, diagonals
    any_sums = torch.empty(0, dtype=torch.float32, device=gradient.device)
    distances = any_sums.new_empty((*shape, 2 * block)) if of_distances else any_sums
    has_targets = of_distances and call.batch.targets_from is not None
    of_targets = any_sums.new_empty((*shape, block)) if has_targets else any_sums
    times = any_sums.new_empty((*shape, BUCKETS)) if of_times else any_sums
    call.launch(
        biases_gradient_kernel, groups * call.heads * diagonals, (Rows.of(gradient), Sums(distances, of_targets, times)),
        (groups, call.batch.samples, diagonals, call.heads, call.scale, 1 / call.divisor),
        OF_DISTANCES=of_distances, OF_TIMES=of_times, BLOCK=block, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    of_table = of_buckets = None
    if of_distances and by_distance is not None:
        # Half of what a block of diagonals has sums for are distances of the block before it.
        first, second = distances.sum(0).unflatten(-1, (2, block)).unbind(2)
        second[:, :-1] += first[:, 1:]
        if has_targets:
            second += of_targets.sum(0)
        of_table = by_distance.new_zeros(by_distance.shape)
        found = min(diagonals * block, by_distance.shape[1])
        of_table[:, :found] = second.flatten(1)[:, :found]
    if of_times and by_time is not None:
        of_buckets = times.sum((0, 2)).to(by_time.dtype)
    return of_table, of_buckets


def groups_of_samples(call: Call, diagonals: int) -> int:
    """Return into how many groups samples are divided, so that all multiprocessors have work."""
    programs = _PROGRAMS * gpu_of(call.queries.device).multiprocessors
    return min(call.batch.samples, ceil_div(programs, call.heads * diagonals))


def _zeros(bias: Tensor | None, is_wanted: bool) -> Tensor | None:
    return bias.new_zeros(bias.shape) if is_wanted and bias is not None else None


@triton.jit
def _scores_gradient(
    queries, keys, values, gradients, bias, by_time, head, first_key, place, begin_row, begin_key, count, query_count, targets,
    scale,
    D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BY_DISTANCE: tl.constexpr,
    BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a tile's scores, zeros for pairs that do not see each other, and the pairs' buckets.

    Args:
        queries, keys, values, gradients: addresses of the sample's first rows, and strides of a row.
        place: of the query ``begin_row``.
        begin_key: place of the first key, maybe below 0.
    """
    row = tl.arange(0, BLOCK)
    i, j = place + row, begin_key + row
    is_query, is_key = begin_row + row < query_count, (j >= 0) & (j < count)
    query = load_tile(queries[0], queries[1], begin_row, row, is_query, True, D, COLUMNS)
    key = load_tile(keys[0], keys[1], begin_key, row, is_key, True, D, COLUMNS)
    scores = multiplied(query, key.T, TF32) * scale
    i_inside, j_inside = tl.minimum(i, count - 1), tl.maximum(j, 0)
    time_i = times_of(bias, first_key, i_inside, is_query, BY_TIME)
    time_j = times_of(bias, first_key, j_inside, is_key, BY_TIME)
    scores = biased(
        scores, bias, by_time, head, i_inside[:, None], j_inside[None, :], tl.minimum(place, count - 1),
        tl.maximum(begin_key + BLOCK - 1, 0), time_i[:, None], time_j[None, :], count, targets, True, BY_DISTANCE, BY_TIME,
        HAS_TARGETS,
    )  # fmt: skip
    gradient = load_tile(gradients[0], gradients[1], begin_row, row, is_query, True, D_V, VALUE_COLUMNS)
    value = load_tile(values[0], values[1], begin_key, row, is_key, True, D_V, VALUE_COLUMNS)
    seen = visible(i[:, None], j[None, :], count, targets, HAS_TARGETS) & is_query[:, None] & (j >= 0)[None, :]
    of_scores = tl.where(seen, multiplied(gradient, value.T, TF32) * slope_of(scores), 0.0)
    # Pairs that are not seen have the bucket of the smallest difference: they add zeros.
    buckets = bucket_of(tl.where(seen, time_i[:, None] - time_j[None, :], 1))
    return of_scores, buckets


@triton.jit(do_not_specialize=["groups", "samples", "diagonals", "heads"])
def biases_gradient_kernel(
    queries, keys, values, bias, batch, gradients, sums, groups, samples, diagonals, heads, scale, factor,
    D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BY_DISTANCE: tl.constexpr,
    BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, OF_DISTANCES: tl.constexpr, OF_TIMES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """See :func:`biases_gradients`.

    Args:
        groups: of samples; the samples of one lie ``groups`` apart.
        others: as of :func:`~dlrm_fused.ops.hstu_attention.kernel.forward_kernel`.
    """
    program = tl.program_id(0)
    # The longest diagonals, those of the smallest distances, come first.
    diagonal, head, group = program // (groups * heads), program // groups % heads, program % groups
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    target_total = tl.zeros((BLOCK, BLOCK), tl.float32)
    row, bucket = tl.arange(0, BLOCK), tl.arange(0, _BUCKETS)[None, :]
    time_total = tl.zeros((BLOCK, _BUCKETS), tl.float32)
    by_time = biases_by_time(bias, head, BY_TIME)
    for sample in range(group, samples, groups):
        first_key, count, first_query, query_count, first_place, targets = sample_of(batch, sample, HAS_TARGETS)
        of_queries = (at_head(queries, first_query, head), queries.of_row)
        of_keys, of_values = (at_head(keys, first_key, head), keys.of_row), (at_head(values, first_key, head), values.of_row)
        of_gradients = (at_head(gradients, first_query, head), gradients.of_row)
        # Tiles of queries from the first one on whose keys are not all before the sample's; of candidates, only the diagonal
        # has more.
        shift = diagonal * BLOCK - first_place
        begin = tl.maximum(shift, 0) // BLOCK
        end = tl.cdiv(query_count, BLOCK)
        if diagonal > 0:
            end = tl.minimum(end, tl.cdiv(tl.maximum(targets + shift, 0), BLOCK))
        for tile in range(begin, end):
            begin_row = tile * BLOCK
            of_scores, buckets = _scores_gradient(
                of_queries, of_keys, of_values, of_gradients, bias, by_time, head, first_key, first_place + begin_row,
                begin_row, begin_row - shift, count, query_count, targets, scale,
                D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32, BLOCK,
            )  # fmt: skip
            if OF_DISTANCES:
                if HAS_TARGETS:
                    i, j = first_place + begin_row + row[:, None], begin_row - shift + row[None, :]
                    total += tl.where((i >= targets) & (j < targets), 0.0, of_scores)
                else:
                    total += of_scores
            if OF_TIMES:
                for number in range(tl.min(buckets), tl.max(buckets) + 1):
                    of_bucket = tl.sum(tl.where(buckets == number, of_scores, 0.0), 1)[:, None]
                    time_total = tl.where(bucket == number, time_total + of_bucket, time_total)
        if HAS_TARGETS and OF_DISTANCES:
            begin_key = targets - (diagonal + 1) * BLOCK + 1
            begin = tl.maximum(targets - first_place, 0)
            steps = tl.cdiv(tl.maximum(query_count - begin, 0), BLOCK) if begin_key + BLOCK > 0 else 0
            for step in range(steps):
                begin_row = begin + step * BLOCK
                of_scores, _ = _scores_gradient(
                    of_queries, of_keys, of_values, of_gradients, bias, by_time, head, first_key, first_place + begin_row,
                    begin_row, begin_key, count, query_count, targets, scale,
                    D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32, BLOCK,
                )  # fmt: skip
                target_total += tl.where((begin_key + row < targets)[None, :], of_scores, 0.0)
    place = (group * heads + head).to(tl.int64) * diagonals + diagonal
    if OF_DISTANCES:
        # Column k of row a gets the element of distance a - c = k - BLOCK from the diagonal.
        number = tl.arange(0, 2 * BLOCK)[None, :]
        column = row[:, None] - number + BLOCK
        inside = (column >= 0) & (column < BLOCK)
        skewed = tl.gather(total, tl.where(inside, column, 0), 1)
        by_distance = tl.sum(tl.where(inside, skewed, 0.0), 0)
        tl.store(sums.distances + place * (2 * BLOCK) + tl.arange(0, 2 * BLOCK), by_distance * factor)
        if HAS_TARGETS:
            # The last key of a tile has the smallest distance.
            tl.store(sums.of_targets + place * BLOCK + BLOCK - 1 - row, tl.sum(target_total, 0) * factor)
    if OF_TIMES:
        tl.store(sums.times + place * _BUCKETS + tl.arange(0, _BUCKETS), tl.sum(time_total, 0) * factor)
