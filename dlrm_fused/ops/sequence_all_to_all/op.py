"""The operator, ``torch.ops.dlrm_fused.sequence_all_to_all``, and its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.dispatch import Operator, expect_no_gradient
from dlrm_fused.ops.common.dtypes import within_range
from dlrm_fused.ops.common.scatter_rows import ItemsByRank, scatter_rows
from dlrm_fused.ops.common.workspace import check_tensor
from dlrm_fused.ops.sequence_all_to_all.between_hosts import RowMessages, Rows
from dlrm_fused.ops.sequence_all_to_all.places import PlacedRows, order_by_rank, place_rows
from dlrm_fused.ops.sequence_all_to_all.workspace import Counts, SequenceWorkspace
from dlrm_fused.symmetric import BlockPool, abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.launches import aligned


def sequence_all_to_all(
    workspace: SequenceWorkspace,
    rows: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[int],
    counts: Counts | Sequence[Sequence[int]],
    gradient_divisor: float = 1.0,
    places: Tensor | None = None,
) -> Tensor:
    """Deliver the rows that this rank has looked up to the ranks that asked for them. Collective, and differentiable.

    Args:
        rows: [n, width], contiguous, of the workspace's output dtype: one for each id that this rank was asked for, feature
            by feature, and of each feature sample by sample, those of rank 0 first.
        offsets: int32 or int64 [features * sum(batch_sizes) + 1], where the rows of each sample begin, and the end. Features
            are those of this rank; it may have none.
        batch_sizes: samples of each rank; equal on all ranks.
        counts: [ranks][ranks]: ids that rank i asked rank j for, equal on all ranks; or those of :meth:`Counts.of`.
        gradient_divisor: by which the gradients of ``rows`` are divided.
        places: int64 [sum of counts[rank]], all numbers below its length: the row of the output to which each row goes, in the
            order in which they come without it; on all ranks or on none.

    Returns:
        [sum of counts[rank], width] of the same dtype: first the rows of rank 0, feature by feature and sample by sample. The
        caller's as long as a tensor uses it. It lies in symmetric memory, unless it was received in another dtype, or more
        than ``held_outputs`` outputs are alive.

    Raises:
        UsageError: for other shapes, dtypes or devices. The other ranks raise too, and name this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On a GPU the next call raises it,
            or ``workspace.raise_fault()``.
    """
    numbers = numbers_in(workspace, counts)
    call = places, list(batch_sizes), numbers, float(gradient_divisor), workspace.handle
    output, _ = _sequence_all_to_all(rows, offsets, *call)
    return output  # type: ignore[no-any-return]


ARGUMENTS = "Tensor offsets, Tensor? places, int[] batch_sizes, int[] counts, float gradient_divisor, int handle"
# The second result says to which row of which rank the gradient of each row goes; -1 for those of other hosts.
torch.library.define("dlrm_fused::sequence_all_to_all", f"(Tensor rows, {ARGUMENTS}) -> (Tensor, Tensor)")
torch.library.define(
    "dlrm_fused::sequence_all_to_all_backward", f"(Tensor gradient, Tensor destinations, {ARGUMENTS}) -> Tensor"
)


def numbers_in(workspace: SequenceWorkspace, counts: Counts | Sequence[Sequence[int]]) -> list[int]:
    """Return the counts of a call as the operator takes them; raises UsageError."""
    if isinstance(counts, Counts):
        return counts.numbers
    with abort_peers_on_error(workspace.channel):
        return workspace.counts(counts).numbers


@dataclass(frozen=True)
class SequenceCall:
    """The arguments that both operators have, as of :func:`sequence_all_to_all`."""

    offsets: Tensor
    places: Tensor | None
    batch_sizes: list[int]
    counts: Counts
    gradient_divisor: float
    workspace: SequenceWorkspace

    @classmethod
    def begin(cls, *arguments: Any) -> Self:
        """Begin a call with the operator's last arguments, those of ``ARGUMENTS``."""
        offsets, places, batch_sizes, numbers, gradient_divisor, handle = arguments
        workspace = SequenceWorkspace.of(handle)
        call = cls(offsets, places, batch_sizes, Counts.of(numbers), gradient_divisor, workspace)
        call.workspace.begin_call()
        return call

    def check(self) -> None:
        """Raise UsageError for wrong arguments."""
        name, ranks, counts, bags = self.workspace.name, self.workspace.world_size, self.counts, sum(self.batch_sizes)
        if len(self.batch_sizes) != ranks or min(self.batch_sizes) < 0:
            raise UsageError(f"{name}: batch_sizes={self.batch_sizes}; needed: a number, at least 0, for each of {ranks} ranks")
        if self.offsets.dtype not in (torch.int32, torch.int64):
            raise UsageError(f"{name}: offsets is {self.offsets.dtype}; needed: torch.int32 or torch.int64")
        features = max(self.offsets.numel() - 1, 0) // max(bags, 1)
        check_tensor(self.workspace, "offsets", self.offsets, self.offsets.dtype, (features * bags + 1,))
        if self.places is not None:
            check_tensor(self.workspace, "places", self.places, torch.int64, (counts.received_bounds[-1],))
        if counts.sent_bounds[-1] and not features:
            raise UsageError(f"{name}: {counts.sent_bounds[-1]} ids, but offsets of no feature; counts={list(counts.sent)}")
        if ranks * counts.most_rows >= 2**31:
            raise UsageError(f"{name}: a rank receives {counts.most_rows} rows; needed: less than 2**31 / {ranks}")
        if not self.gradient_divisor > 0:
            raise UsageError(f"{name}: gradient_divisor={self.gradient_divisor}; needed: a positive number")
        if not uses_kernels(self.workspace.device):
            self._check_values()

    def _check_values(self) -> None:
        """Raise UsageError for wrong numbers in tensors of the CPU. Kernels leave out what is beyond the counts."""
        name, bags, received = self.workspace.name, sum(self.batch_sizes), self.counts.received_bounds[-1]
        lengths = self.offsets.diff().view(-1, max(bags, 1))
        asked = [int(of_rank.sum()) for of_rank in lengths.split(self.batch_sizes, dim=1)] if bags else list(self.counts.sent)
        if int(self.offsets[0]) != 0 or lengths.lt(0).any() or asked != list(self.counts.sent):
            found = f"begin with {int(self.offsets[0])}, and give the ranks {asked} ids"
            raise UsageError(
                f"{name}: offsets {found}; needed: they rise from 0, and give {list(self.counts.sent)}, as counts do"
            )
        if self.places is not None and received and not 0 <= int(self.places.min()) <= int(self.places.max()) < received:
            found = f"from {int(self.places.min())} to {int(self.places.max())}"
            raise UsageError(f"{name}: places {found}; needed: each number from 0 to {received - 1}")

    def placed(self, *lookup: Tensor) -> PlacedRows:
        """Return the places of this rank's rows; ``lookup``: indices and first rows, as of :func:`place_rows`."""
        if not uses_kernels(self.workspace.device):
            return PlacedRows(None, None, order_by_rank(self.offsets, self.batch_sizes, self.counts.sent_bounds[-1]))
        are_many = self.workspace.group.hosts.are_many
        return place_rows(self.offsets, self.batch_sizes, self.counts, *lookup, by_rank=are_many)


