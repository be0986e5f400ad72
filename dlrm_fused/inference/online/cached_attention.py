"""Attention of a few new tokens to a history whose keys and values are kept, and of each to itself, not to one another.

Candidates are ranked so against one history: m rows of queries, keys and values, and a cache with the keys and values of n
tokens. PyTorch's attention kernels give a head and its few queries to one multiprocessor, so that few heads leave most of the
GPU idle. Here, as in Flash-Decoding, the keys of a head are split over programs (:func:`_part_kernel`),
whose results are merged, together with each row's own key and value (:func:`_merge_kernel`).

The kernels read the address and the length of the cache on the device: one CUDA graph serves every history.

Source: Dao, Haziza, Massa, Sizov, *Flash-Decoding for long-context inference*, pytorch.org/blog/flash-decoding, 2023.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.devices import room_of_program
from dlrm_fused.ops.common.dtypes import TRITON_DTYPES
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.symmetric.device import peer_pointer
from dlrm_fused.symmetric.launches import ceil_div, next_power_of_2

_KEYS = 64  # most keys of a step


def reference(projected: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute the attention in plain torch.

    Args:
        projected: [m, heads, 3, d_head], queries, keys and values of the new tokens.
        keys, values: [heads, n, d_head], of the history.

    Returns:
        [m, heads, d_head].
    """
    queries, own_keys, own_values = projected.unbind(2)
    scale = projected.shape[-1] ** -0.5
    scores = torch.einsum("mhd,hnd->mhn", queries, keys)
    own_scores = (queries * own_keys).sum(-1, keepdim=True)
    shares = torch.softmax(torch.cat((scores, own_scores), dim=-1).float() * scale, dim=-1).to(values.dtype)
    return torch.einsum("mhn,hnd->mhd", shares[..., :-1], values) + shares[..., -1:] * own_values


