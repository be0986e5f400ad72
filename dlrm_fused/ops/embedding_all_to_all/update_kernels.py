"""The kernels of the update of embedding tables; see :mod:`dlrm_fused.ops.embedding_all_to_all.update`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# A row of a table passes the caches once; the gradients, which are read again and again, shall stay there.
_PASSES_ONCE = tl.constexpr("evict_first")


# The sort of a lookup.


@triton.jit(do_not_specialize=["bag_count", "batch_size", "bags_each", "steps"])
def label_kernel(
    indices, offsets, feature_first_rows, keys, bags, bag_count, batch_size, bags_each, steps,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
def order_kernel(
    keys, positions, bags, offsets, samples, features, coefficients, count, batch_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    if features is not None:
        tl.store(features + place, feature.to(tl.int32), mask=inside)
    if coefficients is not None:
        length = tl.load(offsets + bag + 1) - tl.load(offsets + bag)
        tl.store(coefficients + place, 1.0 / length.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["batch_size", "length", "table_count"])
def count_kernel(
    begins, first_features, tables_begin, crossings, batch_size, length, table_count,
    ORDERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
def plan_kernel(
    tables_begin, keys, samples, chunks, crossings, chunk_count, length, table_count, table_steps, chunk_steps,
    BLOCK: tl.constexpr,
):  # fmt: skip
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


# The update.


class UpdateArgs(NamedTuple):
    """Arguments that the kernels of the update share, as one argument.

    Triton passes a tuple field by field, so it costs a launch no more than the fields would.
    """

    weights: Any
    momentum1: Any  # of Adagrad and Adam, else None
    momentum2: Any  # of Adam, as the next four, else None
    divisors: Any  # BiasCorrection.divisors
    beta1: Any
    beta2: Any
    weight_decay: Any
    learning_rate: Any  # pointer to an fp32 number
    eps: Any
    seed: Any  # pointer to an int32 for stochastic rounding; None: to nearest
    keys: Any  # of the sorted lookup, as the next two
    samples: Any
    chunks: Any
    partials: Any  # fp32 [chunks, 2, BLOCK_D]
    tables: Any  # int64 [T, 3], DeviceTables.tables
    cancelled: Any  # pointer to an int64: nothing is updated if it is not 0; or None


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
def _read_rows(args, key, row_offset, columns, updated, inside, RULE: tl.constexpr):
    """Weights, and both states of the optimizer: of elements, of rows, or zeros that nothing reads."""
    in_rows = updated[:, None] & inside
    old = tl.load(args.weights + row_offset + columns, mask=in_rows, other=0.0, eviction_policy=_PASSES_ONCE)
    momentum1 = tl.zeros(key.shape, dtype=tl.float32)
    momentum2 = tl.zeros(key.shape, dtype=tl.float32)
    if RULE == "rowwise_adagrad":
        momentum1 = tl.load(args.momentum1 + key, mask=updated, other=0.0)
    elif RULE != "sgd":
        momentum1 = tl.load(args.momentum1 + row_offset + columns, mask=in_rows, other=0.0, eviction_policy=_PASSES_ONCE)
    if RULE == "rowwise_adam":
        momentum2 = tl.load(args.momentum2 + key, mask=updated, other=0.0)
    elif RULE == "adam":
        momentum2 = tl.load(args.momentum2 + row_offset + columns, mask=in_rows, other=0.0, eviction_policy=_PASSES_ONCE)
    return old, momentum1, momentum2


@triton.jit
def _update_rows(
    args, key, row_offset, columns, updated, inside, dim, old, momentum1, momentum2, gradient,
    RULE: tl.constexpr,
):  # fmt: skip
    """One step of the optimizer for the rows of a tile that are to be updated; the gradient is 0 outside of the columns."""
    in_rows = updated[:, None] & inside
    rate = tl.load(args.learning_rate)
    if RULE == "rowwise_adagrad":
        momentum1 += tl.sum(gradient * gradient, 1) / dim
        tl.store(args.momentum1 + key, momentum1, mask=updated)
        step = (rate / (square_root(momentum1) + args.eps))[:, None] * gradient
    elif RULE == "adagrad":
        momentum1 += gradient * gradient
        tl.store(args.momentum1 + row_offset + columns, momentum1, mask=in_rows, eviction_policy=_PASSES_ONCE)
        step = rate * gradient / (square_root(momentum1) + args.eps)
    elif RULE == "sgd":
        step = rate * gradient
    else:
        momentum1 = args.beta1 * momentum1 + (1.0 - args.beta1) * gradient
        tl.store(args.momentum1 + row_offset + columns, momentum1, mask=in_rows, eviction_policy=_PASSES_ONCE)
        if RULE == "adam":
            momentum2 = args.beta2 * momentum2 + (1.0 - args.beta2) * gradient * gradient
            tl.store(args.momentum2 + row_offset + columns, momentum2, mask=in_rows, eviction_policy=_PASSES_ONCE)
        else:
            momentum2 = args.beta2 * momentum2 + (1.0 - args.beta2) * tl.sum(gradient * gradient, 1) / dim
            tl.store(args.momentum2 + key, momentum2, mask=updated)
            momentum2 = momentum2[:, None]
        deviation = square_root(momentum2 / tl.load(args.divisors + 1)) + args.eps
        step = rate * (momentum1 / tl.load(args.divisors) / deviation + args.weight_decay * old.to(tl.float32))
    new = old.to(tl.float32) - step
    if args.seed is not None:
        rounded = _round_stochastically(new, key[:, None], columns, tl.load(args.seed), args.weights.dtype.element_ty)
    else:
        rounded = new.to(args.weights.dtype.element_ty)
    tl.store(args.weights + row_offset + columns, rounded, mask=in_rows, eviction_policy=_PASSES_ONCE)


@triton.jit
def square_root(x):
    """Return the square root of fp32 numbers to one unit in the last place.

    tl.sqrt alone takes the smallest numbers for 0 on GPUs, so they are scaled. tl.sqrt_rn calls a function for rare numbers,
    with which the update of 16-bit rows takes 8% longer.
    """
    is_tiny = x < 2.0**-100
    return tl.sqrt(tl.where(is_tiny, x * 2.0**64, x)) * tl.where(is_tiny, 2.0**-32, 1.0)


@triton.jit
def _one_minus_power(beta, step):
    """In fp64, since fp32 would leave few digits of a small difference."""
    power = tl.exp2(step.to(tl.float64) * tl.log2(tl.full((), beta, tl.float64)))
    return (1.0 - power).to(tl.float32)


@triton.jit
def step_kernel(steps, divisors, beta1, beta2, cancelled):
    """Count a step of Adam, and write what its moments are divided by."""
    if cancelled is not None:  # noqa: SIM102 - known at compile time
        if tl.load(cancelled) != 0:
            return
    step = tl.load(steps) + 1
    tl.store(steps, step)
    tl.store(divisors, _one_minus_power(beta1, step))
    tl.store(divisors + 1, _one_minus_power(beta2, step))


@triton.jit(do_not_specialize=["first_table", "last_table"])
def update_kernel(
    args, first_table, last_table, gradients, gradient_stride, scale, features, feature_columns, coefficients,
    positions, per_sample_weights,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    GRADIENT_VECTOR: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of each row in a chunk of sorted positions, and update the rows whose positions all lie in it.

    Sums of a run that goes beyond the chunk are left in ``partials``: [chunk, 0] if it began before, else [chunk, 1].
    """
    if args.cancelled is not None:  # noqa: SIM102 - known at compile time
        if tl.load(args.cancelled) != 0:
            return
    chunk = tl.program_id(0)
    table = tl.load(args.chunks + 3 * chunk).to(tl.int32)
    if (table < first_table) | (table >= last_table):
        return
    dim = tl.load(args.tables + 3 * table + 1).to(tl.int32)
    if (dim > BLOCK_D) | (2 * dim <= BLOCK_D):
        return  # another launch has these tables
    if DIM > 0:
        dim = DIM
    else:
        dim = tl.multiple_of(dim, 4)
    begin = tl.load(args.chunks + 3 * chunk + 1)
    end = tl.load(args.chunks + 3 * chunk + 2)
    base = tl.multiple_of(tl.load(args.tables + 3 * table), 4)
    column = tl.multiple_of(tl.load(args.tables + 3 * table + 2), 4)
    head_key = tl.load(args.keys + begin)
    continues = (tl.load(args.samples + begin) & 1) == 0

    row = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)[None, :]
    inside = _inside(columns, dim, DIM, BLOCK_D)
    carry = tl.zeros((BLOCK_D,), dtype=tl.float32)
    length = (end - begin).to(tl.int32)
    keys = args.keys + begin
    samples = args.samples + begin
    # The first reads of a tile are loaded while the tile before is in work.
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
        if features is not None:
            feature = tl.load(features + begin + place, mask=exists, other=0)
            gradient_offset += tl.multiple_of(tl.load(feature_columns + feature)[:, None], (4, 4))
        else:
            gradient_offset += column
        # Behind the end it is sample 0 whose gradient is read, for nothing.
        gradient = tl.load(gradients + gradient_offset + columns, mask=inside, other=0.0)
        row_offset = tl.multiple_of(base + key[:, None].to(tl.int64) * dim, (4, 4))
        old, momentum1, momentum2 = _read_rows(args, key, row_offset, columns, updated, inside, RULE)

        coefficient = tl.zeros((ROWS,), dtype=tl.float32) + scale
        if coefficients is not None:
            coefficient *= tl.load(coefficients + begin + place, mask=exists, other=0.0)
        if per_sample_weights is not None:
            position = tl.load(positions + begin + place, mask=exists, other=0)
            coefficient *= tl.load(per_sample_weights + position)
        gradient = gradient.to(tl.float32) * coefficient[:, None]
        gradient = tl.where(((row == 0) & (is_first == 0))[:, None], gradient + carry[None, :], gradient)
        starts = tl.broadcast_to(is_first[:, None], (ROWS, BLOCK_D))
        _, gradient = tl.associative_scan((starts, gradient), 0, _add_in_runs)
        carry = tl.sum(tl.where((row == ROWS - 1)[:, None], gradient, 0.0), 0)

        _update_rows(
            args, key, row_offset, columns, updated, inside, dim, old, momentum1, momentum2, gradient, RULE
        )  # fmt: skip
        is_partial = exists & (is_last | (place == length - 1)) & (updated == 0)
        if tl.max(is_partial.to(tl.int32), 0) > 0:
            slot = 2 * chunk + tl.where(is_head, 0, 1)
            partial = args.partials + slot[:, None].to(tl.int64) * BLOCK_D + columns
            tl.store(partial, gradient, mask=is_partial[:, None] & inside)


