"""The gradients of queries, keys and values of HSTU's attention, for GPUs.

With p_ij = silu(s_ij) and a gradient g_i of the result, all sums over the pairs of which i sees j:

    dv_j = 1 / divisor * sum over i of p_ij * g_i
    ds_ij = <g_i, v_j> * silu'(s_ij),        silu'(s) = sigmoid(s) * (1 + s * (1 - sigmoid(s)))
    dq_i = scale / divisor * sum over j of ds_ij * k_j
    dk_j = scale / divisor * sum over i of ds_ij * q_i

One kernel takes tiles of queries, and walks their keys as the forward pass does; it also adds up the gradients of biases. The
other one has a program for each tile of keys, which walks the queries that see it. Both compute the scores again. All sums have
one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.hstu_attention.bias_gradient import (
    Sums,
    add_candidates,
    add_times,
    along_diagonals,
    no_times,
    part_of_row,
)
from dlrm_fused.ops.hstu_attention.kernel import (
    Call,
    Rows,
    Tiles,
    at_head,
    biased,
    biases_by_time,
    fitted,
    item_of,
    load_tile,
    multiplied,
    sample_of,
    sigmoid,
    store_tile,
    times_of,
    visible,
    walk_of_queries,
)
from dlrm_fused.symmetric.launches import ceil_div

# At most so many for each multiprocessor, where each has a row of sums of biases' gradients.
_PROGRAMS_WITH_SUMS = 16


def queries_and_biases_gradients(
    call: Call, gradient: Tensor, of_distances: bool = False, of_times: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of queries, [m, heads, d] in their dtype, and of biases by distance and by time, as wanted.

    Columns of gradients are contiguous, here and below.

    Args:
        gradient: of the result, [m, heads, d_v].
        of_distances, of_times: which of the biases' gradients are wanted, of biases that there are.
    """
    result = torch.empty(call.queries.shape, dtype=call.queries.dtype, device=call.queries.device)
    tiles = Tiles(64, 64, 4, 3 if sum(call.widths) <= 128 else 2)
    tiles = fitted(tiles, call, kept=lambda tiles: tiles.rows, stepped=lambda tiles: tiles.keys)
    tiles = tiles._replace(rows=min(tiles.rows, tiles.keys))
    query_tiles, has_sums = ceil_div(call.batch.most, tiles.rows), of_distances or of_times
    # Both are of one head.
    programs = items = call.batch.samples * query_tiles if result.numel() else 0
    if has_sums:
        programs = min(items, ceil_div(_PROGRAMS_WITH_SUMS * gpu_of(call.queries.device).multiprocessors, call.heads))
    sums = Sums.new(call, programs * call.heads, of_distances, of_times)
    if items:
        call.launch(
            queries_gradient_kernel, programs * call.heads, (Rows.of(gradient), Rows.of(result), sums),
            (query_tiles, call.batch.samples, max(1, call.band() // call.heads), call.heads, (call.scale, 1 / call.divisor)),
            OF_BIASES=of_distances + 2 * of_times, ROWS=tiles.rows, KEYS=tiles.keys, num_warps=tiles.warps,
            num_stages=tiles.stages,
        )  # fmt: skip
    return result, *sums.gradients(call)


def keys_and_values_gradients(call: Call, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys [n, heads, d] and values [n, heads, d_v], in their dtypes."""
    of_keys = torch.empty(call.keys.shape, dtype=call.keys.dtype, device=call.keys.device)
    of_values = torch.empty(call.values.shape, dtype=call.values.dtype, device=call.values.device)
    if len(gradient) == 0 or of_values.numel() == 0:
        return of_keys.zero_(), of_values.zero_()
    has_both_biases = call.bias.by_distance is not None and call.bias.by_time is not None
    tiles = Tiles(64, 64, 4, 2) if has_both_biases and sum(call.widths) <= 128 else Tiles(32, 64, 4, 3)
    tiles = fitted(tiles, call, kept=lambda tiles: tiles.keys, stepped=lambda tiles: tiles.rows)
    key_tiles = ceil_div(call.batch.longest, tiles.keys)
    call.launch(
        keys_gradient_kernel, call.pairs * key_tiles, (Rows.of(gradient), Rows.of(of_keys), Rows.of(of_values)),
        (key_tiles, call.pairs, call.band(), call.heads, call.scale, 1 / call.divisor),
        ROWS=tiles.rows, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return of_keys, of_values


@triton.jit
def slope_of(scores):
    """Return the derivative of silu at scores."""
    rate = sigmoid(scores)
    return rate + scores * rate * (1 - rate)


@triton.jit
def _add_keys(
    total, carried, times, query, gradient, place, first_place, time, keys, values, of_key, of_value, bias, by_time,
    row_of_sums, row_of_targets, head, first_key, begin, count, targets, scale,
    IS_MASKED: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    BY_DISTANCE: tl.constexpr, BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, KEYS: tl.constexpr,
    OF_DISTANCES: tl.constexpr, OF_TIMES: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a tile of queries and of biases what comes from the KEYS keys from place ``begin`` on.

    Args:
        total: the gradient of queries.
        carried: [KEYS], what the tile before has of this one's distances, from that of its first query and key on.
        times: by bucket, see :mod:`~dlrm_fused.ops.hstu_attention.bias_gradient`.
    """
    if OF_DISTANCES:  # no other tile stores at these distances, so they are loaded before the products
        sums, is_distance = part_of_row(row_of_sums, first_place - begin, count, KEYS)
        carried += tl.load(sums, mask=is_distance, other=0.0)
    row = tl.arange(0, KEYS)
    j = begin + row
    inside = j < count
    key = load_tile(keys, of_key, begin, row, inside, IS_MASKED, D, COLUMNS)
    value = load_tile(values, of_value, begin, row, inside, IS_MASKED, D_V, VALUE_COLUMNS)
    scores = multiplied(query, key.T, TF32) * scale
    # Keys that are none have the last one's time, so that they are in no bucket of their own.
    time_j = times_of(bias, first_key, tl.minimum(j, count - 1), j >= 0, BY_TIME)
    scores = biased(
        scores, bias, by_time, head, place[:, None], j[None, :], first_place, begin + KEYS - 1, time[:, None], time_j[None, :],
        count, targets, IS_MASKED, BY_DISTANCE, BY_TIME, HAS_TARGETS,
    )  # fmt: skip
    of_scores = multiplied(gradient, value.T, TF32) * slope_of(scores)
    if IS_MASKED:
        of_scores = tl.where(visible(place[:, None], j[None, :], count, targets, HAS_TARGETS), of_scores, 0.0)
    total += multiplied(of_scores.to(key.dtype), key, TF32)
    if OF_TIMES:
        times = add_times(times, of_scores, time, time_j)
    if OF_DISTANCES:
        if HAS_TARGETS:
            of_scores = add_candidates(row_of_targets, of_scores, place, begin, count, targets)
        further, nearer = along_diagonals(of_scores)
        tl.store(sums, carried + further, mask=is_distance)
        carried = nearer
    return total, carried, times


@triton.jit
def _walk_keys(
    queries, keys, values, bias, batch, gradients, result, by_time, row_of_sums, row_of_targets, times, head, item, tiles,
    samples, band, factors,
    D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BY_DISTANCE: tl.constexpr,
    BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, OF_DISTANCES: tl.constexpr, OF_TIMES: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a tile of queries of a head, add to the sums of distances, and return the sums of ``times``."""
    scale, factor = factors
    sample, number = item_of(item, tiles, samples, band)
    first_key, count, first_query, query_count, first_place, targets = sample_of(batch, sample, HAS_TARGETS)
    begin_of_tile = (tiles - 1 - number) * ROWS  # the last queries see the most keys
    if begin_of_tile < query_count:
        row = tl.arange(0, ROWS)
        inside = begin_of_tile + row < query_count
        at_queries, at_gradients = at_head(queries, first_query, head), at_head(gradients, first_query, head)
        query = load_tile(at_queries, queries.of_row, begin_of_tile, row, inside, True, D, COLUMNS)
        gradient = load_tile(at_gradients, gradients.of_row, begin_of_tile, row, inside, True, D_V, VALUE_COLUMNS)
        begin_place = first_place + begin_of_tile
        # Rows that are none see what the last query sees: nothing that no query sees gets into sums.
        place = tl.minimum(begin_place + row, first_place + query_count - 1)
        time = times_of(bias, first_key, place, place >= 0, BY_TIME)
        at_keys, at_values = at_head(keys, first_key, head), at_head(values, first_key, head)
        total, carried = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((KEYS,), tl.float32)
        last_place = first_place + tl.minimum(begin_of_tile + ROWS, query_count) - 1
        seen_by_all, jump_at, jump_to, steps = walk_of_queries(begin_place, last_place, targets, KEYS)
        for begin in range(0, seen_by_all, KEYS):
            total, carried, times = _add_keys(
                total, carried, times, query, gradient, place, begin_place, time, at_keys, at_values, keys.of_row,
                values.of_row, bias, by_time, row_of_sums, row_of_targets, head, first_key, begin, count, targets, scale,
                False, D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32, KEYS, OF_DISTANCES, OF_TIMES,
            )  # fmt: skip
        end = seen_by_all
        for step in range(steps):
            begin = seen_by_all + step * KEYS
            begin = tl.where(begin < jump_at, begin, begin - jump_at + jump_to)
            total, carried, times = _add_keys(
                total, carried, times, query, gradient, place, begin_place, time, at_keys, at_values, keys.of_row,
                values.of_row, bias, by_time, row_of_sums, row_of_targets, head, first_key, begin, count, targets, scale,
                True, D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32, KEYS, OF_DISTANCES, OF_TIMES,
            )  # fmt: skip
            end = begin + KEYS
        if OF_DISTANCES:
            sums, is_distance = part_of_row(row_of_sums, begin_place - end, count, KEYS)
            tl.store(sums, tl.load(sums, mask=is_distance, other=0.0) + carried, mask=is_distance)
            tl.debug_barrier()  # a thread loads next what another one has stored
        at_result = at_head(result, first_query, head)
        store_tile(total * (scale * factor), at_result, result.of_row, begin_of_tile, row, inside, D, COLUMNS)
    return times


@triton.jit(do_not_specialize=["tiles", "samples", "band", "heads"])
def queries_gradient_kernel(
    queries, keys, values, bias, batch, gradients, result, sums, tiles, samples, band, heads, factors,
    D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BY_DISTANCE: tl.constexpr,
    BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, OF_BIASES: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """See :func:`queries_and_biases_gradients`. A program has one head, and with sums tiles of queries of several samples.

    Args:
        tiles: of queries of the longest sample.
        band: samples that are worked on together.
        factors: of the scores, and of the result.
        OF_BIASES: which gradients of biases are wanted: 0 none, 1 by distance, 2 by time, 3 both.
    """
    OF_DISTANCES: tl.constexpr = OF_BIASES % 2 == 1
    OF_TIMES: tl.constexpr = OF_BIASES >= 2
    program = tl.program_id(0)
    head, first_item = program % heads, program // heads
    row = program.to(tl.int64)
    row_of_sums, row_of_targets = sums.distances + row * sums.columns, sums.of_targets + row * sums.columns
    by_time = biases_by_time(bias, head, BY_TIME)
    times = no_times(ROWS)
    if OF_BIASES > 0:
        for item in range(first_item, samples * tiles, tl.num_programs(0) // heads):
            times = _walk_keys(
                queries, keys, values, bias, batch, gradients, result, by_time, row_of_sums, row_of_targets, times, head, item,
                tiles, samples, band, factors, D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32,
                OF_DISTANCES, OF_TIMES, ROWS, KEYS,
            )  # fmt: skip
    else:  # a loop would cost registers
        _walk_keys(
            queries, keys, values, bias, batch, gradients, result, by_time, row_of_sums, row_of_targets, times, head,
            first_item, tiles, samples, band, factors, D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS,
            TF32, OF_DISTANCES, OF_TIMES, ROWS, KEYS,
        )  # fmt: skip
    if OF_TIMES:
        buckets: tl.constexpr = times.shape[1]
        tl.store(sums.times + row * buckets + tl.arange(0, buckets), tl.sum(times, 0))


@triton.jit
def _add_queries(
    of_keys, of_values, key, value, j, last_j, time_j, queries, gradients, of_query, of_gradient, bias, by_time, head,
    first_key, first_place, begin, end, count, targets, scale,
    IS_MASKED: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    BY_DISTANCE: tl.constexpr, BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of a tile of keys and values what comes from the ROWS queries from row ``begin`` on, up to ``end``.

    Rows beyond are zeros, and add nothing. Scores are [keys, queries] here.
    """
    row = tl.arange(0, ROWS)
    inside = begin + row < end
    query = load_tile(queries, of_query, begin, row, inside, True, D, COLUMNS)
    gradient = load_tile(gradients, of_gradient, begin, row, inside, True, D_V, VALUE_COLUMNS)
    i = first_place + tl.minimum(begin + row, end - 1)
    time_i = times_of(bias, first_key, i, i >= 0, BY_TIME)
    scores = multiplied(key, query.T, TF32) * scale
    scores = biased(
        scores, bias, by_time, head, i[None, :], j[:, None], first_place + begin, last_j,
        time_i[None, :], time_j[:, None], count, targets, IS_MASKED, BY_DISTANCE, BY_TIME, HAS_TARGETS,
    )  # fmt: skip
    rate = sigmoid(scores)
    shares = scores * rate
    of_scores = multiplied(value, gradient.T, TF32) * (rate + shares * (1 - rate))
    if IS_MASKED:
        seen = visible(i[None, :], j[:, None], count, targets, HAS_TARGETS)
        shares, of_scores = tl.where(seen, shares, 0.0), tl.where(seen, of_scores, 0.0)
    of_values += multiplied(shares.to(gradient.dtype), gradient, TF32)
    of_keys += multiplied(of_scores.to(query.dtype), query, TF32)
    return of_keys, of_values


@triton.jit(do_not_specialize=["tiles", "pairs", "band", "heads"])
def keys_gradient_kernel(
    queries, keys, values, bias, batch, gradients, of_keys, of_values, tiles, pairs, band, heads, scale, factor,
    D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BY_DISTANCE: tl.constexpr,
    BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See :func:`keys_and_values_gradients`.

    Args:
        tiles: of keys of the longest sample; the first ones are seen by the most queries.
        others: as of :func:`~dlrm_fused.ops.hstu_attention.kernel.forward_kernel`.
    """
    pair, number = item_of(tl.program_id(0), tiles, pairs, band)
    sample, head = pair // heads, pair % heads
    first_key, count, first_query, query_count, first_place, targets = sample_of(batch, sample, HAS_TARGETS)
    first = number * KEYS
    if first < count:
        row = tl.arange(0, KEYS)
        inside = first + row < count
        j = tl.minimum(first + row, count - 1)  # so that biases of rows that are none are read where some are
        key = load_tile(at_head(keys, first_key, head), keys.of_row, first, row, inside, True, D, COLUMNS)
        value = load_tile(at_head(values, first_key, head), values.of_row, first, row, inside, True, D_V, VALUE_COLUMNS)
        time_j = times_of(bias, first_key, j, inside, BY_TIME)
        by_time = biases_by_time(bias, head, BY_TIME)
        at_queries, at_gradients = at_head(queries, first_query, head), at_head(gradients, first_query, head)
        last = tl.minimum(first + KEYS, count) - 1
        # Candidates are seen by themselves alone.
        end = query_count if first < targets else tl.minimum(query_count, last + 1 - first_place)
        begin_row = tl.maximum(first - first_place, 0)
        see_all = tl.minimum(last - first_place, end) if last < targets else end
        steps = tl.cdiv(tl.maximum(see_all - begin_row, 0), ROWS)
        total, value_total = tl.zeros((KEYS, COLUMNS), tl.float32), tl.zeros((KEYS, VALUE_COLUMNS), tl.float32)
        for step in range(steps):
            total, value_total = _add_queries(
                total, value_total, key, value, j, last, time_j, at_queries, at_gradients, queries.of_row, gradients.of_row,
                bias, by_time, head, first_key, first_place, begin_row + step * ROWS, end, count, targets, scale,
                True, D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32, ROWS,
            )  # fmt: skip
        for begin in range(begin_row + steps * ROWS, end, ROWS):
            total, value_total = _add_queries(
                total, value_total, key, value, j, last, time_j, at_queries, at_gradients, queries.of_row, gradients.of_row,
                bias, by_time, head, first_key, first_place, begin, end, count, targets, scale,
                False, D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32, ROWS,
            )  # fmt: skip
        store_tile(total * (scale * factor), at_head(of_keys, first_key, head), of_keys.of_row, first, row, inside, D, COLUMNS)
        at_values = at_head(of_values, first_key, head)
        store_tile(value_total * factor, at_values, of_values.of_row, first, row, inside, D_V, VALUE_COLUMNS)
