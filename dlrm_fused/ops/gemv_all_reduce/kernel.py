"""The kernel of GEMV + AllReduce for few rows: partial results leave for their peers as soon as a tile is done.

A word of 64 bits carries a value and the number of the call, so that a reader sees by the word itself whether it is there:
no fence between data and flag is paid, nor a flag at all (as in the LL protocol of NCCL). Stores and loads of aligned 64 bits
are not torn. Where the bytes matter more than the fence (FLAGGED), tiles travel as they are, with a flag each.

Words lie in a *receive buffer*, two halves that calls use in turn. A rank writes a half again two calls later; to complete the
call in between it needed words of that call from every rank, which each sends after it has completed the one before. So
nothing that is still to be read is overwritten, though no rank announces that it is ready.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import triton
import triton.language as tl

from dlrm_fused.ops.common.devices import wait_for_earlier_kernels
from dlrm_fused.ops.gemv_all_reduce.tuning import TAGGED_SPLIT_ROWS, Blocks, padded
from dlrm_fused.symmetric.device import (
    ABORT_CHECK,
    ARRIVAL,
    EPOCH,
    FAULT,
    MISMATCH,
    PROGRAMS_DONE,
    READY,
    REFUSED,
    REFUSED_OFFSET,
    fault_kind,
    look_at,
    must_stop,
    next_epoch,
    peer_pointer,
    report_fault,
    signal,
)

# Words of Channel.state that belong to this kernel.
TILES_DONE = tl.constexpr(4)
_LOW = tl.constexpr(0xFFFFFFFF)


class ReceiveBuffer(NamedTuple):
    """The receive buffer of a rank, as one argument of the kernel. A half, counted in words, holds at

    * ``parts_at`` m * n partial results of each rank;
    * ``sums_at`` the sums of others (TWO_SHOT);
    * ``flags_at`` the flags of tiles (FLAGGED): of partial results by rank, then of sums;
    * the end the handshake, a word for each rank.

    What is tagged and what is not lie at different places: a value could look like a tag.
    """

    words: Any  # int64 tensor, this rank's
    addresses: Any  # int64 tensor [world], of the buffers of all ranks
    half_words: Any
    parts_at: Any
    sums_at: Any
    flags_at: Any


class Epilogue(NamedTuple):
    """The operands of the work that follows the sum, as one argument of the kernel; any tensor stands for what is not used."""

    bias: Any  # [n]
    residual: Any  # [m, n]
    norm_weight: Any  # [n]
    normed: Any  # [m, n], the RMSNorm of the result
    squares: Any  # fp32 [tiles, ROWS], scratch of the norm


class BlockArgs(NamedTuple):
    """The division of the work among programs, one constant of the kernel: of
    :class:`~dlrm_fused.ops.gemv_all_reduce.tuning.Blocks` what decides about its code."""

    rows: int  # a power of two, at least m
    columns: int
    depth: int
    splits: int
    is_even: bool  # whether each split has whole steps
    tagged_splits: bool  # whether parts of splits are handed on as words with tags
    two_shot: bool
    flagged: bool
    is_given: bool

    @classmethod
    def of(cls, blocks: Blocks, rows: int, depth: int) -> Self:
        """Return those for x [rows, depth]."""
        columns, step, splits = blocks.columns, blocks.depth, blocks.splits
        is_even, is_tagged = depth % (step * splits) == 0, rows <= TAGGED_SPLIT_ROWS
        ways = blocks.two_shot, blocks.flagged, blocks.is_given
        return cls(padded(rows), columns, step, splits, is_even, is_tagged, *ways)


class SplitBuffer(NamedTuple):
    """Memory of this rank alone, through which the programs of a tile hand their parts of the sum to the last of them.

    A launch ends before the next one of its stream writes here again.
    """

    words: Any  # int64 [splits, m * n]: values with tags, for few rows
    parts: Any  # fp32 [splits, tiles, COLUMNS * ROWS]: values as they are, each tile with a flag, for more rows
    flags: Any  # int64 [splits, tiles]


@triton.jit
def _tag(epoch):
    """Return the mark of the words of a call: 32 bits, never 0, which is what memory begins with."""
    return epoch % _LOW + 1


@triton.jit
def _pack(values, tag):
    """fp32 values as words."""
    return (tag << 32) | (values.to(tl.int32, bitcast=True).to(tl.int64) & _LOW)


@triton.jit
def _unpack(words):
    return (words & _LOW).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _pack_pairs(values, tag, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Results [ROWS, COLUMNS] of 16 bits as words of two neighbours each."""
    low, high = tl.split(tl.reshape(values.to(tl.int16, bitcast=True), (ROWS, COLUMNS // 2, 2)))
    return (tag << 32) | ((high.to(tl.int64) & 0xFFFF) << 16) | (low.to(tl.int64) & 0xFFFF)


@triton.jit
def _unpack_pairs(words, dtype: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low, high), (ROWS, COLUMNS))


@triton.jit
def poll(channel, word):
    """Look at a word that never becomes 1 as often as :func:`_receive` would: the fastest of the waits here. One warp."""
    seen = tl.load(word, volatile=True)
    done = tl.zeros((), tl.int64)
    while (seen != 1) & (done < channel.poll_limit):
        seen = tl.load(word, volatile=True)
        done += 1
        if done % ABORT_CHECK == 0:
            done = tl.where(must_stop(channel), channel.poll_limit, done)


@triton.jit
def _receive(channel, places, inside, tag, epoch, peer):
    """The words at ``places``, as soon as all of them are of this call."""
    words = tl.load(places, mask=inside, other=0, volatile=True)
    missing = tl.max(tl.where(inside & (((words >> 32) & _LOW) != tag), 1, 0))
    polls = tl.zeros((), tl.int64)
    while (missing > 0) & (polls < channel.poll_limit):
        words = tl.load(places, mask=inside, other=0, volatile=True)
        missing = tl.max(tl.where(inside & (((words >> 32) & _LOW) != tag), 1, 0))
        polls += 1
        if polls % ABORT_CHECK == 0:
            polls = tl.where(must_stop(channel), channel.poll_limit, polls)
    if missing > 0:
        report_fault(channel, fault_kind(channel), peer, epoch, ARRIVAL)
    return words


@triton.jit
def _wait_for_flag(channel, flag, tag, epoch, peer, SCOPE: tl.constexpr):
    """Wait until a flag is of this call; what was stored before it was set may be read then, if volatile."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope=SCOPE)
    polls = tl.zeros((), tl.int64)
    while (seen != tag) & (polls < channel.poll_limit):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope=SCOPE)
        polls += 1
        if polls % ABORT_CHECK == 0:
            polls = tl.where(must_stop(channel), channel.poll_limit, polls)
    if seen != tag:
        report_fault(channel, fault_kind(channel), peer, epoch, ARRIVAL)
    tl.debug_barrier()


@triton.jit
def _receive_tile(channel, flag, places, inside, tag, epoch, peer):
    """The values at ``places``, as soon as their flag is of this call: data that a fence precedes."""
    _wait_for_flag(channel, flag, tag, epoch, peer, "sys")
    return tl.load(places, mask=inside, other=0.0, volatile=True)


@triton.jit
def _send_handshake(channel, fingerprint, handshake, receive_addresses, tag):
    """Tell every rank what this one takes the call to be."""
    for i in tl.static_range(1, channel.world):
        place = peer_pointer(receive_addresses, (channel.rank + i) % channel.world, (handshake + channel.rank) * 8, tl.int64, 8)
        tl.store(place, (tag << 32) | fingerprint)


@triton.jit
def _check_handshake(channel, fingerprint, receive_buffer, handshake, tag, epoch):
    """Compare with what the others take the call to be: with other shapes their words would never come."""
    for i in tl.static_range(1, channel.world):
        peer = (channel.rank + i) % channel.world + tl.zeros((), tl.int64)
        word = look_at(receive_buffer + handshake + peer)
        refused = tl.zeros((), tl.int1)
        polls = tl.zeros((), tl.int64)
        while (((word >> 32) & _LOW) != tag) & (polls < channel.poll_limit):
            word = look_at(receive_buffer + handshake + peer)
            polls += 1
            if polls % ABORT_CHECK == 0:
                refused = (look_at(channel.flags + peer) & _LOW) == REFUSED_OFFSET
                polls = tl.where(must_stop(channel) | refused, channel.poll_limit, polls)
        if refused:
            report_fault(channel, REFUSED, peer, epoch, READY)
        elif ((word >> 32) & _LOW) != tag:
            report_fault(channel, fault_kind(channel), peer, epoch, READY)
        elif (word & _LOW) != fingerprint:
            report_fault(channel, MISMATCH, peer, epoch, READY)


@triton.jit
def _multiply(x, weight, m, n, k, x_stride, weight_stride, tile, split, BLOCKS: tl.constexpr):
    """One tile of weight times x transposed, over this split's part of K: fp32 [COLUMNS, ROWS]."""
    ROWS: tl.constexpr = BLOCKS.rows
    COLUMNS: tl.constexpr = BLOCKS.columns
    DEPTH: tl.constexpr = BLOCKS.depth
    row = tl.arange(0, ROWS)
    exists = (row < m)[None, :]
    # Columns that do not exist are computed from others: loads need no mask, and nobody stores them.
    column = (tile * COLUMNS + tl.arange(0, COLUMNS)) % n
    depth = tl.arange(0, DEPTH)
    steps = tl.cdiv(tl.cdiv(k, DEPTH), BLOCKS.splits)
    begin = split * steps * DEPTH
    left = weight + column[:, None].to(tl.int64) * weight_stride + (begin + depth)[None, :]
    right = x + row[None, :].to(tl.int64) * x_stride + (begin + depth)[:, None]
    product = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(0, steps):
        if BLOCKS.is_even:
            weights = tl.load(left)
            factors = tl.load(right, mask=exists, other=0.0)
        else:
            inside = begin + step * DEPTH + depth < k
            weights = tl.load(left, mask=inside[None, :], other=0.0)
            factors = tl.load(right, mask=inside[:, None] & exists, other=0.0)
        product = tl.dot(weights, factors, product, input_precision="ieee")
        left += DEPTH
        right += DEPTH
    return product


@triton.jit
def _given_tile(product, m, n, stride, tile, BLOCKS: tl.constexpr):
    """One tile of a product fp32 [m, n] that was made before: [COLUMNS, ROWS]."""
    row, column = tl.arange(0, BLOCKS.rows), tile * BLOCKS.columns + tl.arange(0, BLOCKS.columns)
    inside = (column < n)[:, None] & (row < m)[None, :]
    return tl.load(product + row[None, :].to(tl.int64) * stride + column[:, None], mask=inside, other=0.0)


@triton.jit
def _leave_part(
    product, split_buffer, tile, tiles, split, places, slot_words, inside, tag, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store this split's part of a tile, [columns, rows], where the program of the last split reads it."""
    if BLOCKS.tagged_splits:
        tl.store(split_buffer.words + split * slot_words + places, _pack(tl.trans(product), tag), mask=inside)
    else:
        element = tl.arange(0, BLOCKS.columns)[:, None] * BLOCKS.rows + tl.arange(0, BLOCKS.rows)[None, :]
        tl.store(split_buffer.parts + (split * tiles + tile).to(tl.int64) * (BLOCKS.columns * BLOCKS.rows) + element, product)
        tl.debug_barrier()
        tl.atomic_xchg(split_buffer.flags + split * tiles + tile, tag, sem="release", scope="gpu")


@triton.jit
def _add_parts(
    channel, product, split_buffer, tile, tiles, places, slot_words, inside, tag, epoch, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The last split's part of a tile plus those that the others leave, in their order: [rows, columns]."""
    here = tl.full((), channel.rank, tl.int64)
    if BLOCKS.tagged_splits:
        total = tl.trans(product)
        for split in tl.static_range(BLOCKS.splits - 1):
            total += _unpack(_receive(channel, split_buffer.words + split * slot_words + places, inside, tag, epoch, here))
        return total
    element = tl.arange(0, BLOCKS.columns)[:, None] * BLOCKS.rows + tl.arange(0, BLOCKS.rows)[None, :]
    for split in tl.static_range(BLOCKS.splits - 1):
        _wait_for_flag(channel, split_buffer.flags + split * tiles + tile, tag, epoch, here, "gpu")
        part = split_buffer.parts + (split * tiles + tile).to(tl.int64) * (BLOCKS.columns * BLOCKS.rows)
        product += tl.load(part + element, volatile=True)
    return tl.trans(product)


@triton.jit
def _send_partial(
    channel, partial, parts, places, inside, tag, tile, own_flag, receive_addresses, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store partial results in the receive buffers of the peers who add them up."""
    root = tile % channel.world
    if BLOCKS.flagged:
        if root != channel.rank:
            tl.store(peer_pointer(receive_addresses, root, parts * 8, tl.float32) + places, partial, mask=inside)
            signal(peer_pointer(receive_addresses, root, own_flag * 8, tl.int64, 8), tag)
    elif BLOCKS.two_shot:
        if root != channel.rank:
            tl.store(peer_pointer(receive_addresses, root, parts * 8, tl.int64, 8) + places, _pack(partial, tag), mask=inside)
    else:
        words = _pack(partial, tag)
        for i in tl.static_range(1, channel.world):
            peer = (channel.rank + i) % channel.world
            tl.store(peer_pointer(receive_addresses, peer, parts * 8, tl.int64, 8) + places, words, mask=inside)


@triton.jit
def _add_up(
    channel, partial, parts, places, slot_words, receive_buffer, inside, tag, first_flag, tiles, epoch,
    FLAGGED: tl.constexpr,
):  # fmt: skip
    """The sum over ranks, in their order on every rank."""
    total = tl.zeros_like(partial)
    for source in tl.static_range(channel.world):
        peer = tl.full((), source, tl.int64)
        if source == channel.rank:
            total += partial
        elif FLAGGED:
            slot = (receive_buffer + parts).to(tl.pointer_type(tl.float32)) + places + source * slot_words
            flag = receive_buffer + first_flag + source * tiles
            total += _receive_tile(channel, flag, slot, inside, tag, epoch, peer)
        else:
            slot = receive_buffer + parts + places + source * slot_words
            total += _unpack(_receive(channel, slot, inside, tag, epoch, peer))
    return total


@triton.jit
def _normalize(
    channel, result, inside, places, row, column, tile, tiles, epilogue, n, norm_eps,
    ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """RMSNorm of the result's rows, of which this program has one tile; waits for the programs of the other tiles."""
    value = tl.where(inside, result.to(tl.float32), 0.0)
    tl.store(epilogue.squares + tile * ROWS + row, tl.sum(value * value, axis=1))
    tl.debug_barrier()
    done = tl.atomic_add(channel.state + TILES_DONE, 1, sem="acq_rel", scope="gpu") + 1
    polls = tl.zeros((), tl.int64)
    while (done < tiles) & (polls < channel.poll_limit):
        done = tl.atomic_add(channel.state + TILES_DONE, 0, sem="acquire", scope="gpu")
        polls += 1
        if polls % ABORT_CHECK == 0:
            polls = tl.where(must_stop(channel), channel.poll_limit, polls)
    tl.debug_barrier()
    other = tl.arange(0, TILES)
    at_squares = other[:, None] * ROWS + row[None, :]
    of_tiles = tl.load(epilogue.squares + at_squares, mask=(other < tiles)[:, None], other=0.0, volatile=True)
    # Not tl.rsqrt, which takes the smallest numbers for 0 on GPUs.
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(of_tiles, axis=0) / n + norm_eps))
    gain = tl.load(epilogue.norm_weight + column, mask=column < n, other=0.0).to(tl.float32)
    normed = (value * scale[:, None] * gain[None, :]).to(result.dtype)
    tl.store(epilogue.normed + places, normed, mask=inside)


@triton.jit
def _complete(channel, epoch):
    """The last program of the launch ends the call."""
    tl.debug_barrier()
    done = tl.atomic_add(channel.state + PROGRAMS_DONE, 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        nothing = tl.zeros((), tl.int64)
        tl.atomic_xchg(channel.state + PROGRAMS_DONE, nothing, sem="relaxed", scope="gpu")
        tl.atomic_xchg(channel.state + TILES_DONE, nothing, sem="relaxed", scope="gpu")
        if tl.atomic_add(channel.state + FAULT, 0, sem="relaxed", scope="gpu") == 0:
            tl.atomic_xchg(channel.state + EPOCH, epoch, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=["fingerprint", "m"])
def gemv_all_reduce_kernel(
    x, weight, epilogue, out, buffer, split_buffer, channel, fingerprint, m, n, k, x_stride, weight_stride, norm_eps,
    BLOCKS: tl.constexpr, TILES: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    STARTS_EARLY: tl.constexpr,
):  # fmt: skip
    """out [m, n] = sum over ranks of x [m, k] times weight [n, k] transposed, + bias + residual; and its RMSNorm.

    Where the product is given, x is it: fp32 [m, n].

    A program has one tile of columns and one split of K; the last split of a tile adds the others' parts to its own and deals
    with the peers. Programs wait for earlier ones of their own launch only, except in the norm, where all are resident.

    Args:
        epilogue: :class:`Epilogue`.
        fingerprint: 31 bits.
        buffer: :class:`ReceiveBuffer`.
        split_buffer: :class:`SplitBuffer`.
        BLOCKS: :class:`BlockArgs`.
        TILES: power of two, at least the number of tiles; with a norm only.
        STARTS_EARLY: by programmatic dependent launch: :func:`~dlrm_fused.ops.common.devices.wait_for_earlier_kernels`.
    """
    ROWS: tl.constexpr = BLOCKS.rows
    COLUMNS: tl.constexpr = BLOCKS.columns
    SPLITS: tl.constexpr = BLOCKS.splits
    if STARTS_EARLY:
        wait_for_earlier_kernels()
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    tiles = tl.num_programs(0) // SPLITS
    epoch = next_epoch(channel)
    tag = _tag(epoch)
    receive_buffer, receive_addresses = buffer.words, buffer.addresses
    half = (epoch % 2) * buffer.half_words
    handshake = half + buffer.half_words - channel.world
    if tl.program_id(0) == 0:
        _send_handshake(channel, fingerprint, handshake, receive_addresses, tag)

    if BLOCKS.is_given:
        product = _given_tile(x, m, n, x_stride, tile, BLOCKS)
    else:
        product = _multiply(x, weight, m, n, k, x_stride, weight_stride, tile, split, BLOCKS)
    row = tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < m)[:, None] & (column < n)[None, :]
    places = row[:, None].to(tl.int64) * n + column[None, :]
    parts, first_flag = half + buffer.parts_at, half + buffer.flags_at + tile
    slot_words = n.to(tl.int64) * m

    if split < SPLITS - 1:
        _leave_part(product, split_buffer, tile, tiles, split, places, slot_words, inside, tag, BLOCKS)
    else:
        partial = _add_parts(channel, product, split_buffer, tile, tiles, places, slot_words, inside, tag, epoch, BLOCKS)
        _send_partial(
            channel, partial, parts, places + channel.rank * slot_words, inside, tag, tile,
            first_flag + channel.rank * tiles, receive_addresses, BLOCKS,
        )  # fmt: skip
        if tile == 0:
            _check_handshake(channel, fingerprint, receive_buffer, handshake, tag, epoch)
        result = tl.zeros((ROWS, COLUMNS), out.dtype.element_ty)
        adds_up = (not BLOCKS.two_shot) or (tile % channel.world == channel.rank)
        if adds_up:
            total = _add_up(
                channel, partial, parts, places, slot_words, receive_buffer, inside, tag, first_flag, tiles, epoch,
                BLOCKS.flagged,
            )  # fmt: skip
            if HAS_BIAS:
                total += tl.load(epilogue.bias + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
            if HAS_RESIDUAL:
                total += tl.load(epilogue.residual + places, mask=inside, other=0.0).to(tl.float32)
            result = total.to(out.dtype.element_ty)
        if BLOCKS.two_shot:
            result = _spread(
                channel, result, row, tile, half + buffer.sums_at, first_flag + channel.world * tiles, m, n, receive_buffer,
                receive_addresses, tag, epoch, BLOCKS,
            )  # fmt: skip
        tl.store(out + places, result, mask=inside)
        if HAS_NORM:
            _normalize(channel, result, inside, places, row, column, tile, tiles, epilogue, n, norm_eps, ROWS, TILES)
    _complete(channel, epoch)


@triton.jit
def _spread(
    channel, result, row, tile, sums, flag, m, n, receive_buffer, receive_addresses, tag, epoch, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The finished tile, on every rank: the root, which has added it up, sends it; the others receive it."""
    PAIRS: tl.constexpr = (result.dtype.primitive_bitwidth == 16) and not BLOCKS.flagged
    WIDTH: tl.constexpr = BLOCKS.columns // 2 if PAIRS else BLOCKS.columns
    row_length = n // 2 if PAIRS else n
    item = tile * WIDTH + tl.arange(0, WIDTH)
    inside = (row < m)[:, None] & (item < row_length)[None, :]
    places = row[:, None].to(tl.int64) * row_length + item[None, :]
    root = tile % channel.world
    if root == channel.rank:
        for i in tl.static_range(1, channel.world):
            peer = (channel.rank + i) % channel.world
            if BLOCKS.flagged:
                theirs = peer_pointer(receive_addresses, peer, sums * 8, result.dtype)
                tl.store(theirs + places, result, mask=inside)
            else:
                words = _pack_pairs(result, tag, BLOCKS.rows, BLOCKS.columns) if PAIRS else _pack(result, tag)
                tl.store(peer_pointer(receive_addresses, peer, sums * 8, tl.int64, 8) + places, words, mask=inside)
        if BLOCKS.flagged:
            for i in tl.static_range(1, channel.world):
                signal(peer_pointer(receive_addresses, (channel.rank + i) % channel.world, flag * 8, tl.int64, 8), tag)
    else:
        sender = root + tl.zeros((), tl.int64)
        if BLOCKS.flagged:
            own = (receive_buffer + sums).to(tl.pointer_type(result.dtype)) + places
            result = _receive_tile(channel, receive_buffer + flag, own, inside, tag, epoch, sender)
        else:
            words = _receive(channel, receive_buffer + sums + places, inside, tag, epoch, sender)
            if PAIRS:
                result = _unpack_pairs(words, result.dtype, BLOCKS.rows, BLOCKS.columns)
            else:
                result = _unpack(words)
    return result
