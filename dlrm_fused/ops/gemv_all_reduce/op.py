"""A product whose inner dimension is cut over ranks, and the sum over ranks, as one operator.

``torch.ops.dlrm_fused.gemv_all_reduce(x, weight, bias, residual, norm_weight, norm_eps, workspace)``: every rank has some
columns of x and weight, and gets the sum over ranks of x times weight transposed, plus bias and residual, and if wanted the
RMSNorm of that. This is the row-parallel layer of tensor parallelism (Shoeybi et al., *Megatron-LM*, arXiv 1909.08053) with
what follows it in a pre-norm Transformer.

How it runs:

* up to 64 rows on GPUs: one kernel (:mod:`~dlrm_fused.ops.gemv_all_reduce.kernel`), as in Punniyamurthy et al., arXiv
  2305.06942;
* more rows on GPUs: cuBLAS by chunks of rows, the sum of each beside the product of the next
  (:mod:`~dlrm_fused.ops.gemv_all_reduce.chunks`);
* on the CPU: torch's product, and a sum through shared memory.

The order of addition is that of ranks, everywhere: all ranks get the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.workspace import Workspace, check_counts, check_dtype, fingerprint_of
from dlrm_fused.ops.gemv_all_reduce.chunks import ChunkedSum
from dlrm_fused.ops.gemv_all_reduce.kernel import gemv_all_reduce_kernel, polls_per_second
from dlrm_fused.ops.gemv_all_reduce.tuning import MAX_ROWS, MIN_COLUMNS, SPLIT_SLOTS, Blocks, choose_blocks
from dlrm_fused.symmetric import SymmetricGroup, abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels


def gemv_all_reduce(
    workspace: GemvWorkspace,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor | None]:
    """The sum over ranks of ``x @ weight.T``, + bias + residual, and its RMSNorm. Collective; differentiable.

    The gradients of the results must be equal on all ranks, as they are where all ranks go on to compute the same; those of x
    and weight are of this rank's part.

    Args:
        x: [m, K / ranks], m at most ``workspace.max_rows``; rows contiguous. In the workspace's dtype, as all tensors here.
        weight: [N, K / ranks], N at most ``workspace.max_columns``; rows contiguous.
        bias: [N]; equal on all ranks, as what follows.
        residual: [m, N], contiguous.
        norm_weight: [N], or None for no norm.
        norm_eps: added to the mean of squares.

    Returns:
        [m, N] in the workspace's dtype, the same bits on all ranks, rounded once from fp32; and of the same shape its RMSNorm
        (Zhang and Sennrich, arXiv 1910.07467) times ``norm_weight``, or None.

    Raises:
        UsageError: for other shapes, dtypes or devices; the other ranks raise CommunicationError, with the name of this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On GPUs, where kernels run
            behind the host, from a later call or ``workspace.raise_fault()``.
    """
    out, normed = torch.ops.dlrm_fused.gemv_all_reduce(x, weight, bias, residual, norm_weight, norm_eps, workspace.handle)
    return out, None if norm_weight is None else normed


def reference(
    process_group: dist.ProcessGroup | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor | None]:
    """The same in plain torch and torch.distributed: what ``comm=baseline`` runs. Without a process group there is one rank.

    The product is rounded to the dtype of x on every rank before it is summed.
    """
    out = torch.nn.functional.linear(x, weight)
    if process_group is not None and process_group.size() > 1:
        out = _AllReduce.apply(out, process_group)
    if bias is not None:
        out = out + bias
    if residual is not None:
        out = out + residual
    normed = None
    if norm_weight is not None:
        normed = torch.nn.functional.rms_norm(out, (out.shape[-1],), norm_weight, norm_eps)
    return out, normed


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        # In place: nobody else sees the product.
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=process_group)
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class GemvWorkspace(Workspace):
    """The symmetric memory through which partial results are summed. Making one is collective; calls may share it."""

    def __init__(
        self,
        group: SymmetricGroup,
        *,
        name: str,
        max_columns: int,
        dtype: torch.dtype,
        max_rows: int = MAX_ROWS,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Collective.

        Args:
            group: the ranks that take part.
            name: for messages; equal on all ranks, and not used by another workspace of the group.
            max_columns: the largest N.
            dtype: float32, bfloat16 or float16.
            max_rows: the largest m. The memory for it is allocated here: for up to 64 rows on GPUs about
                1.5 kB * (ranks + 3) * max_columns, for more of them three times the result besides.
            timeout_seconds: how long a rank waits for another.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """

        def check() -> dict[str, object]:
            check_dtype(name, dtype)
            check_counts(name, max_columns=max_columns, max_rows=max_rows)
            return {"name": name, "max_columns": max_columns, "dtype": dtype, "max_rows": max_rows}

        super().__init__(group, name, check, timeout_seconds=timeout_seconds)
        self.max_columns, self.max_rows, self.dtype = max_columns, max_rows, dtype
        ranks, few = group.world_size, min(max_rows, MAX_ROWS)
        if uses_kernels(group.device):
            # Slots of words for each rank and for finished sums, the same for values of at most half a word, flags of the
            # narrowest tiles, slots for splits, and handshake.
            self.slot_words = few * max_columns
            self.flags_at = (ranks + 1) * (self.slot_words + triton.cdiv(self.slot_words, 2))
            self.splits_at = self.flags_at + (ranks + 1) * triton.cdiv(max_columns, MIN_COLUMNS)
            self.half_words = self.splits_at + SPLIT_SLOTS * self.slot_words + ranks
            self.receive_buffer = group.allocate(f"{name}.receive_buffer", 2 * self.half_words * 8)
            poll_limit = math.ceil(timeout_seconds * _polls_per_second(group.device))
            self.kernel_args = self.channel.args._replace(poll_limit=poll_limit)
            self.squares = torch.empty(MAX_ROWS * max_columns, dtype=torch.float32, device=group.device)
            self.chunks = ChunkedSum(group, self.channel, name, max_rows * max_columns, dtype) if max_rows > MAX_ROWS else None
        else:
            self.half_words = max_rows * max_columns
            self.receive_buffer = group.allocate(f"{name}.receive_buffer", 2 * self.half_words * 4)


