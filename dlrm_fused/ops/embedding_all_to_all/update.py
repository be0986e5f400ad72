"""The update of embedding tables from the gradients of pooled embeddings: the local half of a lookup's backward pass.

What is computed, where bag b of feature f holds row r with coefficient c (its per-sample weight, else 1; divided by the length
of the bag, if bags are averaged):

    g[r]        += c * scale * gradients[b, columns of f]     over all bags, and all features that share the table
    momentum[r] += mean(g[r] ** 2)                            rowwise Adagrad; once for a row, however often it was looked up
    weights[r]  -= learning_rate / (sqrt(momentum[r]) + eps) * g[r]

FBGEMM calls it EXACT_ROWWISE_ADAGRAD and EXACT_SGD. Rows that no bag holds are not touched. Sums are fp32, in an order that
depends on nothing but the inputs' shapes and rows: the same inputs give the same bits.

How it is computed, without a host synchronization:

* :func:`sort_lookup` brings equal rows together. It needs no gradient, so it may run ahead, on another stream. The sorted
  positions are cut into chunks of equal length, none across two tables: the load is balanced for every distribution of rows.
* One program a chunk gathers the gradients of a tile of positions at once, sums runs of equal rows by a segmented scan, and
  updates each row whose run lies in the chunk, reading and writing it once. Sums of runs that go beyond it are left in scratch.
* Runs that cross chunks are listed when the chunks are cut. A program takes one from the list, adds its sums in order, a tile
  at a time, and updates the row.

Memory traffic: touched rows and their momentum once in and once out; gradients once from memory, else from the cache.
"""

# Kernels follow Triton's ways: constants in capitals, no types but theirs.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables, RowwiseAdagrad

GRADIENT_TYPES = (torch.float32, torch.bfloat16, torch.float16)

_BLOCK = 1024  # positions of a program in the elementwise kernels
_PLAN_BLOCK = 128  # chunks of a program when they are cut
_TILE_ELEMENTS = 1024  # of a program in the update: what one warp holds in registers twice, gradients and weights
_REGISTERS: int | None = 128  # of a thread in the update; what the compiler takes by itself leaves room for fewer programs
_MERGE_ELEMENTS = 4096  # of a program that adds up a run
_MERGES_PER_MULTIPROCESSOR = 16
_LONGEST_CHUNK = 1024  # positions
_CHUNKS_PER_MULTIPROCESSOR = 128  # 32 programs are resident; more let the fast ones make up for the slow ones
_MAX_INT32 = 2**31 - 1


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
    known = _on_device(tables)
    if count == 0:
        empty = indices.new_empty(0, dtype=torch.int32)
        return SortedLookup(batch_size, empty, empty, empty.long(), None, None, empty.long().view(0, 3), empty)

    unsorted_keys, bags = _label(tables, indices, offsets, batch_size)
    keys, positions = torch.sort(unsorted_keys, stable=True)
    samples = torch.empty(count, dtype=torch.int32, device=device)
    features = torch.empty(count, dtype=torch.int32, device=device) if known.is_shared else None
    coefficients = torch.empty(count, dtype=torch.float32, device=device) if tables.mean else None
    _order_kernel[(triton.cdiv(count, _BLOCK),)](
        keys,
        positions,
        bags,
        offsets,
        samples,
        features,
        coefficients,
        count,
        batch_size,
        SHARED=known.is_shared,
        MEAN=tables.mean,
        BLOCK=_BLOCK,
    )

    table_count = len(tables.rows)
    length = _chunk_length(device, count, max(_tile_rows(block, device) for block in known.blocks))
    chunks = torch.empty((triton.cdiv(count, length) + table_count, 3), dtype=torch.int64, device=device)
    crossings = torch.empty(1 + 2 * len(chunks), dtype=torch.int32, device=device)
    tables_begin = torch.empty((2, table_count + 1), dtype=torch.int64, device=device)
    is_ordered = known.first_features is not None
    _count_kernel[(1,)](
        offsets if is_ordered else torch.searchsorted(keys, known.bounds.to(keys.dtype)),
        known.first_features,
        tables_begin,
        crossings,
        batch_size,
        length,
        table_count,
        ORDERED=is_ordered,
        BLOCK=triton.next_power_of_2(table_count),
    )
    _plan_kernel[(triton.cdiv(len(chunks), _PLAN_BLOCK),)](
        tables_begin,
        keys,
        samples,
        chunks,
        crossings,
        len(chunks),
        length,
        table_count,
        table_count.bit_length(),
        len(chunks).bit_length(),
        BLOCK=_PLAN_BLOCK,
    )
    return SortedLookup(batch_size, keys, samples, positions, features, coefficients, chunks, crossings)