@triton.jit(do_not_specialize=["first_table", "last_table"])
def merge_kernel(
    args, first_table, last_table, crossings,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Update the rows whose runs go beyond a chunk: add what the chunk where a run begins and those that follow have left."""
    if args.cancelled is not None:  # noqa: SIM102 - known at compile time
        if tl.load(args.cancelled) != 0:
            return
    columns = tl.arange(0, BLOCK_D)[None, :]
    for nth in range(tl.program_id(0), tl.load(crossings), tl.num_programs(0)):
        chunk = tl.load(crossings + 1 + 2 * nth)
        follow = tl.load(crossings + 2 + 2 * nth)
        table = tl.load(args.chunks + 3 * chunk).to(tl.int32)
        dim = tl.load(args.tables + 3 * table + 1).to(tl.int32)
        if (table >= first_table) & (table < last_table) & (dim <= BLOCK_D) & (2 * dim > BLOCK_D):
            if DIM > 0:
                dim = DIM
            else:
                dim = tl.multiple_of(dim, 4)
            inside = _inside(columns, dim, DIM, BLOCK_D)
            run_key = tl.load(args.keys + tl.load(args.chunks + 3 * chunk + 2) - 1)
            row_offset = tl.multiple_of(tl.load(args.tables + 3 * table) + run_key.to(tl.int64) * dim, 4)
            key = tl.zeros((1,), dtype=args.keys.dtype.element_ty) + run_key
            updated = tl.full((1,), 1, dtype=tl.int1)
            old, momentum1, momentum2 = _read_rows(args, key, row_offset, columns, updated, inside, RULE)
            gradient = tl.load(args.partials + (2 * chunk + 1).to(tl.int64) * BLOCK_D + columns, mask=inside, other=0.0)
            for start in range(0, follow, ROWS):
                nth_after = start + tl.arange(0, ROWS)
                partial = args.partials + 2 * (chunk + 1 + nth_after)[:, None].to(tl.int64) * BLOCK_D + columns
                follows = (nth_after < follow)[:, None]
                gradient += tl.sum(tl.load(partial, mask=follows & inside, other=0.0), 0)[None, :]
            _update_rows(
                args, key, row_offset, columns, updated, inside, dim, old, momentum1, momentum2, gradient, RULE
            )  # fmt: skip


@triton.jit(do_not_specialize=["count", "batch_size", "widest"])
def product_kernel(
    weights, gradients, gradient_stride, scale, keys, bags, offsets, tables, feature_tables, feature_columns, products,
    count, batch_size, widest,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, GRADIENT_VECTOR: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
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
