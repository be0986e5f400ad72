"""GEMM + ReduceScatter by any schedule: while products for one rank travel, those for the next are computed.

What is sent is rounded once, to the dtype; the sum is fp32, in the kernel that multiplies the own rows, and rounded once. To
another host goes the sum of a host's ranks, rounded once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_fused.ops.all_gather_gemm.kernel import multiply_and_add, multiply_and_send
from dlrm_fused.ops.all_gather_gemm.workspace import ShardWorkspace, Started
from dlrm_fused.ops.common.exchanges import HostExchange, exchange_with_hosts, halves_of, rows_of_ranks
from dlrm_fused.ops.common.pieces_call import PiecesCall
from dlrm_fused.ops.common.products import product, product_in_fp32
from dlrm_fused.ops.common.scatter_rows import scatter_rows
from dlrm_fused.ops.common.workspace import fingerprint_of
from dlrm_fused.ops.schedules import Kind, Mover, Pair, Schedule, Task
from dlrm_fused.symmetric.hosts import runs_of

# Two H200s were faster so from this size on, of what goes to the only other rank. The rows of several are one product.
_BYTES_IN_HALVES = 32 << 20


def multiply_and_scatter(
    workspace: ShardWorkspace, x: Tensor, weight: Tensor, schedule: Schedule, *, is_transposed: bool = False
) -> Started:
    """[M / ranks, N]: this rank's rows of the sum over ranks of x @ weight.T; or, if ``is_transposed``, @ weight. Collective.

    The result has x as what ``rows`` gives: nothing is gathered.
    """
    fingerprint = fingerprint_of("scatter", schedule.name, *x.shape, *weight.shape, is_transposed)
    if workspace.is_by_kernels:
        call = _Scatter(workspace, x, weight, schedule, is_transposed, fingerprint)
        call.run(Pair.gemm_reduce_scatter)
        return Started(call.out, lambda: x)
    return Started(_scattered_as_rows(workspace, x, weight.T if is_transposed else weight, fingerprint), lambda: x)


def _scattered_as_rows(workspace: ShardWorkspace, x: Tensor, weight: Tensor, fingerprint: int) -> Tensor:
    """The operator's result, without kernels or between hosts: products go to peers, rounded, while others are computed.

    For rows of another host's rank its counterpart on this host adds up the products of this host's ranks, and sends the sum.
    """
    ranks, rank, hosts = workspace.world_size, workspace.rank, workspace.group.hosts
    columns, shards = len(weight), x.chunk(ranks)
    rows = len(shards[0])
    received = workspace.matrix(workspace.received, rank, (workspace.received_shards, rows, columns))
    window, none = workspace.window_of(workspace.received, fingerprint), x.new_empty(0, columns)

    def store(products: Tensor, places: Sequence[int]) -> None:
        """Store shards of rows at ranks of this host, at rank * the shards that one receives + shard."""
        targets = workspace.rows_of_shards(tuple(places), rows)
        scatter_rows(products, targets, window, rows_per_rank=len(received) * rows)

    def sent(to: range, half: slice) -> Sequence[Tensor]:
        """Return the sums over this host's ranks for those ranks of other hosts to which this rank sends, else nothing."""
        products = product(rows_of_ranks(x, to, ranks)[half], weight)
        if len(hosts.local) == 1:
            return products.chunk(len(to))
        store(products, workspace.places_at_senders(to))
        served = [peer for peer in to if peer in hosts.served]
        of_host = received[: len(served) * len(hosts.local)].view(len(served), len(hosts.local), rows, columns)
        sums = dict(zip(served, of_host.sum(1), strict=True))  # adds up in fp32
        return [sums.get(peer, none) for peer in to]

    # Ranks of other hosts send to ordinary tensors, of which one may become the result.
    parts = {peer: x.new_empty(rows, columns) for peer in hosts.counterparts()}
    # All ranks take part in as many exchanges.
    halves = halves_of(rows, columns * x.element_size(), _BYTES_IN_HALVES) if ranks == 2 else [slice(None)]

    def exchange(half: slice) -> list[HostExchange]:
        return exchange_with_hosts(
            workspace.channel,
            lambda to: sent(to, half),
            lambda peer: parts[peer][half] if peer in parts else none,
            fingerprint,
            beside=len(halves) * (ranks - 1) > 1,  # nothing is computed beside one message
        )

    begun = [(half, one) for half in halves for one, _ in exchange(half)]
    neighbours = [peer for peer in hosts.local if peer != rank]
    if neighbours:
        products = torch.cat([product(rows_of_ranks(x, run, ranks), weight) for run in runs_of(neighbours)])
        store(products, [peer * len(received) + rank for peer in neighbours])
        parts |= {peer: received[peer] for peer in neighbours}
    if not parts:
        return product(x, weight)
    if x.device.type == "cuda" and len(parts) == 1:
        (part,) = parts.values()
        for half, one in begun:
            one.complete()
            part[half].addmm_(shards[rank][half], weight.T)  # adds up in fp32
        return part
    own = product_in_fp32(shards[rank], weight)
    for _, one in begun:
        one.complete()
    total = torch.zeros_like(own)
    for _, part in sorted(parts.items()):
        total += part
    return total.add_(own).to(workspace.dtype)


class _Scatter(PiecesCall):
    """Products for the peers are computed and go there, then own rows are."""

    def __init__(
        self, workspace: ShardWorkspace, x: Tensor, weight: Tensor, schedule: Schedule, is_transposed: bool, fingerprint: int
    ) -> None:
        rows, factor = len(x) // workspace.world_size, weight if is_transposed else weight.T
        super().__init__(workspace, schedule, x, factor, rows=rows, fingerprint=fingerprint)
        self._received, self._weight, self._is_transposed = workspace.received, weight, is_transposed
        self._epoch, self._matrix = workspace.epoch(schedule, rows, fingerprint), workspace.matrix
        self._shards, self._shape = x.view(self.ranks, rows, -1), (self.ranks, rows, factor.shape[1])
        self.out = x.new_empty(self._shape[1:])
        is_one_kernel = schedule.mover is Mover.same_kernel
        self._sent = x.new_empty(0 if is_one_kernel else self.ranks, *self._shape[1:])
        compute = self._multiply_and_send if is_one_kernel else self._multiply
        self.actions |= {Kind.compute: compute, Kind.combine: self._multiply_own_rows}

    def received_on(self, rank: int) -> Tensor:
        return self._matrix(self._received, rank, self._shape)

    def sent_to(self, peer: int) -> Tensor:
        return self._sent[peer]

    def _multiply_and_send(self, _: Task) -> None:
        multiply_and_send(self.x, self._weight, self.out, self._received, self._epoch, is_transposed=self._is_transposed)

    def _multiply(self, task: Task) -> None:
        (piece,) = task.pieces
        peer, rows = self.peer(piece), slice(piece.first, piece.last)
        torch.mm(self._shards[peer, rows], self.factor, out=self._sent[peer, rows])

    def _multiply_own_rows(self, _: Task) -> None:
        own, received = self._shards[self.rank], self.received_on(self.rank)
        multiply_and_add(own, self._weight, self.out, received, self._epoch, is_transposed=self._is_transposed)
