"""GEMV + AllReduce as an operator of PyTorch, ``torch.ops.dlrm_fused.gemv_all_reduce``, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.devices import launch_options, starts_early
from dlrm_fused.ops.common.dispatch import Operator
from dlrm_fused.ops.common.products import product_in_fp32
from dlrm_fused.ops.common.workspace import check_tensor
from dlrm_fused.ops.gemv_all_reduce.between_hosts import SumsByNccl, sum_by_hosts
from dlrm_fused.ops.gemv_all_reduce.chunks import ChunkedSums, ScatteredSums
from dlrm_fused.ops.gemv_all_reduce.copies import CopiedSums
from dlrm_fused.ops.gemv_all_reduce.kernel import BlockArgs, Epilogue, gemv_all_reduce_kernel
from dlrm_fused.ops.gemv_all_reduce.schedule import (
    AUTO,
    CHUNKS,
    COPIES,
    PRODUCT,
    SCATTER,
    check_schedule,
    choose_schedule,
)
from dlrm_fused.ops.gemv_all_reduce.tuning import (
    MAX_ROWS,
    choose_blocks,
    choose_blocks_of_sum,
    fitted,
    overriding_blocks,
)
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace, Inputs
from dlrm_fused.symmetric import abort_peers_on_error
from dlrm_fused.symmetric.launches import aligned, ceil_div, layout_of, next_power_of_2


def gemv_all_reduce(
    workspace: GemvWorkspace,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    *,
    schedule: str = AUTO,
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
        schedule: ``kernel``, or of 16 bits ``product``, for up to 64 rows on GPUs; ``chunks``, ``scatter`` or ``copies``, for
            more; or ``auto``, which takes the fastest of them: from a table, or measured here by the first call with a shape.
            In a CUDA graph it may take another than without: all ranks capture a call, or none. Without a GPU all are one,
            and between hosts, where NCCL adds up the library's products.

    Returns:
        [m, N] in the workspace's dtype, the same bits on all ranks; and of the same shape its RMSNorm (Zhang and Sennrich,
        arXiv 1910.07467) times ``norm_weight``, or None. ``kernel`` and ``product`` round once, from fp32; the
        others, the products of the ranks too; and NCCL, between hosts, bias + residual and each of its sums.

    Raises:
        UsageError: for other shapes, dtypes or devices; the other ranks raise CommunicationError, with the name of this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On GPUs, where kernels run
            behind the host, from a later call or ``workspace.raise_fault()``.
    """
    out, normed = _operator(x, weight, bias, residual, norm_weight, float(norm_eps), workspace.handle, schedule)
    if norm_weight is None:
        return out, None
    if not _norm_is_part(workspace, x):
        normed = torch.nn.functional.rms_norm(out, out.shape[-1:], norm_weight, norm_eps)
    return out, normed


def _norm_is_part(workspace: GemvWorkspace, x: Tensor) -> bool:
    """Whether the norm is the operator's, as in its kernel, or follows as torch's own, whose backward pass is one kernel."""
    return workspace.sums_by_kernel and x.shape[0] <= MAX_ROWS


torch.library.define(
    "dlrm_fused::gemv_all_reduce",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? norm_weight, float norm_eps, int handle, "
    f'str schedule="{AUTO}") -> (Tensor, Tensor)',
)


# Calls of one layout. The workspace keeps them, so they do not keep the workspace.
Call = Callable[[GemvWorkspace, Inputs], tuple[Tensor, Tensor]]


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    handle: int,
    schedule: str = AUTO,
) -> tuple[Tensor, Tensor]:
    workspace = GemvWorkspace.of(handle)
    workspace.begin_call()
    # A new layout may take one call more, of all ranks: addresses, which may differ between them, are no part of it.
    tensors: list[Any] = [x, weight, bias, residual, norm_weight]  # checks refuse what is none
    x, weight, bias, residual, norm_weight = (aligned(each) if isinstance(each, Tensor) else each for each in tensors)
    inputs = Inputs(x, weight, bias, residual, norm_weight, norm_eps)
    # Whatever follows from shapes is found once.
    layout = layout_of(x, weight, bias, residual, norm_weight), norm_eps, schedule, overriding_blocks()
    call: Call | None = workspace.calls.get(layout)
    if call is None:
        with abort_peers_on_error(workspace.channel):
            _check_inputs(workspace, inputs)
            check_schedule(workspace, schedule, x, weight)
        has_choice = schedule == AUTO and workspace.sums_by_kernel
        call = AutoCall() if has_choice else _call_of(schedule, workspace, inputs)
        workspace.calls[layout] = call
    return call(workspace, inputs)


