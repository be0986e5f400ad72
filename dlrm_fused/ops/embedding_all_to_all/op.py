"""Pooled embedding lookup and All-to-All as one kernel, and its backward pass with the tables' optimizer.

Layout: a rank holds some tables and looks up, for each of its features, the bags of all ranks' batches. With the batches of all
ranks one after the other, ``offsets`` of a lookup is feature-major: bag b of feature f is
``indices[offsets[f * B + b] : offsets[f * B + b + 1]]``, B the global batch. A program that has pooled a bag stores it straight
into its row and columns of the output of the rank whose batch the bag belongs to, while other programs still look up: there is
no send buffer, no collective and no concatenation. Row-wise tables send partial sums, which the destination adds in the order
of ranks.

Backward: the output's gradient travels the same way to the owners of the tables, into the layout [B, width] that the update
reads. The sort of the indices, which the update needs, does not depend on it and runs beside the forward pass.

Source: K. Punniyamurthy, K. Hamidouche, B. Beckmann, "Optimizing Distributed ML Communication with Fused
Computation-Collective Operations", SC24 (arXiv 2305.06942), section "embedding + All-to-All". The tables and optimizer states
are those of FBGEMM's table-batched embedding, used in place.

Kernels need a GPU, or Triton's interpreter (``TRITON_INTERPRET=1``) on the CPU.
"""

# Kernels follow Triton's ways: constants in capitals, no types but theirs.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.embedding_all_to_all.pooled import checked_plan, send_gradient
from dlrm_fused.ops.embedding_all_to_all.prefetch_sort import sorted_lookups
from dlrm_fused.ops.embedding_all_to_all.reduce import Output, finish_staged
from dlrm_fused.ops.embedding_all_to_all.scatter import TRITON_DTYPES, scatter_tiles, to_wire
from dlrm_fused.ops.embedding_all_to_all.tables import LocalTables
from dlrm_fused.ops.embedding_all_to_all.tuning import LookupShape, choose_blocks
from dlrm_fused.ops.embedding_all_to_all.update import apply_gradients, per_sample_weight_gradients
from dlrm_fused.ops.embedding_all_to_all.workspace import PRESENCE_UNIT, BatchPlan, EmbeddingWorkspace, FeatureTable
from dlrm_fused.symmetric.device import announced_offset, begin, finish, peer_pointer, uses_kernels, wait_until_ready

_INDEX_DTYPES = (torch.int32, torch.int64)
_FEATURE_FIELDS = tl.constexpr(4)
_PRESENCE_UNIT = tl.constexpr(PRESENCE_UNIT)


def embedding_all_to_all(
    workspace: EmbeddingWorkspace,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    batch_sizes: Sequence[int],
) -> Tensor:
    """Look up and pool this rank's features for all ranks, and receive those of all ranks for its own batch. Collective.

    Differentiable: the backward pass applies the optimizers of the workspace's tables.

    Args:
        workspace: with tables attached.
        indices: for each lookup of this rank int32 or int64 [n], rows of the feature's table.
        offsets: for each lookup int32 or int64 [features * sum(batch_sizes) + 1].
        per_sample_weights: empty, or fp32 for each lookup: [n], or [0] where there are none.
        batch_sizes: bags of each rank; equal on all ranks.

    Returns:
        fp32 [batch_sizes[rank], layout.columns], in symmetric memory, which is free again when no tensor uses it.

    Raises:
        UsageError: for other shapes, dtypes or devices, or, with ``check_indices``, for an index beyond its table. The other
            ranks raise too, and name this one.
        CommunicationError: if a peer is lost, was waited for too long, or has refused to take part. On a GPU the next call
            raises it, or ``workspace.raise_fault()``.
    """
    weights = [tables.weights for tables in workspace.tables]
    return torch.ops.dlrm_fused.embedding_all_to_all(
        workspace.anchor, weights, list(indices), list(offsets), list(per_sample_weights), list(batch_sizes), workspace.handle
    )


