"""The operator, ``torch.ops.dlrm_fused.sequence_all_to_all``, and its backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.dispatch import Operator
from dlrm_fused.ops.common.dtypes import within_range
from dlrm_fused.ops.common.scatter_rows import ItemsByRank, scatter_rows
from dlrm_fused.ops.common.workspace import check_tensor
from dlrm_fused.ops.sequence_all_to_all.workspace import Counts, SequenceWorkspace
from dlrm_fused.symmetric import BlockPool, abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.launches import aligned


def sequence_all_to_all(
    workspace: SequenceWorkspace,
    rows: Tensor,
    order: Tensor,
    counts: Sequence[Sequence[int]],
    gradient_divisor: float = 1.0,
) -> Tensor:
    """Deliver the rows that this rank has looked up to the ranks that asked for them. Collective, and differentiable.

    Args:
        rows: [n, width], contiguous, of the workspace's output dtype: one for each id that this rank was
            asked for, in any order.
        order: int64 [n], contiguous: their numbers by asking rank, and for each in the order in which it asked.
        counts: [ranks][ranks]: ids that rank i asked rank j for; equal on all ranks.
        gradient_divisor: by which the gradients of ``rows`` are divided.

    Returns:
        [sum of counts[rank], width] of the same dtype: first what rank 0 was asked for, in that order. The caller's as
        long as a tensor uses it. It lies in symmetric memory, unless it was received in another dtype, or more than
        ``held_outputs`` outputs are alive.

    Raises:
        UsageError: for other shapes, dtypes or devices. The other ranks raise too, and name this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On a GPU the next call raises it,
            or ``workspace.raise_fault()``.
    """
    flat = [count for of_rank in counts for count in of_rank]
    output, _ = _sequence_all_to_all(rows, order, flat, float(gradient_divisor), workspace.handle)
    return output  # type: ignore[no-any-return]


_ARGUMENTS = "Tensor order, int[] counts, float gradient_divisor, int handle"
# The second result says to which row of which rank the gradient of each row goes; -1 for those of other hosts.
torch.library.define("dlrm_fused::sequence_all_to_all", f"(Tensor rows, {_ARGUMENTS}) -> (Tensor, Tensor)")
torch.library.define(
    "dlrm_fused::sequence_all_to_all_backward", f"(Tensor gradient, Tensor destinations, {_ARGUMENTS}) -> Tensor"
)


def _deliver(rows: Tensor, order: Tensor, flat: list[int], gradient_divisor: float, handle: int) -> tuple[Tensor, Tensor]:
    workspace = SequenceWorkspace.of(handle)
    workspace.begin_call()
    with workspace.checks(flat):
        counts = check_call(workspace, order, flat, gradient_divisor)
        check_tensor(workspace, "rows", rows, workspace.output_dtype, (counts.sent[-1], workspace.width))
    return send(workspace, counts, order, _on_wire(rows, workspace.forward_wire))


def check_call(workspace: SequenceWorkspace, order: Tensor, flat: list[int], gradient_divisor: float) -> Counts:
    """Return the counts of a call; raises UsageError."""
    counts = workspace.counts(_by_rank(flat, workspace.world_size))
    check_tensor(workspace, "order", order, torch.int64, (counts.sent[-1],))
    if not gradient_divisor > 0:
        raise UsageError(f"{workspace.name}: gradient_divisor={gradient_divisor}; needed: a positive number")
    return counts


def send(
    workspace: SequenceWorkspace, counts: Counts, order: Tensor, source: Tensor, source_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Send rows to the ranks that asked for them, and receive those that this rank asked for. Collective.

    Args:
        source: [n, width], of which row i is sent as row i, or [rows, width], of which ``source_rows`` [n] says which.

    Returns:
        the output of :func:`sequence_all_to_all`, and int32 [sum of counts[rank]]: rank * most_rows + i of its row i, -1 for
        those of other hosts.
    """
    first_rows = [counts.first_at(asking) for asking in range(workspace.world_size)]
    items = ItemsByRank(counts.sent, order, None, counts.most_rows, first_rows)
    begins, device = counts.received, order.device
    received = {owner: torch.arange(begins[owner], begins[owner + 1], device=device) for owner in workspace.group.hosts.remote}
    pool, block = _open(workspace, counts, counts.received[-1], workspace.forward_wire)
    destinations_at = workspace.destinations_at(counts.most_rows)
    window = workspace.window(pool, block, "forward", counts.fingerprint)
    scatter_rows(
        source, _targets(workspace, items), window, rows_per_rank=counts.most_rows, source_rows=source_rows,
        dtype=workspace.forward_wire, destinations_at=destinations_at, destinations_per_rank=counts.most_rows,
        received=received, by_rank=items,
    )  # fmt: skip
    begin = pool.offset_of(block) + destinations_at
    destinations = pool.memory.local[begin : begin + 4 * len(block)].view(torch.int32).clone()
    for own in received.values():
        destinations[own] = -1
    return pool.to_hold(block).to(workspace.output_dtype), destinations


