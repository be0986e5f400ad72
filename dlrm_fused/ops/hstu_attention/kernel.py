"""The forward pass of HSTU's attention for GPUs, and what its backward pass shares with it.

A program computes a tile of queries of one sample and head. It walks the keys that they see, tile by tile: first those that all
of its queries see, without masks, then those around the diagonal. Tiles that no query of its sees are skipped. Programs with
the most keys begin first, but of few samples and heads at a time, whose keys and values then stay in the L2 cache.

Sources: Zhai et al., arXiv 2402.17152, equation 2; Dao et al., *FlashAttention*, arXiv 2205.14135 (tiles in shared memory, and
scores that are never stored).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.devices import has_tensor_memory, room_of_program
from dlrm_fused.ops.common.dtypes import uses_tf32
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.hstu_attention.reference import BUCKETS, JaggedQueries, RelativeBias
from dlrm_fused.symmetric.launches import ceil_div, kinds_of, launch_again, next_power_of_2

_LEAST = 16  # rows or columns of a product
_BUCKETS = tl.constexpr(BUCKETS)


class Tiles(NamedTuple):
    """A kernel's shape: rows of queries and of keys that meet in a step, its warps, and steps that are loaded ahead."""

    rows: int
    keys: int
    warps: int
    stages: int


class Rows(NamedTuple):
    """A tensor [rows, heads, columns] for kernels, whose columns are contiguous."""

    tensor: Any
    of_row: int  # strides, in elements
    of_head: int

    @staticmethod
    def of(tensor: Tensor) -> Rows:
        """Return a tensor's memory and strides."""
        return Rows(tensor, tensor.stride(0), tensor.stride(1))


class BatchArgs(NamedTuple):
    """A batch for kernels; without candidates ``targets_from`` is any tensor."""

    key_bounds: Any
    query_bounds: Any
    first_places: Any
    targets_from: Any

    @staticmethod
    def of(batch: JaggedQueries) -> BatchArgs:
        """Return a batch's tensors."""
        targets = batch.first_places if batch.targets_from is None else batch.targets_from
        return BatchArgs(batch.key_bounds, batch.query_bounds, batch.first_places, targets)


class BiasArgs(NamedTuple):
    """Biases for kernels; any tensor stands for one that is not there."""

    by_distance: Any  # [heads, P]
    by_time: Any  # [heads, BUCKETS]
    times: Any  # [n]
    distances: int  # elements from a head to the next
    buckets: int

    @staticmethod
    def of(bias: RelativeBias, any_tensor: Tensor) -> BiasArgs:
        """Return biases whose last dimensions are contiguous."""
        by_distance = any_tensor if bias.by_distance is None else bias.by_distance
        by_time = any_tensor if bias.by_time is None else bias.by_time
        times = any_tensor if bias.times is None else bias.times
        return BiasArgs(by_distance, by_time, times, by_distance.stride(0), by_time.stride(0))


