"""The experts of a Mixture-of-Experts layer, spread over ranks, as one differentiable operator.

``torch.ops.dlrm_fused.expert_layer(x, experts, gates, w_in, w_out, gradient_scale, workspace)``: every rank has tokens, and
some
of the experts, each a two-layer perceptron with SiLU between its layers. A token goes to k experts, and gets the sum of their
results, each times its gate. Nothing is dropped: memory is for the worst case.

How it runs (Punniyamurthy et al., arXiv 2305.06942, "GEMM + All-to-All"):

1. the ranks tell each other how many tokens they have for each expert (:mod:`~dlrm_fused.ops.moe.dispatch`);
2. every token's row is stored straight into its place at its experts' ranks, grouped by expert
   (:mod:`~dlrm_fused.ops.common.scatter_rows`);
3. all experts' first products with SiLU are one kernel, the second products another, which stores each finished row
   straight into its slot at the token's combined;
4. there the k rows of a token are added, in their order.

The backward pass goes the same ways. Counts never pass through the host of a GPU: every size is that of the worst case, and
kernels read how much of it is used.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.scatter_rows import scatter_rows
from dlrm_fused.ops.common.workspace import Workspace, check_counts, check_dtype, fingerprint_of
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups
from dlrm_fused.ops.moe.dispatch import most_rows, route
from dlrm_fused.ops.moe.steps import ExpertSteps, HostSteps, KernelSteps
from dlrm_fused.symmetric import BlockPool, SymmetricGroup, abort_peers_on_error
from dlrm_fused.symmetric.channel import OFFSET_UNIT
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.memory import readable

logger = logging.getLogger("dlrm_fused")

# Kernels load and store 16 bytes at a time.
_ROW_UNIT = 16
# Calls whose backward pass is still to come that need no copy of what they received.
_HELD_CALLS = 1
# Rows of a tile on GPUs: many for experts that have many.
_TILE_ROWS, _FEW_TILE_ROWS = 128, 64


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

    Differentiable in x, gates, w_in and w_out. The backward pass is collective too: all ranks must run it, in the same order
    as other calls of this workspace, also a rank without tokens, whose result is empty.

    Args:
        x: [T, d] in the workspace's dtype, contiguous. T may differ between ranks; at most ``max_tokens``, and may be 0.
        experts: int64 [T, k]: ids from 0 to experts - 1, distinct in a row, or -1: none. On GPUs, where to look would be to
            wait for the device, other ids count as none, and so do repeated ones.
        gates: fp32 [T, k].
        w_in: [experts / ranks, f, d], those of this rank; contiguous, as ``w_out``.
        w_out: [experts / ranks, d, f].
        gradient_scale: factor of the gradients of w_in and w_out, which are sums over the tokens of all ranks.

    Returns:
        [T, d] in the workspace's dtype: added in fp32 in the order of j, and rounded. Zeros for a token without experts.

    Raises:
        UsageError: for other shapes, dtypes or devices; the other ranks raise CommunicationError, with the name of this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On GPUs, where kernels run
            behind the host, from a later call or ``workspace.raise_fault()``.
    """
    return torch.ops.dlrm_fused.expert_layer(x, experts, gates, w_in, w_out, gradient_scale, workspace.handle)[0]


def reference(
    process_group: dist.ProcessGroup | None,
    x: Tensor,
    experts: Tensor,
    gates: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    gradient_scale: float = 1.0,
) -> Tensor:
    """The same in plain torch and torch.distributed: what ``comm=baseline`` runs. Without a process group there is one rank.

    Counts pass through the host: All-to-All needs them there.
    """
    ranks = 1 if process_group is None else process_group.size()
    (tokens, top_k), local = experts.shape, w_in.shape[0]
    slots = experts.flatten()
    counts = slots.new_zeros(1 + ranks * local).scatter_add_(0, slots + 1, torch.ones_like(slots))
    to_receive = _all_to_all(counts[1:], None, None, process_group).view(ranks, local)
    to_send = counts[1:].view(ranks, local).sum(1)
    unrouted, *numbers = torch.cat([counts[:1], to_send, to_receive.flatten()]).tolist()
    sent = numbers[:ranks]
    received = [sum(numbers[ranks + rank * local : ranks + (rank + 1) * local]) for rank in range(ranks)]
    per_expert = [sum(numbers[ranks + expert :: local]) for expert in range(local)]

    # Slots by expert, those without one left out; what arrives is by source, and then by expert.
    order = torch.argsort(slots, stable=True)[unrouted:]
    rows = _AllToAll.apply(_Take.apply(x, order, top_k), received, sent, process_group)
    of_expert = torch.arange(local, device=x.device).repeat(ranks)
    by_expert = torch.argsort(of_expert.repeat_interleave(to_receive.flatten(), output_size=sum(received)), stable=True)
    rows = _Take.apply(rows, by_expert, 1)
    hidden = torch.nn.functional.silu(_grouped_product(rows, _ScaledGradient.apply(w_in, gradient_scale), per_expert))
    rows = _grouped_product(hidden, _ScaledGradient.apply(w_out, gradient_scale), per_expert)
    rows = _AllToAll.apply(_Put.apply(rows, by_expert, sum(received)), sent, received, process_group)
    by_token = _Put.apply(rows, order, tokens * top_k).view(tokens, top_k, x.shape[1])
    return torch.bmm(gates[:, None], by_token.float())[:, 0].to(x.dtype)


