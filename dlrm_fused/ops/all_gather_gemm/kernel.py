"""Matrix products with pieces that arrive, or leave, while others are multiplied: persistent GEMMs for Hopper GPUs.

* :func:`multiply_arriving`: rows of all ranks, this one's first, those of others piece by piece when they have come.
* :func:`push_and_multiply`: the same in a kernel that moves, too: some programs store at the peers, while others multiply.
* :func:`multiply_and_add`: rows of this rank, with what other ranks have sent of their products added to each tile.
* :func:`multiply_and_send`: rows of the peers, stored there, then those of this rank as before, in one kernel.

Tiles, operands and epilogue are those of :mod:`~dlrm_fused.ops.gemm_all_to_all.kernel`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_fused.ops.all_gather_gemm.tuning import tiles_and_pushers, tiles_of_pieces
from dlrm_fused.ops.common.devices import has_async_proxy
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.gemm_all_to_all.kernel import halves, multiply, no_product, programs_of, tile_constants, tile_of, upright
from dlrm_fused.ops.gemm_all_to_all.tuning import Tiles
from dlrm_fused.ops.schedules.piece_flags import (
    PieceFlags,
    begin_epoch,
    end_of_piece,
    mark_piece,
    tell_call,
    wait_for_calls,
    wait_for_piece,
)
from dlrm_fused.symmetric import Channel, SymmetricMemory
from dlrm_fused.symmetric.device import order_bulk_loads, peer_pointer
from dlrm_fused.symmetric.launches import layout_of

# Elements that a program stores at a peer at a time.
_PUSHED_BLOCK = 8192


class Epoch(NamedTuple):
    """The call of a channel in which a kernel moves pieces, or waits for them.

    Attributes:
        channel, pieces, fingerprint: of the call.
        ends: where each piece of a shard ends.
        counters: int64 [2], zero; for these kernels alone: of programs that have begun, and of those that have moved all.
    """

    channel: Channel
    pieces: PieceFlags
    fingerprint: int
    ends: tuple[int, ...]
    counters: Tensor

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of a kernel that waits for pieces."""
        return self.ends, self.pieces.args, self.channel.args


@triton.jit
def product_of_tile(x, weight, first_row, first_column, depth, TRANSPOSED: tl.constexpr, TILE: tl.constexpr):
    """fp32, as :func:`multiply` adds it up.

    Args:
        x: descriptor [R, K], blocks [rows, depth] of TILE, a :class:`~dlrm_fused.ops.gemm_all_to_all.kernel.TileArgs`.
        weight: descriptor [N, K], blocks [columns, depth]; with TRANSPOSED [K, N], [depth, columns].
    """
    product = no_product(TILE.rows, TILE.columns)
    for step in range(0, tl.cdiv(depth, TILE.depth)):
        left = x.load([first_row, step * TILE.depth])
        if TRANSPOSED:
            right = weight.load([step * TILE.depth, first_column])
            product = multiply(left, right, product, TILE.tf32)
        else:
            right = weight.load([first_column, step * TILE.depth])
            product = multiply(left, right.T, product, TILE.tf32)
    return product


@triton.jit
def _store_tile(product, out, first_out, row, row_is_in, first_column, columns, TILE: tl.constexpr):  # fmt: skip
    rows_of_out = tl.multiple_of(out + (first_out + row).to(tl.int64) * columns, 16)[:, None]
    half: tl.constexpr = TILE.columns // 2
    left_half, right_half = halves(upright(product, TILE.rows), TILE.rows, TILE.columns)
    column = first_column + tl.arange(0, half)
    tl.store(
        rows_of_out + column[None, :], left_half.to(out.dtype.element_ty), mask=row_is_in[:, None] & (column < columns)[None, :]
    )
    column += half
    tl.store(
        rows_of_out + column[None, :],
        right_half.to(out.dtype.element_ty),
        mask=row_is_in[:, None] & (column < columns)[None, :],
    )


