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

from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.gemm_all_to_all.kernel import (
    Groups,
    halves,
    multiply,
    no_product,
    programs_of,
    tile_constants,
    tile_of,
    upright,
)
from dlrm_fused.ops.gemm_all_to_all.tuning import fitted, tiles_of_groups
from dlrm_fused.symmetric.launches import ceil_div, launch_again, layout_of


@triton.jit
def _place_of_tile(tile, groups, columns, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """First row, first column and group of a tile of the result; ``WIDTH``: columns of a tile."""
    place, column_tile = tile_of(tile, tl.load(groups.bounds + groups.count), tl.cdiv(columns, WIDTH), TILE.band)
    first_row = tl.load(groups.order + place) * TILE.rows
    return first_row, column_tile * WIDTH, tl.load(groups.order + groups.order_tiles + place)


@triton.jit
def hidden_kernel(x, weight, hidden, activated, groups, columns, depth, GATED: tl.constexpr, TILE: tl.constexpr):
    """See :func:`hidden_layer`.

    Args:
        x: descriptor [R, K], blocks [rows, depth] of TILE, whose columns are, with GATED, those of both products together.
        weight: descriptor [G * P, H, K], blocks [1, columns, depth]; with GATED [1, columns / 2, depth].
        hidden, activated: descriptors [R, P, H] and [R, H], blocks of columns / 2 columns.
        columns: H.
    """
    half: tl.constexpr = TILE.columns // 2
    width: tl.constexpr = half if GATED else TILE.columns
    tiles = tl.load(groups.bounds + groups.count) * tl.cdiv(columns, width)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        first_row, column, group = _place_of_tile(tile, groups, columns, width, TILE)
        if GATED:
            gate, up = no_product(TILE.rows, half), no_product(TILE.rows, half)
            for step in range(tl.cdiv(depth, TILE.depth)):
                left = x.load([first_row, step * TILE.depth])
                right = weight.load([2 * group, column, step * TILE.depth]).reshape(half, TILE.depth)
                gate = multiply(left, right.T, gate, TILE.tf32)
                right = weight.load([2 * group + 1, column, step * TILE.depth]).reshape(half, TILE.depth)
                up = multiply(left, right.T, up, TILE.tf32)
            gate, up = upright(gate, TILE.rows).to(x.dtype), upright(up, TILE.rows).to(x.dtype)
            hidden.store([first_row, 0, column], gate.reshape(TILE.rows, 1, half))
            hidden.store([first_row, 1, column], up.reshape(TILE.rows, 1, half))
            gate = gate.to(tl.float32)
            activated.store([first_row, column], (gate * tl.sigmoid(gate) * up.to(tl.float32)).to(x.dtype))
        else:
            product = no_product(TILE.rows, TILE.columns)
            for step in range(tl.cdiv(depth, TILE.depth)):
                left = x.load([first_row, step * TILE.depth])
                right = weight.load([group, column, step * TILE.depth]).reshape(TILE.columns, TILE.depth)
                product = multiply(left, right.T, product, TILE.tf32)
            left_half, right_half = halves(upright(product, TILE.rows), TILE.rows, TILE.columns)
            left_half, right_half = left_half.to(x.dtype), right_half.to(x.dtype)
            hidden.store([first_row, 0, column], left_half.reshape(TILE.rows, 1, half))
            hidden.store([first_row, 0, column + half], right_half.reshape(TILE.rows, 1, half))
            left_half, right_half = left_half.to(tl.float32), right_half.to(tl.float32)
            activated.store([first_row, column], (left_half * tl.sigmoid(left_half)).to(x.dtype))
            activated.store([first_row, column + half], (right_half * tl.sigmoid(right_half)).to(x.dtype))


@triton.jit
def hidden_gradient_kernel(x, weight, hidden, result, groups, columns, depth, GATED: tl.constexpr, TILE: tl.constexpr):
    """See :func:`hidden_layer_gradient`.

    Args:
        x: descriptor [R, K], blocks [rows, depth] of TILE.
        weight: descriptor [G, K, H], blocks [1, depth, columns].
        hidden: pointer to [R, P, H].
        result: descriptor [R, P, H], blocks [rows, 1, columns / 2].
        columns: H.
    """
    half: tl.constexpr = TILE.columns // 2
    tiles = tl.load(groups.bounds + groups.count) * tl.cdiv(columns, TILE.columns)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        first_row, column, group = _place_of_tile(tile, groups, columns, TILE.columns, TILE)
        product = no_product(TILE.rows, TILE.columns)
        for step in range(tl.cdiv(depth, TILE.depth)):
            left = x.load([first_row, step * TILE.depth])
            right = weight.load([group, step * TILE.depth, column]).reshape(TILE.depth, TILE.columns)
            product = multiply(left, right, product, TILE.tf32)
        left_half, right_half = halves(upright(product, TILE.rows), TILE.rows, TILE.columns)
        _store_hidden_gradient(left_half, hidden, result, first_row, column, columns, GATED, TILE)
        _store_hidden_gradient(right_half, hidden, result, first_row, column + half, columns, GATED, TILE)


@triton.jit
def _store_hidden_gradient(gradient, hidden, result, first_row, first_column, columns, GATED: tl.constexpr, TILE: tl.constexpr):
    """The gradient of the hidden layer from that of what its activation has made of it, fp32, half a tile."""
    parts: tl.constexpr = 2 if GATED else 1
    half: tl.constexpr = TILE.columns // 2
    row, column = first_row + tl.arange(0, TILE.rows), first_column + tl.arange(0, half)
    # Rows begin at multiples of 16 bytes, and so the compiler makes wide loads.
    places = tl.multiple_of(hidden + row.to(tl.int64) * (parts * columns), 16)[:, None] + column[None, :]
    inside = (column < columns)[None, :]
    pre = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    rate = tl.sigmoid(pre)
    slope = rate * (1 + pre * (1 - rate))
    if GATED:
        up = tl.load(places + columns, mask=inside, other=0.0).to(tl.float32)
        result.store([first_row, 1, first_column], (gradient * pre * rate).to(result.dtype).reshape(TILE.rows, 1, half))
        slope *= up
    result.store([first_row, 0, first_column], (gradient * slope).to(result.dtype).reshape(TILE.rows, 1, half))


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
    constants = {"GATED": parts == 2, **tile_constants(tiles, rows.dtype)}
    launch_again(
        (layout_of(rows, w_in, hidden, groups.bounds), tuple(constants.values())),
        hidden_kernel, (programs_of(rows.device, row_tiles * ceil_div(width, columns), tiles),),
        TensorDescriptor.from_tensor(rows, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(w_in.view(-1, width, depth), [1, columns, tiles.depth]),
        TensorDescriptor.from_tensor(hidden.view(count, parts, width), [tiles.rows, 1, half]),
        TensorDescriptor.from_tensor(activated, [tiles.rows, half]),
        groups.args(row_tiles), width, depth, **constants,
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
    constants = {"GATED": parts == 2, **tile_constants(tiles, gradient.dtype)}
    launch_again(
        (layout_of(gradient, w_out, hidden, groups.bounds), tuple(constants.values())),
        hidden_gradient_kernel, (programs_of(gradient.device, row_tiles * ceil_div(width, tiles.columns), tiles),),
        TensorDescriptor.from_tensor(gradient, [tiles.rows, tiles.depth]),
        TensorDescriptor.from_tensor(w_out, [1, tiles.depth, tiles.columns]),
        hidden, TensorDescriptor.from_tensor(result.view(count, parts, width), [tiles.rows, 1, tiles.columns // 2]),
        groups.args(row_tiles), width, depth, **constants,
    )  # fmt: skip