class _Take(torch.autograd.Function):
    """Rows ``index // copies``; no two indices are equal, so that the gradient needs no atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count, ctx.copies = rows.shape[0], copies
        return rows.index_select(0, index if copies == 1 else index // copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (index,), (gradient,) = ctx.saved_tensors, gradients
        copies = gradient.new_zeros(ctx.count * ctx.copies, gradient.shape[1]).index_copy_(0, index, gradient)
        return copies.view(ctx.count, ctx.copies, gradient.shape[1]).sum(1), None, None


class _Put(torch.autograd.Function):
    """``count`` rows: those given where ``index`` says, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(count, rows.shape[1]).index_copy_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[int], sent: list[int], process_group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.received, ctx.sent, ctx.process_group = received, sent, process_group
        return _all_to_all(rows, received, sent, process_group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradients[0].contiguous(), ctx.sent, ctx.received, ctx.process_group), None, None, None


def _all_to_all(
    rows: Tensor, received: list[int] | None, sent: list[int] | None, process_group: dist.ProcessGroup | None
) -> Tensor:
    if process_group is None or process_group.size() == 1:
        return rows.clone()
    result = rows.new_empty(rows.shape[0] if received is None else sum(received), *rows.shape[1:])
    dist.all_to_all_single(result, rows, received, sent, group=process_group)
    return result


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] if ctx.scale == 1 else gradients[0] * ctx.scale, None


def _grouped_product(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """[rows, N]: the first counts[0] rows times ``weight[0].T`` of weight [L, N, K], and so on."""
    has_kernel = rows.is_cuda and rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (9, 0)
    if has_kernel and len(rows):
        ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32).to(rows.device, non_blocking=True)
        return torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    parts = rows.split(list(counts))
    return torch.cat([part @ matrix.T for part, matrix in zip(parts, weight, strict=True)])


@dataclass(frozen=True)
class ExpertMemory:
    """What a workspace needs on each rank; all of it follows from its settings.

    Attributes:
        tile_rows: to which each expert's rows are padded.
        rows: of a receive block, in the worst case; a multiple of ``tile_rows``.
        slots: of results at combined.
        received_bytes: of a receive block: rows, then destinations.
        destinations_at: byte of it at which the destinations begin.
        combined_bytes: of a block of results.
        symmetric_bytes: of symmetric memory, all in all.
        element_bytes: of an element of a row.
    """

    tile_rows: int
    rows: int
    slots: int
    received_bytes: int
    destinations_at: int
    combined_bytes: int
    symmetric_bytes: int
    element_bytes: int

    def hidden_bytes(self, hidden: int) -> int:
        """Of ordinary memory that a call holds until its backward pass, for hidden layers of so many elements."""
        return 2 * self.rows * hidden * self.element_bytes


