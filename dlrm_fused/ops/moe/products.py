"""The first product of all experts with its activation, and the gradient of that: each one kernel for GPUs.

Rows are in groups, as :class:`~dlrm_fused.ops.gemm_all_to_all.kernel.Groups` says; all rows of a tile are of one group, pads
included, so that the tensor memory accelerator stores whole tiles. The hidden layer lies as [R, P, H]: P = 1 with SiLU, whose
weight has the H rows of one matrix, and P = 2 with SwiGLU, whose weight has those of the gate and then those of the other one.

Sources: Elfwing et al., arXiv 1702.03118 (SiLU); Shazeer, *GLU Variants Improve Transformer*, arXiv 2002.05202 (SwiGLU).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups, halves, multiply, no_product, precision, programs_of, upright
from dlrm_fused.ops.gemm_all_to_all.tuning import fitted, tiles_of_groups


@triton.jit
def _place_of_tile(tile, groups, columns, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BAND: tl.constexpr):
    """First row, first column and group of a tile of the result; bands of rows of tiles are done column by column."""
    row_tiles, column_tiles = tl.load(groups.bounds + groups.count), tl.cdiv(columns, COLUMNS)
    first_of_band = tile // (BAND * column_tiles) * BAND
    band = tl.minimum(row_tiles - first_of_band, BAND)
    in_band = tile % (BAND * column_tiles)
    place = first_of_band + in_band % band
    first_row = tl.load(groups.order + place) * ROWS
    return first_row, in_band // band * COLUMNS, tl.load(groups.order + groups.order_tiles + place)


@triton.jit
def hidden_kernel(
    x, weight, hidden, activated, groups, columns, depth,
    GATED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """See :func:`hidden_layer`.

    Args:
        x: descriptor [R, K], blocks [ROWS, DEPTH].
        weight: descriptor [G * P, H, K], blocks [1, COLUMNS, DEPTH]; with GATED [1, COLUMNS / 2, DEPTH].
        hidden, activated: descriptors [R, P, H] and [R, H], blocks of COLUMNS / 2 columns.
        columns: H.
        COLUMNS: of a tile; with GATED of both products together.
    """
    half: tl.constexpr = COLUMNS // 2
    width: tl.constexpr = half if GATED else COLUMNS
    tiles = tl.load(groups.bounds + groups.count) * tl.cdiv(columns, width)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        first_row, column, group = _place_of_tile(tile, groups, columns, width, ROWS, BAND)
        if GATED:
            gate, up = no_product(ROWS, half), no_product(ROWS, half)
            for step in range(tl.cdiv(depth, DEPTH)):
                left = x.load([first_row, step * DEPTH])
                right = weight.load([2 * group, column, step * DEPTH]).reshape(half, DEPTH)
                gate = multiply(left, right.T, gate, PRECISION)
                right = weight.load([2 * group + 1, column, step * DEPTH]).reshape(half, DEPTH)
                up = multiply(left, right.T, up, PRECISION)
            gate, up = upright(gate, ROWS).to(DTYPE), upright(up, ROWS).to(DTYPE)
            hidden.store([first_row, 0, column], gate.reshape(ROWS, 1, half))
            hidden.store([first_row, 1, column], up.reshape(ROWS, 1, half))
            gate = gate.to(tl.float32)
            activated.store([first_row, column], (gate * tl.sigmoid(gate) * up.to(tl.float32)).to(DTYPE))
        else:
            product = no_product(ROWS, COLUMNS)
            for step in range(tl.cdiv(depth, DEPTH)):
                left = x.load([first_row, step * DEPTH])
                right = weight.load([group, column, step * DEPTH]).reshape(COLUMNS, DEPTH)
                product = multiply(left, right.T, product, PRECISION)
            left_half, right_half = halves(upright(product, ROWS), ROWS, COLUMNS)
            left_half, right_half = left_half.to(DTYPE), right_half.to(DTYPE)
            hidden.store([first_row, 0, column], left_half.reshape(ROWS, 1, half))
            hidden.store([first_row, 0, column + half], right_half.reshape(ROWS, 1, half))
            left_half, right_half = left_half.to(tl.float32), right_half.to(tl.float32)
            activated.store([first_row, column], (left_half * tl.sigmoid(left_half)).to(DTYPE))
            activated.store([first_row, column + half], (right_half * tl.sigmoid(right_half)).to(DTYPE))


@triton.jit
def hidden_gradient_kernel(
    x, weight, hidden, result, groups, columns, depth,
    GATED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """See :func:`hidden_layer_gradient`.

    Args:
        x: descriptor [R, K], blocks [ROWS, DEPTH].
        weight: descriptor [G, K, H], blocks [1, DEPTH, COLUMNS].
        hidden: pointer to [R, P, H].
        result: descriptor [R, P, H], blocks [ROWS, 1, COLUMNS / 2].
        columns: H.
    """
    half: tl.constexpr = COLUMNS // 2
    tiles = tl.load(groups.bounds + groups.count) * tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        first_row, column, group = _place_of_tile(tile, groups, columns, COLUMNS, ROWS, BAND)
        product = no_product(ROWS, COLUMNS)
        for step in range(tl.cdiv(depth, DEPTH)):
            left = x.load([first_row, step * DEPTH])
            right = weight.load([group, step * DEPTH, column]).reshape(DEPTH, COLUMNS)
            product = multiply(left, right, product, PRECISION)
        left_half, right_half = halves(upright(product, ROWS), ROWS, COLUMNS)
        _store_hidden_gradient(left_half, hidden, result, first_row, column, columns, GATED, DTYPE, ROWS, half)
        _store_hidden_gradient(right_half, hidden, result, first_row, column + half, columns, GATED, DTYPE, ROWS, half)


@triton.jit
def _store_hidden_gradient(
    gradient, hidden, result, first_row, first_column, columns,
    GATED: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of the hidden layer from that of what its activation has made of it, fp32 [ROWS, WIDTH]."""
    parts: tl.constexpr = 2 if GATED else 1
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, WIDTH)
    # Rows begin at multiples of 16 bytes, and so the compiler makes wide loads.
    places = tl.multiple_of(hidden + row.to(tl.int64) * (parts * columns), 16)[:, None] + column[None, :]
    inside = (column < columns)[None, :]
    pre = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    rate = tl.sigmoid(pre)
    slope = rate * (1 + pre * (1 - rate))
    if GATED:
        up = tl.load(places + columns, mask=inside, other=0.0).to(tl.float32)
        result.store([first_row, 1, first_column], (gradient * pre * rate).to(DTYPE).reshape(ROWS, 1, WIDTH))
        slope *= up
    result.store([first_row, 0, first_column], (gradient * slope).to(DTYPE).reshape(ROWS, 1, WIDTH))