def reference(
    workspace: EmbeddingWorkspace,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    batch_sizes: Sequence[int],
) -> Tensor:
    """The forward pass of :func:`embedding_all_to_all` in plain torch and torch.distributed, without gradients."""
    plan = workspace.plan(batch_sizes)
    output = torch.zeros(plan.local_batch, workspace.layout.columns, device=workspace.device)
    results = [
        _pool(tables, indices[i], offsets[i], per_sample_weights[i] if per_sample_weights else None, plan.global_batch)
        for i, tables in enumerate(workspace.tables)
    ]
    own = torch.cat(results, dim=1) if results else torch.zeros(plan.global_batch, 0, device=workspace.device)
    for rank, lookups in enumerate(workspace.layout.lookups):
        received = torch.empty(plan.global_batch, workspace.layout.width(rank), device=workspace.device)
        if rank == workspace.rank:
            received.copy_(own)
        group = workspace.group.process_group
        if group is not None:
            dist.broadcast(received, dist.get_global_rank(group, rank), group)
        mine = received[plan.starts[workspace.rank] : plan.starts[workspace.rank + 1]]
        source = 0
        for lookup in lookups:
            for column, dim in zip(lookup.columns, lookup.dims, strict=True):
                output[:, column : column + dim] += mine[:, source : source + dim]
                source += dim
    return output


