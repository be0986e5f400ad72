"""A matrix product whose rows belong to different ranks, and the All-to-All that takes them there, as one operator.

``torch.ops.dlrm_fused.gemm_all_to_all`` has two forms:

* equal blocks: x [M, K] is multiplied by weight [N, K] transposed; the p-th of as many equal blocks of rows as there are ranks
  goes to rank p, whose result has the blocks of all ranks in their order;
* routed: rows are in groups with a weight each, such as the experts of a Mixture-of-Experts layer, and every row has a home: a
  rank, and a slot of its result.

How it runs (Punniyamurthy et al., arXiv 2305.06942, "GEMM + All-to-All"):

* ``kernel``, on GPUs: a persistent GEMM, :mod:`~dlrm_fused.ops.gemm_all_to_all.kernel`, that stores every finished tile
  straight into the memory of its ranks;
* ``chunks``, on GPUs, for equal blocks: the library's GEMM by chunks, which a copy engine sends,
  :mod:`~dlrm_fused.ops.gemm_all_to_all.chunks`;
* on the CPU: torch's product, stored in the other process's memory.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.errors import UsageError
from dlrm_fused.ops.common.scatter_rows import put_rows
from dlrm_fused.ops.common.workspace import Handles, agree_on_settings, check_dtype, fingerprint_of
from dlrm_fused.ops.embedding_all_to_all.pooled import refusal_is_told
from dlrm_fused.ops.gemm_all_to_all.chunks import multiply_and_send_chunks
from dlrm_fused.ops.gemm_all_to_all.kernel import Groups, gemm_home, grouped_gemm, grouped_gemm_home, grouped_weight_gradient
from dlrm_fused.ops.gemm_all_to_all.tuning import choose_schedule
from dlrm_fused.symmetric import Channel, EqualBlocks, SymmetricGroup
from dlrm_fused.symmetric.device import uses_kernels

logger = logging.getLogger("dlrm_fused")

FP8 = torch.float8_e4m3fn
SCHEDULES = ("auto", "kernel", "chunks")
_ROW_UNIT = 16  # bytes
_HELD_RESULTS = 2
# Homes and origins count rows of all ranks in 31 bits.
_MOST_ROWS_OF_ALL_RANKS = 2**31 - 1


class Routes(NamedTuple):
    """Where the rows of x belong.

    Attributes:
        groups: which rows belong together.
        homes: int32 [R]: rank * slots + slot, or -1 for rows that belong nowhere, such as those that fill up tiles. No two of
            all ranks may be equal, and none may be outside: that is not checked, since it would mean to wait for the device.
        slots: rows of every rank's result.
    """

    groups: Groups
    homes: Tensor
    slots: int


def gemm_all_to_all(
    exchange: GemmExchange, x: Tensor, weight: Tensor, scale: Tensor | None = None, *, schedule: str = "auto"
) -> Tensor:
    """Row block s of the result is this rank's block of rank s's ``x @ weight.T``. Collective; differentiable.

    The backward pass is collective too.

    Args:
        x: [M, K], contiguous, in the exchange's dtype; M is a multiple of the ranks, at most ``max_rows``. M and N must be
            equal on all ranks. Rows of x, weight and result are multiples of 16 bytes.
        weight: [N, K], contiguous, in the exchange's dtype; or float8_e4m3fn, which has no gradient.
        scale: fp32 [N], of the weight's rows; for float8 weights, which need it.
        schedule: ``kernel``, ``chunks``, or ``auto``, which takes what :func:`schedule_of` says. Without a GPU all are one.

    Returns:
        [M, N] in the exchange's dtype.

    Raises:
        UsageError: for other shapes, dtypes or devices; the other ranks raise CommunicationError, with the name of this one.
        CommunicationError: if a peer is lost, was waited for too long, or makes another call. On GPUs, where kernels run
            behind the host, from a later call or ``exchange.raise_fault()``.
    """
    return torch.ops.dlrm_fused.gemm_all_to_all(x, weight, scale, None, None, None, 0, 0, schedule, exchange.handle)[0]


def routed_gemm_all_to_all(
    exchange: GemmExchange, x: Tensor, weight: Tensor, routes: Routes, scale: Tensor | None = None
) -> Tensor:
    """Every row of x times the weight of its group, transposed, in the slot of its home. Collective; differentiable.

    The backward pass is collective too.

    Args:
        x: [R, K] as in :func:`gemm_all_to_all`; R may differ between ranks, and is a multiple of ``tile_rows``. Rows without
            a home may hold anything finite.
        weight: [G, N, K], contiguous; G may differ between ranks.
        scale: fp32 [G, N].

    Returns:
        [slots, N] in the exchange's dtype; slots that are no row's home are not initialized.

    Raises:
        UsageError, CommunicationError: as :func:`gemm_all_to_all`.
    """
    groups = routes.groups
    return torch.ops.dlrm_fused.gemm_all_to_all(
        x,
        weight,
        scale,
        groups.bounds,
        groups.local_from,
        routes.homes,
        groups.tile_rows,
        routes.slots,
        "auto",
        exchange.handle,
    )[0]


def reference(process_group: dist.ProcessGroup | None, x: Tensor, weight: Tensor) -> Tensor:
    """:func:`gemm_all_to_all` in plain torch and torch.distributed. Without a process group there is one rank."""
    product = torch.nn.functional.linear(x, weight)
    if process_group is None or process_group.size() == 1:
        return product
    result: Tensor = _AllToAll.apply(product, process_group)
    return result


class _AllToAll(torch.autograd.Function):
    """Equal blocks: its own inverse, hence its own gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, process_group: dist.ProcessGroup) -> Tensor:
        ctx.process_group = process_group
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous(), group=process_group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0].contiguous(), ctx.process_group), None


