"""The update of embedding tables from the gradients of pooled embeddings: the local half of a lookup's backward pass.

What is computed, where bag b of feature f holds row r with coefficient c (its per-sample weight, else 1; divided by the length
of the bag, if bags are averaged):

    g[r]        += c * scale * gradients[b, columns of f]     over all bags, and all features that share the table
    momentum[r] += mean(g[r] ** 2)                            rowwise Adagrad; once for a row, however often it was looked up
    weights[r]  -= learning_rate / (sqrt(momentum[r]) + eps) * g[r]

FBGEMM calls it EXACT_ROWWISE_ADAGRAD; the other optimizers are in :mod:`dlrm_fused.ops.embedding_all_to_all.tables`. Rows that
no bag holds are not touched, nor do they decay. Sums are fp32, in an order that depends on nothing but the inputs' shapes and
rows: the same inputs give the same bits.

How it is computed, without a host synchronization:

* :func:`sort_lookup` brings equal rows together. It needs no gradient, so it may run ahead, on another stream. The sorted
  positions are cut into chunks of equal length, none across two tables: the load is balanced for every distribution of rows.
* One program a chunk gathers the gradients of a tile of positions at once, sums runs of equal rows by a segmented scan, and
  updates each row whose run lies in the chunk, reading and writing it once. Sums of runs that go beyond it are left in scratch.
* Runs that cross chunks are listed when the chunks are cut. A program takes one from the list, adds its sums in order, a tile
  at a time, and updates the row.

Memory traffic: touched rows and their states once in and once out; gradients once from memory, else from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.devices import register_limit
from dlrm_fused.ops.common.dtypes import DTYPES
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.embedding_all_to_all import update_kernels as kernels
from dlrm_fused.ops.embedding_all_to_all.tables import Adagrad, Adam, LocalTables, Optimizer, RowwiseAdagrad, RowwiseAdam, Sgd
from dlrm_fused.symmetric.launches import ceil_div, next_power_of_2

_BLOCK = 1024  # positions of a program in the elementwise kernels
_PLAN_BLOCK = 128  # chunks of a program when they are cut
_TILE_ELEMENTS = 1024  # of a warp in the update: what it holds in registers twice, gradients and weights
_TILE_ELEMENTS_WITH_STATES = 512  # the same, where it also holds states of elements
_REGISTERS: int | None = 128  # of a thread in the update; what the compiler takes by itself leaves room for fewer programs
_MERGE_ELEMENTS = 4096  # of a program that adds up a run
_MERGES_PER_MULTIPROCESSOR = 16
_LONGEST_CHUNK = 1024  # positions
_CHUNKS_PER_MULTIPROCESSOR = 128  # 32 programs are resident; more let the fast ones make up for the slow ones
_MAX_INT32 = 2**31 - 1
# Ways in which the kernels update a row.
_RULES = {Sgd: "sgd", RowwiseAdagrad: "rowwise_adagrad", Adagrad: "adagrad", Adam: "adam", RowwiseAdam: "rowwise_adam"}


@dataclass(frozen=True, eq=False)
class SortedLookup:
    """The positions of a lookup, 0 <= n < N, sorted by table and row; positions of one row stay in their order."""

    batch_size: int
    keys: Tensor  # int32 or int64 [N]: the row, counted over all tables
    samples: Tensor  # int32 [N]: sample << 2 | is last of its row << 1 | is first of its row
    positions: Tensor  # int64 [N]: n
    features: Tensor | None  # int32 [N], if features share a table
    coefficients: Tensor | None  # fp32 [N]: 1 / length of the bag, if bags are averaged
    chunks: Tensor  # int64 [chunks, 3]: table (-1: none), begin and end of the chunk among the sorted positions
    crossings: Tensor  # int32 [1 + 2 * chunks]: how many runs cross chunks; of each the chunk it begins in, and how many follow

    def tensors(self) -> Iterator[Tensor]:
        """All of them, for ``record_stream``."""
        optional = (self.features, self.coefficients)
        always = (self.keys, self.samples, self.positions, self.chunks, self.crossings)
        return (tensor for tensor in (*always, *optional) if tensor is not None)


def sort_lookup(tables: LocalTables, indices: Tensor, offsets: Tensor) -> SortedLookup:
    """Sort the rows that a lookup reads, for :func:`apply_gradients`.

    Args:
        tables: what the lookup reads.
        indices: int32 or int64 [N]. Rows outside of their table are not noticed.
        offsets: the same type, [F * B + 1], ending with N (see :mod:`dlrm_fused.ops.embedding_all_to_all.tables`).

    Raises:
        UsageError: inputs of wrong shape, dtype or device.
    """
    batch_size = _check_lookup(tables, indices, offsets)
    device, count = indices.device, indices.numel()
    known = tables.on_device
    if count == 0:
        empty = indices.new_empty(0, dtype=torch.int32)
        return SortedLookup(batch_size, empty, empty, empty.long(), None, None, empty.long().view(0, 3), empty)

    unsorted_keys, bags = _label(tables, indices, offsets, batch_size)
    keys, positions = torch.sort(unsorted_keys, stable=True)
    samples = torch.empty(count, dtype=torch.int32, device=device)
    features = torch.empty(count, dtype=torch.int32, device=device) if known.is_shared else None
    coefficients = torch.empty(count, dtype=torch.float32, device=device) if tables.mean else None
    kernels.order_kernel[(ceil_div(count, _BLOCK),)](
        keys, positions, bags, offsets, samples, features, coefficients, count, batch_size,
        BLOCK=_BLOCK,
    )  # fmt: skip

    table_count = len(tables.rows)
    length = _chunk_length(device, count, max(_tile_rows(block, device, _TILE_ELEMENTS) for block in known.blocks))
    chunks = torch.empty((ceil_div(count, length) + table_count, 3), dtype=torch.int64, device=device)
    crossings = torch.empty(1 + 2 * len(chunks), dtype=torch.int32, device=device)
    tables_begin = torch.empty((2, table_count + 1), dtype=torch.int64, device=device)
    is_ordered = known.first_features is not None
    kernels.count_kernel[(1,)](
        offsets if is_ordered else torch.searchsorted(keys, known.bounds.to(keys.dtype)), known.first_features,
        tables_begin, crossings, batch_size, length, table_count,
        ORDERED=is_ordered, BLOCK=next_power_of_2(table_count),
    )  # fmt: skip
    kernels.plan_kernel[(ceil_div(len(chunks), _PLAN_BLOCK),)](
        tables_begin, keys, samples, chunks, crossings, len(chunks), length, table_count, table_count.bit_length(),
        len(chunks).bit_length(),
        BLOCK=_PLAN_BLOCK,
    )  # fmt: skip
    return SortedLookup(batch_size, keys, samples, positions, features, coefficients, chunks, crossings)


def apply_gradients(
    tables: LocalTables,
    sorted_lookup: SortedLookup,
    gradients: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    scale: float = 1.0,
    cancelled: Tensor | None = None,
) -> None:
    """Update weights and states of the optimizer in place from the gradients of the pooled embeddings.

    Args:
        tables: what the lookup read, with its optimizer.
        sorted_lookup: of these indices and offsets, from :func:`sort_lookup`.
        gradients: fp32, bf16 or fp16 [B, sum of the features' dims], features in order; rows may lie apart (any ``stride(0)``).
        indices, offsets: as in :func:`sort_lookup`.
        per_sample_weights: fp32 [N], those of the lookup, or None.
        scale: the gradients are multiplied by it.
        cancelled: int64 [1] on the device; nothing is updated if it is not 0 then, such as when the gradients have not arrived.

    Raises:
        UsageError: inputs of wrong shape, dtype or device, or tables without optimizer.
    """
    optimizer = _check_update(tables, sorted_lookup, gradients, indices, offsets, per_sample_weights)
    known, device, order, programs = tables.on_device, gradients.device, sorted_lookup, len(sorted_lookup.chunks)
    # A step without any index counts as well.
    if isinstance(optimizer, Adam) and tables.rows:
        correction = known.bias_correction
        assert correction is not None
        kernels.step_kernel[(1,)](optimizer.steps, correction.divisors, *correction.betas, cancelled, num_warps=1)
    if indices.numel() == 0:
        return
    # From torch's own generator: reproducible by its seed, and new numbers in every replay of a CUDA graph.
    seed = torch.randint(_MAX_INT32, (1,), device=device, dtype=torch.int32) if tables.rounds_stochastically else None
    assert known.rate is not None
    known.rate.refresh()
    elements = _tile_elements(optimizer)
    # One launch for the tables whose dims have the same next power of two.
    for block in known.blocks:
        partials = torch.empty((programs, 2, block), dtype=torch.float32, device=device)
        args = kernels.UpdateArgs(
            tables.weights, **_states(tables, optimizer), learning_rate=known.rate.value, seed=seed, keys=order.keys,
            samples=order.samples, chunks=order.chunks, partials=partials, tables=known.tables, cancelled=cancelled,
        )  # fmt: skip
        shapes = {"DIM": known.blocks[block], "BLOCK_D": block, "RULE": _RULES[type(optimizer)]}
        kernels.update_kernel[(programs,)](
            args, 0, len(tables.rows), gradients, gradients.stride(0), scale, order.features, known.columns, order.coefficients,
            order.positions, per_sample_weights,
            **shapes, ROWS=_tile_rows(block, device, elements), GRADIENT_VECTOR=4 if gradients.stride(0) % 4 == 0 else 1,
            num_warps=max(4 * block // elements, 1), **register_limit(device, _REGISTERS),
        )  # fmt: skip
        kernels.merge_kernel[(min(programs, _merge_programs(device)),)](
            args, 0, len(tables.rows), order.crossings, **shapes, ROWS=max(_MERGE_ELEMENTS // block, 4), num_warps=4
        )


def _states(tables: LocalTables, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's part of UpdateArgs, by field."""
    fields: dict[str, Any] = dict.fromkeys(("momentum1", "momentum2", "divisors", "beta1", "beta2", "weight_decay"))
    match optimizer:
        case Sgd():
            fields |= {"eps": 0.0}
        case RowwiseAdagrad() | Adagrad():
            fields |= {"momentum1": optimizer.momentum, "eps": optimizer.eps}
        case Adam():
            correction = tables.on_device.bias_correction
            assert correction is not None
            fields |= {"divisors": correction.divisors, "beta1": correction.betas[0], "beta2": correction.betas[1]}
            fields |= {key: getattr(optimizer, key) for key in ("momentum1", "momentum2", "weight_decay", "eps")}
    return fields


def per_sample_weight_gradients(
    tables: LocalTables, gradients: Tensor, indices: Tensor, offsets: Tensor, scale: float = 1.0
) -> Tensor:
    """Gradients of per-sample weights: each looked-up row times the gradient of its bag. Call it before the update.

    Args:
        tables: what the lookup read.
        gradients: as in :func:`apply_gradients`.
        indices, offsets: as in :func:`sort_lookup`.
        scale: the gradients are multiplied by it.

    Returns:
        fp32 [N]; with mean pooling divided by the length of the bag.

    Raises:
        UsageError: inputs of wrong shape, dtype or device.
    """
    batch_size = _check_lookup(tables, indices, offsets)
    _check_gradients(tables, gradients, batch_size)
    products = torch.empty(indices.numel(), dtype=torch.float32, device=indices.device)
    if indices.numel() == 0:
        return products
    known = tables.on_device
    keys, bags = _label(tables, indices, offsets, batch_size)
    block = min(next_power_of_2(max(tables.feature_dims)), 128)
    rows = max(_TILE_ELEMENTS // block, 1)
    kernels.product_kernel[(ceil_div(indices.numel(), rows),)](
        tables.weights, gradients, gradients.stride(0), scale, keys, bags, offsets, known.tables, known.feature_tables,
        known.columns, products, indices.numel(), batch_size, max(tables.feature_dims),
        ROWS=rows, BLOCK_D=block, GRADIENT_VECTOR=4 if gradients.stride(0) % 4 == 0 else 1, MEAN=tables.mean,
        num_warps=1,
    )  # fmt: skip
    return products


# Shapes of launches. On the CPU, under Triton's interpreter, everything is small, so that small tests cross every border.


def _tile_elements(optimizer: Optimizer) -> int:
    return _TILE_ELEMENTS_WITH_STATES if isinstance(optimizer, Adagrad | Adam) else _TILE_ELEMENTS


def _tile_rows(block: int, device: torch.device, elements: int) -> int:
    return 4 if device.type == "cpu" else min(max(elements // block, 4), 32)


def _chunk_length(device: torch.device, count: int, tile_rows: int) -> int:
    if device.type == "cpu":
        return 2 * tile_rows
    tiles = ceil_div(count, tile_rows * _CHUNKS_PER_MULTIPROCESSOR * gpu_of(device).multiprocessors)
    return tile_rows * min(tiles, _LONGEST_CHUNK // tile_rows)


def _merge_programs(device: torch.device) -> int:
    return 3 if device.type == "cpu" else _MERGES_PER_MULTIPROCESSOR * gpu_of(device).multiprocessors


def _label(tables: LocalTables, indices: Tensor, offsets: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """For each position its row, counted over all tables, and its bag."""
    bag_count, count = offsets.numel() - 1, indices.numel()
    # A program takes so many bags that they hold about two blocks of positions.
    bags_each = min(next_power_of_2(ceil_div(2 * _BLOCK * bag_count, count)), _BLOCK)
    keys = torch.empty_like(indices, dtype=torch.int32 if tables.total_rows <= _MAX_INT32 else torch.int64)
    bags = torch.empty_like(indices, dtype=torch.int32 if bag_count <= _MAX_INT32 else torch.int64)
    kernels.label_kernel[(ceil_div(bag_count, bags_each),)](
        indices, offsets, tables.on_device.feature_first_rows, keys, bags, bag_count, batch_size, bags_each,
        bags_each.bit_length() - 1,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return keys, bags


# Checks of inputs.


def _check_lookup(tables: LocalTables, indices: Tensor, offsets: Tensor) -> int:
    device = tables.weights.device
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        if tensor.dtype not in (torch.int32, torch.int64) or tensor.dtype != indices.dtype:
            raise UsageError(f"{name} are {tensor.dtype}, indices {indices.dtype}: both must be int32, or both int64")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise UsageError(
                f"{name} have shape {list(tensor.shape)}, strides {tensor.stride()}: give a flat, contiguous tensor"
            )
        if tensor.device != device:
            raise UsageError(f"{name} are on {tensor.device}: the weights are on {device}")
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise UsageError("the weights are on the cpu: these kernels run on GPUs, or anywhere with TRITON_INTERPRET=1")
    if indices.numel() and not tables.feature_tables:
        raise UsageError(f"{indices.numel()} indices for tables without features: give none")
    batch_size = tables.batch_size(offsets)
    if indices.numel() and batch_size == 0:
        raise UsageError(f"{indices.numel()} indices, but offsets of no bag: give F * B + 1 offsets")
    return batch_size


def _check_gradients(tables: LocalTables, gradients: Tensor, batch_size: int) -> None:
    expected = (batch_size, sum(tables.feature_dims))
    if gradients.dtype not in DTYPES:
        raise UsageError(f"gradients are {gradients.dtype}: give one of {', '.join(map(str, DTYPES))}")
    if gradients.shape != expected or (gradients.numel() and gradients.stride(1) != 1):
        shape, strides = list(gradients.shape), gradients.stride()
        raise UsageError(f"gradients have shape {shape}, strides {strides}: give {list(expected)} with contiguous rows")
    if gradients.device != tables.weights.device:
        raise UsageError(f"gradients are on {gradients.device}: the weights are on {tables.weights.device}")


def _check_update(
    tables: LocalTables, order: SortedLookup, gradients: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None
) -> Optimizer:
    batch_size = _check_lookup(tables, indices, offsets)
    _check_gradients(tables, gradients, batch_size)
    if weights is not None:
        if weights.dtype != torch.float32 or weights.shape != indices.shape or not weights.is_contiguous():
            raise UsageError(
                f"per_sample_weights are {weights.dtype} {list(weights.shape)}: give contiguous fp32 {list(indices.shape)}"
            )
        if weights.device != indices.device:
            raise UsageError(f"per_sample_weights are on {weights.device}: the indices are on {indices.device}")
    if tables.optimizer is None:
        raise UsageError("these tables have no optimizer: give LocalTables.optimizer, or do not update them")
    if order.batch_size != batch_size or order.keys.numel() != indices.numel():
        raise UsageError(
            f"sorted_lookup is of {order.keys.numel()} indices and batch size {order.batch_size}, these are "
            f"{indices.numel()} and {batch_size}: give the result of sort_lookup for the same inputs"
        )
    return tables.optimizer
