"""Find the places of a rank's rows: to which rank each goes, and to which row of what that one receives.

A rank's ids lie feature by feature, those of a feature rank by rank, and those of a rank sample by sample, as TorchRec's input
dist leaves them. A rank receives the rows of an owner in the same order, without those of other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.sequence_all_to_all.workspace import Counts
from dlrm_fused.symmetric.launches import ceil_div, kinds_of, launch_again

# Ids that a program places at a time.
_IDS = 1024
_MOST_PROGRAMS = 1024


@triton.jit(do_not_specialize=["items", "bags", "ranks", "segments"])
def place_rows_kernel(
    offsets, bounds, indices, first_rows, targets, rows, in_order, items, bags, ranks, segments,
    LOOKS_UP: tl.constexpr, ORDERS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """See :func:`place_rows`. Programs (s, ...) place the ids of segment s: of one feature, and asked for by one rank."""
    segment = tl.program_id(0).to(tl.int64)
    feature, asking = segment // ranks, segment % ranks
    own_ids, ids_of_all = tl.program_id(1).to(tl.int64) * IDS, tl.num_programs(1) * IDS
    first_bag, end_bag = tl.load(bounds + asking), tl.load(bounds + asking + 1)
    begin = tl.load(offsets + feature * bags + first_bag).to(tl.int64)
    end = tl.load(offsets + feature * bags + end_bag).to(tl.int64)
    # Rows of earlier features for this rank.
    before = tl.zeros([], tl.int64)
    for first in range(0, feature, IDS):
        earlier = first + tl.arange(0, IDS)
        inside = earlier < feature
        begins = tl.load(offsets + earlier * bags + first_bag, mask=inside, other=0)
        before += tl.sum((tl.load(offsets + earlier * bags + end_bag, mask=inside, other=0) - begins).to(tl.int64))
    target = tl.load(bounds + ranks + 1 + asking) + before - begin
    # Lengths that are not those of the counts must not reach the rows of others.
    end_target = tl.load(bounds + ranks + ranks + 1 + asking)
    first_row = tl.load(first_rows + feature) if LOOKS_UP else 0
    first_of_rank = tl.load(bounds + ranks + ranks + ranks + 1 + asking) + before - begin
    for first in range(begin + own_ids, end, ids_of_all):
        item = first + tl.arange(0, IDS)
        inside = (item < end) & (item < items)
        place = target + item
        tl.store(targets + item, tl.where(place < end_target, place, -1).to(tl.int32), mask=inside)
        row = item
        if LOOKS_UP:
            row = first_row + tl.load(indices + item, mask=inside, other=0).to(tl.int64)
            tl.store(rows + item, row, mask=inside)
        if ORDERS:
            tl.store(in_order + first_of_rank + item, row, mask=inside & (before + item >= begin) & (place < end_target))
    if segment == segments - 1:
        for first in range(end + own_ids, items, ids_of_all):
            item = first + tl.arange(0, IDS)
            tl.store(targets + item, tl.full([IDS], -1, tl.int32), mask=item < items)
            if LOOKS_UP:
                tl.store(rows + item, tl.zeros([IDS], tl.int64), mask=item < items)


class PlacedRows(NamedTuple):
    """The rows that a rank sends.

    Attributes:
        targets: int32 [n]: rank * most_rows + row, of each id, or -1 for ids beyond those of the counts; None without kernels.
        rows: int64 [n], which rows of the tables they are; None without a lookup.
        in_order: int64 [n], the same, or their numbers without a lookup, by the rank that asked for them; None where it is not
            needed.
    """

    targets: Tensor | None
    rows: Tensor | None
    in_order: Tensor | None


def place_rows(
    offsets: Tensor,
    batch_sizes: Sequence[int],
    counts: Counts,
    indices: Tensor | None = None,
    first_rows: Tensor | None = None,
    *,
    by_rank: bool = False,
) -> PlacedRows:
    """Return the places of a rank's rows, by a kernel.

    Args:
        offsets: int32 or int64 [features * bags + 1], where the ids of each bag begin; ``batch_sizes`` of each rank, of which
            there are ``bags`` together.
        indices: [n], the ids of a lookup, and ``first_rows`` int64 [features], which are added to them.
        by_rank: whether :attr:`PlacedRows.in_order` is needed.
    """
    items, ranks, bags = counts.sent_bounds[-1], len(batch_sizes), sum(batch_sizes)
    device = offsets.device
    targets = torch.empty(items, dtype=torch.int32, device=device)
    rows = None if indices is None else torch.empty(items, dtype=torch.int64, device=device)
    # Zeros, since nothing stands for ids beyond those of the counts.
    in_order = torch.zeros(items, dtype=torch.int64, device=device) if by_rank else None
    placed = PlacedRows(targets, rows, in_order)
    if not items:
        return placed
    segments = (offsets.numel() - 1) // max(bags, 1) * ranks
    first_targets = [asking * counts.most_rows + first for asking, first in enumerate(counts.first_rows)]
    end_targets = [first + count for first, count in zip(first_targets, counts.sent, strict=True)]
    numbers = [0, *accumulate(batch_sizes), *first_targets, *end_targets, *counts.sent_bounds]
    bounds = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
    programs = segments, max(1, min(ceil_div(items, segments * _IDS), ceil_div(_MOST_PROGRAMS, segments)))
    launch_again(
        (kinds_of(offsets, indices), by_rank), place_rows_kernel, programs,
        offsets, bounds, offsets if indices is None else indices, offsets if first_rows is None else first_rows,
        targets, targets if rows is None else rows, targets if in_order is None else in_order, items, bags, ranks, segments,
        LOOKS_UP=indices is not None, ORDERS=by_rank, IDS=_IDS,
    )  # fmt: skip
    return placed


def order_by_rank(offsets: Tensor, batch_sizes: Sequence[int], count: int) -> Tensor:
    """Return :attr:`PlacedRows.in_order` without a kernel, and without a lookup. The host waits for the device.

    Args:
        offsets, batch_sizes: as of :func:`place_rows`.
        count: of the rows.
    """
    bags = sum(batch_sizes)
    if not count or not bags:
        return torch.empty(0, dtype=torch.int64, device=offsets.device)
    ends = torch.tensor([*accumulate(batch_sizes)], device=offsets.device)
    firsts = torch.arange(0, offsets.numel() - 1, bags, device=offsets.device)[:, None]
    ends_of_parts = offsets[firsts + ends].long()  # [features, ranks]
    begins = offsets[firsts + ends - torch.tensor(batch_sizes, device=offsets.device)].long()
    by_rank = (ends_of_parts - begins).T.flatten()
    shifts = begins.T.flatten() - (by_rank.cumsum(0) - by_rank)
    return torch.repeat_interleave(shifts, by_rank, output_size=count) + torch.arange(count, device=offsets.device)