class Call(NamedTuple):
    """The tensors of one call and its numbers, for all kernels."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    batch: JaggedQueries
    bias: RelativeBias
    scale: float
    divisor: float

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.queries.shape[1]

    @property
    def pairs(self) -> int:
        """The pairs of a sample and a head."""
        return self.batch.samples * self.heads

    @property
    def widths(self) -> tuple[int, int]:
        """The columns of queries and keys, and of values, as kernels pad them."""
        return padded(self.queries.shape[2]), padded(self.values.shape[2])

    @property
    def constants(self) -> dict[str, Any]:
        """The constants that all kernels have, by name."""
        columns, value_columns = self.widths
        return {
            "D": self.queries.shape[2],
            "D_V": self.values.shape[2],
            "COLUMNS": columns,
            "VALUE_COLUMNS": value_columns,
            "BY_DISTANCE": self.bias.by_distance is not None,
            "BY_TIME": self.bias.by_time is not None,
            "HAS_TARGETS": self.batch.targets_from is not None,
            "TF32": uses_tf32(self.queries.dtype),
        }

    @property
    def args(self) -> tuple[Rows, Rows, Rows, BiasArgs, BatchArgs]:
        """The arguments that all kernels begin with."""
        rows = (Rows.of(self.queries), Rows.of(self.keys), Rows.of(self.values))
        return *rows, BiasArgs.of(self.bias, self.batch.first_places), BatchArgs.of(self.batch)

    def band(self) -> int:
        """Return how many pairs of a sample and a head are worked on together: as many as have their keys in half of the L2."""
        row = sum(tensor.shape[2] * tensor.element_size() for tensor in (self.keys, self.values))
        return max(1, min(self.pairs, gpu_of(self.queries.device).l2 // 2 // max(1, self.batch.longest * row)))

    def launch(self, kernel: Any, programs: int, more: tuple[Any, ...], numbers: tuple[Any, ...], **constants: Any) -> None:
        """Launch a kernel.

        Args:
            programs: of a grid of one axis.
            more: of its arguments, those that follow ``args`` and may be tensors, alone or in tuples.
            numbers: those that follow, for which nothing is compiled anew.
            constants: the kernel's and the launch's beside ``constants``.
        """
        arguments, constants = (*self.args, *more), {**self.constants, **constants}
        flat = [part for one in arguments for part in (one if isinstance(one, tuple) else (one,))]
        tensors = [part for part in flat if isinstance(part, Tensor)]
        layout = kinds_of(*tensors), tuple(part for part in flat if isinstance(part, int)), tuple(constants.values())
        launch_again(layout, kernel, (programs,), *arguments, *numbers, **constants)


def padded(size: int) -> int:
    """Return the rows or columns of a product that has room for so many."""
    return max(_LEAST, next_power_of_2(size))


def forward(call: Call) -> Tensor:
    """Compute the attention: [m, heads, d_v] in the dtype of values, contiguous."""
    out = torch.empty(*call.queries.shape[:2], call.values.shape[2], dtype=call.values.dtype, device=call.values.device)
    if out.numel() == 0:
        return out
    has_biases = call.bias.by_distance is not None or call.bias.by_time is not None
    if sum(call.widths) > 128:
        tiles = Tiles(128, 64, 8, 3)
    else:
        tiles = Tiles(64, 128, 4, 2) if has_biases else Tiles(64, 64, 4, 3)
    tiles = fitted(tiles, call, kept=lambda tiles: tiles.rows, stepped=lambda tiles: tiles.keys)
    query_tiles = ceil_div(call.batch.most, tiles.rows)
    call.launch(
        forward_kernel, call.pairs * query_tiles, (Rows.of(out),),
        (query_tiles, call.pairs, call.band(), call.heads, call.scale, 1 / call.divisor),
        ROWS=tiles.rows, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def fitted(tiles: Tiles, call: Call, *, kept: Callable[[Tiles], int], stepped: Callable[[Tiles], int]) -> Tiles:
    """Return the tiles of a kernel for which a multiprocessor's shared memory is enough.

    There are the rows that a program keeps, those of the steps that are loaded ahead, and biases of a step; and never more
    rows of queries than a sample may have.

    Args:
        tiles: the fastest for operands of 16 bits, where there is room.
        kept: of tiles, how many rows of both widths a program keeps.
        stepped: of tiles, how many it loads in a step.
    """
    size, columns = call.values.element_size(), sum(call.widths)
    if size > 2 and not uses_tf32(call.values.dtype):
        # Sums of products without tensor cores have their operands in registers.
        tiles = tiles._replace(rows=32, keys=32, warps=8 if columns > 128 else 4)
    elif columns > 256:
        tiles = tiles._replace(rows=min(tiles.rows, 64), keys=min(tiles.keys, 64), warps=8)
    tiles = tiles._replace(rows=min(tiles.rows, padded(max(1, call.batch.most))))
    biases = sum(one is not None for one in (call.bias.by_distance, call.bias.by_time))
    room = room_of_program(gpu_of(call.values.device).shared_memory)
    # Operands that are in registers elsewhere take less than a step's memory.
    more_steps = int(size == 2 and has_tensor_memory(call.values.device))

    def memory() -> int:
        """Return the bytes of a program."""
        steps = tiles.stages + more_steps
        of_rows = size * columns * (kept(tiles) + steps * stepped(tiles))
        return of_rows + 4 * tiles.rows * tiles.keys * max(biases, 1)

    while memory() > room and tiles != (smaller := _shrunk(tiles)):
        tiles = smaller
    return tiles


def _shrunk(tiles: Tiles) -> Tiles:
    """Return tiles that need less memory, or the same if there are none."""
    if tiles.stages > 2:
        return tiles._replace(stages=tiles.stages - 1)
    if tiles.rows > max(_LEAST, tiles.keys):
        return tiles._replace(rows=tiles.rows // 2)
    if tiles.stages > 1:
        return tiles._replace(stages=1)
    if tiles.keys > max(_LEAST, tiles.rows):
        return tiles._replace(keys=tiles.keys // 2)
    return tiles._replace(rows=max(_LEAST, tiles.rows // 2), keys=max(_LEAST, tiles.keys // 2))


@triton.jit
def item_of(number, tiles, pairs, band):
    """Return the pair of a sample and a head of an item of this number, and its tile; tiles count up over a band's pairs."""
    first = number // (band * tiles) * band
    width = tl.minimum(band, pairs - first)
    in_band = number - first * tiles
    return first + in_band % width, in_band // width


