"""All-to-All of pooled embeddings that another library has looked up, without send buffer and concatenation.

``torch.ops.dlrm_fused.pooled_all_to_all(anchor, pooled, batch_sizes, workspace)``: every rank has the pooled embeddings of its
own tables for the bags of all ranks, and gets those of all tables for its own bags. The results are stored straight into their
columns of the destination's output; row-wise partial sums are added there in the order of ranks, those of another host
as one. The backward pass brings the output's gradient to the owners of the tables in the same way, scaled as
``gradient_scale`` says.

This is what ``comm=fused`` runs on the CPU, around FBGEMM's lookup: values are copied, never computed anew, so that results and
gradients are bit-identical to those of TorchRec's table- and column-wise paths; but for the order of sums of gradients between
hosts, with ``distinct``. On GPUs it serves lookups that :mod:`dlrm_fused.ops.embedding_all_to_all.op` does not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrm_fused.ops.common.dispatch import differentiable_once, needs_dispatcher
from dlrm_fused.ops.common.meeting import meet
from dlrm_fused.ops.common.workspace import ReceiveWindow
from dlrm_fused.ops.embedding_all_to_all.distinct import DistinctRows
from dlrm_fused.ops.embedding_all_to_all.gradient import send_gradient
from dlrm_fused.ops.embedding_all_to_all.inputs import check_pooled, checks_of_call
from dlrm_fused.ops.embedding_all_to_all.plan import BatchPlan
from dlrm_fused.ops.embedding_all_to_all.reduce import finish_output, open_output
from dlrm_fused.ops.embedding_all_to_all.scatter import scatter_tiles
from dlrm_fused.ops.embedding_all_to_all.slices import PooledSlices, copy_tile, packed_rows, packed_slices
from dlrm_fused.ops.embedding_all_to_all.workspace import EmbeddingWorkspace
from dlrm_fused.symmetric.device import uses_kernels


def pooled_all_to_all(
    workspace: EmbeddingWorkspace,
    pooled: Sequence[Tensor],
    batch_sizes: Sequence[int],
    distinct: DistinctRows | None = None,
    gradient_scale: float | None = None,
) -> Tensor:
    """Exchange pooled embeddings; differentiable. Collective.

    Args:
        pooled: one tensor [sum(batch_sizes), width of the lookup] of the workspace's output dtype for each lookup of this
            rank, bags of rank 0 first.
        batch_sizes: bags of each rank; equal on all ranks.
        distinct: which results are equal, so that they need to go to another host once; given by all ranks or by none. For
            layouts that have a ``row_dim``.
        gradient_scale: factor of the gradients of ``pooled``; default: the workspace's.

    Returns:
        The same dtype [batch_sizes[rank], layout.columns], the caller's as long as a tensor uses it. It lies in symmetric
        memory, unless it was received in another dtype, or more than ``held_outputs`` outputs are alive.

    Raises:
        UsageError: for other shapes or dtypes; the other ranks raise too, with the name of this one.
        CommunicationError: if a peer is lost, or was waited for too long.
    """
    rows = (None,) * len(DistinctRows._fields) if distinct is None else distinct
    inputs = list(batch_sizes), workspace.handle, *rows, gradient_scale
    if needs_dispatcher():
        return torch.ops.dlrm_fused.pooled_all_to_all(workspace.anchor, list(pooled), *inputs)
    return _PooledAllToAll.apply(workspace.anchor, inputs, *pooled)


class _Options(NamedTuple):
    """The arguments of both operators that may be left out: the fields of DistinctRows, and the scale."""

    sent: Tensor | None = None
    received: Tensor | None = None
    sent_counts: list[int] | None = None
    received_counts: list[int] | None = None
    gradient_scale: float | None = None

    @property
    def distinct(self) -> DistinctRows | None:
        """The distinct rows, if they are given."""
        return None if self.sent is None else DistinctRows(*self[: len(DistinctRows._fields)])  # type: ignore[arg-type]


_OPTIONS = (
    "Tensor? sent=None, Tensor? received=None, int[]? sent_counts=None, int[]? received_counts=None, float? gradient_scale=None"
)
torch.library.define(
    "dlrm_fused::pooled_all_to_all",
    f"(Tensor anchor, Tensor[] pooled, int[] batch_sizes, int handle, {_OPTIONS}) -> Tensor",
)
torch.library.define(
    "dlrm_fused::pooled_all_to_all_backward",
    f"(Tensor gradient, int[] batch_sizes, int handle, {_OPTIONS}) -> Tensor[]",
)


def _exchange(anchor: Tensor, pooled: list[Tensor], batch_sizes: list[int], handle: int, *options: Any) -> Tensor:
    workspace = EmbeddingWorkspace.of(handle)
    workspace.forward_channel.begin_call()
    with checks_of_call(workspace, batch_sizes):
        plan = workspace.plan(batch_sizes)
        check_pooled(workspace, plan, pooled)
    output, receive_offset = open_output(workspace, plan)
    send_in_host = _send_by_kernel if uses_kernels(workspace.device) else _send_by_host
    if plan.hosts.are_many:
        distinct = _Options(*options).distinct
        if distinct is None:
            slices = PooledSlices(workspace, plan, packed_slices(workspace, plan, pooled))
        else:
            slices = PooledSlices(workspace, plan, packed_rows(workspace, plan, pooled, distinct), distinct)
        send_in_host(workspace, plan, pooled, receive_offset)
        slices.send_sums()
        slices.receive(receive_offset)
    else:
        send_in_host(workspace, plan, pooled, receive_offset)
    return finish_output(workspace, plan, output, are_empty_bags_sent=True)


def _send_by_host(workspace: EmbeddingWorkspace, plan: BatchPlan, pooled: list[Tensor], receive_offset: int) -> None:

    def store(peer: int, offset: int) -> None:
        for number, tiles in enumerate(plan.places.pooled_tiles):
            memory, base = workspace.destination_memory(plan, number), 0 if plan.places.goes_to_staging(number) else offset
            for tile in tiles:
                if tile.peer == peer:
                    copy_tile(pooled[number], tile, memory, base, workspace.forward_wire)

    workspace.forward_channel.run_epoch(store, offset=receive_offset, fingerprint=plan.fingerprint)


def _send_by_kernel(workspace: EmbeddingWorkspace, plan: BatchPlan, pooled: list[Tensor], receive_offset: int) -> None:
    wire, last = workspace.forward_wire, len(pooled) - 1
    for number, source in enumerate(pooled):
        window = ReceiveWindow(
            workspace.destination_memory(plan, number), workspace.forward_channel, receive_offset, plan.fingerprint
        )
        scatter_tiles(
            source, plan.pooled_tables[number], max(plan.batch_sizes), window, wire=wire,
            relative=not plan.places.goes_to_staging(number), first=number == 0, last=number == last,
        )  # fmt: skip
    if not pooled:
        meet(workspace.forward_channel, plan.fingerprint, receive_offset)


def _return_gradients(gradient: Tensor, batch_sizes: list[int], handle: int, *options: Any) -> list[Tensor]:
    workspace, given = EmbeddingWorkspace.of(handle), _Options(*options)
    received = send_gradient(workspace, workspace.plan(batch_sizes), gradient, given.distinct)
    # A division, as TorchRec's, so that the bits are the same for three ranks too.
    divisor = 1 / (workspace.gradient_scale if given.gradient_scale is None else given.gradient_scale)
    return [view.to(workspace.output_dtype, copy=True).div_(divisor) for view in received]


torch.library.impl("dlrm_fused::pooled_all_to_all", ["cpu", "cuda"], _exchange)
torch.library.impl("dlrm_fused::pooled_all_to_all_backward", ["cpu", "cuda"], _return_gradients)


@torch.library.register_fake("dlrm_fused::pooled_all_to_all")
def _fake_forward(anchor: Tensor, pooled: list[Tensor], batch_sizes: list[int], handle: int, *_: Any) -> Tensor:
    workspace = EmbeddingWorkspace.of(handle)
    return anchor.new_empty((batch_sizes[workspace.rank], workspace.layout.columns), dtype=workspace.output_dtype)


@torch.library.register_fake("dlrm_fused::pooled_all_to_all_backward")
def _fake_backward(gradient: Tensor, batch_sizes: list[int], handle: int, *_: Any) -> list[Tensor]:
    return [gradient.new_empty((sum(batch_sizes), lookup.width)) for lookup in EmbeddingWorkspace.of(handle).own_lookups]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ctx.batch_sizes, ctx.handle, *options = inputs
    given = _Options(*options)
    ctx.rest = given[2:]
    ctx.save_for_backward(given.sent, given.received)


@differentiable_once
def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    gradients = _gradients(ctx, gradient, torch.ops.dlrm_fused.pooled_all_to_all_backward)
    # PyTorch leaves out arguments at the end that have their default, and wants no gradients of them.
    *counts, scale = ctx.rest
    left_out = 0 if scale is not None else 1 if counts[0] is not None else len(_Options._fields)
    return None, gradients, None, None, *[None] * (len(_Options._fields) - left_out)


def _gradients(ctx: Any, gradient: Tensor, backward: Callable[..., list[Tensor]]) -> list[Tensor]:
    return backward(gradient, ctx.batch_sizes, ctx.handle, *ctx.saved_tensors, *ctx.rest)


torch.library.register_autograd("dlrm_fused::pooled_all_to_all", _differentiate, setup_context=_save_for_backward)


class _PooledAllToAll(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, whose way through Python takes as long as a message.

    Arguments: the anchor, the operator's other inputs, and the pooled embeddings.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inputs: tuple[Any, ...], *pooled: Tensor) -> Tensor:
        output = _exchange(anchor, list(pooled), *inputs)
        _save_for_backward(ctx, (anchor, list(pooled), *inputs), output)
        return output

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_dispatcher = needs_dispatcher((gradient,))  # compiled autograd would trace what it runs
        backward = torch.ops.dlrm_fused.pooled_all_to_all_backward if by_dispatcher else _return_gradients
        return None, None, *_gradients(ctx, gradient, backward)
