"""The expert layer as an operator of PyTorch, ``torch.ops.dlrm_fused.expert_layer``, with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.dispatch import (
    differentiable_once,
    expect_no_gradient,
    needs_dispatcher,
    needs_node,
    without_autocast,
)
from dlrm_fused.ops.common.scatter_rows import scatter_rows
from dlrm_fused.ops.common.workspace import ReceiveWindow, check_tensor, fingerprint_of
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups
from dlrm_fused.ops.moe.between_hosts import Crossings
from dlrm_fused.ops.moe.dispatch import route
from dlrm_fused.ops.moe.workspace import ExpertWorkspace, check_row
from dlrm_fused.symmetric import abort_peers_on_error
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.launches import aligned, layout_of


def expert_layer(
    workspace: ExpertWorkspace,
    x: Tensor,
    experts: Tensor,
    gates: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    gradient_scale: float = 1.0,
) -> Tensor:
    """``out[t] = sum over j of gates[t, j] * (silu(x[t] @ w_in[e].T) @ w_out[e].T)``, e = experts[t, j]. Collective.

    With ``activation="swiglu"`` of the workspace, ``silu(x[t] @ gate.T) * (x[t] @ up.T)`` in place of the silu, w_in[e] being
    gate and up one above the other.

    Differentiable in x, gates, w_in and w_out. The backward pass is collective too: all ranks must run it, in the same order
    as other calls of this workspace, also a rank without tokens, whose result is empty.

    Args:
        x: [T, d] in the workspace's dtype, contiguous. T may differ between ranks; at most ``max_tokens``, and may be 0.
        experts: int64 [T, k]: ids from 0 to experts - 1, distinct in a row, or -1: none. On GPUs, where to look would be to
            wait for the device, other ids count as none, and so do repeated ones.
        gates: fp32 [T, k].
        w_in: [experts / ranks, f, d], those of this rank; contiguous, as ``w_out``. With SwiGLU [experts / ranks, 2 * f, d]. In
            the workspace's dtype, or both in float32: then they are rounded to it here, and their gradients are in float32,
            with the same values as those of the rounded weights.
        w_out: [experts / ranks, d, f].
        gradient_scale: factor of the gradients of w_in and w_out, which are sums over the tokens of all ranks.

    Returns:
        [T, d] in the workspace's dtype: added in fp32 in the order of j, and rounded. Zeros for a token without experts.
        Between hosts this is so for each host's experts, and their sums are added likewise; so are the gradients of x.

    Raises:
        UsageError: for other shapes, dtypes or devices; the other ranks raise CommunicationError, with the name of this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On GPUs, where kernels run
            behind the host, from a later call or ``workspace.raise_fault()``.
    """
    return expert_layer_with_slots(workspace, x, experts, gates, w_in, w_out, gradient_scale)[0]


def expert_layer_with_slots(
    workspace: ExpertWorkspace,
    x: Tensor,
    experts: Tensor,
    gates: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    gradient_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """:func:`expert_layer`, and int64 [experts]: how many tokens of all ranks have each expert, which every rank is told."""
    inputs = x, experts, gates, w_in, w_out, gradient_scale, workspace.handle
    tensors = x, experts, gates, w_in, w_out
    if needs_dispatcher(tensors):
        out, slots, *_ = torch.ops.dlrm_fused.expert_layer(*inputs)
    elif needs_node(tensors):
        out, slots = _ExpertLayer.apply(*inputs)
    else:
        out, slots, *_ = _forward(*inputs)
    return out, slots


# Beside the result and the slots of all ranks, what the backward pass needs: received rows with their destinations, the hidden
# layer before and after its activation, the experts' results by slot, the routes, the order of tiles, the crossings between
# hosts, and both weights if they were rounded; empty tensors if not.
torch.library.define(
    "dlrm_fused::expert_layer",
    "(Tensor x, Tensor experts, Tensor gates, Tensor w_in, Tensor w_out, float gradient_scale, int handle) "
    f"-> ({', '.join(['Tensor'] * 15)})",
)
torch.library.define(
    "dlrm_fused::expert_layer_backward",
    "(Tensor gradient, Tensor gates, Tensor w_in, Tensor w_out, Tensor received, Tensor hidden, Tensor activated, "
    "Tensor combined, Tensor targets, Tensor bounds, Tensor local_from, Tensor order, Tensor crossing_places, "
    "Tensor crossing_counts, Tensor crossing_gates, ScalarType weights_dtype, float gradient_scale, int handle) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


@without_autocast
def _forward(
    x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, gradient_scale: float, handle: int
) -> tuple[Tensor, ...]:
    workspace = ExpertWorkspace.of(handle)
    workspace.begin_call()
    workspace.check_once(
        layout_of(x, experts, gates, w_in, w_out), lambda: _check_inputs(workspace, x, experts, gates, w_in, w_out)
    )
    if not uses_kernels(workspace.device):
        with abort_peers_on_error(workspace.channel):
            _check_ids(workspace, experts)
    is_rounded = w_in.dtype != workspace.dtype
    x, w_in, w_out = aligned(x), aligned(w_in.to(workspace.dtype)), aligned(w_out.to(workspace.dtype))
    steps = workspace.steps

    boundary, elsewhere = workspace.boundary, None
    if boundary and not boundary.all_cross and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"{workspace.name}: with max_tokens={workspace.max_tokens} a call between hosts cannot be captured: the host asks "
            "how many tokens cross; fewer all cross"
        )
    if boundary:
        x, experts, elsewhere, crossings = boundary.receive_guests(x, experts, gates)
        gates = crossings.gates
    else:
        crossings = Crossings.none(x)
    received = workspace.received.receive((workspace.memory.received_bytes,), torch.uint8)
    rows, destinations = workspace.rows_of(received), workspace.destinations_of(received)
    counting = ReceiveWindow(workspace.counts, workspace.channel, 0, fingerprint_of("routes", w_in.shape, gradient_scale))
    targets, groups, slots = route(
        experts,
        counting,
        count=workspace.experts,
        tile_rows=workspace.memory.tile_rows,
        rows_per_rank=workspace.memory.rows,
        block=(rows, destinations),
        elsewhere=elsewhere,
    )
    scatter_rows(
        x,
        targets,
        workspace.window(workspace.received, received, "tokens"),
        rows_per_rank=workspace.memory.rows,
        repeats=workspace.top_k,
        destinations_at=workspace.memory.destinations_at,
        destinations_per_rank=workspace.memory.slots,
    )
    hidden, activated = steps.hidden(rows, w_in, groups)
    combined = workspace.combined.receive((workspace.memory.combined_bytes,), torch.uint8)
    to_tokens = workspace.to_tokens(received, groups)
    window = workspace.window(workspace.combined, combined, "results")
    steps.combine(activated, w_out, to_tokens, window, transposed=False)
    out = steps.sum_slots(workspace.slots_of(combined), targets, gates, x.shape[0], workspace.top_k)
    if boundary:
        out = boundary.return_sums(out, crossings)
    held = workspace.received.to_hold(received), hidden, activated, workspace.combined.to_hold(combined)
    rounded = (w_in, w_out) if is_rounded else (w_in.new_empty(0), w_out.new_empty(0))
    return out, slots, *held, targets, groups.bounds, groups.local_from, groups.order(workspace.tiles), *crossings, *rounded


@without_autocast
def _backward(gradient: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, *held: Any) -> tuple[Tensor, ...]:
    received, hidden, activated, combined, targets, bounds, local_from, order, *crossing, weights_dtype, scale, handle = held
    workspace = ExpertWorkspace.of(handle)
    workspace.begin_call()
    steps, groups = workspace.steps, Groups(workspace.memory.tile_rows, bounds, local_from, {workspace.tiles: order})
    gradient, w_in, w_out = aligned(gradient.contiguous()), aligned(w_in), aligned(w_out)
    boundary, crossings = workspace.boundary, Crossings(*crossing)
    if boundary:
        gradient, gates = boundary.receive_gradients(gradient, crossings), crossings.gates

    # Rows received here are used up before the next call: spare blocks serve.
    receiving, combining = workspace.received.spare, workspace.combined.spare
    gradient_rows, to_tokens = workspace.rows_of(receiving), workspace.to_tokens(received, groups)
    scatter_rows(
        gradient,
        targets,
        workspace.window(workspace.received, receiving, "gradients of results"),
        rows_per_rank=workspace.memory.rows,
        repeats=workspace.top_k,
        scale=gates.flatten(),
    )
    steps.zero_pads(gradient_rows, to_tokens.destinations, groups)
    hidden_gradient = steps.hidden_gradient(gradient_rows, w_out, hidden, groups)
    window = workspace.window(workspace.combined, combining, "gradients of tokens")
    steps.combine(hidden_gradient, w_in, to_tokens, window, transposed=True)
    x_gradient = steps.sum_slots(workspace.slots_of(combining), targets, None, gradient.shape[0], workspace.top_k)
    gates_gradient = steps.gates_gradient(gradient, workspace.slots_of(combined), targets, workspace.top_k)
    if boundary:
        x_gradient, gates_gradient = boundary.return_gradients(x_gradient, gates_gradient, crossings)
    return (
        x_gradient,
        gates_gradient,
        steps.weight_gradient(hidden_gradient, workspace.rows_of(received), groups, scale, weights_dtype),
        steps.weight_gradient(gradient_rows, activated, groups, scale, weights_dtype),
    )


def _check_inputs(workspace: ExpertWorkspace, x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> None:
    local = workspace.local_experts
    for key, tensor, dims in (("x", x, 2), ("w_in", w_in, 3)):
        if tensor.dim() != dims:
            raise UsageError(f"{workspace.name}: {key} has shape {list(tensor.shape)}; needed: {dims} dimensions")
    tokens, parts = x.shape[0], workspace.activation.parts
    hidden = w_in.shape[1] // parts
    of_weights = torch.float32 if w_in.dtype == torch.float32 else workspace.dtype
    expected = {
        "x": (x, workspace.dtype, [tokens, workspace.width]),
        "experts": (experts, torch.int64, [tokens, workspace.top_k]),
        "gates": (gates, torch.float32, [tokens, workspace.top_k]),
        "w_in": (w_in, of_weights, [local, parts * hidden, workspace.width]),
        "w_out": (w_out, of_weights, [local, workspace.width, hidden]),
    }
    for key, (tensor, dtype, shape) in expected.items():
        check_tensor(workspace, key, tensor, dtype, shape)
    if tokens > workspace.max_tokens:
        raise UsageError(
            f"{workspace.name}: {tokens} tokens are above max_tokens={workspace.max_tokens} of the workspace; make it with more"
        )
    check_row(workspace.name, "hidden width", hidden, workspace.dtype)


def _check_ids(workspace: ExpertWorkspace, experts: Tensor) -> None:
    wrong = (experts < -1) | (experts >= workspace.experts)
    if wrong.any():
        raise UsageError(
            f"{workspace.name}: experts holds {int(experts[wrong][0])}; needed: -1 for none, or 0 to {workspace.experts - 1}"
        )
    in_order = experts.sort(dim=1).values
    repeated = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
    if repeated.any():
        token = int(repeated.any(dim=1).nonzero()[0])
        raise UsageError(f"{workspace.name}: experts[{token}] holds {int(in_order[:, 1:][repeated][0])} twice")


torch.library.impl("dlrm_fused::expert_layer", ["cpu", "cuda"], _forward)
torch.library.impl("dlrm_fused::expert_layer_backward", ["cpu", "cuda"], _backward)


@torch.library.register_fake("dlrm_fused::expert_layer")
def _fake_forward(
    x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, gradient_scale: float, handle: int
) -> tuple[Tensor, ...]:
    workspace = ExpertWorkspace.of(handle)
    memory, local, boundary = workspace.memory, workspace.local_experts, workspace.boundary
    slots = experts.numel() + (boundary.most_guests * workspace.top_k if boundary else 0)
    return (
        torch.empty_like(x),
        experts.new_empty(workspace.experts),
        x.new_empty(memory.received_bytes, dtype=torch.uint8),
        x.new_empty(memory.rows, w_in.shape[1]),
        x.new_empty(memory.rows, w_out.shape[2]),
        x.new_empty(memory.combined_bytes, dtype=torch.uint8),
        experts.new_empty(slots, dtype=torch.int32),
        experts.new_empty(local + 1, dtype=torch.int32),
        experts.new_empty(local, dtype=torch.int32),
        experts.new_empty(2, workspace.tiles, dtype=torch.int32),
        *(boundary.fake_crossings(experts, gates) if boundary else Crossings.none(x)),
        *(x.new_empty(0 if weight.dtype == workspace.dtype else weight.shape) for weight in (w_in, w_out)),
    )


@torch.library.register_fake("dlrm_fused::expert_layer_backward")
def _fake_backward(gradient: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, *held: Any) -> tuple[Tensor, ...]:
    weights_dtype = held[-3]
    of_weights = (torch.empty_like(weight, dtype=weights_dtype) for weight in (w_in, w_out))
    return gradient.new_empty(gradient.shape), gates.new_empty(gates.shape), *of_weights


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, gates, w_in, w_out, ctx.gradient_scale, ctx.handle = inputs
    ctx.mark_non_differentiable(*output[1:])
    expect_no_gradient(ctx, output[0])
    *held, rounded_in, rounded_out = output[2:]
    ctx.weights_dtype, is_rounded = w_in.dtype, rounded_in.numel() > 0
    ctx.save_for_backward(gates, *((rounded_in, rounded_out) if is_rounded else (w_in, w_out)), *held)


@differentiable_once
def _differentiate(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, gradient, torch.ops.dlrm_fused.expert_layer_backward)


def _gradients(ctx: Any, gradient: Tensor | None, backward: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor | None, ...]:
    gradient = ctx.zeros() if gradient is None else gradient
    x_gradient, gates_gradient, *of_weights = backward(
        gradient, *ctx.saved_tensors, ctx.weights_dtype, ctx.gradient_scale, ctx.handle
    )
    return x_gradient, None, gates_gradient, *of_weights, None, None


torch.library.register_autograd("dlrm_fused::expert_layer", _differentiate, setup_context=_save_for_backward)


class _ExpertLayer(torch.autograd.Function):
    """The operator without PyTorch's dispatcher, whose way through Python takes as long as a message. Returns what
    :func:`expert_layer_with_slots` does."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output[0], output[1]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        by_dispatcher = needs_dispatcher()  # compiled autograd would trace what it runs
        return _gradients(ctx, gradient, torch.ops.dlrm_fused.expert_layer_backward if by_dispatcher else _backward)