def _deliver(rows: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call = SequenceCall.begin(*arguments)
    workspace, counts = call.workspace, call.counts
    with workspace.checks(counts):
        call.check()
        check_tensor(workspace, "rows", rows, workspace.output_dtype, (counts.sent_bounds[-1], workspace.width))
        placed = call.placed()
    return send(call, _on_wire(rows, workspace.forward_wire), placed)


def send(call: SequenceCall, source: Tensor, placed: PlacedRows) -> tuple[Tensor, Tensor]:
    """Send rows to the ranks that asked for them, and receive those that this rank asked for. Collective.

    Args:
        source: [n, width], of which row i is sent as row i; or the tables, if ``placed`` has rows of them.

    Returns:
        the output of :func:`sequence_all_to_all`, and int32 [sum of counts[rank]]: rank * most_rows + i of its row i, -1 for
        those of other hosts.
    """
    workspace, counts, places = call.workspace, call.counts, call.places
    pool, block = _open(workspace, counts, counts.received_bounds[-1], workspace.forward_wire)

    def words(begin: int) -> Tensor:
        begin += pool.offset_of(block)
        return pool.memory.local[begin : begin + 4 * len(block)].view(torch.int32)

    destinations_at, places_at = workspace.destinations_at(counts.most_rows), workspace.places_at(counts.most_rows)
    if places is not None:
        words(places_at).copy_(places)
    window = workspace.window(pool, block, "forward", counts.fingerprint, places is None)
    messages = items = None
    if workspace.group.hosts.are_many:
        words(destinations_at).fill_(-1)
        sent, received = Rows(source, counts.sent_bounds, placed.in_order), Rows(block, counts.received_bounds, places)
        messages = RowMessages.begin(window, sent, received)
    if placed.targets is None:
        items = ItemsByRank(counts.sent_bounds, placed.in_order, None, counts.most_rows, counts.first_rows)
    scatter_rows(
        source, call.offsets if placed.targets is None else placed.targets, window, rows_per_rank=counts.most_rows,
        source_rows=placed.rows, dtype=workspace.forward_wire, destinations_at=destinations_at,
        destinations_per_rank=counts.most_rows, places_at=None if places is None else places_at, by_rank=items,
    )  # fmt: skip
    if messages is not None:
        messages.complete()
    return pool.to_hold(block).to(workspace.output_dtype), words(destinations_at).clone()


def _return_gradient(gradient: Tensor, destinations: Tensor, *arguments: Any) -> Tensor:
    call = SequenceCall.begin(*arguments)
    result = receive_gradient(call, gradient, destinations).to(call.workspace.output_dtype)
    return result if call.gradient_divisor == 1 else result.div_(call.gradient_divisor)


def receive_gradient(call: SequenceCall, gradient: Tensor, destinations: Tensor) -> Tensor:
    """Return the gradients of the rows that this rank has sent, [n, width], in the wire's dtype. Collective.

    Args:
        gradient: of the output; ``destinations`` are what :func:`send` has returned in the forward pass.
    """
    workspace, counts, places = call.workspace, call.counts, call.places
    with abort_peers_on_error(workspace.channel):
        gradient = gradient.contiguous()
        check_tensor(workspace, "the gradient", gradient, workspace.output_dtype, (counts.received_bounds[-1], workspace.width))
    pool, block = _open(workspace, counts, counts.sent_bounds[-1], workspace.backward_wire)
    window = workspace.window(pool, block, "backward", counts.fingerprint)
    rows = _on_wire(gradient, workspace.backward_wire)
    messages = items = None
    if workspace.group.hosts.are_many:
        sent, received = Rows(rows, counts.received_bounds, places), Rows(block, counts.sent_bounds, call.placed().in_order)
        messages = RowMessages.begin(window, sent, received)
    if not uses_kernels(workspace.device):
        in_order = destinations if places is None else destinations.index_select(0, places)
        items = ItemsByRank(counts.received_bounds, places, in_order, counts.most_rows)
    scatter_rows(rows, destinations, window, rows_per_rank=counts.most_rows, by_rank=items)
    if messages is not None:
        messages.complete()
    return pool.to_hold(block)


def _on_wire(rows: Tensor, wire: torch.dtype) -> Tensor:
    return aligned(rows) if rows.dtype == wire else within_range(rows, wire).to(wire)


def _open(workspace: SequenceWorkspace, counts: Counts, rows: int, wire: torch.dtype) -> tuple[BlockPool, Tensor]:
    """Return the pool and the block in which this rank receives so many rows. Collective where that needs more memory."""
    pool = workspace.pool(counts)
    return pool, pool.receive((rows, workspace.width), wire, workspace.block_bytes)


torch.library.impl("dlrm_fused::sequence_all_to_all_backward", ["cpu", "cuda"], _return_gradient)


@torch.library.register_fake("dlrm_fused::sequence_all_to_all")
def _fake_forward(rows: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    *_, numbers, _, handle = call
    workspace, count = SequenceWorkspace.of(handle), sum(Counts.of(numbers).asked)
    return rows.new_empty(count, workspace.width), rows.new_empty(count, dtype=torch.int32)


@torch.library.register_fake("dlrm_fused::sequence_all_to_all_backward")
def _fake_backward(gradient: Tensor, *call: Any) -> Tensor:
    *_, numbers, _, _ = call
    return gradient.new_empty(sum(Counts.of(numbers).sent), gradient.shape[1])


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass of either operator takes: results but the first, and the arguments of the call."""
    *_, offsets, places, batch_sizes, numbers, gradient_divisor, handle = inputs
    ctx.rest = batch_sizes, numbers, gradient_divisor, handle
    # None of what follows the first input has a gradient.
    ctx.of_others = [None] * (len(inputs) - 1)
    ctx.mark_non_differentiable(*output[1:])
    expect_no_gradient(ctx, output[0])
    ctx.save_for_backward(*output[1:], offsets, places)


def differentiate_by(name: str) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the backward pass of an operator, which this one of ``torch.ops.dlrm_fused`` computes."""

    def differentiate(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        gradient = ctx.zeros() if gradient is None else gradient
        return getattr(torch.ops.dlrm_fused, name)(gradient, *ctx.saved_tensors, *ctx.rest), *ctx.of_others

    return differentiate


_differentiate = differentiate_by("sequence_all_to_all_backward")
_sequence_all_to_all = Operator("dlrm_fused::sequence_all_to_all", _deliver, _differentiate, save_for_backward)
