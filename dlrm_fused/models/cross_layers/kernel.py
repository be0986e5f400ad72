"""Products of the cross layers with the layers' elementwise work in the epilogue.

Each program computes a tile of a product of inner size r, a few hundred, and then reads and writes several tensors of the
product's size, which takes longer. Two programs on a multiprocessor let the epilogue of one run beside the other's product.
Programs of one row of tiles follow each other, so that the narrow operand is read from memory once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 128, 128, 64
PREFETCHES = not triton.knobs.runtime.interpret
_LAUNCH = {"num_warps": 8, "num_stages": 3, "maxnreg": 128}


def forward(u: Tensor, w: Tensor, bias: Tensor, x_0: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
    """x_0 * (u W^T + bias) + x, [b, N].

    Args:
        u: [b, r], of 16 bits like w, x_0 and x.
        w: [N, r].
        bias: float32 [N].
        x_0, x: [b, N].
        y: where u W^T + bias is left for the backward pass, [b, N]; None if there will be none.
    """
    result = torch.empty_like(x)
    (rows, depth), columns = u.shape, len(w)
    forward_kernel[_grid(rows, columns)](
        u, w, bias, x_0, x, result if y is None else y, result, rows, columns, depth,
        KEEPS_Y=y is not None, PREFETCHES=PREFETCHES, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, **_LAUNCH,
    )  # fmt: skip
    return result


def backward(gradient: Tensor, x_0: Tensor, du: Tensor | None = None, v: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a layer's result g, [b, N], of u W^T, [b, N], and of the bias, float32 [N].

    Args:
        gradient: [b, N], of the result of the next layer.
        du: [b, r], of the product with V in the next layer; None if there is none, and ``gradient`` is g.
        v: [r, N], of the next layer.
    """
    rows, columns = x_0.shape
    result, dy = gradient if du is None else torch.empty_like(x_0), torch.empty_like(x_0)
    partial_sums = torch.empty(triton.cdiv(rows, ROWS), columns, dtype=torch.float32, device=x_0.device)
    backward_kernel[_grid(rows, columns)](
        gradient, x_0 if du is None else du, x_0 if v is None else v, x_0, result, dy, partial_sums, rows, columns,
        0 if du is None else du.shape[1], HAS_NEXT=du is not None, PREFETCHES=PREFETCHES, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, **_LAUNCH,
    )  # fmt: skip
    return result, dy, partial_sums.sum(0)


def input_gradient(gradients: Sequence[Tensor], ys: Sequence[Tensor], du: Tensor, v: Tensor) -> Tensor:
    """The gradient of x_0, [b, N]: of what it contributes to each layer, and of the first layer's x.

    Args:
        gradients: of the layers' results, by layer; [b, N].
        ys: u W^T + bias, by layer; [b, N].
        du: [b, r], of the product with V in the first layer.
        v: [r, N], of the first layer.
    """
    (rows, columns), depth = gradients[0].shape, du.shape[1]
    result = torch.empty_like(gradients[0])
    input_gradient_kernel[_grid(rows, columns)](
        tuple(gradients), tuple(ys), du, v, result, rows, columns, depth,
        LAYERS=len(ys), PREFETCHES=PREFETCHES, ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, **_LAUNCH,
    )  # fmt: skip
    return result


def _grid(rows: int, columns: int) -> tuple[int]:
    return (triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS),)