@functools.cache
def _polls_per_second(device: torch.device) -> float:
    return polls_per_second(device)


torch.library.define(
    "dlrm_fused::gemv_all_reduce",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? norm_weight, float norm_eps, int handle) "
    "-> (Tensor, Tensor)",
)


@torch.library.impl("dlrm_fused::gemv_all_reduce", ["cpu", "cuda"])
def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    handle: int,
) -> tuple[Tensor, Tensor]:
    workspace = GemvWorkspace.of(handle)
    workspace.raise_fault()
    with abort_peers_on_error(workspace.channel):
        _check_inputs(workspace, x, weight, {"bias": bias, "norm_weight": norm_weight}, residual)
    fingerprint = _fingerprint(x, weight, (bias, residual, norm_weight), norm_eps)
    if not uses_kernels(workspace.group.device):
        out = _sum_by_host(workspace, x, weight, bias, residual, fingerprint)
    elif x.shape[0] <= MAX_ROWS:
        return _run_kernel(workspace, x, weight, bias, residual, norm_weight, norm_eps)
    else:
        assert workspace.chunks is not None
        out = workspace.chunks.product(x, weight, bias, residual, fingerprint)
    if norm_weight is None:
        return out, out.new_empty(0)
    return out, torch.nn.functional.rms_norm(out, (out.shape[1],), norm_weight, norm_eps)


def _check_inputs(
    workspace: GemvWorkspace, x: Tensor, weight: Tensor, vectors: dict[str, Tensor | None], residual: Tensor | None
) -> None:
    for key, matrix in (("x", x), ("weight", weight)):
        if matrix.dim() != 2 or 0 in matrix.shape or matrix.stride(1) != 1:
            raise UsageError(
                f"{workspace.name}: {key} has shape {list(matrix.shape)}, strides {matrix.stride()}; needed: 2-D, not empty, "
                "rows contiguous"
            )
    (rows, depth), columns = x.shape, weight.shape[0]
    if weight.shape[1] != depth:
        raise UsageError(f"{workspace.name}: x is [m, {depth}], weight [N, {weight.shape[1]}]; their K must be equal")
    for key, value, limit in (("max_rows", rows, workspace.max_rows), ("max_columns", columns, workspace.max_columns)):
        if value > limit:
            what = "m" if key == "max_rows" else "N"
            raise UsageError(f"{workspace.name}: {what}={value} is above {key}={limit} of the workspace; make it with more")
    tensors = {"x": x, "weight": weight, **vectors, "residual": residual}
    expected = {**{key: [columns] for key in vectors}, "residual": [rows, columns]}
    for key, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != workspace.dtype or tensor.device != workspace.group.device:
            raise UsageError(
                f"{workspace.name}: {key} is {tensor.dtype} on {tensor.device}; needed: {workspace.dtype} on "
                f"{workspace.group.device}"
            )
        if key in expected and (list(tensor.shape) != expected[key] or not tensor.is_contiguous()):
            raise UsageError(
                f"{workspace.name}: {key} has shape {list(tensor.shape)}, strides {tensor.stride()}; needed: {expected[key]}, "
                "contiguous"
            )