def _return_gradient(
    gradient: Tensor, destinations: Tensor, order: Tensor, flat: list[int], gradient_divisor: float, handle: int
) -> Tensor:
    workspace = SequenceWorkspace.of(handle)
    workspace.begin_call()
    result = receive_gradient(workspace, gradient, destinations, order, flat).to(workspace.output_dtype)
    return result if gradient_divisor == 1 else result.div_(gradient_divisor)


def receive_gradient(
    workspace: SequenceWorkspace, gradient: Tensor, destinations: Tensor, order: Tensor, flat: list[int]
) -> Tensor:
    """Return the gradients of the rows that this rank has sent, [n, width], in the wire's dtype. Collective.

    Args:
        gradient: of the output; the other arguments are those of the forward pass, and what :func:`send` has returned.
    """
    counts = workspace.counts(_by_rank(flat, workspace.world_size))
    with abort_peers_on_error(workspace.channel):
        gradient = gradient.contiguous()
        check_tensor(workspace, "the gradient", gradient, workspace.output_dtype, (counts.received[-1], workspace.width))
    items = ItemsByRank(counts.received, None, destinations, counts.most_rows)
    received = {asking: order[counts.sent[asking] : counts.sent[asking + 1]] for asking in workspace.group.hosts.remote}
    pool, block = _open(workspace, counts, counts.sent[-1], workspace.backward_wire)
    window = workspace.window(pool, block, "backward", counts.fingerprint)
    rows = _on_wire(gradient, workspace.backward_wire)
    scatter_rows(rows, destinations, window, rows_per_rank=counts.most_rows, received=received, by_rank=items)
    return pool.to_hold(block)


def _by_rank(flat: list[int], ranks: int) -> list[list[int]]:
    return [flat[i * ranks : (i + 1) * ranks] for i in range(ranks)]


def _targets(workspace: SequenceWorkspace, items: ItemsByRank) -> Tensor:
    """Return int32 [n], where kernels store each row; without kernels, nobody asks."""
    assert items.order is not None
    targets = torch.empty_like(items.order, dtype=torch.int32)
    if uses_kernels(workspace.device):
        bounds = zip(itertools.pairwise(items.bounds), items.first_rows, strict=True)
        begins = [(asking * items.rows_per_rank + first, end - begin) for asking, ((begin, end), first) in enumerate(bounds)]
        parts = [torch.arange(begin, begin + count, dtype=torch.int32, device=targets.device) for begin, count in begins]
        targets.index_copy_(0, items.order, torch.cat(parts))
    return targets


def _on_wire(rows: Tensor, wire: torch.dtype) -> Tensor:
    return aligned(rows) if rows.dtype == wire else within_range(rows, wire).to(wire)


def _open(workspace: SequenceWorkspace, counts: Counts, rows: int, wire: torch.dtype) -> tuple[BlockPool, Tensor]:
    """Return the pool and the block in which this rank receives so many rows. Collective where that needs more memory."""
    pool = workspace.pool(counts)
    return pool, pool.receive((rows, workspace.width), wire, workspace.block_bytes)


torch.library.impl("dlrm_fused::sequence_all_to_all_backward", ["cpu", "cuda"], _return_gradient)


@torch.library.register_fake("dlrm_fused::sequence_all_to_all")
def _fake_forward(rows: Tensor, order: Tensor, flat: list[int], _: float, handle: int) -> tuple[Tensor, Tensor]:
    workspace = SequenceWorkspace.of(handle)
    count = sum(flat[workspace.rank * workspace.world_size : (workspace.rank + 1) * workspace.world_size])
    return rows.new_empty(count, workspace.width), rows.new_empty(count, dtype=torch.int32)


@torch.library.register_fake("dlrm_fused::sequence_all_to_all_backward")
def _fake_backward(gradient: Tensor, destinations: Tensor, order: Tensor, *_: Any) -> Tensor:
    return gradient.new_empty(len(order), gradient.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, order, *ctx.rest = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], order)


def _differentiate(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    assert gradient is not None, "the destinations have no gradient"
    backward = torch.ops.dlrm_fused.sequence_all_to_all_backward
    return backward(gradient, *ctx.saved_tensors, *ctx.rest), None, None, None, None


_sequence_all_to_all = Operator("dlrm_fused::sequence_all_to_all", _deliver, _differentiate, _save_for_backward)
