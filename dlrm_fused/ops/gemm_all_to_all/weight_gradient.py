"""The gradients of the weights of groups of rows, such as those of experts, in one persistent kernel for Hopper GPUs."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups, halves, programs_of, tile_constants, tile_of
from dlrm_fused.ops.gemm_all_to_all.tuning import fitted, weight_gradient_tiles
from dlrm_fused.symmetric.launches import launch_again, layout_of


@triton.jit
def _store_in_halves(tile, out, group, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Store a tile, rounded to DTYPE: the left half, then the right one, in the same shared memory."""
    half: tl.constexpr = COLUMNS // 2
    left_half, right_half = halves(tile, ROWS, COLUMNS)
    out.store([group, first_row, first_column], left_half.to(DTYPE).to(out.dtype).reshape(1, ROWS, half))
    out.store([group, first_row, first_column + half], right_half.to(DTYPE).to(out.dtype).reshape(1, ROWS, half))


@triton.jit
def weight_gradient_kernel(a, b, out, bounds, factor, tile_rows, groups, a_columns, b_columns, TILE: tl.constexpr):
    """See :func:`grouped_weight_gradient`; descriptors with blocks [depth, rows], [depth, columns], [1, rows, part of columns].

    Programs that run together have about as many rows as columns, for the L2 cache. The tensor memory accelerator stores a part
    of a tile while the next one is made ready, and the next tile begins.
    """
    ROWS: tl.constexpr = TILE.rows
    COLUMNS: tl.constexpr = TILE.columns
    row_tiles, column_tiles = tl.cdiv(a_columns, ROWS), tl.cdiv(b_columns, COLUMNS)
    tiles_of_group = row_tiles * column_tiles
    for tile in tl.range(tl.program_id(0), groups * tiles_of_group, tl.num_programs(0)):
        group = tile // tiles_of_group
        row_tile, column_tile = tile_of(tile % tiles_of_group, row_tiles, column_tiles, TILE.band)
        first_row, first_column = row_tile * ROWS, column_tile * COLUMNS
        begin_row = tl.load(bounds + group) * tile_rows
        steps = (tl.load(bounds + group + 1) * tile_rows - begin_row) // TILE.depth
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for step in range(steps):
            left = a.load([begin_row + step * TILE.depth, first_row])
            right = b.load([begin_row + step * TILE.depth, first_column])
            product = tl.dot(left.T, right, product, input_precision="tf32" if TILE.tf32 else "ieee")
        half: tl.constexpr = COLUMNS // 2
        if out.dtype.primitive_bitwidth > a.dtype.primitive_bitwidth:
            left_half, right_half = halves(product * factor, ROWS, COLUMNS)
            _store_in_halves(left_half, out, group, first_row, first_column, ROWS, half, a.dtype)
            _store_in_halves(right_half, out, group, first_row, first_column + half, ROWS, half, a.dtype)
        else:
            _store_in_halves(product * factor, out, group, first_row, first_column, ROWS, COLUMNS, a.dtype)


def grouped_weight_gradient(
    a: Tensor, b: Tensor, groups: Groups, out: Tensor, factor: float = 1.0, *, expected_rows: float = 0.0
) -> None:
    """out[g] = factor * a[rows of g].T @ b[rows of g]; zeros for groups without rows. Pads must be zeros in both.

    Args:
        a: [R, M], contiguous, as all matrices here.
        b: [R, N], in the dtype of a.
        out: [G, M, N], in the dtype of a, to which results are rounded, or in float32.
        expected_rows: of a group on average; decides on tiles alone.
    """
    (count, rows, columns), element_size = out.shape, a.element_size()
    tiles = fitted(weight_gradient_tiles(element_size, expected_rows), element_size, gpu_of(a.device).shared_memory)
    tiles = replace(tiles, depth=min(tiles.depth, groups.tile_rows))
    programs = programs_of(a.device, count * tiles.count(rows, columns), tiles)
    constants = tile_constants(tiles, a.dtype)
    launch_again(
        (layout_of(a, b, out, groups.bounds), tuple(constants.values()), groups.tile_rows), weight_gradient_kernel, (programs,),
        TensorDescriptor.from_tensor(a, [tiles.depth, tiles.rows]),
        TensorDescriptor.from_tensor(b, [tiles.depth, tiles.columns]),
        TensorDescriptor.from_tensor(out, [1, tiles.rows, tiles.columns * element_size // (2 * out.element_size())]),
        groups.bounds, float(factor), groups.tile_rows, count, rows, columns, **constants,
    )  # fmt: skip
