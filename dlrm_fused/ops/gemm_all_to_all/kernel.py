"""Matrix products whose rows are stored where they belong: a persistent GEMM for Hopper GPUs.

Every program computes tiles of the result in turn; the tensor memory accelerator (TMA) brings the operands, and the loads of
the next tile are under way while the last one is stored. A finished tile is stored locally, or straight into the memory of
the ranks that its rows belong to, while other tiles are computed: as in Punniyamurthy et al., arXiv 2305.06942. Tiles for
other ranks come first, so that the links are busy from the start and the tail is local.

The rows of x belong together in one of two ways:

* equal blocks: as many for each rank; all are multiplied by one weight;
* groups, such as the rows of an expert, each with a weight of its own (:class:`Groups`). Every group begins with a new tile.
  How many rows there are is known on the device alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_fused.ops.common.dtypes import uses_tf32
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.gemm_all_to_all.split import Arrivals, add_up
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles, fitted, tiles_of_groups, tiles_of_product
from dlrm_fused.symmetric.device import announced_offset, begin, finish, no_channel, wait_until_all_ready
from dlrm_fused.symmetric.launches import ceil_div, launch_again, layout_of, next_power_of_2

# One program finds the order of so many tiles.
TILES_OF_PROGRAM = tl.constexpr(64)


@dataclass(frozen=True)
class Groups:
    """The rows of a matrix [R, K] that belong together. A group has whole tiles; its last rows may be pads.

    Attributes:
        tile_rows: rows of a tile; divides R.
        bounds: int32 [G + 1] on the device: the first tile of each group, and the end.
        local_from: int32 [G]: from which tile of its group on all rows belong to this rank.
    """

    tile_rows: int
    bounds: Tensor
    local_from: Tensor
    _orders: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def order(self, tiles: int) -> Tensor:
        """int32 [2, tiles]: the tiles in the order in which they are computed, those for other ranks first; their groups.

        What is beyond ``bounds[G]`` means nothing.
        """
        if tiles not in self._orders:
            order = torch.empty(2, tiles, dtype=torch.int32, device=self.bounds.device)
            groups = self.local_from.numel()
            if tiles:
                tile_order_kernel[(ceil_div(tiles, TILES_OF_PROGRAM.value),)](
                    self.bounds, self.local_from, order, tiles, groups, LANES=next_power_of_2(groups)
                )
            self._orders[tiles] = order
        return self._orders[tiles]

    def slices(self) -> list[slice]:
        """The rows of each group. Waits for the device."""
        bounds = [tile * self.tile_rows for tile in self.bounds.tolist()]
        return [slice(first, end) for first, end in itertools.pairwise(bounds)]

    def args(self, tiles: int) -> GroupArgs:
        """Return the groups as an argument of a kernel that computes so many rows of tiles."""
        return GroupArgs(self.bounds, self.order(tiles), tiles, self.local_from.numel())


class Routes(NamedTuple):
    """The destinations of the rows of x.

    Attributes:
        groups: which rows belong together.
        destinations: int32 [R]: rank * slots + slot, or -1 for rows that belong nowhere, such as those that fill up tiles. No
            two of all ranks may be equal, and none may be outside: to check that would be to wait for the device.
        slots: rows of every rank's result.
    """

    groups: Groups
    destinations: Tensor
    slots: int


@triton.jit(do_not_specialize=["tiles", "groups"])
def tile_order_kernel(bounds, local_from, order, tiles, groups, LANES: tl.constexpr):
    """See :meth:`Groups.order`."""
    group = tl.arange(0, LANES)
    there = group < groups
    first, last = tl.load(bounds + group, mask=there, other=0), tl.load(bounds + group + 1, mask=there, other=0)
    store_order(order, tiles, first, tl.load(local_from + group, mask=there, other=0), last, LANES)


@triton.jit
def store_order(order, tiles, first, middle, last, LANES: tl.constexpr):
    """Store this program's part of :meth:`Groups.order`: the groups' tiles for other ranks end to end, then those for this.

    Args:
        first, middle, last: [LANES], of each group: its first tile, the first one for this rank alone, and the end.
    """
    sent, kept = middle - first, tl.maximum(last - middle, 0)
    place_of_sent = tl.cumsum(sent, axis=0) - sent
    place_of_kept = tl.sum(sent, axis=0) + tl.cumsum(kept, axis=0) - kept
    places = tl.program_id(0) * TILES_OF_PROGRAM + tl.arange(0, TILES_OF_PROGRAM)
    i = places[:, None]
    of_sent, of_kept = i - place_of_sent[None, :], i - place_of_kept[None, :]
    is_sent = (of_sent >= 0) & (of_sent < sent[None, :])
    is_kept = (of_kept >= 0) & (of_kept < kept[None, :])
    tile = tl.where(is_sent, first[None, :] + of_sent, tl.where(is_kept, middle[None, :] + of_kept, 0))
    group = tl.where(is_sent | is_kept, tl.arange(0, LANES)[None, :], 0)
    tl.store(order + places, tl.sum(tile, axis=1), mask=places < tiles)
    tl.store(order + tiles + places, tl.sum(group, axis=1), mask=places < tiles)


class GroupArgs(NamedTuple):
    """:class:`Groups`, as one argument of the kernel."""

    bounds: Any  # int32 [G + 1]
    order: Any  # int32 [2, order_tiles]
    order_tiles: Any
    count: Any  # G


class TileArgs(NamedTuple):
    """The shape of a tile, one constant of a kernel: nothing of :class:`Tiles` that would compile the same code anew, and
    numbers alone, since Triton writes constants as JSON for hooks that are told of compiled kernels."""

    rows: int
    columns: int
    depth: int
    band: int
    tf32: bool  # how fp32 is multiplied; no word for it, since Triton 3.6 takes none out of a tuple into a function


def tile_constants(tiles: Tiles, dtype: torch.dtype) -> dict[str, Any]:
    """Return the tile, as a constant of a kernel, and how that is compiled."""
    tile = TileArgs(tiles.rows, tiles.columns, tiles.depth, tiles.band, uses_tf32(dtype))
    return {"TILE": tile, "num_warps": tiles.warps, "num_stages": tiles.stages}


class Epilogue(NamedTuple):
    """The tensors beside the product, as one argument of the kernel; any tensor stands for one that is not used."""

    scale: Any  # fp32 [G, N], with SCALED
    out: Any  # [R, N], without SENDS
    partials: Any  # fp32 [tiles, SPLITS, ROWS * COLUMNS], with more than one of SPLITS
    arrivals: Any  # int32 [tiles, SPLITS], of even numbers before a launch and after it; as ``partials``


@triton.jit
def multiply(left, right, product, TF32: tl.constexpr):
    """product + left [ROWS, DEPTH] @ right [DEPTH, COLUMNS]. Tensor cores want 64 rows on the left, but few columns will do."""
    precision: tl.constexpr = "tf32" if TF32 else "ieee"
    if left.shape[0] < 64:
        result = tl.dot(right.T, left.T, product, input_precision=precision)
    else:
        result = tl.dot(left, right, product, input_precision=precision)
    return result


@triton.jit
def upright(product, ROWS: tl.constexpr):
    """Return the sums of :func:`multiply` as [ROWS, COLUMNS]."""
    if ROWS < 64:
        result = tl.trans(product)
    else:
        result = product
    return result


@triton.jit
def no_product(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if ROWS < 64:
        product = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
    return product


@triton.jit
def tile_of(number, row_tiles, column_tiles, BAND: tl.constexpr):
    """Row and column of a tile: columns one after the other within a band of rows, for the L2 cache."""
    band_tiles = BAND * column_tiles
    first_of_band = number // band_tiles * BAND
    band = tl.minimum(row_tiles - first_of_band, BAND)
    return first_of_band + number % band_tiles % band, number % band_tiles // band


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile: stored one after the other, they need half as much shared memory."""
    return tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _store_half(
    product, scale, rows_of_out, row_is_in, first_column, columns,
    SCALED: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The epilogue of half a tile; ``rows_of_out``: [ROWS, 1] pointers to rows."""
    column = first_column + tl.arange(0, WIDTH)
    inside = row_is_in[:, None] & (column < columns)[None, :]
    if SCALED:
        product *= tl.load(scale + column, mask=column < columns, other=0.0)[None, :]
    tl.store(rows_of_out + column[None, :], product.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["slots", "receive_offset", "fingerprint"])
def gemm_kernel(
    x, weight, epilogue, groups, destinations, slots, block_rows, columns, depth, addresses,
    receive_offset, channel, fingerprint,
    GROUPED: tl.constexpr, SENDS: tl.constexpr, TRANSPOSED: tl.constexpr,
    SCALED: tl.constexpr, SPLIT_LEVELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """x times weight transposed, each row stored locally or, with SENDS, where it belongs, as one epoch of a channel.

    Args:
        x: descriptor [R, K], blocks [rows, depth] of TILE, :class:`TileArgs`.
        weight: descriptor [G, N, K], blocks [1, columns, depth]; with TRANSPOSED [G, K, N], [1, depth, columns].
        epilogue: :class:`Epilogue`.
        groups: :class:`GroupArgs`, with GROUPED.
        destinations: int32 [R], rank * slots + slot or -1, with GROUPED and SENDS.
        block_rows: rows for each of the ranks, without GROUPED.
        SPLIT_LEVELS: every tile is computed in 2^SPLIT_LEVELS pieces of K, each by a program of its own; 0 with GROUPED.
    """
    epoch = tl.zeros((), tl.int64)
    may_store = tl.full((), 1, tl.int1)
    if SENDS:
        epoch = begin(channel, receive_offset, fingerprint)
        may_store = wait_until_all_ready(channel, epoch, fingerprint)
    tiles_of_block = tl.cdiv(block_rows, TILE.rows)
    row_tiles = tiles_of_block * channel.world
    if GROUPED:
        row_tiles = tl.load(groups.bounds + groups.count)
    column_tiles = tl.cdiv(columns, TILE.columns)
    element_bytes: tl.constexpr = x.dtype.primitive_bitwidth // 8

    steps = tl.cdiv(depth, TILE.depth)
    steps_of_piece = tl.cdiv(steps, 1 << SPLIT_LEVELS)
    pieces = (row_tiles * column_tiles) << SPLIT_LEVELS

    for number in tl.range(tl.program_id(0), pieces, tl.num_programs(0), flatten=True):
        tile, piece = number >> SPLIT_LEVELS, number % (1 << SPLIT_LEVELS)
        place, column_tile = tile_of(tile, row_tiles, column_tiles, TILE.band)
        if GROUPED:
            first_row = tl.load(groups.order + place) * TILE.rows
            group = tl.load(groups.order + groups.order_tiles + place)
        else:
            peer = (channel.rank + 1 + place // tiles_of_block) % channel.world
            first_row = peer * block_rows + place % tiles_of_block * TILE.rows
            group = 0

        product = no_product(TILE.rows, TILE.columns)
        for step in range(piece * steps_of_piece, tl.minimum(steps, (piece + 1) * steps_of_piece)):
            left = x.load([first_row, step * TILE.depth])
            if TRANSPOSED:
                right = weight.load([group, step * TILE.depth, column_tile * TILE.columns]).reshape(TILE.depth, TILE.columns)
                product = multiply(left, right.to(x.dtype), product, TILE.tf32)
            else:
                right = weight.load([group, column_tile * TILE.columns, step * TILE.depth]).reshape(TILE.columns, TILE.depth)
                product = multiply(left, right.to(x.dtype).T, product, TILE.tf32)

        row = first_row + tl.arange(0, TILE.rows)
        row_bytes = columns.to(tl.int64) * element_bytes
        if SENDS:
            if GROUPED:
                destination = tl.load(destinations + row)
                row_is_in = (destination >= 0) & may_store
                destination = tl.maximum(destination, 0)
                slot = (destination % slots).to(tl.int64)
                blocks = tl.load(addresses + destination // slots) + announced_offset(channel, destination // slots)
            else:
                row_is_in = (row < (peer + 1) * block_rows) & may_store
                slot = (row - peer * block_rows + channel.rank * block_rows).to(tl.int64)
                blocks = tl.load(addresses + peer) + announced_offset(channel, peer)
            rows_of_out = (blocks + slot * row_bytes).to(tl.pointer_type(x.dtype))
        else:
            row_is_in = row < block_rows
            rows_of_out = epilogue.out + row.to(tl.int64) * columns
        # Rows begin at multiples of 16 bytes, and so the compiler makes wide stores.
        rows_of_out = tl.multiple_of(rows_of_out, 16)[:, None]
        half: tl.constexpr = TILE.columns // 2
        left_half, right_half = halves(upright(product, TILE.rows), TILE.rows, TILE.columns)
        if SPLIT_LEVELS > 0:
            left_half, right_half, has_sum = add_up(
                left_half, right_half, epilogue.partials, epilogue.arrivals, tile, piece, SPLIT_LEVELS, TILE.rows, TILE.columns
            )
            row_is_in &= has_sum
        first_column = column_tile * TILE.columns
        scale_of_group = epilogue.scale + group * columns.to(tl.int64)
        _store_half(
            left_half, scale_of_group, rows_of_out, row_is_in, first_column, columns, SCALED, x.dtype, half,
        )  # fmt: skip
        _store_half(
            right_half, scale_of_group, rows_of_out, row_is_in, first_column + half, columns, SCALED, x.dtype, half,
        )  # fmt: skip
    if SENDS:
        finish(channel, epoch)


class _Rows(NamedTuple):
    """The rows of x, as a launch is told of them: arguments of the kernel, in its order."""

    groups: GroupArgs
    destinations: Tensor
    slots: int
    block_rows: int


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    rows: Groups | Routes,
    out: Tensor | ReceiveWindow,
    *,
    weight_is_transposed: bool = False,
) -> None:
    """out[rows of g] = x[rows of g] @ weight[g].T, for every group g; or each row is stored at its destination.

    Args:
        x: [R, K], contiguous; rows begin at multiples of 16 bytes, here and in all matrices.
        weight: [G, N, K] in the dtype of x; or, if ``weight_is_transposed``, [G, K, N]: then x @ weight[g].
        rows: those of each group; with destinations for a window.
        out: [R, N], contiguous, where rows of no group are left as they are; or the window in which the ranks receive
            [slots, N], in one epoch: collective.
    """
    groups, destinations, slots = (rows.groups, rows.destinations, rows.slots) if isinstance(rows, Routes) else (rows, x, 1)
    columns, element_size = weight.shape[2 if weight_is_transposed else 1], x.element_size()
    tiles = fitted(tiles_of_groups(columns, element_size, groups.tile_rows), element_size, gpu_of(x.device).shared_memory)
    row_tiles = len(x) // tiles.rows
    _launch(
        x, weight, out, None, tiles, row_tiles, _Rows(groups.args(row_tiles), destinations, slots, len(x)),
        GROUPED=True, TRANSPOSED=weight_is_transposed,
    )  # fmt: skip


def gemm(
    x: Tensor,
    weight: Tensor,
    out: Tensor | ReceiveWindow,
    scale: Tensor | None = None,
    *,
    part_of: int | None = None,
    arrivals: Arrivals | None = None,
) -> None:
    """out [M, N] = x [M, K] @ weight [N, K].T; or rows p * M / ranks ... are stored at rank p as block ``own rank``.

    Args:
        out: the matrix, or the window in which the ranks receive theirs, in one epoch: collective.
        scale: fp32 [N], of a weight in float8_e4m3fn.
        part_of: rows of the matrix whose part x is, if not all: products of all parts add up in the same order.
        arrivals: counts the pieces where K is split; made for this call if there are none.
    """
    (rows, depth), columns, gpu = x.shape, len(weight), gpu_of(x.device)
    tiles = tiles_of_product(part_of or rows, columns, depth, x.element_size(), gpu)
    tiles = fitted(tiles, x.element_size(), gpu.shared_memory)
    ranks = out.channel.group.world_size if isinstance(out, ReceiveWindow) else 1
    row_tiles = ranks * ceil_div(rows // ranks, tiles.rows)
    _launch(
        x, weight, out, scale, tiles, row_tiles,
        _Rows(GroupArgs(x, x, row_tiles, 1), x, 1, rows // ranks), arrivals,
        GROUPED=False, TRANSPOSED=False,
    )  # fmt: skip


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor | ReceiveWindow,
    scale: Tensor | None,
    tiles: Tiles,
    row_tiles: int,
    rows: _Rows,
    arrivals: Arrivals | None = None,
    **constants: bool,
) -> None:
    """x times weight [G, N, K], or one weight [N, K], by so many rows of tiles."""
    depth, columns = x.shape[1], weight.shape[-1 if constants["TRANSPOSED"] else -2]
    pieces = row_tiles * ceil_div(columns, tiles.columns) * tiles.splits
    partials = counts = None
    if tiles.splits > 1:
        partials = x.new_empty(pieces * tiles.rows * tiles.columns, dtype=torch.float32)
        counts = (arrivals or Arrivals(x.device)).of(pieces)
    block = [1, tiles.depth, tiles.columns] if constants["TRANSPOSED"] else [1, tiles.columns, tiles.depth]
    window = out if isinstance(out, ReceiveWindow) else None
    matrix = out if isinstance(out, Tensor) else None
    epilogue = scale, matrix, partials, counts
    tensors = layout_of(x, weight, scale, matrix, *([rows.groups.bounds, rows.destinations] * constants["GROUPED"]))
    layout = tensors, tiles, tuple(constants.values()), uses_tf32(x.dtype), rows.block_rows
    launches = window.channel.launches if window else launch_again
    launches(
        layout, gemm_kernel, (programs_of(x.device, pieces, tiles),),
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]),
        TensorDescriptor(weight, [1, *weight.shape][-3:], [weight.numel(), *weight.stride()][-3:], block),
        Epilogue(*(x if tensor is None else tensor for tensor in epilogue)), *rows, columns, depth,
        window.memory.addresses if window else x, window.offset if window else 0,
        window.channel.args if window else no_channel(x), window.fingerprint if window else 0,
        SENDS=window is not None, SCALED=scale is not None, SPLIT_LEVELS=tiles.splits.bit_length() - 1, **constants,
        **tile_constants(tiles, x.dtype),
    )  # fmt: skip


def programs_of(device: torch.device, tiles: int, shape: Tiles) -> int:
    # Three for the interpreter: some programs have several tiles, in small tests too.
    return max(1, min(tiles, shape.programs * (gpu_of(device).multiprocessors if device.type == "cuda" else 3)))