def _pool(tables: LocalTables, indices: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor:
    pooled = []
    for feature, table in enumerate(tables.feature_tables):
        rows, dim, first = tables.rows[table], tables.dims[table], tables.offsets[table]
        matrix = tables.weights.detach()[first : first + rows * dim].view(rows, dim).float()
        bags = offsets[feature * batch : (feature + 1) * batch + 1].long()
        begin_row, end_row = int(bags[0]), int(bags[-1])
        pooled.append(
            torch.nn.functional.embedding_bag(
                indices[begin_row:end_row].long(),
                matrix,
                bags - begin_row,
                mode="sum",
                per_sample_weights=weights[begin_row:end_row] if weights is not None and weights.numel() else None,
                include_last_offset=True,
            )
            / ((bags[1:] - bags[:-1]).clamp(min=1)[:, None] if tables.mean else 1)
        )
    return torch.cat(pooled, dim=1)


@triton.jit
def _bags(of_feature, first_bag, end_bag, number):
    """Bags of a feature from ``first_bag`` on: which they are, whether they exist, their first index and their length."""
    bag = first_bag + number
    exists = bag < end_bag
    begin_row = tl.load(of_feature + bag, mask=exists, other=0)
    length = (tl.load(of_feature + bag + 1, mask=exists, other=0) - begin_row).to(tl.int32)
    return bag, exists, begin_row, length


@triton.jit
def _add_rows(
    pooled,
    table,
    indices,
    factors,
    length,
    step,
    dim,
    lane,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EXACT_DIM: tl.constexpr,
):
    """Add rows ``step`` to ``step + ROWS`` of each share: all of them are on their way before the first is added."""
    numbers: tl.tuple = ()
    for r in tl.static_range(ROWS):
        numbers += (tl.load(indices + (step + r) * SPLIT, mask=step + r < length, other=0).to(tl.int64),)
    rows: tl.tuple = ()
    for r in tl.static_range(ROWS):
        inside = (step + r < length)[:, None]
        if not EXACT_DIM:
            inside = inside & (lane < dim)[None, :]
        rows += (tl.load(table + numbers[r][:, None] * dim + lane[None, :], mask=inside, other=0.0),)
    for r in tl.static_range(ROWS):
        row = rows[r].to(tl.float32)
        if WEIGHTED:
            row *= tl.load(factors + (step + r) * SPLIT, mask=step + r < length, other=0.0)[:, None]
        pooled += row
    return pooled


@triton.jit(do_not_specialize=["feature_count", "blocks", "global_batch", "items", "receive_offset", "fingerprint"])
def lookup_and_scatter_kernel(
    weights,
    indices,
    offsets,
    sample_weights,
    features,
    feature_count,
    bags,
    blocks,
    global_batch,
    items,
    stride,
    addresses,
    receive_offset,
    channel,
    fingerprint,
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    RELATIVE: tl.constexpr,
    PARTIAL: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    WIRE: tl.constexpr,
    VECTOR: tl.constexpr,
    BAGS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    DIM: tl.constexpr,
    EXACT_DIM: tl.constexpr,
):
    """Pool bags and store them at the ranks they belong to.

    An item of work is BAGS bags of one feature and one destination. Rows of a bag are dealt out to SPLIT shares, whose threads
    then read neighbouring indices; BAGS * SPLIT * ROWS rows of a table are on their way at once.

    Args:
        features: int64 [feature_count, 4]: number in the lookup, first element of its table, dim, column at the destination.
        bags: int64 [3 * ranks + 1], see :meth:`~dlrm_fused.ops.embedding_all_to_all.workspace.BatchPlan.bag_table`.
        blocks: items of one feature and destination, enough for the largest batch.
        stride: elements between rows at the destination.
        VECTOR: divides dims, columns and table offsets.
        PARTIAL: the results are partial sums. Those of empty bags are not sent: a byte for each bag tells which are.
    """
    if FIRST:
        epoch = begin(channel, receive_offset, fingerprint)
    else:
        epoch = tl.load(channel.state) + 1
    share = tl.arange(0, BAGS * SPLIT)
    lane = tl.arange(0, DIM)
    ready_peers = tl.zeros((), tl.int64)  # a bit for each
    may_send = tl.full((), 1, tl.int1)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        # One feature after the other: a few tables at a time stay in the caches.
        feature = item // (channel.world * blocks)
        turn = item // blocks % channel.world
        peer = (channel.rank + 1 + turn) % channel.world
        fields = features + feature * _FEATURE_FIELDS
        first_bag = tl.load(bags + peer) + item % blocks * BAGS
        end_bag = tl.load(bags + peer + 1)
        table = weights + tl.multiple_of(tl.load(fields + 1), VECTOR)
        dim = DIM if EXACT_DIM else tl.multiple_of(tl.load(fields + 2), VECTOR)
        of_feature = offsets + tl.load(fields) * global_batch

        bag, exists, begin_row, length = _bags(of_feature, first_bag, end_bag, share // SPLIT)
        begin_share = begin_row + share % SPLIT
        share_length = (length - share % SPLIT + SPLIT - 1) // SPLIT
        pooled = tl.zeros((BAGS * SPLIT, DIM), tl.float32)
        for step in range(0, tl.max(share_length, axis=0), ROWS):
            pooled = _add_rows(
                pooled, table, indices + begin_share, sample_weights + begin_share, share_length, step, dim, lane,
                ROWS, SPLIT, WEIGHTED, EXACT_DIM,
            )  # fmt: skip
        if SPLIT > 1:
            pooled = tl.sum(tl.reshape(pooled, (BAGS, SPLIT, DIM)), axis=1)
            bag, exists, begin_row, length = _bags(of_feature, first_bag, end_bag, tl.arange(0, BAGS))
        if MEAN:
            pooled = pooled / tl.maximum(length, 1).to(tl.float32)[:, None]

        if (ready_peers >> peer) & 1 == 0:
            may_send &= wait_until_ready(channel, peer, epoch, fingerprint) >= 0
            ready_peers |= tl.full((), 1, tl.int64) << peer
        offset = tl.load(bags + channel.world + 1 + peer)
        if RELATIVE:
            offset += announced_offset(channel, peer)
        destination = peer_pointer(addresses, peer, offset, WIRE)
        at_row = (bag - tl.load(bags + peer)).to(tl.int64)
        column = tl.multiple_of(tl.load(fields + 3), VECTOR)
        places = destination + at_row[:, None] * tl.multiple_of(stride, 4) + (column + lane)[None, :]
        sent = exists & may_send
        if PARTIAL:
            presence = peer_pointer(addresses, peer, tl.load(bags + 2 * channel.world + 1 + peer), tl.uint8)
            bag_count = end_bag - tl.load(bags + peer)
            of_bags = presence + tl.load(fields) * ((bag_count + _PRESENCE_UNIT - 1) // _PRESENCE_UNIT * _PRESENCE_UNIT)
            tl.store(of_bags + at_row, (length > 0).to(tl.uint8), mask=sent)
            sent = sent & (length > 0)
        stored = sent[:, None]
        if not EXACT_DIM:
            stored = stored & (lane < dim)[None, :]
        tl.store(places, to_wire(pooled, WIRE), mask=stored)
    if LAST:
        finish(channel, epoch)


torch.library.define(
    "dlrm_fused::embedding_all_to_all",
    "(Tensor anchor, Tensor[] weights, Tensor[] indices, Tensor[] offsets, Tensor[] per_sample_weights, int[] batch_sizes, "
    "int handle) -> Tensor",
)
# Returns the gradients of the anchor and of the per-sample weights; updates the tables of the workspace. `prefetched_sort` is a
# PrefetchedSort.handle, or 0.
torch.library.define(
    "dlrm_fused::embedding_all_to_all_backward",
    "(Tensor gradient, Tensor[] indices, Tensor[] offsets, Tensor[] per_sample_weights, int[] batch_sizes, int handle, "
    "int prefetched_sort=0) -> Tensor[]",
)


@torch.library.impl("dlrm_fused::embedding_all_to_all", ["cpu", "cuda"])
def _forward(
    anchor: Tensor,
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    batch_sizes: list[int],
    handle: int,
) -> Tensor:
    workspace = EmbeddingWorkspace.of(handle)
    workspace.forward_channel.raise_fault()

    def check(plan: BatchPlan) -> None:
        _check_inputs(workspace, plan, weights, indices, offsets, per_sample_weights)
        if workspace.check_indices:
            for number in range(len(indices)):
                _check_indices(workspace, plan, number, indices[number], offsets[number])

    plan = checked_plan(workspace, batch_sizes, check, with_all=workspace.check_indices)
    output = Output(workspace, plan)
    launches = [
        (number, features)
        for number in range(len(workspace.tables))
        for features in workspace.feature_tables(number)
        if plan.global_batch
    ]
    for i, (number, features) in enumerate(launches):
        sample_weights = per_sample_weights[number] if per_sample_weights else None
        _launch(
            workspace, plan, number, features, weights[number], indices[number], offsets[number], sample_weights, output,
            first=i == 0, last=i == len(launches) - 1,
        )  # fmt: skip
    if not launches:
        _take_part_with_nothing(workspace, plan, output)
    finish_staged(workspace, plan, output.received, are_empty_bags_sent=False)
    return output.tensor()


def _launch(
    workspace: EmbeddingWorkspace,
    plan: BatchPlan,
    number: int,
    features: FeatureTable,
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    output: Output,
    *,
    first: bool,
    last: bool,
) -> None:
    tables, channel = workspace.tables[number], workspace.forward_channel
    is_weighted = sample_weights is not None and sample_weights.numel() > 0
    is_staged = plan.goes_to_staging(number)
    memory = output.buffers.staging_memory() if is_staged else output.buffers.outputs.memory
    mean_length = indices.numel() / max(1, offsets.numel() - 1)
    most_bags = max(plan.batch_sizes)
    blocks = choose_blocks(
        LookupShape(features.block_dim, tables.weights.dtype, mean_length, features.count * plan.global_batch), workspace.device
    )
    per_feature = triton.cdiv(most_bags, blocks.bags)
    items = workspace.world_size * features.count * per_feature
    lookup_and_scatter_kernel[(min(items, blocks.programs),)](
        weights,
        indices,
        offsets,
        sample_weights if is_weighted else weights,
        features.table,
        features.count,
        plan.bag_table(number),
        per_feature,
        plan.global_batch,
        items,
        plan.destination(number, workspace.rank)[1],
        memory.addresses,
        output.offset,
        channel.args,
        plan.fingerprint,
        WEIGHTED=is_weighted,
        MEAN=tables.mean,
        RELATIVE=not is_staged,
        PARTIAL=workspace.own_lookups[number].row_wise,
        FIRST=first,
        LAST=last,
        WIRE=TRITON_DTYPES[workspace.forward_wire],
        VECTOR=features.vector,
        BAGS=blocks.bags,
        ROWS=blocks.rows,
        SPLIT=blocks.split,
        DIM=features.block_dim,
        EXACT_DIM=features.is_exact,
        num_warps=blocks.warps,
    )


def _take_part_with_nothing(workspace: EmbeddingWorkspace, plan: BatchPlan, output: Output) -> None:
    scatter_tiles(
        torch.empty(0, 4, device=workspace.device),
        plan.empty_table,
        0,
        output.buffers.outputs.memory,
        workspace.forward_channel,
        wire=workspace.forward_wire,
        fingerprint=plan.fingerprint,
        receive_offset=output.offset,
        relative=True,
    )


def _check_inputs(
    workspace: EmbeddingWorkspace,
    plan: BatchPlan,
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
) -> None:
    name, count = workspace.name, len(workspace.own_lookups)
    if not uses_kernels(workspace.device):
        raise UsageError(
            f"{name}: embedding_all_to_all on {workspace.device}: its kernels need a GPU or TRITON_INTERPRET=1; on the CPU use "
            "pooled_all_to_all with a lookup of your own"
        )
    if len(workspace.tables) != count:
        raise UsageError(f"{name}: no tables for its {count} lookups; call attach_tables first")
    for key, tensors in (("weights", weights), ("indices", indices), ("offsets", offsets)):
        if len(tensors) != count:
            raise UsageError(f"{name}: {len(tensors)} {key} for {count} lookups of rank {workspace.rank}")
    if per_sample_weights and len(per_sample_weights) != count:
        raise UsageError(
            f"{name}: {len(per_sample_weights)} per_sample_weights for {count} lookups; give none, or one for each"
        )
    for number in range(count):
        attached = workspace.tables[number].weights
        if weights[number].dtype != attached.dtype or weights[number].shape != attached.shape:
            raise UsageError(
                f"{name}: weights[{number}] is {weights[number].dtype} {list(weights[number].shape)}, the attached tables "
                f"{attached.dtype} {list(attached.shape)}"
            )
        _check_tensor(workspace, f"indices[{number}]", indices[number], _INDEX_DTYPES)
        _check_tensor(workspace, f"offsets[{number}]", offsets[number], _INDEX_DTYPES)
        expected = len(workspace.own_lookups[number].dims) * plan.global_batch + 1
        if offsets[number].numel() != expected:
            raise UsageError(
                f"{name}: offsets[{number}] has {offsets[number].numel()} entries; needed: features * sum(batch_sizes) + 1 = "
                f"{expected}"
            )
        if per_sample_weights and per_sample_weights[number].numel():
            _check_tensor(workspace, f"per_sample_weights[{number}]", per_sample_weights[number], (torch.float32,))
            if per_sample_weights[number].numel() != indices[number].numel():
                raise UsageError(
                    f"{name}: per_sample_weights[{number}] has {per_sample_weights[number].numel()} entries for "
                    f"{indices[number].numel()} indices"
                )


def _check_tensor(workspace: EmbeddingWorkspace, key: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise UsageError(f"{workspace.name}: {key} is {tensor.dtype}; allowed: {', '.join(str(dtype) for dtype in dtypes)}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise UsageError(
            f"{workspace.name}: {key} has shape {list(tensor.shape)}, strides {tensor.stride()}; needed: 1-D, contiguous"
        )
    if tensor.device != workspace.device:
        raise UsageError(f"{workspace.name}: {key} is on {tensor.device}, the workspace on {workspace.device}")


def _check_indices(workspace: EmbeddingWorkspace, plan: BatchPlan, number: int, indices: Tensor, offsets: Tensor) -> None:
    where, bounds = workspace.name, offsets.long().cpu()
    if bounds[0] != 0 or bounds[-1] != indices.numel() or bool((bounds[1:] < bounds[:-1]).any()):
        raise UsageError(f"{where}: offsets[{number}] must rise from 0 to {indices.numel()}, the number of indices")
    tables = workspace.tables[number]
    for feature, table in enumerate(tables.feature_tables):
        own = indices[bounds[feature * plan.global_batch] : bounds[(feature + 1) * plan.global_batch]]
        if own.numel() and (own.min() < 0 or own.max() >= tables.rows[table]):
            wrong = own[(own < 0) | (own >= tables.rows[table])][0].item()
            raise UsageError(
                f"{where}: indices[{number}] holds {wrong} for feature {feature}, whose table has {tables.rows[table]} rows"
            )


@torch.library.impl("dlrm_fused::embedding_all_to_all_backward", ["cpu", "cuda"])
def _backward(
    gradient: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    batch_sizes: list[int],
    handle: int,
    prefetched_sort: int = 0,
) -> list[Tensor]:
    workspace = EmbeddingWorkspace.of(handle)
    ordered = sorted_lookups(prefetched_sort, workspace.tables, indices, offsets)
    received = send_gradient(workspace, workspace.plan(batch_sizes), gradient)
    weight_gradients = []
    for i, tables in enumerate(workspace.tables):
        weights = per_sample_weights[i] if per_sample_weights and per_sample_weights[i].numel() else None
        if weights is not None:
            weight_gradients.append(
                per_sample_weight_gradients(tables, received[i], indices[i], offsets[i], workspace.gradient_scale)
            )
        elif per_sample_weights:
            weight_gradients.append(torch.empty(0, device=workspace.device))
        order = ordered[i]
        if order is not None:
            # Gradients that a peer has failed to send must not reach the tables.
            apply_gradients(
                tables, order, received[i], indices[i], offsets[i], weights, workspace.gradient_scale,
                cancelled=workspace.backward_channel.fault,
            )  # fmt: skip
    return [torch.empty(0, device=workspace.device), *weight_gradients]


@torch.library.register_fake("dlrm_fused::embedding_all_to_all")
def _fake_forward(
    anchor: Tensor,
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    batch_sizes: list[int],
    handle: int,
) -> Tensor:
    workspace = EmbeddingWorkspace.of(handle)
    return anchor.new_empty((batch_sizes[workspace.rank], workspace.layout.columns))


@torch.library.register_fake("dlrm_fused::embedding_all_to_all_backward")
def _fake_backward(
    gradient: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    batch_sizes: list[int],
    handle: int,
    prefetched_sort: int = 0,
) -> list[Tensor]:
    return [gradient.new_empty(0), *(torch.empty_like(weights) for weights in per_sample_weights)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, indices, offsets, per_sample_weights, ctx.batch_sizes, ctx.handle = inputs
    ctx.lookups = len(indices)
    ctx.save_for_backward(*indices, *offsets, *per_sample_weights)
    # A compiler traces with tensors without memory.
    is_traced = type(output) is not Tensor
    ctx.prefetched_sort = None if is_traced else EmbeddingWorkspace.of(ctx.handle).prefetch_sort(indices, offsets)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    count = ctx.lookups
    saved = list(ctx.saved_tensors)
    indices, offsets, per_sample_weights = saved[:count], saved[count : 2 * count], saved[2 * count :]
    # Its memory is needed no longer than for one backward pass.
    prefetched, ctx.prefetched_sort = ctx.prefetched_sort, None
    anchor, *weight_gradients = torch.ops.dlrm_fused.embedding_all_to_all_backward(
        gradient, indices, offsets, per_sample_weights, ctx.batch_sizes, ctx.handle, prefetched.handle if prefetched else 0
    )
    nothing = [None] * count
    return anchor, nothing, nothing, nothing, weight_gradients, None, None


torch.library.register_autograd("dlrm_fused::embedding_all_to_all", _differentiate, setup_context=_save_for_backward)