def apply_gradients(
    tables: LocalTables,
    sorted_lookup: SortedLookup,
    gradients: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    scale: float = 1.0,
    tables_range: tuple[int, int] | None = None,
    cancelled: Tensor | None = None,
) -> None:
    """Update weights and momentum in place from the gradients of the pooled embeddings.

    Args:
        tables: what the lookup read, with its optimizer.
        sorted_lookup: of these indices and offsets, from :func:`sort_lookup`.
        gradients: fp32, bf16 or fp16 [B, sum of the features' dims], features in order; rows may lie apart (any ``stride(0)``).
        indices: as in :func:`sort_lookup`.
        offsets: as in :func:`sort_lookup`.
        per_sample_weights: fp32 [N], those of the lookup, or None.
        scale: the gradients are multiplied by it.
        tables_range: (first, last): update the tables ``first <= table < last`` only, reading no gradients but theirs: some can
            be updated while gradients of others are still on their way. Calls that together name every table once equal
            one call for all.
        cancelled: int64 [1] on the device; nothing is updated if it is not 0 then, such as when the gradients have not arrived.

    Raises:
        UsageError: inputs of wrong shape, dtype or device, or tables without optimizer.
    """
    batch_size = _check_lookup(tables, indices, offsets)
    _check_gradients(tables, gradients, batch_size)
    _check_per_sample_weights(per_sample_weights, indices)
    optimizer = tables.optimizer
    if optimizer is None:
        raise UsageError("these tables have no optimizer: give LocalTables.optimizer, or do not update them")
    if sorted_lookup.batch_size != batch_size or sorted_lookup.keys.numel() != indices.numel():
        raise UsageError(
            f"sorted_lookup is of {sorted_lookup.keys.numel()} indices and batch size {sorted_lookup.batch_size}, these are "
            f"{indices.numel()} and {batch_size}: give the result of sort_lookup for the same inputs"
        )
    first, last = tables_range if tables_range is not None else (0, len(tables.rows))
    if not 0 <= first <= last <= len(tables.rows):
        raise UsageError(f"tables_range is {tables_range}: there are {len(tables.rows)} tables")
    if indices.numel() == 0 or first == last:
        return

    known, device = _on_device(tables), indices.device
    is_adagrad = isinstance(optimizer, RowwiseAdagrad)
    rate = optimizer.learning_rate
    is_rate_on_device = rate.device == device
    is_stochastic = tables.stochastic_rounding and tables.weights.dtype != torch.float32
    # From torch's own generator: reproducible by its seed, and new numbers in every replay of a CUDA graph.
    seed = torch.randint(_MAX_INT32, (1,), device=device, dtype=torch.int32) if is_stochastic else None
    for block, dim in known.blocks.items():
        if not any(triton.next_power_of_2(width) == block for width in tables.dims[first:last]):
            continue
        programs = len(sorted_lookup.chunks)
        partials = torch.empty((programs, 2, block), dtype=torch.float32, device=device)
        shared_arguments = (
            tables.weights,
            optimizer.momentum if isinstance(optimizer, RowwiseAdagrad) else None,
            rate if is_rate_on_device else rate.item(),
            optimizer.eps if isinstance(optimizer, RowwiseAdagrad) else 0.0,
            seed,
            sorted_lookup.keys,
            sorted_lookup.samples,
            sorted_lookup.chunks,
            partials,
            known.tables,
            first,
            last,
            cancelled,
        )
        shapes = {
            "DIM": dim,
            "BLOCK_D": block,
            "ADAGRAD": is_adagrad,
            "RATE_ON_DEVICE": is_rate_on_device,
            "STOCHASTIC": is_stochastic,
        }
        _update_kernel[(programs,)](
            *shared_arguments,
            gradients,
            gradients.stride(0),
            scale,
            sorted_lookup.features,
            known.columns,
            sorted_lookup.coefficients,
            sorted_lookup.positions,
            per_sample_weights,
            **shapes,
            ROWS=_tile_rows(block, device),
            GRADIENT_VECTOR=4 if gradients.stride(0) % 4 == 0 else 1,
            SHARED=known.is_shared,
            MEAN=tables.mean,
            WEIGHTED=per_sample_weights is not None,
            num_warps=max(block // 256, 1),
            maxnreg=_REGISTERS,
        )
        _merge_kernel[(min(programs, _merge_programs(device)),)](
            *shared_arguments,
            sorted_lookup.crossings,
            **shapes,
            ROWS=max(_MERGE_ELEMENTS // block, 4),
            num_warps=4,
        )


def per_sample_weight_gradients(
    tables: LocalTables,
    gradients: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale: float = 1.0,
) -> Tensor:
    """Gradients of per-sample weights: each looked-up row times the gradient of its bag. Call it before the update.

    Args:
        tables: what the lookup read.
        gradients: as in :func:`apply_gradients`.
        indices: as in :func:`sort_lookup`.
        offsets: as in :func:`sort_lookup`.
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
    known = _on_device(tables)
    keys, bags = _label(tables, indices, offsets, batch_size)
    block = min(triton.next_power_of_2(max(tables.feature_dims)), 128)
    rows = max(_TILE_ELEMENTS // block, 1)
    _product_kernel[(triton.cdiv(indices.numel(), rows),)](
        tables.weights,
        gradients,
        gradients.stride(0),
        scale,
        keys,
        bags,
        offsets,
        known.tables,
        known.feature_tables,
        known.columns,
        products,
        indices.numel(),
        batch_size,
        max(tables.feature_dims),
        ROWS=rows,
        BLOCK_D=block,
        GRADIENT_VECTOR=4 if gradients.stride(0) % 4 == 0 else 1,
        MEAN=tables.mean,
        num_warps=1,
    )
    return products


# What the kernels need to know of tables; made at the first use of the tables, since a copy to the device waits for it.


@dataclass(frozen=True, eq=False)
class _DeviceTables:
    tables: (
        Tensor  # int64 [T, 3]: weights of row k (counted over all tables) begin at k * dim + this; dim; column, if one feature
    )
    bounds: Tensor  # int64 [T + 1]: first row of each table, and the number of all rows
    first_features: (
        Tensor | None
    )  # int64 [T + 1], if features stand in the order of tables: first feature that reads each table
    feature_tables: Tensor  # int32 [F]
    feature_first_rows: Tensor  # int64 [F]: first row of the feature's table
    columns: Tensor  # int64 [F]
    is_shared: bool  # some features read the same table
    blocks: dict[int, int]  # powers of two that hold the dims of tables: the dim, if it is one, else 0


_known_tables: WeakKeyDictionary[LocalTables, _DeviceTables] = WeakKeyDictionary()


def _on_device(tables: LocalTables) -> _DeviceTables:
    known = _known_tables.get(tables)
    if known is None:
        known = _known_tables[tables] = _copy_to_device(tables)
    return known


def _copy_to_device(tables: LocalTables) -> _DeviceTables:
    def tensor(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(tables.weights.device)

    feature_tables, count = tables.feature_tables, len(tables.rows)
    columns = dict(zip(feature_tables, tables.feature_columns, strict=True))
    is_ordered = list(feature_tables) == sorted(feature_tables)
    blocks: dict[int, set[int]] = {}
    for dim in tables.dims:
        blocks.setdefault(triton.next_power_of_2(dim), set()).add(dim)
    return _DeviceTables(
        tables=tensor(
            [
                (offset - first_row * dim, dim, columns.get(table, 0))
                for table, (offset, first_row, dim) in enumerate(
                    zip(tables.offsets, tables.first_rows, tables.dims, strict=True)
                )
            ]
        ),
        bounds=tensor([*tables.first_rows, tables.total_rows]),
        first_features=tensor([sum(own < table for own in feature_tables) for table in range(count + 1)])
        if is_ordered
        else None,
        feature_tables=tensor(list(feature_tables), torch.int32),
        feature_first_rows=tensor([tables.first_rows[table] for table in feature_tables]),
        columns=tensor(list(tables.feature_columns)),
        is_shared=len(set(feature_tables)) < len(feature_tables),
        blocks={block: dims.copy().pop() if len(dims) == 1 else 0 for block, dims in blocks.items()},
    )


# Shapes of launches. On the CPU, under Triton's interpreter, everything is small, so that small tests cross every border.


def _tile_rows(block: int, device: torch.device) -> int:
    return 4 if device.type == "cpu" else min(max(_TILE_ELEMENTS // block, 4), 32)


def _chunk_length(device: torch.device, count: int, tile_rows: int) -> int:
    if device.type == "cpu":
        return 2 * tile_rows
    tiles = triton.cdiv(count, tile_rows * _CHUNKS_PER_MULTIPROCESSOR * _multiprocessors(device))
    return tile_rows * min(tiles, _LONGEST_CHUNK // tile_rows)


def _merge_programs(device: torch.device) -> int:
    return 3 if device.type == "cpu" else _MERGES_PER_MULTIPROCESSOR * _multiprocessors(device)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _label(tables: LocalTables, indices: Tensor, offsets: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """For each position its row, counted over all tables, and its bag."""
    bag_count, count = offsets.numel() - 1, indices.numel()
    # A program takes so many bags that they hold about two blocks of positions.
    bags_each = min(triton.next_power_of_2(triton.cdiv(2 * _BLOCK * bag_count, count)), _BLOCK)
    keys = torch.empty_like(indices, dtype=torch.int32 if tables.total_rows <= _MAX_INT32 else torch.int64)
    bags = torch.empty_like(indices, dtype=torch.int32 if bag_count <= _MAX_INT32 else torch.int64)
    _label_kernel[(triton.cdiv(bag_count, bags_each),)](
        indices,
        offsets,
        _on_device(tables).feature_first_rows,
        keys,
        bags,
        bag_count,
        batch_size,
        bags_each,
        bags_each.bit_length() - 1,
        BLOCK=_BLOCK,
    )
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
    if gradients.dtype not in GRADIENT_TYPES:
        raise UsageError(f"gradients are {gradients.dtype}: give one of {', '.join(map(str, GRADIENT_TYPES))}")
    if gradients.shape != expected or (gradients.numel() and gradients.stride(1) != 1):
        shape, strides = list(gradients.shape), gradients.stride()
        raise UsageError(f"gradients have shape {shape}, strides {strides}: give {list(expected)} with contiguous rows")
    if gradients.device != tables.weights.device:
        raise UsageError(f"gradients are on {gradients.device}: the weights are on {tables.weights.device}")


def _check_per_sample_weights(weights: Tensor | None, indices: Tensor) -> None:
    if weights is None:
        return
    if weights.dtype != torch.float32 or weights.shape != indices.shape or not weights.is_contiguous():
        raise UsageError(
            f"per_sample_weights are {weights.dtype} {list(weights.shape)}: give contiguous fp32 {list(indices.shape)}"
        )
    if weights.device != indices.device:
        raise UsageError(f"per_sample_weights are on {weights.device}: the indices are on {indices.device}")


# Kernels of sort_lookup.


@triton.jit(do_not_specialize=["bag_count", "batch_size", "bags_each", "steps"])
def _label_kernel(
    indices,
    offsets,
    feature_first_rows,
    keys,
    bags,
    bag_count,
    batch_size,
    bags_each,
    steps,
    BLOCK: tl.constexpr,
):
    """Find the bag of each position among a few by bisection: neighbours take the same path, so that a warp's loads are one."""
    first_bag = tl.program_id(0).to(bags.dtype.element_ty) * bags_each
    last_bag = tl.minimum(first_bag + bags_each, bag_count)
    end = tl.load(offsets + last_bag)
    for start in range(tl.load(offsets + first_bag), end, BLOCK):
        position = start + tl.arange(0, BLOCK)
        inside = position < end
        # offsets[low] <= position < offsets[high]
        low = tl.zeros((BLOCK,), dtype=bags.dtype.element_ty) + first_bag
        high = tl.zeros((BLOCK,), dtype=bags.dtype.element_ty) + last_bag
        for _ in range(steps):
            middle = low + (high - low) // 2
            is_before = tl.load(offsets + middle) <= position
            low = tl.where(is_before, middle, low)
            high = tl.where(is_before, high, middle)
        row = tl.load(indices + position, mask=inside, other=0) + tl.load(feature_first_rows + low // batch_size)
        tl.store(keys + position, row.to(keys.dtype.element_ty), mask=inside)
        tl.store(bags + position, low, mask=inside)


@triton.jit(do_not_specialize=["count", "batch_size"])
def _order_kernel(
    keys,
    positions,
    bags,
    offsets,
    samples,
    features,
    coefficients,
    count,
    batch_size,
    SHARED: tl.constexpr,
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bring what the update needs to know of a bag into sorted order, and mark where rows begin and end."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(keys + place, mask=inside, other=0)
    is_first = tl.load(keys + place - 1, mask=inside & (place > 0), other=-1) != key
    is_last = tl.load(keys + place + 1, mask=place + 1 < count, other=-1) != key
    bag = tl.load(bags + tl.load(positions + place, mask=inside, other=0))
    feature = bag // batch_size
    sample = (bag - feature * batch_size).to(tl.int32)
    tl.store(samples + place, sample * 4 + is_last.to(tl.int32) * 2 + is_first.to(tl.int32), mask=inside)
    if SHARED:
        tl.store(features + place, feature.to(tl.int32), mask=inside)
    if MEAN:
        length = tl.load(offsets + bag + 1) - tl.load(offsets + bag)
        tl.store(coefficients + place, 1.0 / length.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["batch_size", "length", "table_count"])
def _count_kernel(
    begins,
    first_features,
    tables_begin,
    crossings,
    batch_size,
    length,
    table_count,
    ORDERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write where each table begins among the sorted positions, and its first chunk; after the last table, their ends."""
    table = tl.arange(0, BLOCK)
    exists = table < table_count
    if ORDERED:
        begin = tl.load(begins + tl.load(first_features + table, mask=exists, other=0) * batch_size).to(tl.int64)
        end = tl.load(begins + tl.load(first_features + table + 1, mask=exists, other=0) * batch_size).to(tl.int64)
    else:
        begin = tl.load(begins + table, mask=exists, other=0).to(tl.int64)
        end = tl.load(begins + table + 1, mask=exists, other=0).to(tl.int64)
    chunks_after = tl.cumsum(tl.where(exists, (end - begin + length - 1) // length, 0), 0)
    tl.store(tables_begin + table, begin, mask=exists)
    tl.store(tables_begin + table + 1, end, mask=table == table_count - 1)
    first_chunks = tables_begin + table_count + 1
    tl.store(first_chunks, 0)
    tl.store(first_chunks + table + 1, chunks_after, mask=exists)
    tl.store(crossings, 0)


@triton.jit(do_not_specialize=["chunk_count", "length", "table_count", "table_steps", "chunk_steps"])
def _plan_kernel(
    tables_begin,
    keys,
    samples,
    chunks,
    crossings,
    chunk_count,
    length,
    table_count,
    table_steps,
    chunk_steps,
    BLOCK: tl.constexpr,
):
    """Write the chunks, and list the runs that cross them."""
    chunk = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_chunks = tables_begin + table_count + 1
    exists = chunk < tl.load(first_chunks + table_count)
    # first_chunks[table] <= chunk < first_chunks[high]
    table = tl.zeros((BLOCK,), dtype=tl.int32)
    high = table + table_count
    for _ in range(table_steps):
        middle = (table + high) // 2
        is_before = tl.load(first_chunks + middle) <= chunk
        table = tl.where(is_before, middle, table)
        high = tl.where(is_before, high, middle)
    begin = tl.load(tables_begin + table) + (chunk - tl.load(first_chunks + table)) * length
    end = tl.minimum(begin + length, tl.load(tables_begin + table + 1))
    inside = chunk < chunk_count
    tl.store(chunks + 3 * chunk, tl.where(exists, table, -1), mask=inside)
    tl.store(chunks + 3 * chunk + 1, begin, mask=inside)
    tl.store(chunks + 3 * chunk + 2, end, mask=inside)

    goes_on = exists & ((tl.load(samples + end - 1, mask=exists, other=2) & 2) == 0)
    run_key = tl.load(keys + end - 1, mask=goes_on, other=0)
    is_whole = tl.load(keys + begin, mask=goes_on, other=0) == run_key
    began_before = (tl.load(samples + begin, mask=goes_on, other=0) & 1) == 0
    crosses = goes_on & ((is_whole & began_before) == 0)
    # The run reaches into the chunk that follows as number `follow`, and not into number `beyond`.
    follow = tl.zeros((BLOCK,), dtype=tl.int32)
    beyond = (tl.load(first_chunks + table + 1) - chunk).to(tl.int32)
    for _ in range(chunk_steps):
        middle = (follow + beyond) // 2
        searches = crosses & (middle > follow)
        reaches = tl.load(keys + begin + middle.to(tl.int64) * length, mask=searches, other=0) == run_key
        follow = tl.where(searches & reaches, middle, follow)
        beyond = tl.where(searches & (reaches == 0), middle, beyond)
    # The order of the list is open, that of the sums is not: each run is added up by one program.
    nth = tl.atomic_add(crossings, tl.sum(crosses.to(tl.int32), 0), sem="relaxed") + tl.cumsum(crosses.to(tl.int32), 0) - 1
    tl.store(crossings + 1 + 2 * nth, chunk, mask=crosses)
    tl.store(crossings + 2 + 2 * nth, follow, mask=crosses)


# Kernels of the update.


@triton.jit
def _add_in_runs(is_first_left, left, is_first_right, right):
    """Segmented sum: the right part starts anew where it holds the first of a run."""
    return is_first_left | is_first_right, tl.where(is_first_right != 0, right, left + right)


@triton.jit
def _mix(bits):
    """A random-looking bijection of 32 bits (the constants of Mueller's and Wellons' search, "lowbias32")."""
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _round_stochastically(values, key, columns, seed, dtype: tl.constexpr):
    """Round up or down with the probabilities that make the mean exact: add noise below the last kept bit, cut the rest off."""
    row_bits = _mix(_mix(seed.to(tl.uint32) ^ (key >> 31).to(tl.uint32)) ^ key.to(tl.uint32))
    noise = _mix(row_bits + columns.to(tl.uint32) * 0x9E3779B9)
    dropped: tl.constexpr = 16 if dtype == tl.bfloat16 else 13
    shift = tl.zeros_like(values)
    if dtype == tl.float16:
        # Below 2 ** -14 numbers of fp16 keep the distance that they have there; so have fp32 numbers from 2 ** -14 on.
        shift = tl.where(tl.abs(values) < 0.00006103515625, 0.00006103515625, 0.0)
        shift = tl.where(values < 0, -shift, shift)
    bits = (values + shift).to(tl.uint32, bitcast=True)
    bits = (bits + (noise >> (32 - dropped))) >> dropped << dropped
    rounded = bits.to(tl.float32, bitcast=True) - shift
    # Noise may carry a NaN's bits into the sign.
    return tl.where(values == values, rounded, values).to(dtype)


@triton.jit
def _inside(columns, dim, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    if DIM == BLOCK_D:
        return tl.full((1, BLOCK_D), 1, tl.int1)  # which the compiler drops from masks
    else:
        return columns < dim


@triton.jit
def _read_rows(weights, momentum, key, row_offset, columns, updated, inside, ADAGRAD: tl.constexpr):
    # A row passes once; the gradients, which are read again and again, shall stay in the cache.
    old = tl.load(weights + row_offset + columns, mask=updated[:, None] & inside, other=0.0, eviction_policy="evict_first")
    if ADAGRAD:
        old_momentum = tl.load(momentum + key, mask=updated, other=0.0)
    else:
        old_momentum = tl.zeros(key.shape, dtype=tl.float32)
    return old, old_momentum


@triton.jit
def _update_rows(
    weights,
    momentum,
    learning_rate,
    eps,
    seed,
    key,
    row_offset,
    columns,
    updated,
    inside,
    dim,
    old,
    old_momentum,
    gradient,
    ADAGRAD: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """One step of the optimizer for the rows of a tile that are to be updated; the gradient is 0 outside of the columns."""
    if RATE_ON_DEVICE:
        rate = tl.load(learning_rate)
    else:
        rate = learning_rate
    step = rate * gradient
    if ADAGRAD:
        new_momentum = old_momentum + tl.sum(gradient * gradient, 1) / dim
        tl.store(momentum + key, new_momentum, mask=updated)
        step = (rate / (tl.sqrt(new_momentum) + eps))[:, None] * gradient
    new = old.to(tl.float32) - step
    if STOCHASTIC:
        rounded = _round_stochastically(new, key[:, None], columns, tl.load(seed), weights.dtype.element_ty)
    else:
        rounded = new.to(weights.dtype.element_ty)
    tl.store(weights + row_offset + columns, rounded, mask=updated[:, None] & inside, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["first_table", "last_table"])
def _update_kernel(
    weights,
    momentum,
    learning_rate,
    eps,
    seed,
    keys,
    samples,
    chunks,
    partials,
    tables,
    first_table,
    last_table,
    cancelled,
    gradients,
    gradient_stride,
    scale,
    features,
    feature_columns,
    coefficients,
    positions,
    per_sample_weights,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADAGRAD: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    GRADIENT_VECTOR: tl.constexpr,
    SHARED: tl.constexpr,
    MEAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Sum the gradients of each row in a chunk of sorted positions, and update the rows whose positions all lie in it.

    Sums of a run that goes beyond the chunk are left in ``partials``: [chunk, 0] if it began before, else [chunk, 1].
    """
    if cancelled is not None:  # noqa: SIM102 - known at compile time
        if tl.load(cancelled) != 0:
            return
    chunk = tl.program_id(0)
    table = tl.load(chunks + 3 * chunk).to(tl.int32)
    if (table < first_table) | (table >= last_table):
        return
    dim = tl.load(tables + 3 * table + 1).to(tl.int32)
    if (dim > BLOCK_D) | (2 * dim <= BLOCK_D):
        return  # another launch has these tables
    if DIM > 0:
        dim = DIM
    else:
        dim = tl.multiple_of(dim, 4)
    begin = tl.load(chunks + 3 * chunk + 1)
    end = tl.load(chunks + 3 * chunk + 2)
    base = tl.multiple_of(tl.load(tables + 3 * table), 4)
    column = tl.multiple_of(tl.load(tables + 3 * table + 2), 4)
    head_key = tl.load(keys + begin)
    continues = (tl.load(samples + begin) & 1) == 0

    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = _inside(columns, dim, DIM, BLOCK_D)
    carry = tl.zeros((BLOCK_D,), dtype=tl.float32)
    length = (end - begin).to(tl.int32)
    keys += begin
    samples += begin
    # What a tile reads first is loaded while the tile before is in work.
    next_key = tl.load(keys + row, mask=row < length, other=0)
    next_record = tl.load(samples + row, mask=row < length, other=0)
    for start in range(0, length, ROWS):
        key, record = next_key, next_record
        place = start + row
        exists = place < length
        next_place = place + ROWS
        next_key = tl.load(keys + next_place, mask=next_place < length, other=0)
        next_record = tl.load(samples + next_place, mask=next_place < length, other=0)
        is_first, is_last, sample = record & 1, (record & 2) != 0, record >> 2
        is_head = continues & (key == head_key)
        updated = exists & is_last & (is_head == 0)

        gradient_offset = tl.multiple_of(sample[:, None].to(tl.int64) * gradient_stride, (GRADIENT_VECTOR, GRADIENT_VECTOR))
        if SHARED:
            feature = tl.load(features + begin + place, mask=exists, other=0)
            gradient_offset += tl.multiple_of(tl.load(feature_columns + feature)[:, None], (4, 4))
        else:
            gradient_offset += column
        # Behind the end it is sample 0 whose gradient is read, for nothing.
        gradient = tl.load(gradients + gradient_offset + columns, mask=inside, other=0.0)
        row_offset = tl.multiple_of(base + key[:, None].to(tl.int64) * dim, (4, 4))
        old, old_momentum = _read_rows(weights, momentum, key, row_offset, columns, updated, inside, ADAGRAD)

        coefficient = tl.zeros((ROWS,), dtype=tl.float32) + scale
        if MEAN:
            coefficient *= tl.load(coefficients + begin + place, mask=exists, other=0.0)
        if WEIGHTED:
            position = tl.load(positions + begin + place, mask=exists, other=0)
            coefficient *= tl.load(per_sample_weights + position)
        gradient = gradient.to(tl.float32) * coefficient[:, None]
        gradient = tl.where(((row == 0) & (is_first == 0))[:, None], gradient + carry[None, :], gradient)
        starts = tl.broadcast_to(is_first[:, None], (ROWS, BLOCK_D))
        _, gradient = tl.associative_scan((starts, gradient), 0, _add_in_runs)
        carry = tl.sum(tl.where((row == ROWS - 1)[:, None], gradient, 0.0), 0)

        _update_rows(
            weights,
            momentum,
            learning_rate,
            eps,
            seed,
            key,
            row_offset,
            columns,
            updated,
            inside,
            dim,
            old,
            old_momentum,
            gradient,
            ADAGRAD,
            RATE_ON_DEVICE,
            STOCHASTIC,
        )
        is_partial = exists & (is_last | (place == length - 1)) & (updated == 0)
        if tl.max(is_partial.to(tl.int32), 0) > 0:
            slot = 2 * chunk + tl.where(is_head, 0, 1)
            partial = partials + slot[:, None].to(tl.int64) * BLOCK_D + columns
            tl.store(partial, gradient, mask=is_partial[:, None] & inside)


@triton.jit(do_not_specialize=["first_table", "last_table"])
def _merge_kernel(
    weights,
    momentum,
    learning_rate,
    eps,
    seed,
    keys,
    samples,
    chunks,
    partials,
    tables,
    first_table,
    last_table,
    cancelled,
    crossings,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADAGRAD: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Update the rows whose runs go beyond a chunk: add what the chunk where a run begins and those that follow have left."""
    if cancelled is not None:  # noqa: SIM102 - known at compile time
        if tl.load(cancelled) != 0:
            return
    columns = tl.arange(0, BLOCK_D)[None, :]
    for nth in range(tl.program_id(0), tl.load(crossings), tl.num_programs(0)):
        chunk = tl.load(crossings + 1 + 2 * nth)
        follow = tl.load(crossings + 2 + 2 * nth)
        table = tl.load(chunks + 3 * chunk).to(tl.int32)
        dim = tl.load(tables + 3 * table + 1).to(tl.int32)
        if (table >= first_table) & (table < last_table) & (dim <= BLOCK_D) & (2 * dim > BLOCK_D):
            if DIM > 0:
                dim = DIM
            else:
                dim = tl.multiple_of(dim, 4)
            inside = _inside(columns, dim, DIM, BLOCK_D)
            run_key = tl.load(keys + tl.load(chunks + 3 * chunk + 2) - 1)
            row_offset = tl.multiple_of(tl.load(tables + 3 * table) + run_key.to(tl.int64) * dim, 4)
            key = tl.zeros((1,), dtype=keys.dtype.element_ty) + run_key
            updated = tl.full((1,), 1, dtype=tl.int1)
            old, old_momentum = _read_rows(weights, momentum, key, row_offset, columns, updated, inside, ADAGRAD)
            gradient = tl.load(partials + (2 * chunk + 1).to(tl.int64) * BLOCK_D + columns, mask=inside, other=0.0)
            for start in range(0, follow, ROWS):
                nth_after = start + tl.arange(0, ROWS)
                partial = partials + 2 * (chunk + 1 + nth_after)[:, None].to(tl.int64) * BLOCK_D + columns
                follows = (nth_after < follow)[:, None]
                gradient += tl.sum(tl.load(partial, mask=follows & inside, other=0.0), 0)[None, :]
            _update_rows(
                weights,
                momentum,
                learning_rate,
                eps,
                seed,
                key,
                row_offset,
                columns,
                updated,
                inside,
                dim,
                old,
                old_momentum,
                gradient,
                ADAGRAD,
                RATE_ON_DEVICE,
                STOCHASTIC,
            )


@triton.jit(do_not_specialize=["count", "batch_size", "widest"])
def _product_kernel(
    weights,
    gradients,
    gradient_stride,
    scale,
    keys,
    bags,
    offsets,
    tables,
    feature_tables,
    feature_columns,
    products,
    count,
    batch_size,
    widest,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GRADIENT_VECTOR: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Product of each looked-up row with the gradient of its bag."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = position < count
    key = tl.load(keys + position, mask=exists, other=0).to(tl.int64)
    bag = tl.load(bags + position, mask=exists, other=0)
    feature = bag // batch_size
    sample = (bag - feature * batch_size).to(tl.int64)
    table = tl.load(feature_tables + feature)
    dim = tl.multiple_of(tl.load(tables + 3 * table + 1)[:, None], (4, 4))
    row_offset = tl.multiple_of(tl.load(tables + 3 * table)[:, None] + key[:, None] * dim, (4, 4))
    gradient_offset = tl.multiple_of((sample * gradient_stride)[:, None], (GRADIENT_VECTOR, GRADIENT_VECTOR))
    gradient_offset += tl.multiple_of(tl.load(feature_columns + feature)[:, None], (4, 4))
    product = tl.zeros((ROWS,), dtype=tl.float32)
    for begin in range(0, widest, BLOCK_D):
        columns = begin + tl.arange(0, BLOCK_D)[None, :]
        inside = exists[:, None] & (columns < dim)
        weight = tl.load(weights + row_offset + columns, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradients + gradient_offset + columns, mask=inside, other=0.0).to(tl.float32)
        product += tl.sum(weight * gradient, 1)
    product *= scale
    if MEAN:
        product /= (tl.load(offsets + bag + 1, mask=exists, other=1) - tl.load(offsets + bag, mask=exists, other=0)).to(
            tl.float32
        )
    tl.store(products + position, product, mask=exists)
