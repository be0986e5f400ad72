"""The kernels of the fused lookup: bags are pooled and stored straight into the output of the rank they belong to, or into a
slice for a rank of another host."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dlrm_fused.ops.common.dtypes import TRITON_DTYPES, to_wire
from dlrm_fused.ops.common.gpus import gpu_of
from dlrm_fused.ops.embedding_all_to_all.byte_layout import PRESENCE_UNIT
from dlrm_fused.ops.embedding_all_to_all.host_slices import HostSlices
from dlrm_fused.ops.embedding_all_to_all.layout import FeatureTable
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.ops.embedding_all_to_all.tuning import Blocks, LookupShape, choose_blocks
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace
from dlrm_fused.symmetric.device import announced_offset, begin, finish, next_epoch, peer_pointer, wait_until_ready
from dlrm_fused.symmetric.launches import ceil_div

_FEATURE_FIELDS = tl.constexpr(4)
_PRESENCE_UNIT = tl.constexpr(PRESENCE_UNIT)


class Destinations(NamedTuple):
    """The places where a launch stores its results.

    Attributes:
        receivers: int64 [n, 3]: whose bags, whose address, and for waiting that rank's number within the host.
        addresses: int64, of the memory of ranks; or a uint8 buffer.
        bags: :attr:`~dlrm_fused.ops.embedding_all_to_all.plan.BatchPlan.bag_tables`.
        stride: elements between rows there.
        is_relative: whether offsets count from where the receiver has announced to receive.
        awaits_receivers: whether to wait until they are ready; not for a buffer of this rank's own.
    """

    receivers: Tensor
    addresses: Tensor
    bags: Tensor
    stride: int
    is_relative: bool
    awaits_receivers: bool


class Pooling(NamedTuple):
    """The way in which a program pools the bags of an item of work, one constant of the kernels; see :func:`_pool`."""

    weighted: bool
    mean: bool
    vector: int  # divides dims, columns and table offsets
    bags: int
    rows: int
    split: int
    dim: int  # a power of two, at least that of every feature
    is_exact: bool  # whether it is that of every feature


class LookupArgs(NamedTuple):
    """The tensors of a :class:`Lookup`, as one argument of the kernels."""

    weights: Any
    indices: Any
    offsets: Any
    sample_weights: Any  # any tensor, if there are none
    features: Any  # int64 [n, 4], FeatureTable


class KernelDestinations(NamedTuple):
    """:class:`Destinations` as an argument of the kernel."""

    receivers: Any
    receiver_count: Any
    addresses: Any
    stride: Any


def in_memory_of_ranks(workspace: EmbeddingWorkspace, plan: BatchPlan, number: int) -> Destinations:
    """Return where a lookup stores: results go to ranks of this host, partial sums to all ranks."""
    return Destinations(
        plan.receiver_tables[number],
        workspace.destination_memory(plan, number).addresses,
        plan.bag_tables[number],
        plan.places.destination(number, workspace.rank)[1],
        is_relative=not plan.places.goes_to_staging(number),
        awaits_receivers=True,
    )


def in_slices(slices: HostSlices, buffer: Tensor) -> Destinations:
    """Return where a lookup stores results for ranks of other hosts: in a buffer of ``slices.results``."""
    return Destinations(slices.receivers, buffer, slices.bags, slices.width, is_relative=False, awaits_receivers=False)


class Lookup(NamedTuple):
    """Some features of a lookup of this rank, and what is looked up.

    Attributes:
        number: of the lookup.
        features: one of ``workspace.feature_tables(number)`` or ``slice_feature_tables(number)``.
        weights, indices, offsets, sample_weights: the lookup's.
    """

    number: int
    features: FeatureTable
    weights: Tensor
    indices: Tensor
    offsets: Tensor
    sample_weights: Tensor | None

    @property
    def is_weighted(self) -> bool:
        return self.sample_weights is not None and self.sample_weights.numel() > 0

    @property
    def args(self) -> LookupArgs:
        sample_weights = self.sample_weights if self.is_weighted else self.weights
        return LookupArgs(self.weights, self.indices, self.offsets, sample_weights, self.features.table)


def _blocks(workspace: EmbeddingWorkspace, plan: BatchPlan, lookup: Lookup) -> tuple[Blocks, int]:
    """Return how to divide the work, and the items of one feature and destination."""
    mean_length = lookup.indices.numel() / max(1, lookup.offsets.numel() - 1)
    bags = lookup.features.count * plan.global_batch
    shape = LookupShape(lookup.features.block_dim, workspace.tables[lookup.number].weights.dtype, mean_length, bags)
    blocks = choose_blocks(shape, gpu_of(workspace.device))
    return blocks, ceil_div(max(plan.batch_sizes), blocks.bags)


def _constants(workspace: EmbeddingWorkspace, plan: BatchPlan, lookup: Lookup, blocks: Blocks) -> dict[str, Any]:
    features, is_mean = lookup.features, workspace.tables[lookup.number].mean
    shape = blocks.bags, blocks.rows, blocks.split, features.block_dim
    return {
        "POOLING": Pooling(lookup.is_weighted, is_mean, features.vector, *shape, features.is_exact),
        "WIRE": TRITON_DTYPES[workspace.forward_wire], "num_warps": blocks.warps,
    }  # fmt: skip


def lookup_and_scatter(
    workspace: EmbeddingWorkspace,
    plan: BatchPlan,
    lookup: Lookup,
    destinations: Destinations,
    *,
    receive_offset: int,
    first: bool,
    last: bool,
) -> None:
    """Look up some features of this rank, and store what belongs to each rank there.

    Args:
        receive_offset: where this rank receives in this epoch.
        first, last: whether this launch begins or ends the epoch; between them others may send more.
    """
    blocks, per_feature = _blocks(workspace, plan, lookup)
    to = KernelDestinations(
        destinations.receivers, destinations.receivers.shape[0], destinations.addresses, destinations.stride
    )
    items = to.receiver_count * lookup.features.count * per_feature
    lookup_and_scatter_kernel[(min(items, blocks.programs),)](
        lookup.args, destinations.bags, per_feature, plan.global_batch, items, to, receive_offset,
        workspace.forward_channel.args, plan.fingerprint,
        RELATIVE=destinations.is_relative, WAITS=destinations.awaits_receivers,
        PARTIAL=workspace.own_lookups[lookup.number].row_wise and not plan.hosts.are_many, FIRST=first, LAST=last,
        **_constants(workspace, plan, lookup, blocks),
    )  # fmt: skip


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
    pooled, table, indices, factors, length, step, dim, lane, POOLING: tl.constexpr,
):  # fmt: skip
    """Add ``POOLING.rows`` rows of each share from ``step`` on: all of them are on their way before the first is added."""
    ROWS: tl.constexpr = POOLING.rows
    numbers: tl.tuple = ()
    for r in tl.static_range(ROWS):
        numbers += (tl.load(indices + (step + r) * POOLING.split, mask=step + r < length, other=0).to(tl.int64),)
    rows: tl.tuple = ()
    for r in tl.static_range(ROWS):
        inside = (step + r < length)[:, None]
        if not POOLING.is_exact:
            inside = inside & (lane < dim)[None, :]
        rows += (tl.load(table + numbers[r][:, None] * dim + lane[None, :], mask=inside, other=0.0),)
    for r in tl.static_range(ROWS):
        row = rows[r].to(tl.float32)
        if POOLING.weighted:
            row *= tl.load(factors + (step + r) * POOLING.split, mask=step + r < length, other=0.0)[:, None]
        pooled += row
    return pooled


@triton.jit
def _pool(
    item, lookup, bags, blocks, global_batch, receivers, receiver_count, POOLING: tl.constexpr,
):  # fmt: skip
    """Pool the bags of an item of work: so many bags of one feature and one destination.

    Rows of a bag are dealt out to ``split`` shares, whose threads then read neighbouring indices; bags * split * rows of a
    table are on their way at once.

    Returns:
        fp32 [bags, dim]; for each bag its number, whether it exists, and its length; pointers to the feature's and the
        receiver's fields.
    """
    BAGS: tl.constexpr = POOLING.bags
    SPLIT: tl.constexpr = POOLING.split
    DIM: tl.constexpr = POOLING.dim
    VECTOR: tl.constexpr = POOLING.vector
    share = tl.arange(0, BAGS * SPLIT)
    lane = tl.arange(0, DIM)
    # One feature after the other: a few tables at a time stay in the caches.
    feature = item // (receiver_count * blocks)
    of_receiver = receivers + item // blocks % receiver_count * 3
    peer = tl.load(of_receiver)
    fields = lookup.features + feature * _FEATURE_FIELDS
    first_bag = tl.load(bags + peer) + item % blocks * BAGS
    end_bag = tl.load(bags + peer + 1)
    table = lookup.weights + tl.multiple_of(tl.load(fields + 1), VECTOR)
    dim = DIM if POOLING.is_exact else tl.multiple_of(tl.load(fields + 2), VECTOR)
    of_feature = lookup.offsets + tl.load(fields) * global_batch

    bag, exists, begin_row, length = _bags(of_feature, first_bag, end_bag, share // SPLIT)
    begin_share = begin_row + share % SPLIT
    share_length = (length - share % SPLIT + SPLIT - 1) // SPLIT
    pooled = tl.zeros((BAGS * SPLIT, DIM), tl.float32)
    for step in range(0, tl.max(share_length, axis=0), POOLING.rows):
        pooled = _add_rows(
            pooled, table, lookup.indices + begin_share, lookup.sample_weights + begin_share, share_length, step, dim, lane,
            POOLING,
        )  # fmt: skip
    if SPLIT > 1:
        pooled = tl.sum(tl.reshape(pooled, (BAGS, SPLIT, DIM)), axis=1)
        bag, exists, begin_row, length = _bags(of_feature, first_bag, end_bag, tl.arange(0, BAGS))
    if POOLING.mean:
        pooled = pooled / tl.maximum(length, 1).to(tl.float32)[:, None]
    return pooled, bag, exists, length, fields, of_receiver


@triton.jit(do_not_specialize=["blocks", "global_batch", "items", "receive_offset", "fingerprint"])
def lookup_and_scatter_kernel(
    lookup, bags, blocks, global_batch, items, to, receive_offset, channel, fingerprint,
    RELATIVE: tl.constexpr, WAITS: tl.constexpr, PARTIAL: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    WIRE: tl.constexpr, POOLING: tl.constexpr,
):  # fmt: skip
    """Pool bags and store them at the ranks they belong to.

    Args:
        lookup: :class:`LookupArgs`.
        bags: int64, :attr:`~dlrm_fused.ops.embedding_all_to_all.plan.BatchPlan.bag_tables`.
        blocks: items of one feature and destination, enough for the largest batch.
        to: :class:`KernelDestinations`.
        WAITS: until the receivers are ready.
        PARTIAL: the results are partial sums, on one host. Those of empty bags are not sent: a byte for each bag tells which
            are.
    """
    if FIRST:
        epoch = begin(channel, receive_offset, fingerprint)
    else:
        epoch = next_epoch(channel)
    VECTOR: tl.constexpr = POOLING.vector
    lane = tl.arange(0, POOLING.dim)
    ready_ranks = tl.zeros((), tl.int64)  # a bit for each of this host
    may_send = tl.full((), 1, tl.int1)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        pooled, bag, exists, length, fields, of_receiver = _pool(
            item, lookup, bags, blocks, global_batch, to.receivers, to.receiver_count, POOLING
        )
        peer = tl.load(of_receiver)
        receiver = tl.load(of_receiver + 1)
        if WAITS:
            number = tl.load(of_receiver + 2)
            if (ready_ranks >> number) & 1 == 0:
                may_send &= wait_until_ready(channel, receiver, epoch, fingerprint) >= 0
                ready_ranks |= tl.full((), 1, tl.int64) << number
        offset = tl.load(bags + channel.world + 1 + peer)
        if RELATIVE:
            offset += announced_offset(channel, receiver)
        destination = peer_pointer(to.addresses, receiver, offset, WIRE)
        at_row = (bag - tl.load(bags + peer)).to(tl.int64)
        column = tl.multiple_of(tl.load(fields + 3), VECTOR)
        places = destination + at_row[:, None] * tl.multiple_of(to.stride, 4) + (column + lane)[None, :]
        sent = exists & may_send
        if PARTIAL:
            presence = peer_pointer(to.addresses, receiver, tl.load(bags + 2 * channel.world + 1 + peer), tl.uint8)
            bag_count = tl.load(bags + peer + 1) - tl.load(bags + peer)
            of_bags = presence + tl.load(fields) * ((bag_count + _PRESENCE_UNIT - 1) // _PRESENCE_UNIT * _PRESENCE_UNIT)
            tl.store(of_bags + at_row, (length > 0).to(tl.uint8), mask=sent)
            sent = sent & (length > 0)
        stored = sent[:, None]
        if not POOLING.is_exact:
            stored = stored & (lane < tl.load(fields + 2))[None, :]
        tl.store(places, to_wire(pooled, WIRE), mask=stored)
    if LAST:
        finish(channel, epoch)
