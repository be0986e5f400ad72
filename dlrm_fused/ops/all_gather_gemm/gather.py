"""AllGather + GEMM by any schedule: the rows of all ranks are multiplied while those of peers are on their way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from dlrm_fused.compat.torch import current_stream
from dlrm_fused.ops.all_gather_gemm.kernel import multiply_arriving, push_and_multiply
from dlrm_fused.ops.all_gather_gemm.workspace import ShardWorkspace, Started
from dlrm_fused.ops.common.exchanges import exchange_with_hosts, rows_of_ranks
from dlrm_fused.ops.common.pieces_call import PiecesCall
from dlrm_fused.ops.common.scatter_rows import scatter_rows
from dlrm_fused.ops.common.workspace import fingerprint_of
from dlrm_fused.ops.schedules import Kind, Mover, Pair, Schedule, Task
from dlrm_fused.symmetric.hosts import runs_of


def gather_and_multiply(
    workspace: ShardWorkspace, x: Tensor, weight: Tensor, schedule: Schedule, *, is_transposed: bool = False
) -> Started:
    """[M, N] = the rows of all ranks @ weight.T; or, if ``is_transposed``, @ weight. Collective."""
    fingerprint = fingerprint_of("gather", schedule.name, *x.shape, *weight.shape, is_transposed)
    if workspace.is_by_kernels:
        call = _Gather(workspace, x, weight, schedule, is_transposed, fingerprint)
        call.run(Pair.all_gather_gemm)
        return Started(call.out, call.gathered_rows)
    factor = weight if is_transposed else weight.T
    gathered, arrivals = _begin_to_gather(workspace, x, fingerprint)
    if not workspace.group.hosts.are_many:
        return Started(gathered @ factor, lambda: gathered)
    out, ranks = x.new_empty(len(gathered), factor.shape[1]), workspace.world_size
    for sources in itertools.chain([runs_of(workspace.group.hosts.local)], arrivals):
        for run in sources:
            torch.mm(rows_of_ranks(gathered, run, ranks), factor, out=rows_of_ranks(out, run, ranks))
    return Started(out, lambda: gathered)


def gather_beside(workspace: ShardWorkspace, x: Tensor) -> Started:
    """Begin to gather rows beside what follows; ``rows`` waits for them. Collective.

    Meanwhile the workspace may multiply and scatter once, not gather. The result has x as ``out``.
    """
    fingerprint = fingerprint_of("gather beside", *x.shape)
    if not workspace.is_by_kernels:
        return _gather_rows_beside(workspace, x, fingerprint)
    ranks, rank, pieces, stream = workspace.world_size, workspace.rank, workspace.pieces_beside, workspace.gather_stream
    main = current_stream(workspace.device) if stream else None
    if stream and main:
        stream.wait_stream(main)
    with torch.cuda.stream(stream) if stream else nullcontext():
        pieces.begin(fingerprint)
        for shift in range(1, ranks):
            peer = (rank + shift) % ranks
            workspace.matrix(workspace.gathered, peer, (ranks, *x.shape))[rank].copy_(x, non_blocking=True)
            pieces.mark(peer, 0)
        own = workspace.matrix(workspace.gathered, rank, (ranks, *x.shape))
        own[rank].copy_(x, non_blocking=True)

    def rows() -> Tensor:
        if stream and main:
            main.wait_stream(stream)
        for shift in range(1, ranks):
            pieces.wait((rank - shift) % ranks, 0)
        return own.flatten(0, 1)

    return Started(x, rows)


def _gather_rows_beside(workspace: ShardWorkspace, x: Tensor, fingerprint: int) -> Started:
    gathered, arrivals = _begin_to_gather(workspace, x, fingerprint)

    def rows() -> Tensor:
        for _ in arrivals:
            pass
        return gathered

    return Started(x, rows)


def _begin_to_gather(workspace: ShardWorkspace, x: Tensor, fingerprint: int) -> tuple[Tensor, Iterator[Sequence[range]]]:
    """Return the rows of this host's ranks in [M, K], memory of the workspace until its next call; and an iterator that waits
    for those of other hosts, and gives the ranks whose rows have come.

    A row crosses once to each other host, where the counterpart of its rank stores it at the others.
    """
    if workspace.world_size == 1:
        return x, iter([])
    gathered = workspace.matrix(workspace.gathered, workspace.rank, (workspace.world_size * len(x), x.shape[1]))
    received_from, none, hosts = gathered.chunk(workspace.world_size), x[:0], workspace.group.hosts
    counterparts, served = hosts.counterparts(), hosts.served
    exchanges = exchange_with_hosts(
        workspace.channel,
        lambda to: [x if rank in counterparts else none for rank in to],
        lambda rank: received_from[rank] if rank in served else none,
        fingerprint,
    )
    window = workspace.window_of(workspace.gathered, fingerprint)
    received_from[workspace.rank].copy_(x)

    neighbours = [rank for rank in hosts.local if rank != workspace.rank]

    def store_at_neighbours(ranks: tuple[int, ...]) -> None:
        if neighbours:
            rows = workspace.rows_of_shards(ranks * len(neighbours), len(x))
            places = tuple(peer * workspace.world_size + rank for peer in neighbours for rank in ranks)
            targets = workspace.rows_of_shards(places, len(x))
            scatter_rows(gathered, targets, window, rows_per_rank=len(gathered), source_rows=rows)

    store_at_neighbours((workspace.rank,))

    def arrivals() -> Iterator[Sequence[range]]:
        for exchange, sources in exchanges:
            exchange.complete()
            store_at_neighbours(tuple(rank for run in sources for rank in run if rank in served))
            yield sources

    return gathered, arrivals()


class _Gather(PiecesCall):
    """Shards go to the peers, and are multiplied."""

    def __init__(
        self, workspace: ShardWorkspace, x: Tensor, weight: Tensor, schedule: Schedule, is_transposed: bool, fingerprint: int
    ) -> None:
        factor = weight if is_transposed else weight.T
        super().__init__(workspace, schedule, x, factor, rows=len(x), fingerprint=fingerprint)
        self._gathered, self._weight, self._is_transposed = workspace.gathered, weight, is_transposed
        self._epoch, self._matrix = workspace.epoch(schedule, self.rows, fingerprint), workspace.matrix
        self.out = x.new_empty(self.ranks * self.rows, factor.shape[1])
        self.actions[Kind.compute] = self._multiply_arriving if schedule.is_one_product else self._multiply

    def gathered_rows(self) -> Tensor:
        """[M, K], when the call has been started; this rank's rows join the peers' now."""
        gathered = self.received_on(self.rank)
        gathered[self.rank].copy_(self.x)
        return gathered.flatten(0, 1)

    def received_on(self, rank: int) -> Tensor:
        return self._matrix(self._gathered, rank, (self.ranks, *self.x.shape))

    def sent_to(self, peer: int) -> Tensor:
        return self.x

    def _multiply_arriving(self, _: Task) -> None:
        multiplication = push_and_multiply if self.schedule.mover is Mover.same_kernel else multiply_arriving
        multiplication(self.x, self._gathered, self._weight, self.out, self._epoch, is_transposed=self._is_transposed)

    def _multiply(self, task: Task) -> None:
        (piece,) = task.pieces
        rows = slice(piece.first, piece.last)
        out = self.out.view(self.ranks, self.rows, -1)[self.source(piece), rows]
        shard = self.x if piece.shift == 0 else self.received_on(self.rank)[self.source(piece), rows]
        torch.mm(shard, self.factor, out=out)
