"""GEMM + All-to-All by pieces: while a copy engine sends the rows of one rank, those of the next are multiplied.

The products are the library's, this rank's own last. A copy engine is told addresses by the host, which does not know where
another rank's result will lie; so the pieces are received in spare blocks, which lie at the same place on all ranks, and copied
out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_fused.ops.common.pieces_call import PiecesCall
from dlrm_fused.ops.gemm_all_to_all.workspace import GemmWorkspace
from dlrm_fused.ops.schedules import Kind, Pair, Schedule, Task


def multiply_and_send_chunks(
    workspace: GemmWorkspace, x: Tensor, weight: Tensor, schedule: Schedule, fingerprint: int
) -> Tensor:
    """Return the operator's result, an ordinary tensor, by a schedule whose mover is a copy engine. One epoch: collective."""
    call = _Chunks(workspace, schedule, x, weight, fingerprint)
    call.run(Pair.gemm_all_to_all)
    return call.result.flatten(0, 1)


class _Chunks(PiecesCall):
    def __init__(self, workspace: GemmWorkspace, schedule: Schedule, x: Tensor, weight: Tensor, fingerprint: int) -> None:
        super().__init__(workspace, schedule, x, weight.T, rows=len(x) // workspace.world_size, fingerprint=fingerprint)
        self._results, self._shape = workspace.results, (self.ranks, self.rows, self.factor.shape[1])
        self.result, self._sent = self.x.new_empty(self._shape), self.x.new_empty(self._shape)
        self._rows_of = self.x.view(self.ranks, self.rows, -1)
        self.actions |= {Kind.compute: self._multiply, Kind.combine: self._copy_out}

    def received_on(self, rank: int) -> Tensor:
        spare = self._results.memory.peer(rank)[: self.result.numel() * self.result.element_size()]
        return spare.view(self.x.dtype).view(self._shape)

    def sent_to(self, peer: int) -> Tensor:
        return self._sent[peer]

    def _multiply(self, task: Task) -> None:
        (piece,) = task.pieces
        peer, rows = self.peer(piece), slice(piece.first, piece.last)
        out = self.result if piece.shift == 0 else self._sent
        torch.mm(self._rows_of[peer, rows], self.factor, out=out[peer, rows])

    def _copy_out(self, task: Task) -> None:
        for piece in task.pieces:
            source, rows = self.source(piece), slice(piece.first, piece.last)
            self.result[source, rows].copy_(self.received_on(self.rank)[source, rows])