def schedule_of(exchange: GemmExchange, rows: int, columns: int, depth: int) -> str:
    """What ``auto`` takes for x [rows, depth] and weight [columns, depth]: ``kernel`` or ``chunks``."""
    return choose_schedule(rows, columns, depth, exchange.dtype.itemsize)


class GemmExchange:
    """The symmetric memory through which products travel. Making one is collective; calls may share it.

    Attributes:
        handle: how the operator names it.
    """

    def __init__(
        self,
        group: SymmetricGroup,
        *,
        name: str,
        max_rows: int,
        max_columns: int,
        dtype: torch.dtype,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Collective.

        Args:
            group: the ranks that take part.
            name: for messages; equal on all ranks, and not used by another exchange of the group.
            max_rows: of x, and of a result.
            max_columns: the largest N. Memory for three results is allocated here: two that callers may hold, and one more;
                a caller who holds more than two gets copies.
            dtype: float32, bfloat16 or float16.
            timeout_seconds: how long a rank waits for another.

        Raises:
            UsageError: on all ranks, if an argument is wrong on one of them, or they differ.
        """

        def check() -> dict[str, object]:
            check_dtype(name, dtype)
            for key, value in (("max_rows", max_rows), ("max_columns", max_columns)):
                if not isinstance(value, int) or value < 1:
                    raise UsageError(f"{name}: {key}={value}; needed: a whole number, at least 1")
            most = _MOST_ROWS_OF_ALL_RANKS // group.world_size
            if max_rows > most:
                raise UsageError(f"{name}: max_rows={max_rows}; allowed with {group.world_size} ranks: at most {most}")
            return {"name": name, "max_rows": max_rows, "max_columns": max_columns, "dtype": dtype}

        agree_on_settings(group, name, check)
        self.group, self.name = group, name
        self.max_rows, self.max_columns, self.dtype = max_rows, max_columns, dtype
        self.channel = Channel(group, name, timeout_seconds)
        # A result, and for each row of it where it came from.
        self.origins_at = -(-max_rows * max_columns * dtype.itemsize // _ROW_UNIT) * _ROW_UNIT
        self.results = EqualBlocks(group, f"{name}.results", self.origins_at + 4 * max_rows, _HELD_RESULTS)
        # Beside the stream of the products.
        self.stream = torch.cuda.Stream(group.device, priority=-1) if group.device.type == "cuda" else None
        self._said: set[tuple[int, int, int]] = set()
        self.handle = _exchanges.add(self)

    def raise_fault(self) -> None:
        """Raise CommunicationError if a call that was started has failed since. Does not wait for the device."""
        self.channel.raise_fault()

    def say_schedule(self, schedule: str, rows: int, columns: int, depth: int) -> None:
        """Log what ``auto`` takes, once for each shape, on rank 0."""
        if self.group.rank == 0 and (rows, columns, depth) not in self._said:
            self._said.add((rows, columns, depth))
            logger.info("%s: schedule %s for x [%d, %d] and weight [%d, %d]", self.name, schedule, rows, depth, columns, depth)

    def rows_of(self, block: Tensor, rows: int, columns: int) -> Tensor:
        """[rows, columns]: the result in a block."""
        return block[: rows * columns * self.dtype.itemsize].view(self.dtype).view(rows, columns)

    def origins_of(self, block: Tensor, rows: int) -> Tensor:
        """int32 [rows]: where the rows of a result came from, rank * max_rows + row of x; -1 for nowhere."""
        return block[self.origins_at : self.origins_at + 4 * rows].view(torch.int32)


_exchanges: Handles[GemmExchange] = Handles("GemmExchange")

torch.library.define(
    "dlrm_fused::gemm_all_to_all",
    "(Tensor x, Tensor weight, Tensor? scale, Tensor? bounds, Tensor? local_from, Tensor? homes, int tile_rows, int slots, "
    "str schedule, int exchange) -> (Tensor, Tensor)",
)
torch.library.define(
    "dlrm_fused::gemm_all_to_all_backward",
    "(Tensor gradient, Tensor x, Tensor weight, Tensor? scale, Tensor? bounds, Tensor? local_from, Tensor? homes, "
    "Tensor origins, int tile_rows, int exchange) -> (Tensor, Tensor)",
)


@torch.library.impl("dlrm_fused::gemm_all_to_all", ["cpu", "cuda"])
def _forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bounds: Tensor | None,
    local_from: Tensor | None,
    homes: Tensor | None,
    tile_rows: int,
    slots: int,
    schedule: str,
    exchange: int,
) -> tuple[Tensor, Tensor]:
    """The result, and for routed rows int32 [slots]: where each came from, :meth:`GemmExchange.origins_of`."""
    owner = _exchanges.get(exchange)
    owner.raise_fault()
    if bounds is None or local_from is None or homes is None:
        with refusal_is_told(owner.channel):
            _check_equal_blocks(owner, x, weight, scale, schedule)
        return _send_equal_blocks(owner, x, weight, scale, schedule), x.new_empty(0, dtype=torch.int32)
    routes = Routes(Groups(tile_rows, bounds, local_from), homes, slots)
    with refusal_is_told(owner.channel):
        _check_routed(owner, x, weight, scale, routes)
    return _send_home(owner, x, weight, scale, routes)


def _check_equal_blocks(owner: GemmExchange, x: Tensor, weight: Tensor, scale: Tensor | None, schedule: str) -> None:
    ranks = owner.group.world_size
    if schedule not in SCHEDULES:
        raise UsageError(f"{owner.name}: schedule={schedule}; allowed: {', '.join(SCHEDULES)}")
    if schedule == "chunks" and scale is not None:
        raise UsageError(
            f"{owner.name}: schedule=chunks: the library has no product with float8 weights and scales; allowed: kernel"
        )
    _check_matrices(owner, x, weight, 2, scale)
    if x.shape[0] % ranks or not x.shape[0]:
        raise UsageError(f"{owner.name}: x has {x.shape[0]} rows; needed: a positive multiple of the {ranks} ranks")


def _check_routed(owner: GemmExchange, x: Tensor, weight: Tensor, scale: Tensor | None, routes: Routes) -> None:
    groups, homes, slots = routes
    _check_matrices(owner, x, weight, 3, scale)
    if groups.tile_rows not in (16, 32, 64, 128) or x.shape[0] % groups.tile_rows or not x.shape[0]:
        raise UsageError(
            f"{owner.name}: tile_rows={groups.tile_rows}, x has {x.shape[0]} rows; needed: tiles of 16, 32, 64 or 128 "
            "rows, and a positive number of whole tiles"
        )
    if not 1 <= slots <= owner.max_rows:
        raise UsageError(f"{owner.name}: slots={slots}; allowed: 1 to max_rows={owner.max_rows} of the exchange")
    expected = {
        "bounds": (groups.bounds, weight.shape[0] + 1),
        "local_from": (groups.local_from, weight.shape[0]),
        "homes": (homes, x.shape[0]),
    }
    for key, (tensor, length) in expected.items():
        if tensor.dtype != torch.int32 or tensor.shape != (length,) or tensor.device != owner.group.device:
            raise UsageError(
                f"{owner.name}: {key} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; needed: int32 [{length}] on "
                f"{owner.group.device}"
            )


def _check_matrices(owner: GemmExchange, x: Tensor, weight: Tensor, weight_dims: int, scale: Tensor | None) -> None:
    name, device = owner.name, owner.group.device
    weight_dtype = FP8 if scale is not None else owner.dtype
    for key, tensor, dims, dtype in (("x", x, 2, owner.dtype), ("weight", weight, weight_dims, weight_dtype)):
        if tensor.dim() != dims or 0 in tensor.shape[1:] or not tensor.is_contiguous():
            raise UsageError(
                f"{name}: {key} has shape {list(tensor.shape)}, strides {tensor.stride()}; needed: {dims}-D, contiguous"
            )
        if tensor.dtype != dtype or tensor.device != device:
            with_scale = " with" if scale is not None else " without"
            raise UsageError(
                f"{name}: {key} is {tensor.dtype} on {tensor.device}; needed{with_scale} scale: {dtype} on {device}"
            )
        if tensor.shape[-1] * tensor.element_size() % _ROW_UNIT:
            raise UsageError(
                f"{name}: rows of {key} have {tensor.shape[-1]} elements of {tensor.element_size()} bytes; "
                f"needed: a multiple of {_ROW_UNIT} bytes"
            )
    columns, depth = weight.shape[-2:]
    if x.shape[1] != depth:
        raise UsageError(f"{name}: x is [rows, {x.shape[1]}], weight [..., N, {depth}]; their K must be equal")
    if columns * owner.dtype.itemsize % _ROW_UNIT:
        raise UsageError(f"{name}: N={columns} elements of {owner.dtype}; needed: a multiple of {_ROW_UNIT} bytes")
    for key, value, limit in (("rows", x.shape[0], owner.max_rows), ("columns", columns, owner.max_columns)):
        if value > limit:
            raise UsageError(f"{name}: {key}={value} is above max_{key}={limit} of the exchange; make it with more")
    if scale is not None and (scale.dtype != torch.float32 or scale.shape != weight.shape[:-1] or not scale.is_contiguous()):
        raise UsageError(
            f"{name}: scale is {scale.dtype} {list(scale.shape)}; needed: float32 {list(weight.shape[:-1])}, contiguous"
        )


def _send_equal_blocks(owner: GemmExchange, x: Tensor, weight: Tensor, scale: Tensor | None, schedule: str) -> Tensor:
    (rows, depth), columns, blocks = x.shape, weight.shape[0], owner.results
    if schedule == "auto":
        schedule = "kernel" if scale is not None else schedule_of(owner, rows, columns, depth)
        owner.say_schedule(schedule, rows, columns, depth)
    fingerprint = fingerprint_of(rows, columns, scale is None, schedule)
    if schedule == "chunks" and uses_kernels(owner.group.device):
        return multiply_and_send_chunks(x, weight, blocks, owner.channel, owner.stream, fingerprint)
    block = blocks.take()
    if uses_kernels(owner.group.device):
        gemm_home(
            x,
            weight,
            blocks.memory,
            owner.channel,
            receive_offset=blocks.offset_of(block),
            fingerprint=fingerprint,
            scale=scale,
        )
    else:
        _put(owner, _product(x, weight, scale), _homes_of_equal_blocks(owner, rows), rows, block, fingerprint)
    return owner.rows_of(blocks.to_hold(block), rows, columns)


def _send_home(owner: GemmExchange, x: Tensor, weight: Tensor, scale: Tensor | None, routes: Routes) -> tuple[Tensor, Tensor]:
    groups, homes, slots = routes
    columns, blocks = weight.shape[1], owner.results
    block = blocks.take()
    owner.origins_of(block, slots).fill_(-1)
    fingerprint = fingerprint_of(slots, columns)
    if uses_kernels(owner.group.device):
        grouped_gemm_home(
            x,
            weight,
            groups,
            homes,
            blocks.memory,
            owner.channel,
            slots=slots,
            receive_offset=blocks.offset_of(block),
            fingerprint=fingerprint,
            scale=scale,
            origins_at=owner.origins_at,
            first_origin=owner.group.rank * owner.max_rows,
        )
    else:
        product = x.new_zeros(x.shape[0], columns)
        for group, own in _rows_of_groups(groups):
            product[own] = _product(x[own], weight[group], None if scale is None else scale[group])
        _put(owner, product, homes, slots, block, fingerprint, tells_origin=True)
    held = blocks.to_hold(block)
    return owner.rows_of(held, slots, columns), owner.origins_of(held, slots).clone()


def _product(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    product = torch.nn.functional.linear(x.float(), weight.float())
    return (product if scale is None else product * scale).to(x.dtype)


def _rows_of_groups(groups: Groups) -> list[tuple[int, slice]]:
    """On the CPU: the groups that have rows, and these."""
    bounds = [tile * groups.tile_rows for tile in groups.bounds.tolist()]
    return [(g, slice(*bounds[g : g + 2])) for g in range(len(bounds) - 1) if bounds[g] < bounds[g + 1]]


def _homes_of_equal_blocks(owner: GemmExchange, rows: int) -> Tensor:
    """int32 [rows]: rank * rows + row, where each row of a matrix of equal blocks belongs."""
    ranks, rank = owner.group.world_size, owner.group.rank
    own_block = torch.arange(rank * (rows // ranks), (rank + 1) * (rows // ranks), dtype=torch.int32, device=owner.group.device)
    first = torch.arange(0, ranks * rows, rows, dtype=torch.int32, device=owner.group.device)
    return (first[:, None] + own_block).flatten()


def _put(
    owner: GemmExchange,
    rows: Tensor,
    targets: Tensor,
    rows_per_rank: int,
    block: Tensor,
    fingerprint: int,
    *,
    tells_origin: bool = False,
) -> None:
    put_rows(
        rows,
        targets,
        owner.results.memory,
        owner.channel,
        rows_per_rank=rows_per_rank,
        receive_offset=owner.results.offset_of(block),
        fingerprint=fingerprint,
        homes_at=owner.origins_at if tells_origin else None,
        first_home=owner.group.rank * owner.max_rows,
    )


@torch.library.register_fake("dlrm_fused::gemm_all_to_all")
def _fake_forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bounds: Tensor | None,
    local_from: Tensor | None,
    homes: Tensor | None,
    tile_rows: int,
    slots: int,
    schedule: str,
    exchange: int,
) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if homes is None else slots
    return x.new_empty(rows, weight.shape[-2]), x.new_empty(0 if homes is None else slots, dtype=torch.int32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, scale, bounds, local_from, homes, ctx.tile_rows, _, _, ctx.exchange = inputs
    ctx.save_for_backward(x, weight, scale, bounds, local_from, homes, output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    weight = ctx.saved_tensors[1]
    x_gradient, weight_gradient = torch.ops.dlrm_fused.gemm_all_to_all_backward(
        gradient, *ctx.saved_tensors, ctx.tile_rows, ctx.exchange
    )
    return (x_gradient, None if weight.dtype == FP8 else weight_gradient, *[None] * 8)


torch.library.register_autograd("dlrm_fused::gemm_all_to_all", _differentiate, setup_context=_save_for_backward)


@torch.library.impl("dlrm_fused::gemm_all_to_all_backward", ["cpu", "cuda"])
def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bounds: Tensor | None,
    local_from: Tensor | None,
    homes: Tensor | None,
    origins: Tensor,
    tile_rows: int,
    exchange: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of x, and of the weight unless it is float8."""
    owner = _exchanges.get(exchange)
    owner.raise_fault()
    factors = weight if scale is None else (weight.float() * scale[..., None]).to(owner.dtype)
    if bounds is None or local_from is None or homes is None:
        return _fetch_equal_blocks(owner, gradient.contiguous(), x, factors, scale is None)
    return _fetch_routed(
        owner, gradient.contiguous(), x, factors, Groups(tile_rows, bounds, local_from), homes, origins, scale is None
    )


def _fetch_equal_blocks(
    owner: GemmExchange, gradient: Tensor, x: Tensor, weight: Tensor, with_weight: bool
) -> tuple[Tensor, Tensor]:
    """While the gradients of one rank's rows come from there, those of the rank before are multiplied, this rank's own first.

    Every rank sends to the next one, then to the one after it, and so on: an epoch each.
    """
    group, ranks, rank = owner.group, owner.group.world_size, owner.group.rank
    rows, columns = gradient.shape
    main = torch.cuda.current_stream(group.device) if owner.stream else None
    received = owner.rows_of(owner.results.spare, rows, columns)
    received_from, sent_to = received.chunk(ranks), gradient.chunk(ranks)
    homes = _homes_of_equal_blocks(owner, rows).chunk(ranks)
    x_gradient = torch.empty_like(x)
    gradient_of = x_gradient.chunk(ranks)
    if owner.stream and main:
        owner.stream.wait_stream(main)
    arrivals = []
    with torch.cuda.stream(owner.stream) if owner.stream else nullcontext():
        for shift in range(1, ranks):
            to = (rank + shift) % ranks
            _put(owner, sent_to[to], homes[to], rows, owner.results.spare, fingerprint_of(rows, columns, "backward", shift))
            arrivals.append(owner.stream.record_event() if owner.stream else None)
    torch.mm(sent_to[rank], weight, out=gradient_of[rank])
    received_from[rank].copy_(sent_to[rank])
    for shift, arrival in enumerate(arrivals, start=1):
        if main and arrival:
            main.wait_event(arrival)
        source = (rank - shift) % ranks
        torch.mm(received_from[source], weight, out=gradient_of[source])
    return x_gradient, received.T @ x if with_weight else x.new_empty(0)


def _fetch_routed(
    owner: GemmExchange,
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    groups: Groups,
    homes: Tensor,
    origins: Tensor,
    with_weight: bool,
) -> tuple[Tensor, Tensor]:
    columns, blocks = gradient.shape[1], owner.results
    _put(owner, gradient, origins, owner.max_rows, blocks.spare, fingerprint_of(columns, "routed backward"))
    received = owner.rows_of(blocks.spare, x.shape[0], columns)
    received.masked_fill_((homes < 0)[:, None], 0)
    x_gradient = torch.zeros_like(x)
    weight_gradient = torch.zeros_like(weight) if with_weight else x.new_empty(0)
    if uses_kernels(owner.group.device):
        grouped_gemm(received, weight, groups, x_gradient, weight_is_transposed=True)
        if with_weight:
            grouped_weight_gradient(received, x, groups, weight_gradient)
        return x_gradient, weight_gradient
    for group, own in _rows_of_groups(groups):
        x_gradient[own] = received[own] @ weight[group]
        if with_weight:
            weight_gradient[group] = received[own].T @ x[own]
    return x_gradient, weight_gradient


@torch.library.register_fake("dlrm_fused::gemm_all_to_all_backward")
def _fake_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bounds: Tensor | None,
    local_from: Tensor | None,
    homes: Tensor | None,
    origins: Tensor,
    tile_rows: int,
    exchange: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight) if scale is None else x.new_empty(0)
