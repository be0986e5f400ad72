"""GEMM + All-to-All as an operator of PyTorch, ``torch.ops.dlrm_fused.gemm_all_to_all``, with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dlrm_fused.compat.torch import current_stream
from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.devices import has_float8
from dlrm_fused.ops.common.dispatch import Operator, without_autocast
from dlrm_fused.ops.common.exchanges import exchange_with_hosts, rows_of_ranks
from dlrm_fused.ops.common.matrix_workspace import ROW_BYTES
from dlrm_fused.ops.common.products import product_in_fp32
from dlrm_fused.ops.common.scatter_rows import scatter_rows
from dlrm_fused.ops.common.workspace import ReceiveWindow, check_tensor, fingerprint_of
from dlrm_fused.ops.gemm_all_to_all.chunks import multiply_and_send_chunks
from dlrm_fused.ops.gemm_all_to_all.kernel import gemm
from dlrm_fused.ops.gemm_all_to_all.schedule import AUTO, BY_PIECES, CHUNKS, KERNEL, SCHEDULES, by_rule
from dlrm_fused.ops.gemm_all_to_all.workspace import GemmWorkspace
from dlrm_fused.ops.schedules import SCHEDULES as ALL_SCHEDULES
from dlrm_fused.ops.schedules import Pair
from dlrm_fused.ops.schedules.rule import SPACE
from dlrm_fused.symmetric.device import uses_kernels
from dlrm_fused.symmetric.hosts import runs_of
from dlrm_fused.symmetric.launches import aligned, layout_of

FP8 = torch.float8_e4m3fn


def gemm_all_to_all(
    workspace: GemmWorkspace, x: Tensor, weight: Tensor, scale: Tensor | None = None, *, schedule: str = "auto"
) -> Tensor:
    """Row block s of the result is this rank's block of rank s's ``x @ weight.T``. Collective; differentiable.

    The backward pass is collective too.

    Args:
        x: [M, K], contiguous, in the workspace's dtype; M is a multiple of the ranks, at most ``max_rows``. M and N must be
            equal on all ranks. Rows of x, weight and result are multiples of 16 bytes.
        weight: [N, K], contiguous, in the workspace's dtype; or float8_e4m3fn, which has no gradient.
        scale: fp32 [N], of the weight's rows; for float8 weights, which need it.
        schedule: ``kernel``, ``chunks`` or ``chunks_2``, see docs/schedules.md; or ``auto``, which takes the fastest: from a
            table, or measured here by the first call with a shape. Without a GPU all are one. Between hosts ``auto`` and both
            ``chunks`` are one, which takes the library's products.

    Returns:
        [M, N] in the workspace's dtype.

    Raises:
        UsageError: for other shapes, dtypes or devices; the other ranks raise CommunicationError, with the name of this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On GPUs, where kernels run
            behind the host, from a later call or ``workspace.raise_fault()``.
    """
    return _operator(x, weight, scale, schedule, workspace.handle)


torch.library.define(
    "dlrm_fused::gemm_all_to_all", "(Tensor x, Tensor weight, Tensor? scale, str schedule, int handle) -> Tensor"
)
torch.library.define(
    "dlrm_fused::gemm_all_to_all_backward",
    "(Tensor gradient, Tensor x, Tensor weight, Tensor? scale, int handle) -> (Tensor, Tensor)",
)


def _forward(x: Tensor, weight: Tensor, scale: Tensor | None, schedule: str, handle: int) -> Tensor:
    workspace = GemmWorkspace.of(handle)
    workspace.begin_call()

    def check() -> None:
        _check_schedule(workspace, scale, schedule)
        _check_matrices(workspace, x, weight, scale)

    workspace.check_once((layout_of(x, weight, scale), schedule), check)
    x, weight = aligned(x), aligned(weight)
    if schedule == AUTO:
        schedule = _choose_schedule(workspace, x, weight, scale)
    return _send_by(schedule, workspace, x, weight, scale)


def _check_schedule(workspace: GemmWorkspace, scale: Tensor | None, schedule: str) -> None:
    name = workspace.name
    if schedule not in SCHEDULES:
        raise UsageError(f"{name}: schedule={schedule}; allowed: {', '.join(SCHEDULES)}")
    if schedule in BY_PIECES and scale is not None:
        raise UsageError(
            f"{name}: schedule={schedule}: the library has no product with float8 weights and scales; allowed: auto, kernel"
        )


def _check_matrices(workspace: GemmWorkspace, x: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    name, device, ranks = workspace.name, workspace.device, workspace.world_size
    weight_dtype = FP8 if scale is not None else workspace.dtype
    if scale is not None and not has_float8(device):
        raise UsageError(
            f"{name}: scale is given, for a weight in {FP8}, which {device} cannot read: needed is compute capability 8.9 or "
            f"above; give a weight in {workspace.dtype} without scale"
        )
    for key, tensor, dtype in (("x", x, workspace.dtype), ("weight", weight, weight_dtype)):
        if tensor.dim() != 2 or 0 in tensor.shape[1:] or not tensor.is_contiguous():
            raise UsageError(
                f"{name}: {key} has shape {list(tensor.shape)}, strides {tensor.stride()}; needed: 2-D, contiguous"
            )
        if tensor.dtype != dtype or tensor.device != device:
            with_scale = " with" if scale is not None else " without"
            raise UsageError(
                f"{name}: {key} is {tensor.dtype} on {tensor.device}; needed{with_scale} scale: {dtype} on {device}"
            )
        if tensor.shape[-1] * tensor.element_size() % ROW_BYTES:
            raise UsageError(
                f"{name}: rows of {key} have {tensor.shape[-1]} elements of {tensor.element_size()} bytes; "
                f"needed: a multiple of {ROW_BYTES} bytes"
            )
    columns, depth = weight.shape
    if x.shape[1] != depth:
        raise UsageError(f"{name}: x is [rows, {x.shape[1]}], weight [..., N, {depth}]; their K must be equal")
    workspace.check_row_bytes(N=columns)
    workspace.check_size(("rows", x.shape[0]), ("columns", columns))
    if scale is not None:
        check_tensor(workspace, "scale", scale, torch.float32, weight.shape[:-1])
    if x.shape[0] % ranks or not x.shape[0]:
        raise UsageError(f"{name}: x has {x.shape[0]} rows; needed: a positive multiple of the {ranks} ranks")


def _choose_schedule(workspace: GemmWorkspace, x: Tensor, weight: Tensor, scale: Tensor | None) -> str:
    if scale is not None:
        return KERNEL
    if workspace.group.hosts.are_many:
        return CHUNKS
    shape = x.shape[0], weight.shape[0], weight.shape[1]
    return workspace.schedules.choose(
        shape,
        SPACE[Pair.gemm_all_to_all],
        lambda name: _send_by(name, workspace, x, weight, None),
        lambda: by_rule(workspace.world_size, shape, workspace.dtype.itemsize, workspace.gpu),
    )


def _send_by(schedule: str, workspace: GemmWorkspace, x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    rows, columns, blocks, hosts = x.shape[0], weight.shape[0], workspace.results, workspace.group.hosts
    call, with_kernels = (rows, columns, scale is None, schedule), uses_kernels(workspace.device)
    if schedule in BY_PIECES and with_kernels and not hosts.are_many:
        return multiply_and_send_chunks(workspace, x, weight, ALL_SCHEDULES[schedule], fingerprint_of(*call))
    result = blocks.receive((rows, columns), workspace.dtype, workspace.result_bytes)
    window = workspace.window(blocks, result, *call)
    if hosts.are_many:
        _multiply_and_exchange(workspace, x, weight, scale, window, by_library=schedule in BY_PIECES)
    elif with_kernels:
        gemm(x, weight, window, scale, arrivals=workspace.arrivals)
    else:
        scatter_rows(_product(x, weight, scale), _destinations(workspace, rows), window, rows_per_rank=rows)
    return blocks.to_hold(result)


def _product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    part_of: int | None = None,
    out: Tensor | None = None,
    *,
    by_library: bool = False,
) -> Tensor:
    """Return x @ weight.T in ``out``, by the kernel with the bits that it has in a host; ``part_of``: as in :func:`gemm`."""
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    if uses_kernels(x.device):
        if by_library:
            torch.mm(x, weight.T, out=out)
        else:
            gemm(x, weight, out, scale, part_of=part_of)
        return out
    product = product_in_fp32(x, weight)
    return out.copy_(product if scale is None else product * scale)


# Multiplications below which the parts of a product take longer than what can be hidden beside them: two H200s.
_WORK_IN_PARTS = 1 << 33


def _multiply_and_exchange(
    workspace: GemmWorkspace, x: Tensor, weight: Tensor, scale: Tensor | None, window: ReceiveWindow, *, by_library: bool
) -> None:
    """The products for other hosts, then those for this one: while some travel, the next are computed.

    Of a small product by the library, NCCL takes rows to all ranks, when all are there.
    """
    hosts, channel, rows, columns = workspace.group.hosts, workspace.channel, len(x), weight.shape[0]
    ranks = workspace.world_size
    result_from = workspace.rows_of(window.memory.local[window.offset :], rows, columns).chunk(ranks)
    if by_library and channel.is_by_nccl and rows * weight.numel() < _WORK_IN_PARTS:
        products = torch.mm(x, weight.T).chunk(ranks)
        sent, received = dict(enumerate(products)), dict(enumerate(result_from))
        channel.exchange(sent, received, fingerprint=window.fingerprint, beside=False).complete()
        return
    multiply = partial(_product, weight=weight, scale=scale, part_of=rows, by_library=by_library)

    def products_for(receivers: range) -> Sequence[Tensor]:
        return multiply(rows_of_ranks(x, receivers, ranks)).chunk(len(receivers))

    exchanges = exchange_with_hosts(channel, products_for, result_from.__getitem__, window.fingerprint)
    if len(hosts.local) == 1:  # nobody else stores here
        multiply(x.chunk(ranks)[hosts.rank], out=result_from[hosts.rank])
    else:
        product = x.new_empty(rows, columns)
        for run in runs_of(hosts.local):
            multiply(rows_of_ranks(x, run, ranks), out=rows_of_ranks(product, run, ranks))
        scatter_rows(product, _destinations(workspace, rows, hosts.local), window, rows_per_rank=rows)
    for exchange, _ in exchanges:
        exchange.complete()


def _destinations(workspace: GemmWorkspace, rows: int, receivers: Sequence[int] | None = None) -> Tensor:
    """int32 [rows]: rank * rows + row, where each row of a matrix of equal blocks belongs; -1 for who is no receiver."""
    ranks, rank, device = workspace.world_size, workspace.rank, workspace.device
    first, end = rank * (rows // ranks), (rank + 1) * (rows // ranks)
    first_of_rank = torch.arange(0, ranks * rows, rows, dtype=torch.int32, device=device)
    destinations = first_of_rank[:, None] + torch.arange(first, end, dtype=torch.int32, device=device)
    for other in set(range(ranks)) - set(range(ranks) if receivers is None else receivers):
        destinations[other] = -1
    return destinations.flatten()


@torch.library.register_fake("dlrm_fused::gemm_all_to_all")
def _fake_forward(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, _, ctx.handle = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, scale = ctx.saved_tensors  # once: with activation checkpointing it computes them
    x_gradient, weight_gradient = torch.ops.dlrm_fused.gemm_all_to_all_backward(gradient, x, weight, scale, ctx.handle)
    return (x_gradient, None if weight.dtype == FP8 else weight_gradient, None, None, None)


_operator = Operator("dlrm_fused::gemm_all_to_all", _forward, _differentiate, _save_for_backward)


@torch.library.impl("dlrm_fused::gemm_all_to_all_backward", ["cpu", "cuda"])
@without_autocast
def _backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, handle: int) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of the weight unless it is float8.

    While the gradients of one rank's rows come from there, those of the rank before are multiplied, this rank's own first.
    Every rank sends to the next one, then to the one after it, and so on: an epoch each.
    """
    workspace = GemmWorkspace.of(handle)
    workspace.begin_call()
    gradient = aligned(gradient.contiguous())
    factors = weight if scale is None else (weight.float() * scale[..., None]).to(workspace.dtype)
    fetch = _fetch_between_hosts if workspace.group.hosts.are_many else _fetch_in_host
    x_gradient, fetched = fetch(workspace, gradient, factors, torch.empty_like(x))
    return x_gradient, fetched.T @ x if scale is None else x.new_empty(0)


