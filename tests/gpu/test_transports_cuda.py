"""Operators whose slices go between hosts as messages compute the bits of those whose ranks store into each other's memory.

Every rank counts as a host of its own; where there are four, also every two as a host. All ranks have two groups: one of one
host, and one in which what goes to other hosts is a message. Hosts of two ranks add up what row-wise tables give before they
send it: these columns need only be equal up to rounding. All ranks begin as many exchanges, since NCCL waits for all. In the
epochs before the 100th PyTorch raises where the host would wait for its GPU.

With ``TRITON_INTERPRET=1`` all of this runs on the CPU. ``EPOCHS=5000 pytest tests/gpu/test_transports_cuda.py`` for many
epochs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_fused.ops.all_gather_gemm import ShardWorkspace, all_gather_gemm, gemm_reduce_scatter
from dlrm_fused.ops.embedding_all_to_all import Sgd, embedding_all_to_all
from dlrm_fused.ops.embedding_all_to_all import op as lookup_op
from dlrm_fused.ops.gemm_all_to_all import GemmWorkspace, gemm_all_to_all
from dlrm_fused.ops.gemv_all_reduce import GemvWorkspace, gemv_all_reduce
from dlrm_fused.ops.gemv_all_reduce import between_hosts as sums_between_hosts
from dlrm_fused.ops.moe import ExpertWorkspace, between_hosts, expert_layer
from dlrm_fused.ops.sequence_all_to_all import SequenceWorkspace, sequence_all_to_all, sequence_lookup_all_to_all
from dlrm_fused.symmetric import SymmetricGroup, symmetric_group
from dlrm_fused.symmetric.messages import Exchange, NcclLink
from dlrm_fused.symmetric.tcp import TcpLink
from dlrm_fused.training.runtime import Rank
from tests.distributed.launch import Ranks
from tests.gpu.all_ranks import HALF, ON_GPU, RANKS, SHARE_A_GPU, delay, process_group_of_checks, small_tiles_without_gpus
from tests.gpu.test_embedding_all_to_all_cuda import world_of
from tests.ops.embedding_all_to_all.world import Traffic
from tests.ops.sequence_all_to_all import test_lookup as sequence_lookups
from tests.ops.sequence_all_to_all.test_op import WIDTH, Call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device"),
    pytest.mark.timeout(1800),
]
MOST_SECONDS = 1700.0
EPOCHS = int(os.environ.get("EPOCHS", "100" if ON_GPU else "3"))
# Memory has grown by then; in thousands of epochs it may grow once more, for which the host waits.
WATCHED_EPOCHS = range(90, 100)
TIMEOUT_SECONDS = 60.0
COLUMNS, DEPTH = (512, 384) if ON_GPU else (32, 48)
TILE_ROWS = 16
RANKS_PER_HOST = [count for count in (1, 2, 4) if count < RANKS and RANKS % count == 0]
# Times the rounding of what travels.
SUM_TOLERANCE = 8.0


class Results(NamedTuple):
    """What a transport computes in an epoch.

    Attributes:
        same: must have the same bits on any hosts.
        sums: over the ranks, which hosts of several ranks add up in another order.
        rounding: relative, of a sum that travels.
        products: of the library, or of kernels on one host and of the library between hosts, which may add up in another order.
    """

    same: Sequence[Tensor]
    sums: Sequence[Tensor] = ()
    rounding: float = 0.0
    products: Sequence[Tensor] = ()

    def agree(self, other: Results, *, hosts_have_sums: bool) -> bool:
        tolerance = SUM_TOLERANCE * self.rounding
        return (
            all(map(torch.equal, self.same, other.same))
            and _are_near(self.sums, other.sums, tolerance if hosts_have_sums else 0.0)
            and _are_near(self.products, other.products, tolerance)
        )


def _are_near(own: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> bool:
    return all(torch.allclose(*pair, rtol=tolerance, atol=tolerance) for pair in zip(own, other, strict=True))


# By its number.
Epoch = Callable[[int], Results]


def embedding_steps(group: SymmetricGroup, timeout_seconds: float, *, traffic: Traffic) -> Epoch:
    """Lookups and updates: sum and mean, weighted and not, row-wise tables; batches of all sizes."""
    world = world_of(group.world_size, traffic)
    workspace = world.workspace(group, "transports", timeout_seconds=timeout_seconds)
    is_sum = torch.zeros(world.layout.columns, dtype=torch.bool)
    for lookup in world.layout.lookups[group.rank]:
        if lookup.row_wise:
            for column, dim in zip(lookup.columns, lookup.dims, strict=True):
                is_sum[column : column + dim] = True
    of_sums, of_tables = (chosen.nonzero()[:, 0].to(group.device) for chosen in (is_sum, ~is_sum))

    def step(number: int) -> Results:
        # Batches are small; in every other step some ranks take the way of large ones.
        few_bytes = 0 if number % 2 and group.rank % 2 == 0 else lookup_op._FEW_BYTES
        with mock.patch.object(lookup_op, "_FEW_BYTES", few_bytes):
            return take_step()

    def take_step() -> Results:
        sizes = world.draw_batch_sizes()
        own = world.draw_batches(sizes)[group.rank]
        gradient = _on_device(group, world.draw_gradients(sizes)[group.rank])
        batch = [[_on_device(group, getattr(lookup, key)) for lookup in own] for key in ("indices", "offsets", "weights")]
        output = embedding_all_to_all(workspace, *batch, sizes)
        columns, sums = (output.detach().index_select(1, chosen) for chosen in (of_tables, of_sums))
        output.backward(gradient)
        weights = [tables.weights.clone() for tables in workspace.tables if tables is not None]
        return Results([columns, *weights], [sums], torch.finfo(traffic.forward_wire).eps)

    return step


def sequences(group: SymmetricGroup, timeout_seconds: float) -> Epoch:
    """Rows of the caller, and rows of tables, with their gradients; in every other call with places."""
    workspace = SequenceWorkspace(group, WIDTH, name="transports", timeout_seconds=timeout_seconds)
    own, rate = sequence_lookups.tables_of(group.rank), torch.tensor(sequence_lookups.RATE, device=group.device)
    tables = replace(own, weights=own.weights.to(group.device), optimizer=Sgd(rate))
    workspace.attach_tables([tables])

    def deliver(number: int) -> Results:
        call = Call.draw(group.world_size, number, features=3, placed=number % 2 > 0)
        offsets, batch_sizes, counts = call.arguments(group.rank)
        places = call.places_of(group.rank)
        arguments = _on_device(group, offsets), batch_sizes, counts, 1.0, None if places is None else _on_device(group, places)
        drawn = call.rows[group.rank], call.gradients[group.rank], sequence_lookups.indices_of(call, group.rank, number)
        rows, gradient, indices = (_on_device(group, tensor) for tensor in drawn)
        delivered = sequence_all_to_all(workspace, rows.requires_grad_(), *arguments)
        (of_rows,) = torch.autograd.grad(delivered, rows, gradient)
        looked_up = sequence_lookup_all_to_all(workspace, indices, *arguments)
        found = looked_up.detach().clone()
        looked_up.backward(gradient)
        return Results([delivered.detach(), of_rows, found, tables.weights.clone()])

    return deliver


def products(group: SymmetricGroup, timeout_seconds: float, *, dtype: torch.dtype) -> Epoch:
    """GEMM + All-to-All of equal blocks, and its gradients."""
    workspace = GemmWorkspace(
        group,
        name="transports",
        max_rows=64 * group.world_size,
        max_columns=COLUMNS,
        dtype=dtype,
        timeout_seconds=timeout_seconds,
    )

    def multiply(number: int) -> Results:
        normal = _normal(group, dtype, number)
        x, weight = normal((1 + number % 64) * group.world_size, DEPTH), normal(COLUMNS, DEPTH)
        schedule = "chunks" if number % 2 else "kernel"
        result = gemm_all_to_all(workspace, x.requires_grad_(), weight.requires_grad_(), schedule=schedule)
        (of_x,) = torch.autograd.grad(result, [x], normal(*result.shape))
        # The library multiplies rows of several ranks at once between hosts, and all rows of a small product; within a host
        # those of each rank by themselves.
        rounding = torch.finfo(dtype).eps * (DEPTH**0.5 if dtype == torch.float32 else 1.0)
        same, near = ([of_x], []) if group.world_size == 2 else ([], [of_x])
        (same if schedule == "kernel" else near).append(result.detach())
        return Results(same, rounding=rounding, products=near)

    return multiply


def sums(group: SymmetricGroup, timeout_seconds: float) -> Epoch:
    """GEMV + AllReduce in fp32; in every other call with a bias and a residual."""
    workspace = GemvWorkspace(
        group, name="transports", max_columns=COLUMNS, max_rows=16, dtype=torch.float32, timeout_seconds=timeout_seconds
    )

    def multiply(number: int) -> Results:
        normal = _normal(group, torch.float32, number)
        x, weight = normal(1 + number % 16, DEPTH), normal(COLUMNS, DEPTH)
        # Of a bias and a residual all ranks have the same; large sums between hosts go in halves, and so do these.
        bias, residual = (torch.full(shape, 0.1 * number, device=group.device) for shape in ((COLUMNS,), (len(x), COLUMNS)))
        with mock.patch.object(sums_between_hosts, "_BYTES_IN_HALVES", 1):
            out, _ = gemv_all_reduce(workspace, x, weight, *((bias, residual) if number % 2 else (None, None)))
        return Results([], rounding=DEPTH**0.5 * torch.finfo(out.dtype).eps, products=[out])

    return multiply


def sharded_rows(group: SymmetricGroup, timeout_seconds: float) -> Epoch:
    """AllGather + GEMM, GEMM + ReduceScatter, and the gradients of both, in fp32."""
    workspace = ShardWorkspace(
        group,
        name="transports",
        max_rows=16 * group.world_size,
        max_columns=max(COLUMNS, DEPTH),
        dtype=torch.float32,
        timeout_seconds=timeout_seconds,
    )

    def multiply(number: int) -> Results:
        normal = _normal(group, torch.float32, number)
        shard, weight_in, weight_out = normal(1 + number % 16, DEPTH), normal(COLUMNS, DEPTH), normal(DEPTH, COLUMNS)
        leaves = [leaf.requires_grad_() for leaf in (shard, weight_in, weight_out)]
        hidden = all_gather_gemm(workspace, shard, weight_in)
        out = gemm_reduce_scatter(workspace, hidden, weight_out)
        gradients = torch.autograd.grad(out, leaves, normal(*out.shape))
        rounding = DEPTH * torch.finfo(out.dtype).eps
        return Results([], rounding=rounding, products=[hidden.detach(), out.detach(), *gradients])

    return multiply


def experts(group: SymmetricGroup, timeout_seconds: float, *, dtype: torch.dtype, all_cross: bool = True) -> Epoch:
    """The expert layer and all its gradients; some tokens have one expert."""
    count, width, hidden, tokens = 2 * group.world_size, COLUMNS // 2, DEPTH, 200 if ON_GPU else 12
    with mock.patch.object(between_hosts, "all_tokens_cross", return_value=all_cross):
        workspace = ExpertWorkspace(
            group,
            name="transports",
            experts=count,
            top_k=2,
            max_tokens=tokens,
            width=width,
            dtype=dtype,
            timeout_seconds=timeout_seconds,
        )

    def compute(number: int) -> Results:
        normal = _normal(group, dtype, number)
        own = torch.Generator().manual_seed(1000 * number + group.rank)
        chosen = torch.rand(tokens - number % tokens, count, generator=own).argsort(1)[:, :2].contiguous()
        chosen[::5, 1] = -1
        rows = len(chosen)
        leaves = [normal(rows, width), normal(rows, 2).float(), normal(2, hidden, width), normal(2, width, hidden)]
        x, gates, w_in, w_out = (leaf.requires_grad_() for leaf in leaves)
        out = expert_layer(workspace, x, _on_device(group, chosen), gates, w_in, w_out, 0.5)
        # Each host adds up what its experts make of a token, and has rows in an order of its own. Results are small: over their
        # largest element the tolerance tells a sum that is missing.
        results = [out.detach(), *torch.autograd.grad(out, leaves, normal(*out.shape))]
        rounding = torch.finfo(dtype).eps * (DEPTH**0.5 if dtype == torch.float32 else 1.0)
        return Results([], rounding=rounding, products=[_over_largest(result) for result in results])

    return compute


def _over_largest(result: Tensor) -> Tensor:
    return result.float() / result.abs().max().float().clamp(min=torch.finfo(torch.float32).tiny)


def _normal(group: SymmetricGroup, dtype: torch.dtype, number: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + group.rank)
    return lambda *shape: _on_device(group, torch.randn(shape, generator=generator).mul_(0.1).to(dtype))


def _on_device(group: SymmetricGroup, tensor: Tensor) -> Tensor:
    return tensor.to(group.device, non_blocking=True)


COUNTED = "experts, tokens that cross are counted"  # for which the host waits
OPERATORS: dict[str, Callable[[SymmetricGroup, float], Epoch]] = {
    "embedding": partial(embedding_steps, traffic=Traffic(longest_bag=4, largest_batch=6)),
    "embedding, SGD, 16 bits on the wire": partial(
        embedding_steps,
        traffic=Traffic(forward_wire=HALF, backward_wire=HALF, optimizer="sgd", longest_bag=4, largest_batch=6),
    ),
    "sequences": sequences,
    "products": partial(products, dtype=HALF),
    "products in fp32": partial(products, dtype=torch.float32),
    **({} if SHARE_A_GPU else {"sums": sums}),  # its kernel waits for that of the other rank
    "sharded rows": sharded_rows,
    "experts": partial(experts, dtype=HALF),
    COUNTED: partial(experts, dtype=HALF, all_cross=False),
    "experts in fp32": partial(experts, dtype=torch.float32),
}


@contextmanager
def host_may_wait(may: bool) -> Iterator[None]:
    """Unless it may, PyTorch raises where the host would wait for its GPU."""
    if may:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def counted_exchanges() -> Iterator[list[int]]:
    """Count the exchanges that this rank begins; the list has an element for each."""
    begun: list[int] = []
    with ExitStack() as patches:
        for link in NcclLink, TcpLink:
            begin = link.exchange

            def exchange(*arguments: Any, begin: Callable[..., Exchange] = begin, **options: Any) -> Exchange:
                begun.append(len(begun))
                return begin(*arguments, **options)

            patches.enter_context(mock.patch.object(link, "exchange", exchange))
        yield begun


def differing_epochs(name: str, ranks_per_host: int) -> dict[str, int]:
    """On a rank: how many epochs were compared, how many differ, and how many exchanges it began."""
    rank = Rank.from_environment()
    small_tiles_without_gpus()
    with process_group_of_checks(rank) as device, counted_exchanges() as begun:
        stores = OPERATORS[name](symmetric_group(device=device), TIMEOUT_SECONDS)
        os.environ["DLRM_FUSED_HOST"] = f"host{rank.index // ranks_per_host}"
        apart = symmetric_group(dist.new_group(range(RANKS)), device)
        assert apart.hosts.are_many
        messages, late, differing = OPERATORS[name](apart, TIMEOUT_SECONDS), random.Random(rank.index), 0
        for number in range(EPOCHS):
            by_stores = stores(number)
            delay(late)
            with host_may_wait(not ON_GPU or name == COUNTED or number not in WATCHED_EPOCHS):
                by_messages = messages(number)
            differing += not by_messages.agree(by_stores, hosts_have_sums=ranks_per_host > 1)
        dist.barrier()  # others may still need what this rank has sent
    return {"epochs": EPOCHS, "differing": differing, "exchanges": len(begun)}


@pytest.mark.parametrize("ranks_per_host", RANKS_PER_HOST)
@pytest.mark.parametrize("name", OPERATORS)
def test_messages_give_the_bits_of_stores(name: str, ranks_per_host: int) -> None:
    compared = Ranks(RANKS, differing_epochs, name, ranks_per_host).wait(MOST_SECONDS)
    assert compared == [{"epochs": EPOCHS, "differing": 0, "exchanges": compared[0]["exchanges"]}] * RANKS