@triton.jit
def _first_of_tile(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column of the first element of this program's tile."""
    tiles_in_row = tl.cdiv(columns, COLUMNS)
    return tl.program_id(0) // tiles_in_row * ROWS, tl.program_id(0) % tiles_in_row * COLUMNS


@triton.jit
def _places(first_row, first_column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of a tile, the places of its elements in a tensor [rows, columns], and which of them exist."""
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    return column, row.to(tl.int64)[:, None] * columns + column[None, :], (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def _product(
    left, right, first_row, first_column, rows, columns, depth, right_row, right_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Two halves, float32 [ROWS, COLUMNS / 2] each, of a tile of left [rows, depth] times right [depth, columns].

    Half a tile at a time, the epilogue needs so few registers that two programs share a multiprocessor.

    Args:
        right_row, right_column: strides of right.
    """
    step = tl.arange(0, DEPTH)
    row, column = (first_row + tl.arange(0, ROWS)) % rows, (first_column + tl.arange(0, COLUMNS)) % columns
    lefts = left + row.to(tl.int64)[:, None] * depth + step[None, :]
    rights = right + step[:, None] * right_row + column[None, :] * right_column
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, depth, DEPTH):
        a = tl.load(lefts, mask=(first + step < depth)[None, :], other=0.0)
        b = tl.load(rights, mask=(first + step < depth)[:, None], other=0.0)
        product = tl.dot(a, b, product)
        lefts += DEPTH
        rights += DEPTH * right_row
    return tl.split(tl.permute(tl.reshape(product, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _prefetch(tensor, first_row, first_column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Begin to bring a tile of a tensor [rows, columns] of 16 bits into the L2 cache."""
    line: tl.constexpr = 64  # elements
    row = tl.minimum(first_row + tl.arange(0, ROWS), rows - 1)
    column = tl.minimum(first_column + line * tl.arange(0, COLUMNS // line), columns - 1)
    places = tensor + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _read(tensor, place, is_in):
    return tl.load(tensor + place, mask=is_in, other=0.0).to(tl.float32)


@triton.jit
def _write(tensor, place, is_in, values):
    tl.store(tensor + place, values.to(tensor.dtype.element_ty), mask=is_in)


@triton.jit
def forward_kernel(
    u, w, bias, x_0, x, y, result, rows, columns, depth,
    KEEPS_Y: tl.constexpr, PREFETCHES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """See :func:`forward`."""
    first_row, first_column = _first_of_tile(columns, ROWS, COLUMNS)
    if PREFETCHES:
        _prefetch(x_0, first_row, first_column, rows, columns, ROWS, COLUMNS)
        _prefetch(x, first_row, first_column, rows, columns, ROWS, COLUMNS)
    halves = _product(u, w, first_row, first_column, rows, columns, depth, 1, depth, ROWS, COLUMNS, DEPTH)
    for half in tl.static_range(2):
        begin = first_column + half * (COLUMNS // 2)
        column, place, is_in = _places(first_row, begin, rows, columns, ROWS, COLUMNS // 2)
        with_bias = halves[half] + tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
        if KEEPS_Y:
            _write(y, place, is_in, with_bias)
        _write(result, place, is_in, _read(x_0, place, is_in) * with_bias + _read(x, place, is_in))


@triton.jit
def backward_kernel(
    gradient, du, v, x_0, result, dy, partial_sums, rows, columns, depth,
    HAS_NEXT: tl.constexpr, PREFETCHES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """See :func:`backward`.

    Args:
        partial_sums: float32 [rows of tiles, N]: of the gradient of the bias.
    """
    first_row, first_column = _first_of_tile(columns, ROWS, COLUMNS)
    if HAS_NEXT:
        if PREFETCHES:
            _prefetch(gradient, first_row, first_column, rows, columns, ROWS, COLUMNS)
            _prefetch(x_0, first_row, first_column, rows, columns, ROWS, COLUMNS)
        halves = _product(du, v, first_row, first_column, rows, columns, depth, columns, 1, ROWS, COLUMNS, DEPTH)
    for half in tl.static_range(2):
        begin = first_column + half * (COLUMNS // 2)
        column, place, is_in = _places(first_row, begin, rows, columns, ROWS, COLUMNS // 2)
        g = _read(gradient, place, is_in)
        if HAS_NEXT:
            g += halves[half]
            _write(result, place, is_in, g)
        of_product = g * _read(x_0, place, is_in)
        _write(dy, place, is_in, of_product)
        sums = tl.sum(tl.where(is_in, of_product, 0.0), axis=0)
        tl.store(partial_sums + (first_row // ROWS).to(tl.int64) * columns + column, sums, mask=column < columns)


@triton.jit
def input_gradient_kernel(
    gradients, ys, du, v, result, rows, columns, depth,
    LAYERS: tl.constexpr, PREFETCHES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """See :func:`input_gradient`."""
    first_row, first_column = _first_of_tile(columns, ROWS, COLUMNS)
    if PREFETCHES:
        for layer in tl.static_range(LAYERS):
            _prefetch(gradients[layer], first_row, first_column, rows, columns, ROWS, COLUMNS)
            _prefetch(ys[layer], first_row, first_column, rows, columns, ROWS, COLUMNS)
    halves = _product(du, v, first_row, first_column, rows, columns, depth, columns, 1, ROWS, COLUMNS, DEPTH)
    for half in tl.static_range(2):
        begin = first_column + half * (COLUMNS // 2)
        _, place, is_in = _places(first_row, begin, rows, columns, ROWS, COLUMNS // 2)
        total = halves[half]
        for layer in tl.static_range(LAYERS):
            g = _read(gradients[layer], place, is_in)
            if layer == 0:
                total += g
            total += g * _read(ys[layer], place, is_in)
        _write(result, place, is_in, total)