def cached_attention(projected: Tensor, cache: Tensor, layer: int, max_keys: int) -> Tensor:
    """Compute the attention by kernels that read on the device where the history's keys and values are; see :func:`reference`.

    Args:
        projected: [m, heads, 3, d_head], contiguous, float32, bfloat16 or float16.
        cache: int64 [2] on the device: the address of a contiguous tensor [layers, 2, heads, n, d_head] of keys and values,
            of ``projected``'s dtype and device, and n, which may be 0.
        layer: the layer whose keys and values are taken.
        max_keys: the largest n there will be; it decides how many programs share a head.

    Returns:
        [m, heads, d_head].
    """
    rows, heads, _, d_head = projected.shape
    columns, lines = max(16, next_power_of_2(d_head)), max(16, next_power_of_2(rows))
    step = _keys(lines, columns, projected.element_size(), gpu_of(projected.device).shared_memory)
    # The power of two below the number of multiprocessors.
    programs = 1 << (gpu_of(projected.device).multiprocessors.bit_length() - 1)
    splits = min(next_power_of_2(ceil_div(max_keys, step)), max(1, next_power_of_2(programs // heads)))
    parts = torch.empty(splits, heads, rows, d_head, dtype=torch.float32, device=projected.device)
    weights = torch.empty(splits, heads, rows, dtype=torch.float32, device=projected.device)
    result = torch.empty(rows, heads, d_head, dtype=projected.dtype, device=projected.device)
    scale = d_head**-0.5 * 1.4426950408889634  # so that the exponential is of base 2
    _part_kernel[(heads, splits)](
        projected, cache, parts, weights, rows, layer, scale,
        HEADS=heads, D_HEAD=d_head, COLUMNS=columns, ROWS=lines, KEYS=step,
        DTYPE=TRITON_DTYPES[projected.dtype], num_warps=4, num_stages=2,
    )  # fmt: skip
    _merge_kernel[(heads, rows)](
        projected, parts, weights, result, rows, scale,
        HEADS=heads, D_HEAD=d_head, COLUMNS=columns, SPLITS=splits, num_warps=2,
    )  # fmt: skip
    return result


def _keys(rows: int, columns: int, element_size: int, memory: int) -> int:
    """Return the keys of a step for which ``memory`` bytes of a multiprocessor's shared memory are enough, 16 at least.

    Queries are there, and the keys and values of a step with their shares; or of two steps, where products of 16 bits have
    their shares in registers.
    """
    keys, steps = _KEYS, 2 if element_size == 2 else 1
    while keys > 16:
        loads = 2 * keys * columns * element_size
        shares = rows * (keys * element_size + 4)
        if rows * columns * element_size + max(steps * loads, loads + shares) <= room_of_program(memory):
            break
        keys //= 2
    return keys


@triton.jit(do_not_specialize=["rows", "layer"])
def _part_kernel(
    projected, cache, parts, weights, rows, layer, scale,
    HEADS: tl.constexpr, D_HEAD: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Compute all rows' attention to one split of one head's keys, and the base-2 logarithm of its sum of exponentials."""
    head, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    of_query = (row < rows)[:, None] & (column < D_HEAD)[None, :]
    query = projected + row[:, None] * (HEADS * 3 * D_HEAD) + head * 3 * D_HEAD + column[None, :]
    queries = tl.load(query, mask=of_query, other=0.0)
    count = tl.load(cache + 1).to(tl.int32)
    steps = tl.cdiv(tl.cdiv(count, splits), KEYS)
    first = split * steps * KEYS
    of_head = count.to(tl.int64) * D_HEAD
    keys = peer_pointer(cache, 0, 0, DTYPE) + (layer * 2 * HEADS + head) * of_head
    values = keys + HEADS * of_head
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    attended = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(first, tl.minimum(first + steps * KEYS, count), KEYS):
        place = begin + tl.arange(0, KEYS)
        inside = place < count
        of_key = inside[:, None] & (column < D_HEAD)[None, :]
        at_begin = (tl.zeros((), tl.int64) + begin) * D_HEAD
        at = tl.arange(0, KEYS)[:, None] * D_HEAD + column[None, :]
        key = tl.load(keys + at_begin + at, mask=of_key, other=0.0)
        value = tl.load(values + at_begin + at, mask=of_key, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        now_highest = tl.maximum(highest, tl.max(scores, axis=1))
        # Scores that are all -inf have no share, as in a softmax with others.
        base = tl.where(now_highest == float("-inf"), 0.0, now_highest)
        share = tl.exp2(scores - base[:, None])
        fading = tl.exp2(highest - base)
        total = total * fading + tl.sum(share, axis=1)
        attended = attended * fading[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
        highest = now_highest
    attended /= tl.where(total > 0, total, 1.0)[:, None]
    part = (split * HEADS + head) * rows + row
    tl.store(parts + part[:, None] * D_HEAD + column[None, :], attended, mask=of_query)
    tl.store(weights + part, highest + tl.log2(total), mask=row < rows)  # -inf for a split without keys


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(
    projected, parts, weights, result, rows, scale,
    HEADS: tl.constexpr, D_HEAD: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge one row of one head: the parts, and its own key and value, in proportion to their sums of exponentials."""
    head, row = tl.program_id(0), tl.program_id(1)
    split, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    of_head = column < D_HEAD
    own = projected + (row * HEADS + head) * 3 * D_HEAD + column
    query = tl.load(own, mask=of_head, other=0.0).to(tl.float32)
    key = tl.load(own + D_HEAD, mask=of_head, other=0.0).to(tl.float32)
    value = tl.load(own + 2 * D_HEAD, mask=of_head, other=0.0).to(tl.float32)
    own_weight = tl.sum(query * key, axis=0) * scale
    part = (split * HEADS + head) * rows + row
    weight = tl.load(weights + part)
    highest = tl.maximum(tl.max(weight, axis=0), own_weight)
    share, own_share = tl.exp2(weight - highest), tl.exp2(own_weight - highest)
    attended = tl.load(parts + part[:, None] * D_HEAD + column[None, :], mask=of_head[None, :], other=0.0)
    total = tl.sum(attended * share[:, None], axis=0) + value * own_share
    total /= tl.sum(share, axis=0) + own_share
    at_result = result + (row * HEADS + head) * D_HEAD + column
    tl.store(at_result, total.to(result.dtype.element_ty), mask=of_head)
