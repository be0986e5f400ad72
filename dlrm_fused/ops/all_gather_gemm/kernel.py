"""Matrix products with pieces that arrive while others are multiplied: persistent GEMMs for Hopper GPUs.

* :func:`multiply_arriving`: rows of all ranks, this one's first, those of others piece by piece when they have come.
* :func:`multiply_and_add`: rows of this rank, with what other ranks have sent of their products added to each tile.

Tiles, operands and epilogue are those of :mod:`~dlrm_fused.ops.gemm_all_to_all.kernel`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES
from dlrm_fused.ops.gemm_all_to_all.kernel import halves, multiply, no_product, precision, programs_of, upright
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles, tiles_of_product
from dlrm_fused.ops.schedules.piece_flags import PieceFlags, end_of_piece, piece_of_row, wait_for_piece
from dlrm_fused.symmetric import Channel, SymmetricMemory
from dlrm_fused.symmetric.device import order_bulk_loads, peer_pointer, signal

# Elements that a program stores at a peer at a time.
_PUSHED_BLOCK = 8192


@triton.jit
def tile_of(number, row_tiles, column_tiles, BAND: tl.constexpr):
    """Row and column of a tile: columns one after the other within a band of rows, for the L2 cache."""
    band_tiles = BAND * column_tiles
    first_of_band = number // band_tiles * BAND
    band = tl.minimum(row_tiles - first_of_band, BAND)
    return first_of_band + number % band_tiles % band, number % band_tiles // band


@triton.jit
def product_of_tile(
    x, weight, first_row, first_column, depth,
    TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """fp32, as :func:`multiply` adds it up.

    Args:
        x: descriptor [rows, K], blocks [ROWS, DEPTH].
        weight: descriptor [N, K], blocks [COLUMNS, DEPTH]; with TRANSPOSED [K, N], [DEPTH, COLUMNS].
    """
    product = no_product(ROWS, COLUMNS)
    for step in range(0, tl.cdiv(depth, DEPTH)):
        left = x.load([first_row, step * DEPTH])
        if TRANSPOSED:
            right = weight.load([step * DEPTH, first_column])
            product = multiply(left, right, product, PRECISION)
        else:
            right = weight.load([first_column, step * DEPTH])
            product = multiply(left, right.T, product, PRECISION)
    return product


@triton.jit
def _store_tile(product, out, first_out, row, row_is_in, first_column, columns, DTYPE: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    rows_of_out = tl.multiple_of(out + (first_out + row).to(tl.int64) * columns, 16)[:, None]
    half: tl.constexpr = COLUMNS // 2
    left_half, right_half = halves(upright(product, ROWS), ROWS, COLUMNS)
    column = first_column + tl.arange(0, half)
    tl.store(rows_of_out + column[None, :], left_half.to(DTYPE), mask=row_is_in[:, None] & (column < columns)[None, :])
    column += half
    tl.store(rows_of_out + column[None, :], right_half.to(DTYPE), mask=row_is_in[:, None] & (column < columns)[None, :])


@triton.jit
def _multiply_piece(
    x, weight, out, number, first_row, end_row, first_out, columns, depth,
    TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """This program's tiles of rows ``first_row`` to ``end_row`` of x, stored ``first_out`` rows further on in ``out``.

    Args:
        number: this program's first tile of the piece.

    Returns:
        This program's first tile of the piece that follows.
    """
    row_tiles, column_tiles = tl.cdiv(end_row - first_row, ROWS), tl.cdiv(columns, COLUMNS)
    tiles, programs = row_tiles * column_tiles, tl.num_programs(0)
    for tile in tl.range(number, tiles, programs, flatten=True):
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, BAND)
        first = first_row + row_tile * ROWS
        product = product_of_tile(
            x, weight, first, column_tile * COLUMNS, depth, TRANSPOSED, DTYPE, PRECISION, ROWS, COLUMNS, DEPTH
        )
        row = first + tl.arange(0, ROWS)
        _store_tile(product, out, first_out, row, row < end_row, column_tile * COLUMNS, columns, DTYPE, ROWS, COLUMNS)
    return number + tl.cdiv(tl.maximum(tiles - number, 0), programs) * programs - tiles


@triton.jit
def _push(own, addresses, pieces, pushed, stamp, elements, channel, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Store this rank's rows at all peers, all programs together; the last one to end tells them.

    Args:
        addresses: int64 [ranks], of the memory in which shards are gathered.
        pushed: int64 [1], programs that have ended; 0 before and after.
        elements: of a shard.
    """
    element_bytes: tl.constexpr = DTYPE.primitive_bitwidth // 8
    first_byte = channel.rank * elements.to(tl.int64) * element_bytes
    for first in range(tl.program_id(0) * BLOCK, elements, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        values = tl.load(own + place, mask=place < elements)
        for i in tl.static_range(1, channel.world):
            tl.store(peer_pointer(addresses, (channel.rank + i) % channel.world, first_byte, DTYPE) + place, values,
                     mask=place < elements)  # fmt: skip
    tl.debug_barrier()
    if tl.atomic_add(pushed, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.atomic_xchg(pushed, tl.zeros((), tl.int64), sem="relaxed", scope="gpu")
        for i in tl.static_range(1, channel.world):
            flags = peer_pointer(pieces.addresses, (channel.rank + i) % channel.world, 0, tl.int64)
            signal(flags + channel.rank * pieces.of_rank, tl.load(stamp))


@triton.jit
def arriving_gemm_kernel(
    own, gathered, weight, own_elements, out, addresses, pushed, stamp, shard_rows, columns, depth, ends, pieces, channel,
    PUSHES: tl.constexpr, TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ON_GPU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See :func:`multiply_arriving`.

    Args:
        own: descriptor [shard_rows, K]; ``own_elements`` points to the same.
        gathered: descriptor [ranks * shard_rows, K].
        weight: as in :func:`product_of_tile`.
        ends: tuple: where each piece of a shard ends.
        PUSHES: whether this kernel moves, too.
    """
    if PUSHES:
        _push(own_elements, addresses, pieces, pushed, stamp, shard_rows * depth, channel, DTYPE, BLOCK)
    number = tl.program_id(0)
    number = _multiply_piece(
        own, weight, out, number, 0, shard_rows, channel.rank * shard_rows, columns, depth,
        TRANSPOSED, DTYPE, PRECISION, ROWS, COLUMNS, DEPTH, BAND,
    )  # fmt: skip
    peers: tl.constexpr = channel.world - 1
    for segment in range(0, len(ends) * peers):
        piece, source = segment // peers, (channel.rank + channel.world - 1 - segment % peers) % channel.world
        wait_for_piece(channel, pieces, source, piece)
        order_bulk_loads(ON_GPU)
        first = source * shard_rows + end_of_piece(ends, piece - 1)
        end = source * shard_rows + end_of_piece(ends, piece)
        number = _multiply_piece(
            gathered, weight, out, number, first, end, 0, columns, depth,
            TRANSPOSED, DTYPE, PRECISION, ROWS, COLUMNS, DEPTH, BAND,
        )  # fmt: skip


@triton.jit
def _add_received(product, received, row, column, inside, shard_elements, columns, channel, DTYPE: tl.constexpr):
    """The sum of a part of a tile over the ranks, in fp32: those of the peers in their order, then this rank's."""
    total = tl.zeros(product.shape, tl.float32)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    for i in tl.static_range(0, channel.world):
        if i != channel.rank:
            part = received + i * shard_elements.to(tl.int64) + place
            total += tl.load(part, mask=inside, other=0.0).to(tl.float32)
    return (total + product).to(DTYPE)


@triton.jit
def adding_gemm_kernel(
    x, weight, out, received, rows, columns, depth, ends, pieces, channel,
    WAITS: tl.constexpr, TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """See :func:`multiply_and_add`; ``received``: [ranks, rows, N]."""
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=True):
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, BAND)
        product = product_of_tile(
            x, weight, row_tile * ROWS, column_tile * COLUMNS, depth, TRANSPOSED, DTYPE, PRECISION, ROWS, COLUMNS, DEPTH
        )
        if WAITS:
            last = tl.minimum(row_tile * ROWS + ROWS, rows) - 1
            piece = piece_of_row(ends, last)
            for i in tl.static_range(1, channel.world):
                wait_for_piece(channel, pieces, (channel.rank + i) % channel.world, piece)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        half: tl.constexpr = COLUMNS // 2
        left_half, right_half = halves(upright(product, ROWS), ROWS, COLUMNS)
        rows_of_out = tl.multiple_of(out + row.to(tl.int64) * columns, 16)[:, None]
        column = column_tile * COLUMNS + tl.arange(0, half)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total = _add_received(left_half, received, row, column, inside, rows * columns, columns, channel, DTYPE)
        tl.store(rows_of_out + column[None, :], total, mask=inside)
        column += half
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total = _add_received(right_half, received, row, column, inside, rows * columns, columns, channel, DTYPE)
        tl.store(rows_of_out + column[None, :], total, mask=inside)


def multiply_arriving(
    own: Tensor,
    memory: SymmetricMemory,
    weight: Tensor,
    out: Tensor,
    pieces: PieceFlags,
    ends: tuple[int, ...],
    channel: Channel,
    pushed: Tensor,
    *,
    pushes: bool,
    is_transposed: bool,
) -> None:
    """out [ranks * m, N] = the rows of all ranks @ weight.T, the peers' when they have come. Within an epoch.

    Args:
        own: [m, K], contiguous; rows begin at multiples of 16 bytes, here and in all matrices.
        memory: where the peers' rows come, each shard in its place.
        weight: [N, K], or [K, N] if ``is_transposed``.
        ends: where each piece of a shard ends.
        pushed: int64 [1], zero; for this kernel alone.
        pushes: whether this kernel sends the own rows to the peers, in one piece.
    """
    (rows, depth), columns, ranks = own.shape, out.shape[1], channel.group.world_size
    gathered = memory.local[: ranks * own.numel() * own.element_size()].view(own.dtype).view(-1, depth)
    tiles = tiles_of_product(len(out), columns, depth, own.element_size())
    count = ranks * triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
    # Programs that wait for all of another rank's must not be followed by others of their grid in the interpreter.
    programs = 1 if pushes and own.device.type == "cpu" else programs_of(own.device, count, tiles)
    arriving_gemm_kernel[(programs,)](
        TensorDescriptor.from_tensor(own, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(gathered, [tiles.rows, tiles.depth]), _weight_blocks(weight, tiles, is_transposed),
        own, out, memory.addresses, pushed, pieces.stamp, rows, columns, depth, ends, pieces.args, channel.args,
        PUSHES=pushes, ON_GPU=own.device.type == "cuda", BLOCK=_PUSHED_BLOCK, **_constants(own, tiles, is_transposed),
    )  # fmt: skip


def multiply_and_add(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    received: Tensor,
    pieces: PieceFlags,
    ends: tuple[int, ...],
    channel: Channel,
    *,
    waits: bool,
    is_transposed: bool,
) -> None:
    """out [m, N] = x @ weight.T + what the peers have sent.

    Args:
        x: [m, K], contiguous.
        weight: as in :func:`multiply_arriving`.
        received: [ranks, m, N] in the dtype of x; this rank's own part is not read.
        ends: where each piece of the rows ends.
        waits: whether pieces may still be on their way; within an epoch.
    """
    (rows, depth), columns = x.shape, out.shape[1]
    tiles = tiles_of_product(rows, columns, depth, x.element_size())
    count = triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
    adding_gemm_kernel[(programs_of(x.device, count, tiles),)](
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]), _weight_blocks(weight, tiles, is_transposed),
        out, received, rows, columns, depth, ends, pieces.args, channel.args,
        WAITS=waits, **_constants(x, tiles, is_transposed),
    )  # fmt: skip


def _weight_blocks(weight: Tensor, tiles: Tiles, is_transposed: bool) -> TensorDescriptor:
    block = [tiles.depth, tiles.columns] if is_transposed else [tiles.columns, tiles.depth]
    return TensorDescriptor.from_tensor(weight, block)


def _constants(x: Tensor, tiles: Tiles, is_transposed: bool) -> dict[str, object]:
    return {
        "TRANSPOSED": is_transposed, "DTYPE": TRITON_DTYPES[x.dtype], "PRECISION": precision(x.dtype),
        "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth, "BAND": tiles.band,
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