def hidden_layer(rows: Tensor, w_in: Tensor, groups: Groups, hidden: Tensor, activated: Tensor) -> None:
    """``hidden = rows @ w_in[e].T`` and what its activation makes of it, for the rows of each expert.

    Args:
        rows: [R, d], contiguous, as all matrices here; rows begin at multiples of 16 bytes.
        w_in: [G, P * H, d].
        hidden: [R, P * H]: with P = 1 ``activated`` is silu(hidden); with P = 2 silu(left half) * right half.
        activated: [R, H].
    """
    (count, depth), width = rows.shape, activated.shape[1]
    parts = hidden.shape[1] // width
    tiles = tiles_of_groups(parts * width, rows.element_size(), groups.tile_rows)
    tiles = fitted(tiles, rows.element_size(), gpu_of(rows.device).shared_memory)
    half, columns = tiles.columns // 2, tiles.columns // parts
    row_tiles = count // tiles.rows
    hidden_kernel[(programs_of(rows.device, row_tiles * triton.cdiv(width, columns), tiles),)](
        TensorDescriptor.from_tensor(rows, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(w_in.view(-1, width, depth), [1, columns, tiles.depth]),
        TensorDescriptor.from_tensor(hidden.view(count, parts, width), [tiles.rows, 1, half]),
        TensorDescriptor.from_tensor(activated, [tiles.rows, half]),
        groups.args(row_tiles), width, depth,
        GATED=parts == 2, DTYPE=TRITON_DTYPES[rows.dtype], PRECISION=precision(rows.dtype), ROWS=tiles.rows,
        COLUMNS=tiles.columns, DEPTH=tiles.depth, BAND=tiles.band, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def hidden_layer_gradient(gradient: Tensor, w_out: Tensor, hidden: Tensor, groups: Groups, result: Tensor) -> None:
    """The gradient of the hidden layer, from that of the experts' results.

    Args:
        gradient: [R, d].
        w_out: [G, d, H].
        hidden, result: [R, P * H].
    """
    (count, depth), width = gradient.shape, w_out.shape[2]
    parts = hidden.shape[1] // width
    tiles = tiles_of_groups(width, gradient.element_size(), groups.tile_rows)
    tiles = fitted(tiles, gradient.element_size(), gpu_of(gradient.device).shared_memory)
    row_tiles = count // tiles.rows
    hidden_gradient_kernel[(programs_of(gradient.device, row_tiles * triton.cdiv(width, tiles.columns), tiles),)](
        TensorDescriptor.from_tensor(gradient, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(w_out, [1, tiles.depth, tiles.columns]),
        hidden, TensorDescriptor.from_tensor(result.view(count, parts, width), [tiles.rows, 1, tiles.columns // 2]),
        groups.args(row_tiles), width, depth,
        GATED=parts == 2, DTYPE=TRITON_DTYPES[gradient.dtype], PRECISION=precision(gradient.dtype), ROWS=tiles.rows,
        COLUMNS=tiles.columns, DEPTH=tiles.depth, BAND=tiles.band, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
