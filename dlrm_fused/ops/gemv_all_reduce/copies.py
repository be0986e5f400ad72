"""Product + AllReduce for many rows by copy engines, which take no multiprocessor from the products.

Each rank adds up its shard of the rows, piece by piece. The products of the peers' shards are the library's; while a copy
engine takes a piece to its peer, the next one is multiplied. The kernel that multiplies the own shard adds what has come to
each tile, and while it goes on with the next piece, the sums of this one travel to all peers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_fused.ops.all_gather_gemm.kernel import Epoch, multiply_and_add
from dlrm_fused.ops.common.pieces_call import PiecesCall
from dlrm_fused.ops.gemv_all_reduce.workspace import GemvWorkspace, Inputs
from dlrm_fused.ops.schedules import Kind, Pair, Task
from dlrm_fused.ops.schedules.estimate import Size
from dlrm_fused.ops.schedules.machines import machine_of
from dlrm_fused.ops.schedules.piece_flags import ends_of
from dlrm_fused.ops.schedules.plan import cut
from dlrm_fused.ops.schedules.rule import copies


class CopiedSums:
    """Calls of one layout. The ranks must divide m, and rows of all matrices have a multiple of 16 bytes.

    Attributes:
        schedule: the way in which the rows are cut.
        epoch: of the kernel that adds.
        parts, sums: [ranks, m / ranks, N] on each rank, where it receives products of its shard, and sums of all shards.
    """

    def __init__(self, workspace: GemvWorkspace, inputs: Inputs, fingerprint: int) -> None:
        size = Size(Pair.gemm_all_reduce, workspace.world_size, *inputs.shape, workspace.dtype.itemsize)
        self.schedule, self._fingerprint = copies(size, machine_of(workspace.gpu)), fingerprint
        rows, columns, _ = inputs.shape
        shape = workspace.world_size, rows // workspace.world_size, columns
        ends = ends_of(cut(shape[1], self.schedule.parts))
        counters = workspace.pieces.args.stamp  # nothing is counted
        self.epoch = Epoch(workspace.channel, workspace.pieces, fingerprint, ends, counters)
        self.parts, self.sums = (
            [memory.peer(rank).view(workspace.dtype)[: rows * columns].view(shape) for rank in range(workspace.world_size)]
            for memory in (workspace.parts, workspace.results.memory)
        )

    def __call__(self, workspace: GemvWorkspace, inputs: Inputs) -> Tensor:
        """Return the sum over ranks [m, N], plus bias and residual, an ordinary tensor. One epoch."""
        call = _Call(self, workspace, inputs, self._fingerprint)
        call.run(Pair.gemm_all_reduce)
        return call.out


class _Call(PiecesCall):
    """Until the sums of a peer's shard come, their place in the result has this rank's products for that peer."""

    def __init__(self, sums: CopiedSums, workspace: GemvWorkspace, inputs: Inputs, fingerprint: int) -> None:
        x, weight = inputs.x.contiguous(), inputs.weight.contiguous()
        self._sums, self._shape = sums, sums.sums[0].shape
        super().__init__(workspace, sums.schedule, x, weight.T, rows=self._shape[1], fingerprint=fingerprint)
        self._weight, self._bias, self._pieces = weight, inputs.bias, len(sums.epoch.ends)
        self._residual = None if inputs.residual is None else inputs.residual.contiguous().view(self._shape)
        self.out = x.new_empty(len(x), len(weight))
        self._shards, self._out_of = x.view(self.ranks, self.rows, -1), self.out.view(self._shape)
        self.actions |= {Kind.compute: self._multiply, Kind.combine: self._combine}

    def received_on(self, rank: int) -> Tensor:
        return self._sums.parts[rank]

    def sent_to(self, peer: int) -> Tensor:
        return self._out_of[peer]

    def _multiply(self, task: Task) -> None:
        (piece,) = task.pieces
        peer, rows = self.peer(piece), slice(piece.first, piece.last)
        torch.mm(self._shards[peer, rows], self.factor, out=self._out_of[peer, rows])

    def _move(self, task: Task) -> None:
        (piece,) = task.pieces
        if piece.number < self._pieces:
            super()._move(task)
        else:
            rows = slice(piece.first, piece.last)
            there = self._sums.sums[self.peer(piece)]
            there[self.rank, rows].copy_(self._out_of[self.rank, rows], non_blocking=True)

    def _combine(self, task: Task) -> None:
        (piece,) = task.pieces
        source, rows = self.source(piece), slice(piece.first, piece.last)
        if piece.shift:
            self._out_of[source, rows].copy_(self._sums.sums[self.rank][source, rows])
            return
        multiply_and_add(
            self._shards[self.rank],
            self._weight,
            self._out_of[self.rank],
            self.received_on(self.rank),
            self._sums.epoch,
            is_transposed=False,
            pieces=range(piece.number, piece.number + 1),
            bias=self._bias,
            residual=None if self._residual is None else self._residual[self.rank],
        )
