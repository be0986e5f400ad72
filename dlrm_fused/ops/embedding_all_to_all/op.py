"""Pooled embedding lookup and All-to-All as one kernel, and its backward pass with the tables' optimizer.

Layout: a rank holds some tables and looks up, for each of its features, the bags of all ranks' batches. With the batches of all
ranks one after the other, ``offsets`` of a lookup is feature-major: bag b of feature f is
``indices[offsets[f * B + b] : offsets[f * B + b + 1]]``, B the global batch. A program that has pooled a bag stores it straight
into its row and columns of the output of the rank whose batch the bag belongs to, while other programs still look up: there is
no send buffer, no collective and no concatenation. Row-wise tables send partial sums, which the destination adds in the order
of ranks, those of another host as one.

Backward: the output's gradient travels the same way to the owners of the tables, into the layout [B, width] that the update
reads. The sort of the indices, which the update needs, does not depend on it and runs beside the forward pass.

Source: K. Punniyamurthy, K. Hamidouche, B. Beckmann, "Optimizing Distributed ML Communication with Fused
Computation-Collective Operations", SC24 (arXiv 2305.06942), section "embedding + All-to-All". The tables and optimizer states
are those of FBGEMM's table-batched embedding, used in place.

Kernels need a GPU, or Triton's interpreter (``TRITON_INTERPRET=1``) on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.compat.torch import current_stream
from dlrm_fused.ops.common.dispatch import differentiable_once, needs_dispatcher
from dlrm_fused.ops.common.meeting import meet
from dlrm_fused.ops.embedding_all_to_all.gradient import send_gradient
from dlrm_fused.ops.embedding_all_to_all.inputs import check_lookups, checks_of_call
from dlrm_fused.ops.embedding_all_to_all.kernel import Lookup, in_memory_of_ranks, in_slices, lookup_and_scatter
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.ops.embedding_all_to_all.prefetch_sort import PrefetchedSort
from dlrm_fused.ops.embedding_all_to_all.reduce import finish_output, open_output
from dlrm_fused.ops.embedding_all_to_all.slices import PooledSlices
from dlrm_fused.ops.embedding_all_to_all.update import apply_gradients, per_sample_weight_gradients
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace

# Results for other hosts of fewer bytes: their lookups wait for the memory more than they keep it busy, and their messages are
# short (measured on two H200s).
_FEW_BYTES = 2 << 20


def embedding_all_to_all(
    workspace: EmbeddingWorkspace,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    batch_sizes: Sequence[int],
    gradient_scale: float | None = None,
) -> Tensor:
    """Look up and pool this rank's features for all ranks, and receive those of all ranks for its own batch. Collective.

    Differentiable: the backward pass applies the optimizers of the workspace's tables.

    Args:
        workspace: with tables attached.
        indices: for each lookup of this rank int32 or int64 [n], rows of the feature's table.
        offsets: for each lookup int32 or int64 [features * sum(batch_sizes) + 1].
        per_sample_weights: empty, or fp32 for each lookup: [n], or [0] where there are none.
        batch_sizes: bags of each rank; equal on all ranks.
        gradient_scale: factor of the gradients that the tables get; default: the workspace's.

    Returns:
        [batch_sizes[rank], layout.columns] of the workspace's output dtype, the caller's as long as a tensor uses it. It lies
        in symmetric memory, unless it was received in another dtype, or more than ``held_outputs`` outputs are alive.

    Raises:
        UsageError: for other shapes, dtypes or devices, or, with ``check_indices``, for an index beyond its table. The other
            ranks raise too, and name this one.
        CommunicationError: if a peer is lost, was waited for too long, or has refused to take part. On a GPU the next call
            raises it, or ``workspace.raise_fault()``.
    """
    weights = [tables.weights for tables in workspace.tables]
    lookups = weights, list(indices), list(offsets), list(per_sample_weights)
    inputs = *lookups, list(batch_sizes), workspace.handle, gradient_scale
    if needs_dispatcher():
        return torch.ops.dlrm_fused.embedding_all_to_all(workspace.anchor, *inputs)
    if not torch.is_grad_enabled():
        return _look_up_and_deliver(workspace.anchor, *inputs)
    return _EmbeddingAllToAll.apply(workspace.anchor, inputs, *per_sample_weights)


torch.library.define(
    "dlrm_fused::embedding_all_to_all",
    "(Tensor anchor, Tensor[] weights, Tensor[] indices, Tensor[] offsets, Tensor[] per_sample_weights, int[] batch_sizes, "
    "int handle, float? gradient_scale=None) -> Tensor",
)
# Returns the gradients of the anchor and of the per-sample weights; updates the tables of the workspace.
torch.library.define(
    "dlrm_fused::embedding_all_to_all_backward",
    "(Tensor gradient, Tensor[] indices, Tensor[] offsets, Tensor[] per_sample_weights, int[] batch_sizes, int handle, "
    "float? gradient_scale=None) -> Tensor[]",
)


def _look_up_and_deliver(
    anchor: Tensor,
    weights: list[Tensor],
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    batch_sizes: list[int],
    handle: int,
    gradient_scale: float | None = None,
) -> Tensor:
    workspace = EmbeddingWorkspace.of(handle)
    workspace.forward_channel.begin_call()
    with checks_of_call(workspace, batch_sizes, with_all=workspace.check_indices):
        plan = workspace.plan(batch_sizes)
        check_lookups(workspace, plan, weights, indices, offsets, per_sample_weights)
    to_hosts: list[Lookup] = []  # whose results leave in slices
    to_ranks: list[Lookup] = []  # whose results, or partial sums, are stored at ranks of this host
    for number in range(len(weights)) if plan.global_batch else ():
        sample_weights = per_sample_weights[number] if per_sample_weights else None
        inputs = weights[number], indices[number], offsets[number], sample_weights
        to_ranks += [Lookup(number, features, *inputs) for features in workspace.feature_tables(number)]
        if plan.hosts.are_many:
            to_hosts += [Lookup(number, features, *inputs) for features in workspace.slice_feature_tables(number)]

    output, receive_offset = open_output(workspace, plan)
    if plan.hosts.are_many:
        slices = _look_up_between_hosts(workspace, plan, to_hosts, to_ranks, receive_offset)
        slices.send_sums()
        slices.receive(receive_offset)
    else:
        _look_up_for_ranks(workspace, plan, to_ranks, receive_offset)
    return finish_output(workspace, plan, output, are_empty_bags_sent=plan.hosts.are_many)


def _look_up_for_ranks(workspace: EmbeddingWorkspace, plan: BatchPlan, lookups: Sequence[Lookup], receive_offset: int) -> None:
    """Run the epoch inside the host: store the results at the ranks that receive them, and wait for theirs."""
    for i, lookup in enumerate(lookups):
        lookup_and_scatter(
            workspace, plan, lookup, in_memory_of_ranks(workspace, plan, lookup.number),
            receive_offset=receive_offset, first=i == 0, last=i == len(lookups) - 1,
        )  # fmt: skip
    if not lookups:
        meet(workspace.forward_channel, plan.fingerprint, receive_offset)  # such as a rank without tables


def _look_up_between_hosts(
    workspace: EmbeddingWorkspace, plan: BatchPlan, to_hosts: Sequence[Lookup], to_ranks: Sequence[Lookup], receive_offset: int
) -> PooledSlices:
    """Look up first what goes to other hosts, and beside its message what ranks of this host get; few results at once."""
    are_few = plan.slices.results.bytes < _FEW_BYTES
    side = workspace.side_stream if are_few else None
    main = current_stream(workspace.device) if side else None
    if side and main:
        side.wait_stream(main)
    try:
        slices = _look_up_slices(workspace, plan, to_hosts, beside=not are_few)
        with torch.cuda.stream(side):
            _look_up_for_ranks(workspace, plan, to_ranks, receive_offset)
        return slices
    finally:
        if side and main:
            main.wait_stream(side)


def _look_up_slices(workspace: EmbeddingWorkspace, plan: BatchPlan, lookups: Sequence[Lookup], *, beside: bool) -> PooledSlices:
    """Look the results for ranks of other hosts up into a buffer, and begin to send them."""
    buffer = plan.slices.results.new_buffer(workspace.device)
    to = in_slices(plan.slices, buffer)
    for lookup in lookups if plan.slices.receivers.numel() else ():
        lookup_and_scatter(workspace, plan, lookup, to, receive_offset=0, first=False, last=False)
    return PooledSlices(workspace, plan, plan.slices.results.of(buffer), beside=beside)


def update_tables(
    gradient: Tensor,
    indices: list[Tensor],
    offsets: list[Tensor],
    per_sample_weights: list[Tensor],
    batch_sizes: list[int],
    handle: int,
    gradient_scale: float | None = None,
    prefetched: PrefetchedSort | None = None,
) -> list[Tensor]:
    """The backward pass: bring the gradient to the tables' owners, and apply their optimizers. Collective.

    Args:
        gradient: [local batch, columns], of the output.
        prefetched: the sorted indices of the forward pass, whose tables are updated; None: they are sorted here.
        others: those of the forward pass.

    Returns:
        Gradients: of the anchor, and of the per-sample weights of each lookup that has them.
    """
    workspace = EmbeddingWorkspace.of(handle)
    sort = prefetched or PrefetchedSort(workspace.tables, indices, offsets, stream=None)
    orders = sort.take(indices, offsets)
    received = send_gradient(workspace, workspace.plan(batch_sizes), gradient)
    weight_gradients, scale = [], workspace.gradient_scale if gradient_scale is None else gradient_scale
    for i, (tables, order) in enumerate(zip(sort.tables, orders, strict=True)):
        weights = per_sample_weights[i] if per_sample_weights and per_sample_weights[i].numel() else None
        if weights is not None:
            weight_gradients.append(per_sample_weight_gradients(tables, received[i], indices[i], offsets[i], scale))
        elif per_sample_weights:
            weight_gradients.append(torch.empty(0, device=workspace.device))
        if order is not None:
            # Gradients that a peer has failed to send must not reach the tables.
            apply_gradients(
                tables, order, received[i], indices[i], offsets[i], weights, scale, cancelled=workspace.backward_channel.fault
            )
    return [torch.empty(0, device=workspace.device), *weight_gradients]


torch.library.impl("dlrm_fused::embedding_all_to_all", ["cpu", "cuda"], _look_up_and_deliver)
torch.library.impl("dlrm_fused::embedding_all_to_all_backward", ["cpu", "cuda"], update_tables)


@torch.library.register_fake("dlrm_fused::embedding_all_to_all")
def _fake_forward(anchor: Tensor, *inputs: Any) -> Tensor:
    _, _, _, _, batch_sizes, handle, *_ = inputs
    workspace = EmbeddingWorkspace.of(handle)
    return anchor.new_empty((batch_sizes[workspace.rank], workspace.layout.columns), dtype=workspace.output_dtype)


@torch.library.register_fake("dlrm_fused::embedding_all_to_all_backward")
def _fake_backward(
    gradient: Tensor, indices: list[Tensor], offsets: list[Tensor], per_sample_weights: list[Tensor], *_: Any
) -> list[Tensor]:
    return [gradient.new_empty(0), *(torch.empty_like(weights) for weights in per_sample_weights)]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, indices, offsets, per_sample_weights, ctx.batch_sizes, ctx.handle, ctx.gradient_scale = inputs
    ctx.lookups = len(indices)
    ctx.save_for_backward(*indices, *offsets, *per_sample_weights)
    # A compiler traces with tensors without memory; what it has compiled sorts in the backward pass.
    is_traced = type(output) is not Tensor
    ctx.prefetched_sort = None if is_traced else EmbeddingWorkspace.of(ctx.handle).prefetch_sort(indices, offsets)


@differentiable_once
def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    anchor, *weight_gradients = _gradients(ctx, gradient)
    nothing = [None] * ctx.lookups
    # PyTorch leaves out arguments at the end that have their default, and wants no gradients of them.
    return anchor, nothing, nothing, nothing, weight_gradients, None, None, *([] if ctx.gradient_scale is None else [None])


def _gradients(ctx: Any, gradient: Tensor) -> list[Tensor]:
    count = ctx.lookups
    saved = list(ctx.saved_tensors)
    lookups = saved[:count], saved[count : 2 * count], saved[2 * count :]
    inputs = gradient, *lookups, ctx.batch_sizes, ctx.handle, ctx.gradient_scale
    if ctx.prefetched_sort is None or needs_dispatcher():  # compiled autograd would trace what it runs
        return torch.ops.dlrm_fused.embedding_all_to_all_backward(*inputs)
    return update_tables(*inputs, ctx.prefetched_sort)


torch.library.register_autograd("dlrm_fused::embedding_all_to_all", _differentiate, setup_context=_save_for_backward)


class _EmbeddingAllToAll(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, on whose way through Python the host spends as long as on the launches.

    Arguments: the anchor, the operator's other inputs, and once more the weights of samples, which have gradients.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: tuple[Any, ...], *_: Tensor) -> Tensor:
        output = _look_up_and_deliver(anchor, *inputs)
        _save_for_backward(ctx, (anchor, *inputs), output)
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        anchor, *weight_gradients = _gradients(ctx, gradient)
        return anchor, None, *weight_gradients