def expert_memory(
    ranks: int, experts: int, top_k: int, max_tokens: int, width: int, dtype: torch.dtype, *, with_kernels: bool
) -> ExpertMemory:
    """The memory of an :class:`ExpertWorkspace` with these settings.

    Args:
        with_kernels: whether kernels run, which want rows in tiles: on GPUs.
    """
    tile_rows = 1
    if with_kernels:
        tile_rows = _TILE_ROWS if ranks * max_tokens * top_k >= 2 * _TILE_ROWS * experts else _FEW_TILE_ROWS
    rows, slots = most_rows(ranks, experts, top_k, max_tokens, tile_rows), max_tokens * top_k
    destinations_at = rows * width * dtype.itemsize
    received_bytes, combined_bytes = destinations_at + rows * 4, slots * width * dtype.itemsize
    counts_bytes, flags_bytes = ranks * experts * 4, 3 * ranks * 8
    # Of each kind those that calls may hold until their backward passes, and a spare one.
    blocks = (_HELD_CALLS + 1) * (_round_up(received_bytes, OFFSET_UNIT) + _round_up(combined_bytes, OFFSET_UNIT))
    return ExpertMemory(
        tile_rows=tile_rows,
        rows=rows,
        slots=slots,
        received_bytes=received_bytes,
        destinations_at=destinations_at,
        combined_bytes=combined_bytes,
        symmetric_bytes=counts_bytes + flags_bytes + blocks,
        element_bytes=dtype.itemsize,
    )


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class ExpertWorkspace(Workspace):
    """The symmetric memory through which tokens and results travel. Making one is collective; keep it as long as it is used.

    Results of calls whose backward pass is still to come hold memory of the workspace. It has room for one such call; those
    of more are copied to ordinary memory.

    Attributes:
        memory: how much of it there is.
    """

    def __init__(
        self,
        group: SymmetricGroup,
        *,
        name: str,
        experts: int,
        top_k: int,
        max_tokens: int,
        width: int,
        dtype: torch.dtype,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Collective.

        Args:
            group: the ranks that take part.
            name: for messages; equal on all ranks, and not used by another workspace of the group.
            experts: of all ranks together; a multiple of the number of ranks.
            top_k: experts of a token.
            max_tokens: of one rank and call.
            width: elements of a token; their bytes must be a multiple of 16.
            dtype: float32, bfloat16 or float16: of tokens, weights and results.
            timeout_seconds: how long a rank waits for another.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """
        self.experts, self.top_k, self.max_tokens, self.width, self.dtype = experts, top_k, max_tokens, width, dtype
        super().__init__(group, name, lambda: self._check_settings(group, name), timeout_seconds=timeout_seconds)
        with_kernels = uses_kernels(group.device)
        self.memory = expert_memory(group.world_size, experts, top_k, max_tokens, width, dtype, with_kernels=with_kernels)
        if group.rank == 0:
            logger.info(
                "expert layer %s: %s of symmetric memory on each rank, for %d rows in the worst case",
                name,
                readable(self.memory.symmetric_bytes),
                self.memory.rows,
            )
        self.counts = group.allocate(f"{name}.counts", group.world_size * experts * 4)
        self.received = BlockPool.with_spare(group, f"{name}.received", self.memory.received_bytes, _HELD_CALLS)
        self.combined = BlockPool.with_spare(group, f"{name}.combined", self.memory.combined_bytes, _HELD_CALLS)
        self.steps: ExpertSteps = (KernelSteps if with_kernels else HostSteps)(self.channel, self.memory.slots)

    @property
    def local_experts(self) -> int:
        return self.experts // self.group.world_size

    def release(self) -> None:
        """Let go of the memory for tokens and results, of a workspace that is not used any more: once this rank has completed
        its last call, forward and backward."""
        for blocks in (self.received, self.combined):
            blocks.release()

    def rows_of(self, received: Tensor) -> Tensor:
        """[R, d]: the rows in a receive block."""
        return received[: self.memory.destinations_at].view(self.dtype).view(self.memory.rows, self.width)

    def destinations_of(self, received: Tensor) -> Tensor:
        """int32 [R]: the destinations in a receive block."""
        return received[self.memory.destinations_at : self.memory.received_bytes].view(torch.int32)

    def slots_of(self, combined: Tensor) -> Tensor:
        """[slots, d]: the rows in a block of results."""
        return combined[: self.memory.combined_bytes].view(self.dtype).view(self.memory.slots, self.width)

    def _check_settings(self, group: SymmetricGroup, name: str) -> Mapping[str, object]:
        """Raises UsageError; returns what must be equal on all ranks."""
        check_dtype(name, self.dtype)
        settings = {key: getattr(self, key) for key in ("experts", "top_k", "max_tokens", "width")}
        check_counts(name, **settings)
        ranks = group.world_size
        if self.experts % ranks:
            raise UsageError(f"{name}: experts={self.experts}; needed: a multiple of the {ranks} ranks")
        if self.top_k > self.experts:
            raise UsageError(f"{name}: top_k={self.top_k}; needed: at most experts={self.experts}")
        _check_row(name, "width", self.width, self.dtype)
        rows = ranks * most_rows(ranks, self.experts, self.top_k, self.max_tokens, _TILE_ROWS)
        if max(rows, ranks * self.max_tokens * self.top_k) >= 2**31:
            raise UsageError(f"{name}: max_tokens={self.max_tokens}: {rows} rows of all ranks; needed: less than 2**31")
        return {"name": name, "dtype": self.dtype, **settings}


def _check_row(name: str, key: str, elements: int, dtype: torch.dtype) -> None:
    if elements < 1 or elements * dtype.itemsize % _ROW_UNIT:
        raise UsageError(f"{name}: {key}={elements}; needed: a multiple of {_ROW_UNIT // dtype.itemsize}, 16 bytes")


# Beside the result, what the backward pass needs: received rows with their destinations, the hidden layer before and after
# SiLU, the
# experts' results at combined, and the routes.
torch.library.define(
    "dlrm_fused::expert_layer",
    "(Tensor x, Tensor experts, Tensor gates, Tensor w_in, Tensor w_out, float gradient_scale, int handle) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "dlrm_fused::expert_layer_backward",
    "(Tensor gradient, Tensor gates, Tensor w_in, Tensor w_out, Tensor received, Tensor hidden, Tensor activated, Tensor "
    "combined, "
    "Tensor targets, Tensor bounds, Tensor local_from, float gradient_scale, int handle) -> (Tensor, Tensor, Tensor, Tensor)",
)


@torch.library.impl("dlrm_fused::expert_layer", ["cpu", "cuda"])
def _forward(
    x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, gradient_scale: float, handle: int
) -> tuple[Tensor, ...]:
    workspace = ExpertWorkspace.of(handle)
    workspace.raise_fault()
    with abort_peers_on_error(workspace.channel):
        _check_inputs(workspace, x, experts, gates, w_in, w_out)
    steps = workspace.steps

    routes = route(
        experts,
        workspace.counts,
        workspace.channel,
        count=workspace.experts,
        tile_rows=workspace.memory.tile_rows,
        rows_per_rank=workspace.memory.rows,
        fingerprint=fingerprint_of("routes", w_in.shape, gradient_scale),
    )
    received = workspace.received.receive((workspace.memory.received_bytes,), torch.uint8)
    rows, destinations = workspace.rows_of(received), workspace.destinations_of(received)
    destinations.fill_(-1)
    scatter_rows(
        x,
        routes.targets,
        workspace.received.memory,
        workspace.channel,
        rows_per_rank=workspace.memory.rows,
        receive_offset=workspace.received.offset_of(received),
        fingerprint=fingerprint_of("tokens"),
        copies=workspace.top_k,
        destinations_at=workspace.memory.destinations_at,
        first_destination=workspace.group.rank * workspace.memory.slots,
    )
    steps.zero_pads(rows, destinations, routes.groups)
    hidden, activated = steps.hidden(rows, w_in, routes.groups)
    combined = workspace.combined.receive((workspace.memory.combined_bytes,), torch.uint8)
    steps.send_home(
        activated,
        w_out,
        destinations,
        routes.groups,
        workspace.combined.memory,
        weight_is_transposed=False,
        receive_offset=workspace.combined.offset_of(combined),
        fingerprint=fingerprint_of("results"),
    )
    out = steps.sum_slots(workspace.slots_of(combined), routes.targets, gates, x.shape[0], workspace.top_k)
    held = workspace.received.to_hold(received), hidden, activated, workspace.combined.to_hold(combined)
    return out, *held, routes.targets, routes.groups.bounds, routes.groups.local_from


@torch.library.impl("dlrm_fused::expert_layer_backward", ["cpu", "cuda"])
def _backward(
    gradient: Tensor,
    gates: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    received: Tensor,
    hidden: Tensor,
    activated: Tensor,
    combined: Tensor,
    targets: Tensor,
    bounds: Tensor,
    local_from: Tensor,
    gradient_scale: float,
    handle: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    workspace = ExpertWorkspace.of(handle)
    workspace.raise_fault()
    steps, groups = workspace.steps, Groups(workspace.memory.tile_rows, bounds, local_from)
    gradient = gradient.contiguous()

    # What is received here is used up before the next epoch: spare blocks serve.
    gradient_rows, destinations = workspace.rows_of(workspace.received.spare), workspace.destinations_of(received)
    scatter_rows(
        gradient,
        targets,
        workspace.received.memory,
        workspace.channel,
        rows_per_rank=workspace.memory.rows,
        receive_offset=workspace.received.offset_of(workspace.received.spare),
        fingerprint=fingerprint_of("gradients of results"),
        copies=workspace.top_k,
        scale=gates.flatten(),
    )
    steps.zero_pads(gradient_rows, destinations, groups)
    hidden_gradient = steps.hidden_gradient(gradient_rows, w_out, hidden, groups)
    steps.send_home(
        hidden_gradient,
        w_in,
        destinations,
        groups,
        workspace.combined.memory,
        weight_is_transposed=True,
        receive_offset=workspace.combined.offset_of(workspace.combined.spare),
        fingerprint=fingerprint_of("gradients of tokens"),
    )
    return (
        steps.sum_slots(workspace.slots_of(workspace.combined.spare), targets, None, gradient.shape[0], workspace.top_k),
        steps.gates_gradient(gradient, workspace.slots_of(combined), targets, workspace.top_k),
        steps.weight_gradient(hidden_gradient, workspace.rows_of(received), groups, gradient_scale),
        steps.weight_gradient(gradient_rows, activated, groups, gradient_scale),
    )


def _check_inputs(workspace: ExpertWorkspace, x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> None:
    local = workspace.local_experts
    for key, tensor, dims in (("x", x, 2), ("w_in", w_in, 3)):
        if tensor.dim() != dims:
            raise UsageError(f"{workspace.name}: {key} has shape {list(tensor.shape)}; needed: {dims} dimensions")
    tokens, hidden = x.shape[0], w_in.shape[1]
    expected = {
        "x": (x, workspace.dtype, [tokens, workspace.width]),
        "experts": (experts, torch.int64, [tokens, workspace.top_k]),
        "gates": (gates, torch.float32, [tokens, workspace.top_k]),
        "w_in": (w_in, workspace.dtype, [local, hidden, workspace.width]),
        "w_out": (w_out, workspace.dtype, [local, workspace.width, hidden]),
    }
    for key, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype or tensor.device != workspace.group.device:
            raise UsageError(
                f"{workspace.name}: {key} is {tensor.dtype} on {tensor.device}; needed: {dtype} on {workspace.group.device}"
            )
        if list(tensor.shape) != shape or not tensor.is_contiguous():
            raise UsageError(
                f"{workspace.name}: {key} has shape {list(tensor.shape)}, strides {tensor.stride()}; needed: {shape}, "
                f"contiguous"
            )
    if tokens > workspace.max_tokens:
        raise UsageError(
            f"{workspace.name}: {tokens} tokens are above max_tokens={workspace.max_tokens} of the workspace; make it with more"
        )
    _check_row(workspace.name, "hidden width", hidden, workspace.dtype)
    if not uses_kernels(workspace.group.device):
        _check_ids(workspace, experts)


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


@torch.library.register_fake("dlrm_fused::expert_layer")
def _fake_forward(
    x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, gradient_scale: float, handle: int
) -> tuple[Tensor, ...]:
    workspace = ExpertWorkspace.of(handle)
    memory, local = workspace.memory, workspace.local_experts
    hidden = x.new_empty(memory.rows, w_in.shape[1])
    return (
        torch.empty_like(x),
        x.new_empty(memory.received_bytes, dtype=torch.uint8),
        hidden,
        torch.empty_like(hidden),
        x.new_empty(memory.combined_bytes, dtype=torch.uint8),
        experts.new_empty(experts.numel(), dtype=torch.int32),
        experts.new_empty(local + 1, dtype=torch.int32),
        experts.new_empty(local, dtype=torch.int32),
    )


@torch.library.register_fake("dlrm_fused::expert_layer_backward")
def _fake_backward(
    gradient: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, *held: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return gradient.new_empty(gradient.shape), gates.new_empty(gates.shape), torch.empty_like(w_in), torch.empty_like(w_out)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, gates, w_in, w_out, ctx.gradient_scale, ctx.handle = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gates, w_in, w_out, *output[1:])


def _differentiate(ctx: Any, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    assert gradient is not None, "what else the operator returns has no gradient"
    gradients = torch.ops.dlrm_fused.expert_layer_backward(gradient, *ctx.saved_tensors, ctx.gradient_scale, ctx.handle)
    x_gradient, gates_gradient, w_in_gradient, w_out_gradient = gradients
    return x_gradient, None, gates_gradient, w_in_gradient, w_out_gradient, None, None


torch.library.register_autograd("dlrm_fused::expert_layer", _differentiate, setup_context=_save_for_backward)