def _fingerprint(
    x: Tensor, weight: Tensor, optional: Sequence[Tensor | None], norm_eps: float, blocks: Blocks | None = None
) -> int:
    """What must be equal on all ranks, as 31 bits."""
    given = [tensor is not None for tensor in optional]
    return fingerprint_of(tuple(x.shape), tuple(weight.shape), x.dtype, given, norm_eps, blocks)


def _run_kernel(
    workspace: GemvWorkspace,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    (rows, depth), columns, ranks = x.shape, weight.shape[0], workspace.group.world_size
    has_norm = norm_weight is not None
    blocks = choose_blocks(rows, columns, depth, ranks, x.element_size(), with_norm=has_norm)
    blocks = replace(blocks, splits=min(blocks.splits, 1 + SPLIT_SLOTS * workspace.slot_words // (rows * columns)))
    tiles = triton.cdiv(columns, blocks.columns)
    parts_at, slot_words = 0, workspace.slot_words
    if blocks.flagged:
        parts_at, slot_words = (ranks + 1) * slot_words, triton.cdiv(slot_words, 2)
    out = x.new_empty(rows, columns)
    normed = torch.empty_like(out) if has_norm else out.new_empty(0)
    gemv_all_reduce_kernel[(tiles * blocks.splits,)](
        x,
        weight,
        out if bias is None else bias,
        out if residual is None else residual,
        norm_weight if has_norm else out,
        out,
        normed,
        workspace.squares,
        workspace.receive_buffer.local.view(torch.int64),
        workspace.receive_buffer.addresses,
        workspace.kernel_args,
        _fingerprint(x, weight, (bias, residual, norm_weight), norm_eps, blocks),
        workspace.half_words,
        parts_at,
        parts_at + ranks * slot_words,
        workspace.flags_at,
        workspace.splits_at,
        rows,
        columns,
        depth,
        x.stride(0),
        weight.stride(0),
        norm_eps,
        ROWS=max(16, triton.next_power_of_2(rows)),
        COLUMNS=blocks.columns,
        DEPTH=blocks.depth,
        SPLITS=blocks.splits,
        TILES=triton.next_power_of_2(tiles) if has_norm else 1,
        EVEN=depth % (blocks.depth * blocks.splits) == 0,
        TWO_SHOT=blocks.two_shot,
        FLAGGED=blocks.flagged,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=has_norm,
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return out, normed


def _sum_by_host(
    workspace: GemvWorkspace, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, fingerprint: int
) -> Tensor:
    """The sum through memory that CPU processes share: every rank writes its part and reads all."""
    channel, group = workspace.channel, workspace.group
    partial = torch.nn.functional.linear(x.float(), weight.float())
    # Two halves in turn: who writes one again has seen everybody begin the epoch after, done with reading it.
    first = int(channel.state[0]) % 2 * workspace.half_words
    parts = [
        workspace.receive_buffer.peer(rank).view(torch.float32)[first : first + partial.numel()].view_as(partial)
        for rank in range(group.world_size)
    ]
    parts[group.rank].copy_(partial)
    channel.run_epoch(lambda *_: None, fingerprint=fingerprint)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    if bias is not None:
        total += bias.float()
    if residual is not None:
        total += residual.float()
    return total.to(x.dtype)


@torch.library.register_fake("dlrm_fused::gemv_all_reduce")
def _fake_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    handle: int,
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    return out, torch.empty_like(out) if norm_weight is not None else x.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, residual, norm_weight, ctx.norm_eps, _ = inputs
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.save_for_backward(x, weight, norm_weight, None if norm_weight is None else output[0])


def _differentiate(ctx: Any, out_gradient: Tensor, normed_gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, norm_weight, out = ctx.saved_tensors
    gradient, norm_weight_gradient = out_gradient, None
    if norm_weight is not None:
        through_norm, norm_weight_gradient = _differentiate_norm(out, norm_weight, normed_gradient, ctx.norm_eps)
        gradient = gradient + through_norm
    return (
        gradient @ weight,
        gradient.T @ x,
        gradient.sum(0) if ctx.has_bias else None,
        gradient if ctx.has_residual else None,
        norm_weight_gradient,
        None,
        None,
    )


def _differentiate_norm(out: Tensor, norm_weight: Tensor, gradient: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm's input and weight, in fp32 inside."""
    value, scaled = out.float(), gradient.float() * norm_weight.float()
    rate = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    unit = value * rate
    through = rate * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return through.to(out.dtype), (gradient.float() * unit).sum(0).to(norm_weight.dtype)


torch.library.register_autograd("dlrm_fused::gemv_all_reduce", _differentiate, setup_context=_save_for_backward)
