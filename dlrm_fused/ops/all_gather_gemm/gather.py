"""AllGather + GEMM by any schedule: the rows of all ranks are multiplied while those of peers are on their way."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from dlrm_fused.compat.torch import current_stream
from dlrm_fused.ops.all_gather_gemm.kernel import multiply_arriving, push_and_multiply
from dlrm_fused.ops.all_gather_gemm.workspace import ShardWorkspace, Started
from dlrm_fused.ops.common.pieces_call import PiecesCall
from dlrm_fused.ops.common.scatter_rows import ItemsByRank, scatter_rows
from dlrm_fused.ops.common.workspace import fingerprint_of
from dlrm_fused.ops.schedules import Kind, Mover, Pair, Schedule, Task


def gather_and_multiply(
    workspace: ShardWorkspace, x: Tensor, weight: Tensor, schedule: Schedule, *, is_transposed: bool = False
) -> Started:
    """[M, N] = the rows of all ranks @ weight.T; or, if ``is_transposed``, @ weight. Collective."""
    fingerprint = fingerprint_of("gather", schedule.name, *x.shape, *weight.shape, is_transposed)
    if workspace.is_by_kernels:
        call = _Gather(workspace, x, weight, schedule, is_transposed, fingerprint)
        call.run(Pair.all_gather_gemm)
        return Started(call.out, call.gathered_rows)
    gathered = x if workspace.world_size == 1 else _gathered_as_rows(workspace, x, fingerprint)
    return Started(gathered @ (weight if is_transposed else weight.T), lambda: gathered)


def gather_beside(workspace: ShardWorkspace, x: Tensor) -> Started:
    """Begin to gather rows beside what follows; ``rows`` waits for them. Collective.

    Meanwhile the workspace may multiply and scatter once, not gather. The result has x as ``out``.
    """
    fingerprint = fingerprint_of("gather beside", *x.shape)
    if not workspace.is_by_kernels:
        gathered = x if workspace.world_size == 1 else _gathered_as_rows(workspace, x, fingerprint)
        return Started(x, lambda: gathered)
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


def _gathered_as_rows(workspace: ShardWorkspace, x: Tensor, fingerprint: int) -> Tensor:
    """[M, K]: the rows of all ranks, in the workspace's memory until its next call. One epoch; between hosts as well."""
    ranks, rows = workspace.world_size, len(x)
    gathered = workspace.matrix(workspace.gathered, workspace.rank, (ranks * rows, x.shape[1]))
    all_rows = ranks * rows
    own = torch.arange(rows, dtype=torch.int32, device=x.device) + workspace.rank * rows
    # Every row goes to all ranks; for another host's rank it is a row of a slice, in the order of the rows.
    of_slice = own - workspace.rank * rows
    hosts = workspace.group.hosts
    targets = torch.stack([rank * all_rows + (of_slice if rank in hosts.remote else own) for rank in range(ranks)], dim=1)
    received = {rank: torch.arange(rank * rows, (rank + 1) * rows, device=x.device) for rank in hosts.remote}
    items = torch.arange(all_rows, device=x.device).view(rows, ranks).T.flatten()  # item row * ranks + rank goes to the rank
    scatter_rows(
        x,
        targets.flatten(),
        workspace.window_of(workspace.gathered, fingerprint),
        rows_per_rank=all_rows,
        repeats=ranks,
        received=received,
        by_rank=ItemsByRank.equal(all_rows, all_rows, ranks, workspace.rank * rows, items),
    )
    return gathered


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