def _fetch_between_hosts(
    workspace: GemmWorkspace, gradient: Tensor, weight: Tensor, x_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill x's gradient; return it and the gradient of this rank's product. While rows of other hosts come, those of this one
    are multiplied."""
    hosts, rows, ranks, block = workspace.group.hosts, len(gradient), workspace.world_size, workspace.results.spare
    fetched = workspace.rows_of(block, *gradient.shape)
    sent_to, received_from = gradient.chunk(ranks), fetched.chunk(ranks)
    window = workspace.window(workspace.results, block, *gradient.shape, "backward")
    exchanges = exchange_with_hosts(
        workspace.channel,
        lambda receivers: sent_to[receivers.start : receivers.stop],
        received_from.__getitem__,
        window.fingerprint,
    )
    if len(hosts.local) == 1:
        received_from[hosts.rank].copy_(sent_to[hosts.rank])
    else:
        scatter_rows(gradient, _destinations(workspace, rows, hosts.local), window, rows_per_rank=rows)

    def multiply(sources: Sequence[range]) -> None:
        for run in sources:
            torch.mm(rows_of_ranks(fetched, run, ranks), weight, out=rows_of_ranks(x_gradient, run, ranks))

    multiply(runs_of(hosts.local))
    for exchange, sources in exchanges:
        exchange.complete()
        multiply(sources)
    return x_gradient, fetched


def _fetch_in_host(workspace: GemmWorkspace, gradient: Tensor, weight: Tensor, x_gradient: Tensor) -> tuple[Tensor, Tensor]:
    ranks, rank, (rows, columns) = workspace.world_size, workspace.rank, gradient.shape
    beside = workspace.streams.beside
    main = current_stream(workspace.device) if beside else None
    received = workspace.rows_of(workspace.results.spare, rows, columns)
    received_from, sent_to = received.chunk(ranks), gradient.chunk(ranks)
    destinations = _destinations(workspace, rows).chunk(ranks)
    gradient_of = x_gradient.chunk(ranks)
    if beside and main:
        beside.wait_stream(main)
    arrivals = []
    with torch.cuda.stream(beside) if beside else nullcontext():
        for shift in range(1, ranks):
            to = (rank + shift) % ranks
            window = workspace.window(workspace.results, workspace.results.spare, rows, columns, "backward", shift)
            scatter_rows(sent_to[to], destinations[to], window, rows_per_rank=rows)
            arrivals.append(beside.record_event() if beside else None)
    torch.mm(sent_to[rank], weight, out=gradient_of[rank])
    received_from[rank].copy_(sent_to[rank])
    for shift, arrival in enumerate(arrivals, start=1):
        if main and arrival:
            main.wait_event(arrival)
        source = (rank - shift) % ranks
        torch.mm(received_from[source], weight, out=gradient_of[source])
    return x_gradient, received


@torch.library.register_fake("dlrm_fused::gemm_all_to_all_backward")
def _fake_backward(gradient: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight) if scale is None else x.new_empty(0)