@triton.jit
def sample_of(batch, sample, HAS_TARGETS: tl.constexpr):
    """Return a sample's first row of keys, their number, its first row of queries, their number, the place of the first query,
    and the place of the first candidate."""
    first_key = tl.load(batch.key_bounds + sample).to(tl.int64)
    keys = (tl.load(batch.key_bounds + sample + 1) - first_key).to(tl.int32)
    first_query = tl.load(batch.query_bounds + sample).to(tl.int64)
    queries = (tl.load(batch.query_bounds + sample + 1) - first_query).to(tl.int32)
    targets = keys
    if HAS_TARGETS:
        targets = tl.minimum(tl.load(batch.targets_from + sample).to(tl.int32), keys)
    return first_key, keys, first_query, queries, tl.load(batch.first_places + sample).to(tl.int32), targets


@triton.jit
def at_head(rows, first_row, head):
    """Return the address of a head's columns in a row."""
    return rows.tensor + first_row * rows.of_row + head.to(tl.int64) * rows.of_head


@triton.jit
def load_tile(head_rows, of_row, first, row, inside, IS_MASKED: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Load rows ``first + row`` of a head, zeros outside.

    Args:
        head_rows: the address of a sample's first row.
        first: a number of 32 bits.
        row: [ROWS], of 32 bits.
        inside: [ROWS], which rows there are, with IS_MASKED.
    """
    column = tl.arange(0, COLUMNS)
    places = head_rows + (tl.zeros((), tl.int64) + first) * of_row + (row.to(tl.int64) * of_row)[:, None] + column[None, :]
    if IS_MASKED:
        if D == COLUMNS:
            tile = tl.load(places, mask=inside[:, None], other=0.0)
        else:
            tile = tl.load(places, mask=inside[:, None] & (column < D)[None, :], other=0.0)
    elif D == COLUMNS:
        tile = tl.load(places)
    else:
        tile = tl.load(places, mask=(column < D)[None, :], other=0.0)
    return tile


@triton.jit
def store_tile(tile, head_rows, of_row, first, row, inside, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Store rows ``first + row`` of a head, those that are ``inside``, in the dtype of memory."""
    column = tl.arange(0, COLUMNS)
    places = head_rows + (tl.zeros((), tl.int64) + first) * of_row + (row.to(tl.int64) * of_row)[:, None] + column[None, :]
    tl.store(places, tile.to(head_rows.dtype.element_ty), mask=inside[:, None] & (column < D)[None, :])


@triton.jit
def multiplied(left, right, TF32: tl.constexpr):
    """Return left @ right in fp32."""
    return tl.dot(left, right, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), with a relative error of some 2^-24 * (1 + abs(x)). A division takes more instructions."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def bucket_of(seconds):
    """Return the buckets of differences of times, int32, as :func:`~dlrm_fused.ops.hstu_attention.reference.time_buckets`."""
    return (tl.maximum(seconds, 1).to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 254


@triton.jit
def looked_up(table, index):
    """Return the elements of a table [C] at an index [A, B], from shared memory. Loads are copied there pair by pair."""
    flat = tl.reshape(index, (index.shape[0] * index.shape[1],))
    return tl.reshape(tl.gather(table, flat, 0), index.shape)


@triton.jit
def biases_by_time(bias, head, BY_TIME: tl.constexpr):
    """Return a head's biases by bucket, [BUCKETS] fp32; a number without BY_TIME."""
    found = 0.0
    if BY_TIME:
        found = tl.load(bias.by_time + head.to(tl.int64) * bias.buckets + tl.arange(0, _BUCKETS)).to(tl.float32)
    return found


@triton.jit
def biased(
    scores, bias, by_time, head, i, j, first_i, last_j, time_i, time_j, count, targets, IS_MASKED: tl.constexpr,
    BY_DISTANCE: tl.constexpr, BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    """Return scores with their biases.

    Args:
        by_time: see :func:`biases_by_time`.
        i, j: the places of queries and keys, in the shapes in which they are broadcast against each other; i is the place of
            a query; with IS_MASKED j may be above it.
        first_i, last_j: the least i, and a number that no j exceeds; i and j of a tile span no more than its rows.
        time_i, time_j: int32, their times, in the same shapes; with BY_TIME.
        count: of the sample's keys.
        targets: the place of the first candidate, which all candidates are taken to be at.
    """
    if BY_DISTANCE:
        if HAS_TARGETS:
            i, j = tl.minimum(i, targets), tl.minimum(j, targets)
            first_i, last_j = tl.minimum(first_i, targets), tl.minimum(last_j, targets)
        distance = tl.maximum(i - j, 0) if IS_MASKED else i - j
        least = tl.maximum(first_i - last_j, 0)
        rows: tl.constexpr = scores.shape[0]
        columns: tl.constexpr = scores.shape[1]
        near = least + tl.arange(0, 2 * (rows if rows > columns else columns))
        known = tl.load(bias.by_distance + head.to(tl.int64) * bias.distances + near, mask=near < count, other=0.0)
        scores += looked_up(known.to(tl.float32), distance - least)
    if BY_TIME:
        scores += looked_up(by_time, bucket_of(time_i - time_j))
    return scores


@triton.jit
def times_of(bias, first_key, place, inside, BY_TIME: tl.constexpr):
    """Return the times of places, int32 seconds since the sample's first key; or the places, without BY_TIME."""
    times = place
    if BY_TIME:
        since = tl.load(bias.times + first_key)
        times = (tl.load(bias.times + first_key + place, mask=inside, other=0) - since).to(tl.int32)
    return times


@triton.jit
def visible(i, j, keys, targets, HAS_TARGETS: tl.constexpr):
    """Return which keys at places j queries at places i see."""
    seen = (j <= i) & (j < keys)
    if HAS_TARGETS:
        seen = seen & ((j < targets) | (j == i))
    return seen


@triton.jit
def walk_of_queries(first_place, last_place, targets, KEYS: tl.constexpr):
    """Return how a tile of queries walks its keys, at places up to its last one: the number of keys that all of them see, a
    multiple of KEYS; the place to which steps of KEYS follow from there; the place from which they go on; and their number.

    The second part is the diagonal, if candidates lie between that and what comes before them.
    """
    seen_by_all = tl.minimum(first_place + 1, targets) // KEYS * KEYS
    before = tl.cdiv(tl.maximum(tl.minimum(targets, last_place + 1) - seen_by_all, 0), KEYS)
    jump_at = seen_by_all + before * KEYS
    jump_to = tl.maximum(jump_at, first_place // KEYS * KEYS)
    return seen_by_all, jump_at, jump_to, before + tl.cdiv(tl.maximum(last_place + 1 - jump_to, 0), KEYS)


@triton.jit
def _attend(
    attended, query, place, first_place, time, keys, values, of_key, of_value, bias, by_time, head, first_key, begin, count,
    targets, scale,
    IS_MASKED: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    BY_DISTANCE: tl.constexpr, BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add what a tile of queries gets from the KEYS keys from place ``begin`` on."""
    row = tl.arange(0, KEYS)
    j = begin + row
    inside = j < count
    key = load_tile(keys, of_key, begin, row, inside, IS_MASKED, D, COLUMNS)
    value = load_tile(values, of_value, begin, row, inside, IS_MASKED, D_V, VALUE_COLUMNS)
    scores = multiplied(query, key.T, TF32) * scale
    time_j = times_of(bias, first_key, j, inside, BY_TIME)
    scores = biased(
        scores, bias, by_time, head, place[:, None], j[None, :], first_place, begin + KEYS - 1, time[:, None], time_j[None, :],
        count, targets, IS_MASKED, BY_DISTANCE, BY_TIME, HAS_TARGETS,
    )  # fmt: skip
    shares = scores * sigmoid(scores)
    if IS_MASKED:
        shares = tl.where(visible(place[:, None], j[None, :], count, targets, HAS_TARGETS), shares, 0.0)
    return attended + multiplied(shares.to(value.dtype), value, TF32)


@triton.jit(do_not_specialize=["tiles", "pairs", "band", "heads"])
def forward_kernel(
    queries, keys, values, bias, batch, out, tiles, pairs, band, heads, scale, factor,
    D: tl.constexpr, D_V: tl.constexpr, COLUMNS: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BY_DISTANCE: tl.constexpr,
    BY_TIME: tl.constexpr, HAS_TARGETS: tl.constexpr, TF32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """See :func:`forward`.

    Args:
        tiles: of queries of the longest sample.
        pairs: of a sample and a head.
        band: pairs that are worked on together.
        scale, factor: of the scores, and of the result.
    """
    pair, number = item_of(tl.program_id(0), tiles, pairs, band)
    sample, head = pair // heads, pair % heads
    first_key, count, first_query, query_count, first_place, targets = sample_of(batch, sample, HAS_TARGETS)
    begin_of_tile = (tiles - 1 - number) * ROWS  # the last queries see the most keys
    if begin_of_tile < query_count:
        row = tl.arange(0, ROWS)
        inside = begin_of_tile + row < query_count
        at_queries = at_head(queries, first_query, head)
        query = load_tile(at_queries, queries.of_row, begin_of_tile, row, inside, True, D, COLUMNS)
        begin_place = first_place + begin_of_tile
        place = tl.minimum(begin_place + row, count - 1)
        time = times_of(bias, first_key, place, place >= 0, BY_TIME)
        by_time = biases_by_time(bias, head, BY_TIME)
        at_keys, at_values = at_head(keys, first_key, head), at_head(values, first_key, head)
        attended = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
        last_place = first_place + tl.minimum(begin_of_tile + ROWS, query_count) - 1
        seen_by_all, jump_at, jump_to, steps = walk_of_queries(begin_place, last_place, targets, KEYS)
        for begin in range(0, seen_by_all, KEYS):
            attended = _attend(
                attended, query, place, begin_place, time, at_keys, at_values, keys.of_row, values.of_row, bias, by_time, head,
                first_key, begin, count, targets, scale,
                False, D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32, KEYS,
            )  # fmt: skip
        for step in range(steps):
            begin = seen_by_all + step * KEYS
            begin = tl.where(begin < jump_at, begin, begin - jump_at + jump_to)
            attended = _attend(
                attended, query, place, begin_place, time, at_keys, at_values, keys.of_row, values.of_row, bias, by_time, head,
                first_key, begin, count, targets, scale,
                True, D, D_V, COLUMNS, VALUE_COLUMNS, BY_DISTANCE, BY_TIME, HAS_TARGETS, TF32, KEYS,
            )  # fmt: skip
        at_out = at_head(out, first_query, head)
        store_tile(attended * factor, at_out, out.of_row, begin_of_tile, row, inside, D_V, VALUE_COLUMNS)