class AutoCall:
    """Calls of one layout, each by the schedule that ``auto`` takes."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}

    def __call__(self, workspace: GemvWorkspace, inputs: Inputs) -> tuple[Tensor, Tensor]:
        def run(schedule: str) -> tuple[Tensor, Tensor]:
            if schedule not in self._calls:
                self._calls[schedule] = _call_of(schedule, workspace, inputs)
            return self._calls[schedule](workspace, inputs)

        schedule = choose_schedule(workspace, inputs.shape, run)
        choice = None if self._calls else workspace.schedules.measured_here.get(inputs.shape)
        if choice and choice.captured != schedule:
            run(choice.captured)  # measured with another layout: kernels shall not be compiled in a capture
        return run(schedule)


_SUMS: dict[str, Callable[..., Callable[[GemvWorkspace, Inputs], Tensor]]] = {
    CHUNKS: ChunkedSums,
    SCATTER: ScatteredSums,
    COPIES: CopiedSums,
}


def _call_of(schedule: str, workspace: GemvWorkspace, inputs: Inputs) -> Call:
    """Return what makes calls of the layout of these inputs: the sum, and its norm where the operator has it, else empty."""
    if workspace.sums_by_kernel and len(inputs.x) <= MAX_ROWS:
        return KernelCall(workspace, inputs, is_given=schedule == PRODUCT)
    if workspace.sums_by_kernel:
        sums = _SUMS[schedule](workspace, inputs, inputs.fingerprint(schedule))
    else:
        sums = SumsByNccl(inputs) if workspace.channel.is_by_nccl else sum_by_hosts
    return lambda workspace, inputs: _without_norm(sums(workspace, inputs))


def _check_inputs(workspace: GemvWorkspace, inputs: Inputs) -> None:
    x, weight, name = inputs.x, inputs.weight, workspace.name
    for key, matrix in (("x", x), ("weight", weight)):
        if matrix.dim() != 2 or 0 in matrix.shape or matrix.stride(1) != 1:
            raise UsageError(
                f"{name}: {key} has shape {list(matrix.shape)}, strides {matrix.stride()}; needed: 2-D, not empty, "
                "rows contiguous"
            )
    (rows, depth), columns = x.shape, weight.shape[0]
    if weight.shape[1] != depth:
        raise UsageError(f"{name}: x is [m, {depth}], weight [N, {weight.shape[1]}]; their K must be equal")
    workspace.check_size(("m", rows), ("N", columns))
    # Rows of x and weight may lie apart.
    check_tensor(workspace, "x", x[:0], workspace.dtype, [0, depth])
    check_tensor(workspace, "weight", weight[:0], workspace.dtype, [0, depth])
    for key, shape in {"bias": [columns], "norm_weight": [columns], "residual": [rows, columns]}.items():
        if (tensor := getattr(inputs, key)) is not None:
            check_tensor(workspace, key, tensor, workspace.dtype, shape)


class KernelCall:
    """Calls of one layout by the kernel for up to 64 rows, without checks: the sum, and its norm, or empty without one.

    Args:
        is_given: whether the product is the library's, in fp32, and the kernel only adds it up over the ranks.
    """

    def __init__(self, workspace: GemvWorkspace, inputs: Inputs, *, is_given: bool = False) -> None:
        x, weight, bias, residual, norm_weight, norm_eps = inputs
        (rows, columns, depth), has_norm, gpu = inputs.shape, norm_weight is not None, workspace.gpu
        ranks, self._is_given = workspace.world_size, is_given
        if is_given:
            blocks = choose_blocks_of_sum(rows, columns, ranks, gpu, with_norm=has_norm)
        else:
            blocks = choose_blocks(rows, columns, depth, ranks, x.element_size(), gpu, with_norm=has_norm)
            blocks = fitted(blocks, rows, x.element_size(), gpu.shared_memory)
        tiles = ceil_div(columns, blocks.columns)
        self._programs = tiles * blocks.splits
        early = starts_early(x.device, self._programs)
        self._shared = (
            workspace.buffer_args(flagged=blocks.flagged), workspace.split_buffer, workspace.kernel_args,
            inputs.fingerprint(blocks), rows, columns, depth, columns if is_given else x.stride(0), weight.stride(0), norm_eps,
        )  # fmt: skip
        self._layout = "gemv", blocks, layout_of(x, weight, bias, residual, norm_weight)
        self._constants = {
            "BLOCKS": BlockArgs.of(blocks, rows, depth),
            "TILES": next_power_of_2(tiles) if has_norm else 1,
            "HAS_BIAS": bias is not None,
            "HAS_RESIDUAL": residual is not None,
            "HAS_NORM": has_norm,
            "STARTS_EARLY": early,
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
            **launch_options(early),
        }

    def __call__(self, workspace: GemvWorkspace, inputs: Inputs) -> tuple[Tensor, Tensor]:
        x, weight, bias, residual, norm_weight, _ = inputs
        out = x.new_empty(len(x), len(weight))
        normed = out.new_empty(0) if norm_weight is None else torch.empty_like(out)
        bias, residual, norm_weight = (out if tensor is None else tensor for tensor in (bias, residual, norm_weight))
        epilogue = Epilogue(bias, residual, norm_weight, normed, workspace.squares)
        workspace.channel.launches(
            self._layout, gemv_all_reduce_kernel, (self._programs,),
            product_in_fp32(x, weight) if self._is_given else x, weight, epilogue, out, *self._shared, **self._constants,
        )  # fmt: skip
        return out, normed


def _without_norm(out: Tensor) -> tuple[Tensor, Tensor]:
    return out, out.new_empty(0)


@torch.library.register_fake("dlrm_fused::gemv_all_reduce")
def _fake_forward(
    x: Tensor, weight: Tensor, bias: Any, residual: Any, norm_weight: Any, norm_eps: Any, handle: int, schedule: str = AUTO
) -> tuple[Tensor, Tensor]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    has_norm = norm_weight is not None and _norm_is_part(GemvWorkspace.of(handle), x)
    return out, torch.empty_like(out) if has_norm else x.new_empty(0)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, residual, norm_weight, ctx.norm_eps, handle, *_ = inputs
    if not _norm_is_part(GemvWorkspace.of(handle), x):
        norm_weight = None
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
        None,
    )


def _differentiate_norm(out: Tensor, norm_weight: Tensor, gradient: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm's input and weight, in fp32 inside."""
    value, scaled = out.float(), gradient.float() * norm_weight.float()
    rate = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    unit = value * rate
    through = rate * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return through.to(out.dtype), (gradient.float() * unit).sum(0).to(norm_weight.dtype)


_operator = Operator("dlrm_fused::gemv_all_reduce", _forward, _differentiate, _save_for_backward)