@triton.jit
def _multiply_piece(
    x, weight, out, number, programs, first_row, end_row, first_out, columns, depth,
    TRANSPOSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute this program's tiles of x's rows ``first_row`` to ``end_row``; store them ``first_out`` rows later in ``out``.

    Args:
        number: this program's first tile of the piece.
        programs: that have tiles of it.

    Returns:
        This program's first tile of the piece that follows.
    """
    row_tiles, column_tiles = tl.cdiv(end_row - first_row, TILE.rows), tl.cdiv(columns, TILE.columns)
    tiles = row_tiles * column_tiles
    for tile in tl.range(number, tiles, programs, flatten=True):
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, TILE.band)
        first = first_row + row_tile * TILE.rows
        product = product_of_tile(x, weight, first, column_tile * TILE.columns, depth, TRANSPOSED, TILE)
        row = first + tl.arange(0, TILE.rows)
        _store_tile(product, out, first_out, row, row < end_row, column_tile * TILE.columns, columns, TILE)
    return number + tl.cdiv(tl.maximum(tiles - number, 0), programs) * programs - tiles


@triton.jit
def _is_last(counter, programs):
    """Whether this program is the last of so many to come here, after all that they stored; the counter is 0 again then."""
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == programs - 1
    if is_last:
        tl.atomic_xchg(counter, tl.zeros((), tl.int64), sem="relaxed", scope="gpu")
    return is_last


@triton.jit
def _push(own, addresses, pieces, counter, elements, pushers, epoch, channel, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Store this rank's rows at all peers, the first programs together; the last one to end tells them.

    Args:
        addresses: int64 [ranks], of the memory in which shards are gathered.
        counter: int64, 0 before and after.
        elements: of a shard.
    """
    element_bytes: tl.constexpr = DTYPE.primitive_bitwidth // 8
    first_byte = channel.rank * elements * element_bytes
    first, stride = tl.program_id(0).to(tl.int64) * BLOCK, pushers.to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    values = tl.load(own + place, mask=place < elements)
    for _ in range(first, elements, stride):
        # The next ones are on their way from memory, while these leave.
        following = tl.load(own + place + stride, mask=place + stride < elements)
        for i in tl.static_range(1, channel.world):
            shard = peer_pointer(addresses, (channel.rank + i) % channel.world, first_byte, DTYPE)
            tl.store(shard + place, values, mask=place < elements)
        place += stride
        values = following
    if _is_last(counter, pushers):
        for i in tl.static_range(1, channel.world):
            mark_piece(channel, pieces, (channel.rank + i) % channel.world, 0, epoch)


@triton.jit
def _multiply_arriving(
    gathered, weight, out, number, shard_rows, columns, depth, ends, pieces, channel, epoch,
    TRANSPOSED: tl.constexpr, HAS_ASYNC_PROXY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute this program's tiles of the peers' rows, in the order in which they come.

    Args:
        number: this program's first tile of the first piece.
    """
    peers: tl.constexpr = channel.world - 1
    for segment in range(0, len(ends) * peers):
        piece, source = segment // peers, (channel.rank + channel.world - 1 - segment % peers) % channel.world
        wait_for_piece(channel, pieces, source, piece, epoch)
        order_bulk_loads(HAS_ASYNC_PROXY)
        first = source * shard_rows + end_of_piece(ends, piece - 1)
        end = source * shard_rows + end_of_piece(ends, piece)
        number = _multiply_piece(
            gathered, weight, out, number, tl.num_programs(0), first, end, 0, columns, depth, TRANSPOSED, TILE,
        )  # fmt: skip


@triton.jit
def arriving_gemm_kernel(
    own, gathered, weight, out, shard_rows, columns, depth, ends, pieces, channel,
    TRANSPOSED: tl.constexpr, HAS_ASYNC_PROXY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See :func:`multiply_arriving`.

    Args:
        own: descriptor [shard_rows, K].
        gathered: descriptor [ranks * shard_rows, K].
        weight: as in :func:`product_of_tile`.
        ends: tuple: where each piece of a shard ends.
    """
    number = _multiply_piece(
        own, weight, out, tl.program_id(0), tl.num_programs(0), 0, shard_rows, channel.rank * shard_rows, columns, depth,
        TRANSPOSED, TILE,
    )  # fmt: skip
    _multiply_arriving(
        gathered, weight, out, number, shard_rows, columns, depth, ends, pieces, channel, tl.load(pieces.stamp),
        TRANSPOSED, HAS_ASYNC_PROXY, TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["fingerprint", "pushers"])
def pushing_gemm_kernel(
    own, gathered, weight, own_elements, out, addresses, counters, shard_rows, columns, depth, ends, pieces, channel,
    fingerprint, pushers, TRANSPOSED: tl.constexpr, HAS_ASYNC_PROXY: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See :func:`push_and_multiply`.

    The first programs push, and then have the first tiles of the peers' rows; the other programs begin with those of own rows.

    Args:
        own_elements: points to what ``own`` describes.
        own, gathered, weight, ends: as in :func:`arriving_gemm_kernel`; the shard is one piece.
    """
    epoch = begin_epoch(channel, counters)
    program = tl.program_id(0)
    if program < pushers:
        if program == 0:
            tell_call(channel, pieces, epoch, fingerprint)
        if wait_for_calls(channel, pieces, epoch, fingerprint):
            _push(
                own_elements, addresses, pieces, counters + 1, depth.to(tl.int64) * shard_rows, pushers, epoch, channel,
                own.dtype, BLOCK,
            )  # fmt: skip
    else:
        _multiply_piece(
            own, weight, out, program - pushers, tl.num_programs(0) - pushers, 0, shard_rows, channel.rank * shard_rows,
            columns, depth, TRANSPOSED, TILE,
        )  # fmt: skip
    _multiply_arriving(
        gathered, weight, out, program, shard_rows, columns, depth, ends, pieces, channel, epoch,
        TRANSPOSED, HAS_ASYNC_PROXY, TILE,
    )  # fmt: skip


class Summands(NamedTuple):
    """The tensors that are added to a sum over the ranks, as one argument of a kernel; any tensor stands for an unused one."""

    bias: Any  # [N]
    residual: Any  # [m, N], contiguous


@triton.jit
def _add_half(
    product, out, received, summands, first_row, end_row, first_column, rows, columns, channel,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See :func:`_add_and_store`; half a tile, in fp32: what comes from the peers in their order, then this rank's."""
    row, column = first_row + tl.arange(0, TILE.rows), first_column + tl.arange(0, TILE.columns // 2)
    inside = (row < end_row)[:, None] & (column < columns)[None, :]
    first_of_row = row.to(tl.int64) * columns
    total = tl.zeros(product.shape, tl.float32)
    for i in tl.static_range(0, channel.world):
        if i != channel.rank:
            total += received.load([i * rows + first_row, first_column]).to(tl.float32)
    total += product
    if HAS_BIAS:
        total += tl.load(summands.bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        places = tl.multiple_of(summands.residual + first_of_row, 16)[:, None] + column[None, :]
        total += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(tl.multiple_of(out + first_of_row, 16)[:, None] + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_and_store(
    product, out, received, summands, first_row, end_row, first_column, rows, columns, channel,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of own rows, with what the peers have sent; ``received`` as in :func:`adding_gemm_kernel`."""
    half: tl.constexpr = TILE.columns // 2
    left_half, right_half = halves(upright(product, TILE.rows), TILE.rows, TILE.columns)
    _add_half(
        left_half, out, received, summands, first_row, end_row, first_column, rows, columns, channel, HAS_BIAS, HAS_RESIDUAL,
        TILE,
    )  # fmt: skip
    _add_half(
        right_half, out, received, summands, first_row, end_row, first_column + half, rows, columns, channel, HAS_BIAS,
        HAS_RESIDUAL, TILE,
    )  # fmt: skip


@triton.jit
def _multiply_and_add_piece(
    x, weight, out, received, summands, number, first_of_x, first_row, end_row, rows, columns, depth, channel,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As :func:`_multiply_piece`, of own rows, which begin in x at ``first_of_x``, with what the peers have sent."""
    row_tiles, column_tiles = tl.cdiv(end_row - first_row, TILE.rows), tl.cdiv(columns, TILE.columns)
    tiles, programs = row_tiles * column_tiles, tl.num_programs(0)
    for tile in tl.range(number, tiles, programs, flatten=True):
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, TILE.band)
        first = first_row + row_tile * TILE.rows
        product = product_of_tile(x, weight, first_of_x + first, column_tile * TILE.columns, depth, TRANSPOSED, TILE)
        _add_and_store(
            product, out, received, summands, first, end_row, column_tile * TILE.columns, rows, columns, channel, HAS_BIAS,
            HAS_RESIDUAL, TILE,
        )  # fmt: skip
    return number + tl.cdiv(tl.maximum(tiles - number, 0), programs) * programs - tiles


@triton.jit
def _wait_for_peers(channel, pieces, piece, epoch, HAS_ASYNC_PROXY: tl.constexpr):
    """Wait until a piece of every peer has come."""
    for i in tl.static_range(1, channel.world):
        wait_for_piece(channel, pieces, (channel.rank + i) % channel.world, piece, epoch)
    order_bulk_loads(HAS_ASYNC_PROXY)


@triton.jit(do_not_specialize=["first_piece", "end_piece"])
def adding_gemm_kernel(
    x, weight, out, received, summands, rows, columns, depth, first_piece, end_piece, ends, pieces, channel,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_ASYNC_PROXY: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """See :func:`multiply_and_add`; ``received``: descriptor [ranks * rows, N], blocks of half a tile."""
    number, epoch = tl.program_id(0), tl.load(pieces.stamp)
    for piece in range(first_piece, end_piece):
        _wait_for_peers(channel, pieces, piece, epoch, HAS_ASYNC_PROXY)
        number = _multiply_and_add_piece(
            x, weight, out, received, summands, number, 0, end_of_piece(ends, piece - 1), end_of_piece(ends, piece), rows,
            columns, depth, channel, HAS_BIAS, HAS_RESIDUAL, TRANSPOSED, TILE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["fingerprint"])
def sending_gemm_kernel(
    x, weight, out, received, addresses, counters, rows, columns, depth, ends, pieces, channel, fingerprint,
    TRANSPOSED: tl.constexpr, HAS_ASYNC_PROXY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See :func:`multiply_and_send`; ``rows``: of a shard; ``received``: as in :func:`adding_gemm_kernel`.

    Each program multiplies its first tile of own rows before it looks whether its stores at the peers are done: they are on
    their way meanwhile.
    """
    element_bytes: tl.constexpr = x.dtype.primitive_bitwidth // 8
    epoch, number = begin_epoch(channel, counters), tl.program_id(0)
    if number == 0:
        tell_call(channel, pieces, epoch, fingerprint)
    can_send = wait_for_calls(channel, pieces, epoch, fingerprint)
    for shift in range(1, channel.world):
        peer = (channel.rank + shift) % channel.world
        block = peer_pointer(addresses, peer, channel.rank * rows * columns.to(tl.int64) * element_bytes, x.dtype)
        number = _multiply_piece(
            x, weight, block, number, tl.num_programs(0), peer * rows, tl.where(can_send, peer + 1, peer) * rows,
            -peer * rows, columns, depth, TRANSPOSED, TILE,
        )  # fmt: skip
    own = channel.rank * rows
    row_tiles, column_tiles = tl.cdiv(rows, TILE.rows), tl.cdiv(columns, TILE.columns)
    row_tile, column_tile = tile_of(tl.minimum(number, row_tiles * column_tiles - 1), row_tiles, column_tiles, TILE.band)
    product = no_product(TILE.rows, TILE.columns)
    if number < row_tiles * column_tiles:
        product = product_of_tile(x, weight, own + row_tile * TILE.rows, column_tile * TILE.columns, depth, TRANSPOSED, TILE)
    if _is_last(counters + 1, tl.num_programs(0)) & can_send:
        for i in tl.static_range(1, channel.world):
            mark_piece(channel, pieces, (channel.rank + i) % channel.world, 0, epoch)
    _wait_for_peers(channel, pieces, 0, epoch, HAS_ASYNC_PROXY)
    if number < row_tiles * column_tiles:
        _add_and_store(
            product, out, received, 0, row_tile * TILE.rows, rows, column_tile * TILE.columns, rows, columns, channel, False,
            False, TILE,
        )  # fmt: skip
    _multiply_and_add_piece(
        x, weight, out, received, 0, number + tl.num_programs(0), own, 0, rows, rows, columns, depth, channel, False, False,
        TRANSPOSED, TILE,
    )  # fmt: skip


def multiply_arriving(
    own: Tensor, memory: SymmetricMemory, weight: Tensor, out: Tensor, epoch: Epoch, *, is_transposed: bool
) -> None:
    """out [ranks * m, N] = the rows of all ranks @ weight.T, the peers' when they have come.

    Args:
        own: [m, K], contiguous; rows begin at multiples of 16 bytes, here and in all matrices.
        memory: where the peers' rows come, each shard in its place.
        weight: [N, K], or [K, N] if ``is_transposed``.
    """
    (rows, depth), columns, ranks = own.shape, out.shape[1], epoch.channel.group.world_size
    tiles = tiles_of_pieces(rows, columns, depth, own.element_size(), gpu_of(own.device), peers=ranks - 1)
    programs, constants = programs_of(own.device, ranks * tiles.count(rows, columns), tiles), tile_constants(tiles, own.dtype)
    epoch.channel.launches(
        (layout_of(own, weight, out), epoch.ends, is_transposed, tuple(constants.values())), arriving_gemm_kernel, (programs,),
        *_shards(own, memory, ranks, tiles), _weight_blocks(weight, tiles, is_transposed), out, rows, columns, depth,
        *epoch.args, HAS_ASYNC_PROXY=has_async_proxy(own.device), TRANSPOSED=is_transposed, **constants,
    )  # fmt: skip


def push_and_multiply(
    own: Tensor, memory: SymmetricMemory, weight: Tensor, out: Tensor, epoch: Epoch, *, is_transposed: bool
) -> None:
    """Multiply as :func:`multiply_arriving` does, in an epoch that the kernel begins.

    The kernel sends the own rows to the peers, in one piece.
    """
    (rows, depth), columns, ranks = own.shape, out.shape[1], epoch.channel.group.world_size
    tiles, pushers = tiles_and_pushers(rows, columns, depth, own.element_size(), ranks - 1, gpu_of(own.device))
    count = tiles.count(rows, columns)
    programs = programs_of(own.device, max(pushers + count, (ranks - 1) * count), tiles)
    constants = tile_constants(tiles, own.dtype)
    epoch.channel.launches(
        (layout_of(own, weight, out), epoch.ends, is_transposed, tuple(constants.values())), pushing_gemm_kernel, (programs,),
        *_shards(own, memory, ranks, tiles), _weight_blocks(weight, tiles, is_transposed),
        own, out, memory.addresses, epoch.counters, rows, columns, depth, *epoch.args, epoch.fingerprint, pushers,
        HAS_ASYNC_PROXY=has_async_proxy(own.device), BLOCK=_PUSHED_BLOCK, TRANSPOSED=is_transposed, **constants,
    )  # fmt: skip


def multiply_and_add(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    received: Tensor,
    epoch: Epoch,
    *,
    is_transposed: bool,
    pieces: range | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """out [m, N] = x @ weight.T + what the peers have sent, when it has come, + bias + residual.

    Args:
        x: [m, K], contiguous.
        weight: as in :func:`multiply_arriving`.
        received: [ranks, m, N] in the dtype of x; this rank's own part is not read.
        pieces: those of the epoch whose rows are computed, if not all.
        bias, residual: [N] and [m, N], contiguous.
    """
    (rows, depth), columns = x.shape, out.shape[1]
    summands, chosen = (bias, residual), range(len(epoch.ends)) if pieces is None else pieces
    multiplied = epoch.ends[chosen.stop - 1] - (epoch.ends[chosen.start - 1] if chosen.start else 0)
    tiles = tiles_of_pieces(multiplied, columns, depth, x.element_size(), gpu_of(x.device), added=1.0)
    count = tiles.count(multiplied, columns)
    constants = tile_constants(tiles, x.dtype)
    epoch.channel.launches(
        (layout_of(x, weight, out, received, *summands), epoch.ends, is_transposed, tuple(constants.values())),
        adding_gemm_kernel, (programs_of(x.device, count, tiles),),
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]), _weight_blocks(weight, tiles, is_transposed),
        out, _received_blocks(received.view(-1, columns), tiles), Summands(*(out if one is None else one for one in summands)),
        rows, columns, depth, chosen.start, chosen.stop, *epoch.args,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, HAS_ASYNC_PROXY=has_async_proxy(x.device),
        TRANSPOSED=is_transposed, **constants,
    )  # fmt: skip


def multiply_and_send(
    x: Tensor, weight: Tensor, out: Tensor, memory: SymmetricMemory, epoch: Epoch, *, is_transposed: bool
) -> None:
    """x @ weight.T: rows of the peers are stored there, in one piece; then out [m, N], as :func:`multiply_and_add`. The kernel
    begins the epoch.

    Args:
        x: [ranks * m, K], contiguous.
        weight: as in :func:`multiply_arriving`.
        memory: where each rank receives [ranks, m, N].
    """
    (rows, columns), depth, ranks = out.shape, x.shape[1], epoch.channel.group.world_size
    tiles = tiles_of_pieces(len(x), columns, depth, x.element_size(), gpu_of(x.device), added=1 / ranks)
    count = ranks * tiles.count(rows, columns)
    received = memory.local[: ranks * out.numel() * out.element_size()].view(out.dtype).view(-1, columns)
    # Each program waits for those of another rank, and the interpreter runs the programs of a grid one after the other.
    programs = programs_of(x.device, count, tiles) if x.device.type == "cuda" else 1
    constants = tile_constants(tiles, x.dtype)
    epoch.channel.launches(
        (layout_of(x, weight, out), epoch.ends, is_transposed, tuple(constants.values())), sending_gemm_kernel, (programs,),
        TensorDescriptor.from_tensor(x, [tiles.rows, tiles.depth]), _weight_blocks(weight, tiles, is_transposed),
        out, _received_blocks(received, tiles), memory.addresses, epoch.counters, rows, columns, depth, *epoch.args,
        epoch.fingerprint,
        HAS_ASYNC_PROXY=has_async_proxy(x.device), TRANSPOSED=is_transposed, **constants,
    )  # fmt: skip


def _shards(own: Tensor, memory: SymmetricMemory, ranks: int, tiles: Tiles) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return descriptors of this rank's rows, and of the place of all ranks' rows."""
    gathered = memory.local[: ranks * own.numel() * own.element_size()].view(own.dtype).view(-1, own.shape[1])
    block = [tiles.rows, tiles.depth]
    return TensorDescriptor.from_tensor(own, block), TensorDescriptor.from_tensor(gathered, block)


def _weight_blocks(weight: Tensor, tiles: Tiles, is_transposed: bool) -> TensorDescriptor:
    block = [tiles.depth, tiles.columns] if is_transposed else [tiles.columns, tiles.depth]
    return TensorDescriptor.from_tensor(weight, block)


def _received_blocks(received: Tensor, tiles: Tiles) -> TensorDescriptor:
    """Half a tile each."""
    return TensorDescriptor.from_tensor(received, [tiles.rows, tiles.columns // 2])
