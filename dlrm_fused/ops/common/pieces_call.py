"""The base of calls whose pieces travel while others are computed: of a product with AllGather, ReduceScatter or All-to-All."""

from __future__ import annotations

import abc

from torch import Tensor

from dlrm_fused.ops.common.matrix_workspace import MatrixWorkspace
from dlrm_fused.ops.schedules import Kind, Pair, Piece, Schedule, Task, make_plan
from dlrm_fused.ops.schedules.executor import Action


class PiecesCall(abc.ABC):
    """One call on this rank, in an epoch of the workspace's pieces.

    Attributes:
        x: what is multiplied.
        factor: [K, N], by what.
        rows: of a shard.
        actions: what starts each task of the call's plan; subclasses add theirs.
    """

    def __init__(
        self, workspace: MatrixWorkspace, schedule: Schedule, x: Tensor, factor: Tensor, *, rows: int, fingerprint: int
    ) -> None:
        self.workspace, self.schedule, self.x, self.factor, self.rows = workspace, schedule, x, factor, rows
        self.rank, self.ranks = workspace.rank, workspace.world_size
        self.actions: dict[Kind, Action] = {
            Kind.begin: lambda _: workspace.pieces.begin(fingerprint),
            Kind.move: self._move,
            Kind.mark: self._mark,
            Kind.gate: self._wait,
        }

    @abc.abstractmethod
    def received_on(self, rank: int) -> Tensor:
        """[ranks, rows, columns]: where a rank receives, by the rank from which it comes."""

    @abc.abstractmethod
    def sent_to(self, peer: int) -> Tensor:
        """[rows, columns], for a peer."""

    def run(self, pair: Pair) -> None:
        """Start all tasks. The host waits for none of them."""
        self.workspace.streams.run(make_plan(pair, self.schedule, self.ranks, self.rows), self.actions)

    def peer(self, piece: Piece) -> int:
        """Return the rank to which a piece goes."""
        return (self.rank + piece.shift) % self.ranks

    def source(self, piece: Piece) -> int:
        """Return the rank from which a piece comes."""
        return (self.rank - piece.shift) % self.ranks

    def _move(self, task: Task) -> None:
        (piece,) = task.pieces
        peer, rows = self.peer(piece), slice(piece.first, piece.last)
        self.received_on(peer)[self.rank, rows].copy_(self.sent_to(peer)[rows], non_blocking=True)

    def _mark(self, task: Task) -> None:
        for piece in task.pieces:
            self.workspace.pieces.mark(self.peer(piece), piece.number)

    def _wait(self, task: Task) -> None:
        for piece in task.pieces:
            self.workspace.pieces.wait(self.source(piece), piece.number)
